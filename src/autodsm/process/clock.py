"""The noise received so far, as a clock; and the laws by which training times are drawn.

Coordinates may have different units, so each is measured by its own total, `T_i = ∫_0^t1 Q_ii`:

    G(t) = max_i T_i · mean_i (∫_0^t Q_ii / T_i),    the mean over all i that receive noise.

For a scalar g that is `∫g²`. A change of units multiplies G by a number. Near t = 0 a score changes over times in
proportion to t itself, or better to G: log G is a network's natural time feature and, for half of the draws, its
natural scale.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import as_floating, check_name, check_number, is_concrete
from ..base.quadrature import NODES, WEIGHTS
from .process import Process, check_process
from .structure import noise_diagonal

_EARLIEST = 1e-8  # of t1; before it G is continued as a power of t
_POINTS = 1024  # 0.018 apart in log t: chords of log G are off by h²/8 of its curvature, 4·10⁻⁵
_NUMBERS = 1 << 22  # values of g² held at once, at most: 32 MB

TIME_LAWS = ("mixed", "uniform")
EARLIEST = 1e-3
"""Where training, and so the use of a trained score, starts unless told otherwise: a share of t1."""


class Clock(eqx.Module):
    """`G(t)`, tabulated as log G over log t and interpolated linearly, right to about 10⁻⁴.

    clock = Clock(process)
    clock(0.5), clock.log(0.5), clock.inverse(0.1)
    """

    log_values: Float[Array, " points"]
    totals: Float[Array, " entries"]
    """`T_i`, one for each entry of the diagonal of Q as g gives it, one alone for a scalar g; 0 without noise."""
    t1: float = eqx.field(static=True)

    def __init__(self, process: Process):
        check_process(process)
        self.t1 = process.t1
        with jax.ensure_compile_time_eval():
            known = is_concrete(process.g(0.0))
        if not known:
            raise ValueError(
                "diffusion is traced (by jit, vmap or grad), and the times of a schedule follow from its values. Make "
                "the process outside; only parameters of the drift can be traced or derived in."
            )
        times = self.t1 * np.exp(np.linspace(np.log(_EARLIEST), 0.0, _POINTS))
        with jax.ensure_compile_time_eval():
            if process.constant_noise:
                totals = self.t1 * np.asarray(noise_diagonal(process.g(0.0)), np.float64)
                values = np.max(totals) * times / self.t1
            else:
                totals, values = _integrate(process, times)
        if not values[-1] > 0:
            raise ValueError("diffusion is zero on all of [0, t1]: without noise there is no score to learn.")
        self.totals = jnp.asarray(totals, float)
        self.log_values = jnp.asarray(np.log(np.maximum(values, 1e-30 * values[-1])), float)

    def totals_of(self, shape: tuple[int, ...]) -> Array:
        """`T_i`, so that it broadcasts against states of this shape."""
        entries = self.totals.size
        if entries == math.prod(shape):
            return self.totals.reshape(shape)
        return self.totals[0] if entries == 1 else self.totals.reshape(entries, *(1 for _ in shape[1:]))

    def share(self, t) -> Array:
        """`G(t)/G(t1)`, which is the same in all units."""
        return jnp.exp(self.log(t) - self.log_values[-1])

    @property
    def total(self) -> float:
        """`G(t1)`."""
        return float(np.exp(np.asarray(self.log_values, float)[-1]))

    def log(self, t) -> Array:
        """`log G(t)`."""
        t = as_floating(t, "t").astype(float)
        position = (_POINTS - 1) * (1.0 - jnp.log(jnp.maximum(t / self.t1, 1e-30)) / np.log(_EARLIEST))
        left = jnp.clip(jnp.floor(position).astype(int), 0, _POINTS - 2)
        low, high = self.log_values[left], self.log_values[left + 1]
        return low + (position - left) * (high - low)

    def __call__(self, t) -> Array:
        return jnp.exp(self.log(t))

    def inverse(self, log_value) -> Array:
        """The time at which log G reaches `log_value`."""
        grid = self.t1 * jnp.exp(jnp.linspace(np.log(_EARLIEST), 0.0, _POINTS))
        right = jnp.clip(jnp.searchsorted(self.log_values, log_value), 1, _POINTS - 1)
        low, high = self.log_values[right - 1], self.log_values[right]
        part = jnp.where(high > low, (log_value - low) / jnp.where(high > low, high - low, 1.0), 1.0)
        return grid[right - 1] * (grid[right] / grid[right - 1]) ** part


def _integrate(process: Process, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`T_i`, and G at the times, by eight Gauss nodes on an eighth of every interval between them."""
    edges = np.concatenate([[0.0], times])
    edges = np.interp(np.arange(8 * _POINTS + 1) / 8, np.arange(_POINTS + 1), edges)
    rates = jax.jit(jax.vmap(lambda t: noise_diagonal(process.g(t))))
    entries = jax.eval_shape(lambda: noise_diagonal(process.g(0.0))).size
    # Of many entries few intervals at once: their integrals are kept, the values at the nodes are not.
    count = 1 << int(np.log2(np.clip(_NUMBERS // (64 * entries), 1, _POINTS)))
    pieces = []
    for part in np.split(np.arange(8 * _POINTS), _POINTS // count):
        a, b = edges[part, None], edges[part + 1, None]
        found = np.asarray(rates(jnp.ravel(a + (b - a) * NODES)), np.float64).reshape(count, 8, 8, entries)
        pieces.append(np.einsum("pk,n,pkne->pe", (b - a).reshape(count, 8), WEIGHTS, found))
    received = np.cumsum(np.concatenate(pieces), axis=0)
    totals = received[-1]
    noisy = totals > 0
    if not noisy.any():
        return totals, received[:, 0]
    return totals, totals.max() * np.mean(received[:, noisy] / totals[noisy], axis=1)


class TimeLaw(eqx.Module):
    """How times in (t0, t1] are drawn: `at(u)` maps u, uniform on [0, 1), to a time with density `density(t)`.

    "uniform"; or "mixed", half of them uniform and half log-uniform in G, which leaves no scale of time untrained.
    """

    clock: Clock
    t0: float = eqx.field(static=True)
    kind: str = eqx.field(static=True)

    def __init__(self, process: Process, kind: str = "mixed", t0: float | None = None, *, clock: Clock | None = None):
        check_process(process)
        check_name("times", kind, TIME_LAWS)
        t0 = EARLIEST * process.t1 if t0 is None else t0
        check_number("t0", t0)
        if not (is_concrete(t0) and 0 < t0 < process.t1):
            raise ValueError(f"t0={t0} must lie inside (0, t1) = (0, {process.t1}): training times start there.")
        self.clock = Clock(process) if clock is None else clock
        self.t0 = float(t0)
        self.kind = kind

    def at(self, u) -> Array:
        u = jnp.asarray(u)
        uniform = self.t0 + (self.t1 - self.t0) * (u if self.kind == "uniform" else (2.0 * u) % 1.0)
        if self.kind == "uniform":
            return uniform
        first, last = self.clock.log(self.t0), self.clock.log(self.t1)
        scaled = self.clock.inverse(first + (last - first) * (2.0 * u % 1.0))
        return jnp.clip(jnp.where(u < 0.5, scaled, uniform), self.t0, self.t1).astype(u.dtype)

    def density(self, t) -> Array:
        even = 1.0 / (self.t1 - self.t0)
        if self.kind == "uniform":
            return jnp.full_like(jnp.asarray(t, float), even)
        first, last = self.clock.log(self.t0), self.clock.log(self.t1)
        slope = jnp.vectorize(jax.grad(self.clock.log))(jnp.asarray(t, float))
        return 0.5 * even + 0.5 * slope / (last - first)

    @property
    def t1(self) -> float:
        return self.clock.t1
