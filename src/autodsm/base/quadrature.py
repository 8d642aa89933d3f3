"""Gauss–Legendre quadrature on [0, 1]: `∫_a^b f = (b − a) Σ_k w_k f(a + (b − a) x_k)`.

With n nodes it is exact for polynomials of a degree below 2n.
"""

import numpy as np


def gauss(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The n nodes x and weights w."""
    x, w = np.polynomial.legendre.leggauss(n)
    return 0.5 * (x + 1.0), 0.5 * w


NODES, WEIGHTS = gauss(8)
"""For the noise: exact to double precision where it changes by e over the interval, to 10⁻⁹ where by e⁸."""
