"""Schedules s(t), 0 ≤ s(t) < t: from which earlier time the kernel to time t is taken.

`ScheduledPairs`: `∫_s^t g² = λ`, s = 0 where the whole integral is less. For a matrix g it is `max_ij ∫ |Q_ij| = λ`;
since `|Q_ij| ≤ √(Q_ii Q_jj)` the largest is always a diagonal entry, `max_i ∫ Q_ii`.
λ is on `∫g²`, so a Langevin process with `g² = 2β` has `∫β = λ/2`. Given a scale for each coordinate, such as its
deviation, it is `max_i ∫ Q_ii/scale_i² = λ`, a number without units.

The error of the linearization on [s, t] is bounded by (Lemma 2 of the paper; the operator is taken at τ)

    KL(q(y_t) ‖ q̂(y_t))  ≤  ∫_s^t E[ ½ |f(y_τ,τ) − T_s f(y_τ,τ)|² in Q⁻¹ ] dτ,

which `kl_bound` estimates from paths and `ScheduledPairs.for_tolerance` turns into a choice of λ.
"""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import check_count, check_key, check_positive, check_times, is_concrete
from ..base.linalg import inverse_and_log_det
from ..base.quadrature import NODES, WEIGHTS
from ..base.types import PRNGKey, StateLike
from ..paths.initial import initial_states
from ..paths.simulate import simulate
from ..process.noise import check_invertible
from ..process.process import Process, check_process
from ..process.structure import Elementwise, noise_diagonal
from .linearize import linearize

MAX_PANELS = 1 << 14
"""A jump of g takes 30 halvings, down to 10⁻⁹ of the span: these are hundreds of jumps."""


class AbstractSchedule(eqx.Module):
    """A function s(t) with 0 ≤ s(t) < t."""

    @abc.abstractmethod
    def __call__(self, t) -> Array: ...


class FromZero(AbstractSchedule):
    """`s = 0`: ordinary denoising score matching, exact for linear drifts."""

    def __call__(self, t):
        check_times("t", t)
        return jnp.zeros_like(jnp.asarray(t, float))


class ConstantGap(AbstractSchedule):
    """`s = max(0, t − gap)`."""

    gap: float

    def __init__(self, gap: float):
        check_positive("gap", gap)
        self.gap = gap

    def __call__(self, t):
        check_times("t", t)
        return jnp.maximum(jnp.asarray(t, float) - self.gap, 0.0)


class ScheduledPairs(AbstractSchedule):
    """`∫_s^t g² = λ`, or with `scales` (an array of a state's shape) `max_i ∫_s^t Q_ii/scale_i² = λ`.

        s = ScheduledPairs(process, lam=1e-2)
        s(0.5)

    `G(t) = ∫_0^t Q_ii` is tabulated once, on panels refined until each is resolved by eight Gauss nodes; s(t) is
    then found in its panel by Newton's method, so it is as accurate as the arithmetic whatever g is.
    """

    lam: Array
    process: Process
    edges: Float[Array, " panels+1"]
    totals: Float[Array, "panels+1 entries"]
    units: Float[Array, " entries"]
    """The squared scale of each entry of Q that is kept."""
    entries: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, process: Process, lam: float, *, scales: StateLike | None = None):
        check_process(process)
        check_positive("lam", lam, why="It is the integral of g² from s to t.")
        self.lam = jnp.asarray(lam, float)
        self.process = process
        with jax.ensure_compile_time_eval():
            units = np.ones(1) if scales is None else _squared_scales(process, np.asarray(scales, np.float64))
            edges, totals, self.entries = _tabulate(process, units)
            self.units = jnp.asarray(np.broadcast_to(units, max(len(units), max(self.entries) + 1)), float)
            self.units = self.units[jnp.asarray(self.entries)]
        self.edges, self.totals = jnp.asarray(edges, float), jnp.asarray(totals, float)

    def __call__(self, t):
        check_times("t", t, self.process.t1)
        return jnp.vectorize(self._one)(jnp.asarray(t, float))

    def _one(self, t):
        panel = jnp.clip(jnp.searchsorted(self.edges, t, side="right") - 1, 0, len(self.edges) - 2)
        target = self.totals[panel] + self._integral(self.edges[panel], t) - self.lam
        s = jnp.max(jax.vmap(self._invert, in_axes=(0, 1, 0))(target, self.totals, jnp.arange(len(target))))
        return jnp.minimum(s, t * (1 - 4 * jnp.finfo(t.dtype).eps))

    def _rates(self, tau) -> Float[Array, " entries"]:
        return noise_diagonal(self.process.g(tau))[jnp.asarray(self.entries)] / self.units

    def _integral(self, a, b) -> Float[Array, " entries"]:
        values = jax.vmap(self._rates)(a + (b - a) * jnp.asarray(NODES, self.edges.dtype))
        return (b - a) * jnp.asarray(WEIGHTS, values.dtype) @ values

    def _invert(self, target, totals, entry):
        """The time at which the integral of one entry reaches `target`, 0 when it is negative."""
        panel = jnp.clip(jnp.searchsorted(totals, target, side="right") - 1, 0, len(totals) - 2)
        a, b = self.edges[panel], self.edges[panel + 1]
        wanted = jnp.maximum(target - totals[panel], 0.0)
        whole = totals[panel + 1] - totals[panel]
        s = a + (b - a) * wanted / jnp.where(whole > 0, whole, 1.0)
        for _ in range(4):
            rate = self._rates(s)[entry]
            excess = self._integral(a, s)[entry] - wanted
            s = jnp.clip(s - excess / jnp.where(rate > 0, rate, jnp.inf), a, b)
        return jnp.where(target > 0, s, 0.0)

    @classmethod
    def for_tolerance(
        cls,
        process: Process,
        y0,
        tol: float,
        *,
        key: PRNGKey,
        times=None,
        n: int = 1024,
        expand: str = "t",
        ito: bool = False,
    ) -> "ScheduledPairs":
        """The largest λ whose `kl_bound` stays below `tol` at every one of `times` (default: eight over the span).

        The bound is estimated with the same n paths for every λ tried; λ is found to 1 %. When the linearization
        is exact, λ is the whole integral of g², so that s = 0.
        """
        check_positive("tol", tol, why="It is the KL divergence allowed, in nats.")
        times = process.t1 * np.arange(1, 9) / 8 if times is None else times
        pairs = cls(process, 1.0)
        upper = float(jnp.max(pairs.totals[-1]))

        @eqx.filter_jit
        def worst(pairs, lam):
            pairs = eqx.tree_at(lambda p: p.lam, pairs, lam)
            return jnp.max(kl_bound(process, pairs, y0, times, key=key, n=n, expand=expand, ito=ito).bound)

        def acceptable(lam):
            bound = float(worst(pairs, jnp.asarray(lam, float)))
            if np.isnan(bound):
                raise ValueError("the KL bound is not finite: some simulated paths leave the domain of the drift.")
            return bound <= tol

        if acceptable(upper):
            return cls(process, upper)
        lower = 1e-6 * upper
        if not acceptable(lower):
            raise ValueError(f"tol={tol} is not met by any λ down to {lower:.1e}. Allow a larger tol, or use ito=True.")
        while upper / lower > 1.01:
            middle = np.sqrt(lower * upper)
            lower, upper = (middle, upper) if acceptable(middle) else (lower, middle)
        return cls(process, lower)


class KLBound(NamedTuple):
    """A bound on `KL(q(y_t) ‖ q̂(y_t))` at each time, in nats, with its standard error over paths."""

    bound: Float[Array, " times"]
    stderr: Float[Array, " times"]


def kl_bound(
    process: Process,
    schedule: AbstractSchedule,
    y0,
    times,
    *,
    key: PRNGKey,
    n: int = 1024,
    expand: str = "t",
    ito: bool = False,
) -> KLBound:
    """Estimate Lemma 2's bound on the error of the local kernels from s(t) to t, from n paths.

        kl_bound(process, ScheduledPairs(process, 1e-2), y0, [0.1, 0.5, 1.0], key=key)

    `y0` is a sampler `y0(key, n)` or an array of samples. Needs an invertible `Q = g gᵀ`. A bound that is not finite is
    an error; inside of `jax.jit` it is NaN or infinite.
    """
    check_process(process)
    check_key(key)
    check_count("n", n)
    if not callable(schedule):
        raise TypeError(f"schedule={schedule!r} must be a function s(t), e.g. ScheduledPairs(process, lam=1e-2).")
    if np.ndim(times) != 1 or len(times) == 0:
        raise ValueError(f"times has shape {np.shape(times)}; it must be a list of times, e.g. [{process.t1}].")
    check_times("times", times, process.t1)
    times = jnp.asarray(times, float)
    start_key, path_key = jax.random.split(key)
    starts = initial_states(y0, n, key=start_key)
    process.check(starts[0])
    check_invertible(
        process,
        starts.shape[1:],
        what="the KL bound",
        remedy="Choose λ directly: ScheduledPairs(process, lam=...).",
    )
    values = _kl_values(process, schedule, starts, jax.random.split(path_key, n), times, expand, ito)
    size = jnp.max(values, axis=1, keepdims=True)  # squares of values as large as a runaway drift makes them overflow
    spread = jnp.std(values / jnp.where(size > 0, size, 1.0), axis=1) * size[:, 0]
    found = KLBound(jnp.mean(values, axis=1), spread / np.sqrt(n))
    if is_concrete(found) and not np.all(np.isfinite(found)):
        raise FloatingPointError(
            "the KL bound is not finite: the drift is too far from its linearization for this precision, or not finite "
            "itself, along the paths from y0. Check y0, or take a schedule of shorter intervals."
        )
    return found


@eqx.filter_jit
def _kl_values(process: Process, schedule, starts, keys, times, expand: str, ito: bool) -> Float[Array, "times n"]:
    """The integral of Lemma 2 along each path, up to each of the times."""
    nodes = jnp.asarray(NODES, starts.dtype)

    def one(y, t, key):
        first, second = jax.random.split(key)
        s = schedule(t).astype(y.dtype)
        y_s = simulate(process, y, s[None], key=first)[0]
        taus = s + (t - s) * nodes
        inside = simulate(process, y_s, taus, key=second, t0=s)
        affine = linearize(process, y_s, s, expand=expand, ito=ito)

        def squared(tau, y):
            structure = affine.structure
            A, b = affine.coefficients(tau)
            exact = structure.split(process.f(y, tau))
            wrong = exact - structure.matvec(A, structure.split(y - y_s)) - b
            Q = structure.noise_cov(process.g(tau).astype(y.dtype))
            if isinstance(structure, Elementwise):
                return jnp.sum(wrong**2 / Q)
            return jnp.sum(wrong * structure.matvec(inverse_and_log_det(Q)[0], wrong))

        return 0.5 * (t - s) * jnp.sum(jnp.asarray(WEIGHTS, y.dtype) * jax.vmap(squared)(taus, inside))

    return jax.vmap(lambda t: jax.vmap(lambda y, k: one(y, t, k))(starts, keys))(times)


def _undominated(rows: np.ndarray) -> tuple[int, ...]:
    """Rows that no other row exceeds everywhere: only these can have the largest integral."""
    kept: list[int] = []
    for i in np.argsort(-rows.sum(axis=1), kind="stable"):
        if not any(np.all(rows[i] <= rows[k]) for k in kept):
            kept.append(int(i))
    return tuple(kept)


def _squared_scales(process: Process, scales: np.ndarray) -> np.ndarray:
    """For each entry of the diagonal of Q as g gives it, the smallest squared scale of its coordinates."""
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ValueError(f"scales={np.array2string(scales, threshold=8)} must be finite numbers above zero.")
    entries = jax.eval_shape(lambda: noise_diagonal(process.g(0.0))).size
    if scales.size % entries or (entries not in (1, scales.size) and entries != scales.shape[0]):
        raise ValueError(
            f"scales of shape {scales.shape} do not fit the {entries} entries of g: give one a coordinate."
        )
    return np.min(scales.reshape(entries, -1), axis=1) ** 2


def _tabulate(process: Process, units: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Panel edges, the integral of each entry of Q/units up to each edge, and which entries are kept."""
    evaluate = jax.jit(jax.vmap(lambda tau: noise_diagonal(process.g(tau))))
    chunk = 2048

    def values(tau):  # in chunks of one size, so that one compilation serves
        flat = np.resize(tau.ravel(), -(-tau.size // chunk) * chunk)
        out = np.concatenate([np.asarray(evaluate(c), np.float64) for c in flat.reshape(-1, chunk)])
        return out[: tau.size].reshape(*tau.shape, -1) / units

    def integrals(edges):
        a, b = edges[:-1, None], edges[1:, None]
        return (b - a) * np.einsum("n,pne->pe", WEIGHTS, values(a + (b - a) * NODES))

    probes = values(process.t1 * np.linspace(0.0, 1.0, 257))
    if not np.all(np.isfinite(probes)):
        raise ValueError("diffusion is not finite everywhere on [0, t1]; choose t1 before its singularity.")
    if not np.any(probes > 0):
        raise ValueError("diffusion is zero on all of [0, t1]: there is no noise to schedule.")
    entries = _undominated(probes.T)

    precision = 1e-11 if jax.config.jax_enable_x64 else 1e-5  # pyright: ignore[reportAttributeAccessIssue]
    edges = process.t1 * np.linspace(0.0, 1.0, 65)
    while len(edges) < MAX_PANELS:
        halved = np.stack([edges[:-1], 0.5 * (edges[:-1] + edges[1:])], axis=1)
        fine = np.append(halved.ravel(), edges[-1])
        halves = integrals(fine)[:, entries].reshape(-1, 2, len(entries))
        whole = integrals(edges)[:, entries]
        scale = np.sum(whole, axis=0)
        rough = np.abs(whole - halves.sum(1)) > precision * np.maximum(whole, precision * scale)
        # Newton's method starts well when g² changes little over a panel, or the panel hardly counts.
        uneven = (halves.max(1) > 1.5 * halves.min(1)) & (whole > 1e-3 * precision * scale)
        split = np.any(rough | uneven, axis=1) & (np.diff(edges) > 1e-9 * process.t1)
        if not split.any():
            break
        edges = np.sort(np.append(edges, halved[split, 1]))
    totals = np.concatenate([np.zeros((1, len(entries))), np.cumsum(integrals(edges)[:, entries], axis=0)])
    return edges, totals, entries
