"""What `fit` uses where nothing was given, chosen from the process.

| the process                              | objective                                            |
|------------------------------------------|------------------------------------------------------|
| linear drift, few coupled coordinates    | DSM from s = 0, exact                                |
| elementwise drift                        | TabulatedDSM, exact; PathwiseDSM where no table fits |
| coupled drift, invertible noise          | PathwiseDSM, no linearization                        |
| noise in some coordinates only           | LocalDSM with antithetic pairs                       |
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._types import PRNGKey
from .clock import Clock
from .marginals import Marginals
from .network import MLP, TIMES, Frozen, Score, TimeFeatures, UNet
from .objective import DSM, LocalDSM, PathwiseDSM, TabulatedDSM
from .priors import score_of
from .process import Process, check_invertible, is_invertible
from .schedule import FromZero
from .structure import Elementwise

MAX_LINEAR = 4
"""Largest number of coordinates coupled to each other for which a linear process gets the exact kernel from s = 0."""


def is_linear(process: Process, x: np.ndarray) -> bool:
    """True when the drift is affine in the state, as far as midpoints of probe states show, at several times."""
    # From where the data lie to ten times as far as noise alone would carry them: a drift may bend only out there.
    spread = 1.0 + np.std(x) + np.sqrt(Clock(process).total)
    reach = spread * np.geomspace(0.1, 10.0, 32)
    rng = np.random.default_rng(0)
    shape = (len(reach), *x.shape[1:])
    a, b = (x[:1] + rng.normal(size=shape) * reach.reshape(-1, *(1 for _ in shape[1:])) for _ in range(2))
    times = process.t1 * np.geomspace(1e-3, 1.0, 9)
    with jax.enable_x64(True):
        f = jax.jit(jax.vmap(jax.vmap(process.f, in_axes=(None, 0)), in_axes=(0, None)))
        ends = (np.asarray(f(jnp.asarray(v, float), times)) for v in (a, b, 0.5 * (a + b)))
        left, right, middle = ends
    bend = np.abs(left + right - 2 * middle)  # (probes, times, *shape)
    size, within = np.abs(left) + np.abs(right), tuple(range(1, left.ndim))
    # Each pair by itself, so that a far one does not hide how a near one bends; up to rounding of the largest term.
    return bool(np.all(bend <= 1e-5 * size + 1e-9 * size.max(axis=within, keepdims=True) + 1e-30))


def choose_objective(process: Process, x: np.ndarray, **options) -> tuple[DSM, str]:
    """The default objective for examples like `x` (n, *shape), and why."""
    shape = x.shape[1:]
    structure = process.structure_for(shape)
    if structure.rows <= MAX_LINEAR and is_linear(process, x):
        return LocalDSM(process, schedule=FromZero(), **options), "DSM from s = 0: the drift is linear, so it is exact"
    try:
        check_invertible(process, shape, what="", remedy="")
    except ValueError:
        return LocalDSM(process, **options), "LocalDSM, antithetic pairs: noise enters only some coordinates"
    if isinstance(structure, Elementwise):
        return TabulatedDSM(process, **options), "TabulatedDSM: the drift acts on each coordinate alone"
    return PathwiseDSM(process, **options), "PathwiseDSM: the drift couples coordinates, and the noise is invertible"


class Framed(eqx.Module):
    """A network in the frame of the marginals, with an affine part: `net(z, t) + a_t + (b_t + c_t) z`.

    z = (y − m_t)/s_t; a and b, of every coordinate, are tables over the times of the marginals; c, one for all, is
    linear in the features of time, which tell early times apart. All are zero before training. Where their gradients
    vanish the score obeys Stein's identities E[s] = 0 and E[s_i (y − m_t)_i] = −1 at all times, however little of it
    the network has learned, and so its flow carries means and variances as the process does.
    """

    net: Callable
    shift: Float[Array, "points ..."]
    scale: Float[Array, "points ..."]
    gain: Float[Array, " features"]
    features: TimeFeatures
    marginals: Frozen

    def __init__(self, net: Callable, clock: Clock, marginals: Marginals):
        self.net, self.features, self.marginals = net, TimeFeatures(clock), Frozen(marginals)
        self.shift, self.scale = jnp.zeros_like(marginals.mean), jnp.zeros_like(marginals.std)
        self.gain = jnp.zeros(TIMES[self.features.time] + 1)

    def __call__(self, y, t):
        marginals = self.marginals.value
        z = marginals.standardize(y, t)
        shift, scale = (marginals.between(table, t) for table in (self.shift, self.scale))
        gain = self.gain[0] + self.features(t) @ self.gain[1:]
        return self.net(z, t) + (shift + (scale + gain) * z).astype(z.dtype)


def default_network(
    process: Process, shape: tuple[int, ...], marginals: Marginals, prior, *, key: PRNGKey, **size
) -> Score:
    """An MLP, as a residual on the score of the prior or of the Gaussian of the marginals; `size`: width, depth, ….

    With few coordinates it also sees waves of the state, and so learns sharp edges sooner. Towards a prior they fade,
    if noise enters all coordinates and so smooths all edges.
    """
    clock, few = Clock(process), math.prod(shape) <= 4
    size = {"activation": "gelu", **size}
    spread = float(jnp.sqrt(jnp.mean(marginals.std[-1] ** 2)))
    if prior is None:
        net = Framed(MLP(shape, clock, key=key, fourier=(0.25, 0.5) if few else (), **size), clock, marginals)
        return Score(net, clock, parameterization="residual", base=marginals.score, spread=spread)
    fading = spread if is_invertible(process, shape, 0.5 * process.t1) else None
    net = MLP(shape, clock, key=key, fourier=(0.25, 0.5, 1.0, 2.0) if few else (), spread=fading, **size)
    return Score(net, clock, parameterization="residual", base=score_of(prior), spread=spread)


def image_network(
    process: Process, shape: tuple[int, ...], marginals: Marginals, prior, *, key: PRNGKey, width: int = 128
) -> Score:
    """A U-Net of `width` channels, halved down to four pixels (Ho et al.'s, for 32×32), as a residual on the score of
    the prior, or predicting noise."""
    clock, spread = Clock(process), float(jnp.sqrt(jnp.mean(marginals.std[-1] ** 2)))
    halvings = [n for n in (1, 2, 3) if all(side % 2**n == 0 and side >> n >= 4 for side in shape[-2:])]
    net = UNet(shape, clock, key=key, channels=width, levels=(1, *(2 for _ in halvings)))
    if prior is None:
        return Score(net, clock, spread=spread)
    return Score(net, clock, parameterization="residual", base=score_of(prior), spread=spread)
