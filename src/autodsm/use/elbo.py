"""Lower bounds of the likelihood of a generative model.

For a state y_δ at time δ = t0, with the paths of the process started from it,

    log p(y_δ) ≥ E[log π(y_T)] − ∫_δ^T E[ ½‖s‖²_Q + ∇·(Q s) − ∇·f ] dt                    (ISM)
    log p(y_δ) ≥ E[log π(y_T)] − ∫_δ^T E[ ½‖s − ŝ‖²_Q − ½‖ŝ‖²_Q − ∇·f ] dt                (DSM)

where the target ŝ has the score as its mean given y_t. The integrals are equal for targets without error ("pathwise",
"tabulated"), and for "local-dsm" up to its linearization. From y_δ to the data,

    log p(y_0) ≥ E[log p(y_0|y_δ) − log q(y_δ|y_0) + log p(y_δ)],

q the Gaussian kernel from 0 to δ that the paths start with, and a decoder `p(y_0|y_δ) = N(x̂, A⁻¹ P A⁻ᵀ)`, A and P of
the process linearized at x̂. The point x̂ solves `m(x̂) = y_δ + P s(y_δ, δ)`, m the mean of the kernel from x̂. It depends
on y_δ alone, so the decoder is a density in y_0 and the bound is valid, whatever the linearization is worth.

**Drifts that jump**, as towards a Laplace prior: automatic differentiation misses the delta in their divergence. For
"local-dsm" and "tabulated" it is taken by parts, `−E[∇·f] = E[f·ŝ]`, which needs no derivative; "ism" and "pathwise"
derive a score or a path, and are refused.

**The time integral** is estimated at stratified times, drawn half evenly in t and half in log G, and weighted by their
density. Along a path of the process, with the exact score, `log p(y_δ) = log p(y_T) − ∫ […] dt − ∫ s·g dw`. The last
term has mean zero and most of the variance: a sum for it, over the same path, is taken away ("ism" and "local-dsm").
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import (
    as_floating,
    as_shape,
    check_count,
    check_key,
    check_name,
    suggest_options,
)
from ..base.estimate import Estimate, chunk_for, estimate, over_samples
from ..base.linalg import inverse_and_log_det
from ..base.modules import replace
from ..base.types import PRNGKey, State, StateLike
from ..kernels.gaussian import transition
from ..kernels.schedule import ScheduledPairs
from ..network.shape import check_one
from ..paths.schemes import SOLVERS
from ..process.clock import TimeLaw
from ..process.jumps import is_known
from ..process.noise import check_divergence, divergence, implicit, inner, trace_directions
from ..process.priors import WithVelocity, check_log_prob, check_support, draw_prior, prior_shape
from ..process.process import Process, check_process
from ..process.structure import Elementwise, noise_diagonal
from ..targets import AbstractTarget, Adapted, Paths, Tabulated
from ..targets.paths import time_grid
from .flow import check_score
from .likelihood import jump_near

KINDS = ("ism", "local-dsm", "pathwise", "tabulated")


class ELBO(eqx.Module):
    """A lower bound of the log-likelihood, as a function of a score and one example.

        bound = ELBO(process, prior, kind="ism")
        value = bound(score, x, key=key)                       # one unbiased estimate
        mean = bound.average(score, xs, key=key)               # an Estimate: value and standard error

    **Arguments:**

    - `prior`: the law at t1, with `log_prob(y)`; of a number, it is taken for every coordinate.
    - `kind`: "ism", "local-dsm", "pathwise" (invertible noise) or "tabulated" (elementwise drifts).
    - `lam`: λ of "local-dsm" (0.001), relative to the squared width of the prior in each coordinate.
    - `t0`: δ, by default `t1/1000`.
    - `draws`: times at which the integrand is evaluated, on one path.
    - `steps`: of the path (512; "tabulated" has none). Its error enters the bound once for each time the process
      relaxes: with 512, for Langevin dynamics of ∫β = 10 towards a law of curvature 2, by a few thousandths of a nat
      for each coordinate.
    - `divergence`: of the score in "ism", "exact" (default) or "hutchinson" with that many `probes`.
      `average` and `values` choose the weights of "pathwise" from the examples, and `prepare` does for single calls;
      else they are those of a process without drift, which is right too but varies more.
    - `y_range`, `shape`: of "tabulated": where y_δ lies, and the shape of a state.
    - `decoder`: False leaves the part from y_δ to the data out: the bound is of log p(y_δ) at the example itself.
    """

    process: Process
    prior: Any
    law: TimeLaw
    schedule: ScheduledPairs | None
    target: AbstractTarget | None
    """Of the process from δ on, in the time t − δ; for "pathwise" and "tabulated"."""
    grid: Float[Array, " points"]
    """Times that the paths of "ism" and "local-dsm" step to, besides those of the draws."""
    kind: str = eqx.field(static=True)
    draws: int = eqx.field(static=True)
    divergence: str = eqx.field(static=True)
    probes: int | None = eqx.field(static=True)
    decoder: bool = eqx.field(static=True)
    jumping: bool | None = eqx.field(static=True)
    """Whether the drift jumps; None before the shape of a state is known."""

    @suggest_options(gone={"forgetting": "Paths are weighed for the least variance, as `prepare` finds it."})
    def __init__(
        self,
        process: Process,
        prior,
        *,
        kind: str = "ism",
        lam: float | None = None,
        t0: float | None = None,
        draws: int = 64,
        steps: int | None = None,
        divergence: str | None = None,
        probes: int | None = None,
        y_range: tuple[float, float] | None = None,
        shape: tuple[int, ...] | None = None,
        decoder: bool = True,
    ):
        check_process(process)
        check_name("kind", kind, KINDS)
        check_count("draws", draws)
        given = dict(lam=lam, steps=steps, divergence=divergence, probes=probes)
        _check_used(kind, **given, y_range=y_range, shape=shape)
        steps = 512 if steps is None else steps
        check_count("steps", steps)
        check_log_prob(prior)
        check_support(prior)
        self.process, self.prior, self.kind, self.draws = process, prior, kind, draws
        self.divergence = check_divergence(divergence or "exact", probes)
        self.probes, self.decoder, self.jumping = probes, decoder, None
        self.law = TimeLaw(process, "mixed", t0)
        grid = time_grid(process, steps)
        self.grid = jnp.asarray(grid[(grid > self.law.t0) & (grid < process.t1)], float)
        self.schedule = None
        if kind == "local-dsm":
            self.schedule = ScheduledPairs(process, 1e-3 if lam is None else lam, scales=_widths(process, prior))
        self.target = None
        if kind == "pathwise":
            later = self._later()
            self.target = Adapted(later, Paths(later, steps), known_start=False)
        elif kind == "tabulated":
            if y_range is None or shape is None:
                raise ValueError('kind="tabulated" needs y_range=(low, high), where y_δ lies, and shape of a state.')
            shape = as_shape(shape)
            if not is_known(process, shape):
                raise ValueError(
                    "tables are made from values of the drift, and a parameter of it is traced (by jit, vmap or grad). "
                    'Make the bound outside; for derivatives in that parameter use kind="local-dsm" or "ism".'
                )
            self.target = Tabulated(self._later(), shape, y_range=y_range, antithetic=True)

    def __call__(self, score: Callable, x: StateLike, *, key: PRNGKey) -> Float[Array, ""]:
        """An unbiased estimate of the bound for one example."""
        check_key(key)
        x = as_floating(x, "x")
        if (own := prior_shape(self.prior)) is not None and own != x.shape:
            raise ValueError(f"prior has shape {own}, the example has shape {x.shape}. Give ONE example.")
        check_one(score, x, "The bound takes one example; bound.average(score, xs, key=key) takes many.")
        check_score(score, x.shape, x.dtype)
        self = self._settled(x.shape)
        start_key, u_key, path_key, value_key = jax.random.split(key, 4)
        if self.decoder:
            y, first, gap = self._start(score, x, start_key)
        else:
            y, first, gap = x, score(x, jnp.asarray(self.law.t0, x.dtype)), jnp.zeros((), x.dtype)
        u = (jnp.arange(self.draws, dtype=x.dtype) + jax.random.uniform(u_key, (), x.dtype)) / self.draws
        t = jnp.maximum(jnp.sort(self.law.at(u)), self.law.t0 + 1e-6 * self.process.t1)  # kernels need some time
        if self.target is not None:
            values, end = self._with_target(score, y, t, path_key, value_key)
        else:
            values, end = self._on_path(score, y, first, t, path_key, value_key)
        return gap + jnp.sum(self.prior.log_prob(end)) - jnp.mean(values / self.law.density(t).astype(x.dtype))

    def prepare(self, xs, *, key: PRNGKey) -> "ELBO":
        """The same bound, of less variance: "pathwise" weighs paths as is best for examples (n, *shape)."""
        if not isinstance(self.target, Adapted) or self.target.profile is not None:
            return self
        if not is_known(self.process, np.shape(xs)[1:]):
            return self
        return replace(self, target=self.target.fitted(xs, key=key))

    def _settled(self, shape: tuple[int, ...]) -> "ELBO":
        """The same bound, which knows whether the drift jumps."""
        as_shape(shape)
        if self.jumping is not None or not is_known(self.process, shape):
            return self
        jump = jump_near(self.process, self.prior, shape)
        if jump is not None and self.kind in ("ism", "pathwise"):
            raise ValueError(
                f"kind={self.kind!r} takes a derivative of the drift or the score, and misses the delta where it "
                f'jumps: {jump}. Use kind="local-dsm", which needs none, or a prior whose log_prob is smooth.'
            )
        return replace(self, jumping=jump is not None)

    def _with_target(self, score, y: State, t, key, end_key) -> tuple[Array, State]:
        assert self.target is not None
        draw = self.target.draw(y, t - self.law.t0, key=key)
        one = jax.vmap(lambda y, s, t: self._denoising(score, y, s, t), in_axes=(0, 0, None))
        last = jnp.asarray([self.process.t1 - self.law.t0], y.dtype)
        return jnp.mean(jax.vmap(one)(draw.y, draw.score, t), axis=1), self.target.states(y, last, key=end_key)[0]

    def _on_path(self, score, y: State, first: State, t, key, value_key) -> tuple[Array, State]:
        """Values at the times t on one path, with the sum for `∫ s·g dw` spread over them; and its end. `first` is the
        score at the start."""
        delta = jnp.asarray(self.law.t0, y.dtype)
        at = t if self.schedule is None else jnp.maximum(self.schedule(t).astype(y.dtype), delta)
        times = jnp.concatenate([delta[None], at, jnp.asarray([self.process.t1], y.dtype)])
        path, kicks = self._path(y, times, key)
        keys = jax.random.split(value_key, len(t))
        if self.schedule is None:
            values, scores = jax.vmap(lambda y, t, k: self._implicit(score, y, t, k))(path[1:-1], t, keys)
        else:
            values = jax.vmap(lambda y, s, t, k: self._local(score, y, s, t, k))(path[1:-1], at, t, keys)
            scores = jax.vmap(score)(path[1:-1], at)
        noise = jnp.sum(first * kicks[0]) + jnp.sum(scores * kicks[1:])
        return values + noise * self.law.density(t).astype(y.dtype), path[-1]

    def _path(self, y: State, times, key) -> tuple[Array, Array]:
        """States at `times`, increasing from the first, and the sum of `g dw` in each interval between them."""
        scheme = SOLVERS["weak2"]
        every = jnp.sort(jnp.concatenate([times, self.grid.astype(y.dtype)]))
        noise = scheme.noise(key, (len(every) - 1, *self.process.noise_shape(y.shape)), y.dtype)

        def step(y, inputs):
            t, h, unit = inputs
            dw = jnp.sqrt(h) * unit
            y = scheme.step(self.process, y, self.process.f(y, t), t, h, dw)
            return y, (y, self.process.diffuse(t + 0.5 * h, dw, y.shape))

        _, (path, kicks) = jax.lax.scan(step, y, (every[:-1], jnp.diff(every), noise))
        at = jnp.searchsorted(every, times)
        path = jnp.concatenate([y[None], path])[at]
        received = jnp.concatenate([jnp.zeros_like(y)[None], jnp.cumsum(kicks, axis=0)])[at]
        return path, jnp.diff(received, axis=0)

    def _local(self, score, y: State, s, t, key) -> Array:
        kernel = transition(self.process, y, s, t)
        eps = jax.random.normal(key, y.shape, y.dtype)
        one = lambda e: self._denoising(score, kernel.sample(e), kernel.score(e), t)  # noqa: E731
        return jnp.mean(jax.vmap(one)(jnp.stack([eps, -eps])))

    def _later(self) -> Process:
        """The process from δ on, in the time t − δ."""
        process, delta = self.process, self.law.t0
        drift, noise = lambda y, t: process.drift(y, t + delta), lambda t: process.g(t + delta)
        return Process(drift, noise, process.t1 - delta, structure=process.structure)

    def average(self, score: Callable, xs, *, key: PRNGKey, chunk: int | None = None) -> Estimate:
        """The mean over examples, (n, *shape), with its standard error."""
        return estimate(self.values(score, xs, key=key, chunk=chunk))

    def values(self, score: Callable, xs, *, key: PRNGKey, chunk: int | None = None) -> np.ndarray:
        """One estimate for each of the examples, (n,); two scores with the same key see the same paths."""
        check_key(key)
        xs = as_floating(xs, "xs")
        if xs.ndim < 1:
            raise ValueError("xs is a number; give several examples, stacked along a first axis.")
        size = int(np.prod(np.shape(xs)[1:]))
        every = size if self.kind == "ism" and self.divergence == "exact" else 1  # derivatives of each score
        chunk = chunk_for(size * (self.draws * every + len(self.grid))) if chunk is None else chunk
        # With a key of its own: for two scores the same.
        settled = self._settled(np.shape(xs)[1:]).prepare(xs, key=jax.random.key(0))
        values = over_samples(eqx.Partial(_bound, settled, score), xs, key=key, chunk=chunk)
        if bad := int(np.sum(~np.isfinite(values))):
            raise FloatingPointError(
                f"the bound is not finite for {bad} of {len(values)} examples: is the score, on [t0, t1]?"
            )
        return values

    def _implicit(self, score, y: State, t, key) -> tuple[Array, State]:
        """The integrand, and the score."""
        along = trace_directions(self.divergence, self.probes, key, y)
        assert along is not None
        value, s = implicit(self.process, score, y, t, along)
        return value - divergence(self.process, y, t), s

    def _denoising(self, score, y: State, target: State, t) -> Array:
        found = score(y, t)  # ½‖s − ŝ‖² − ½‖ŝ‖², without the difference of two large numbers
        quadratic = 0.5 * inner(self.process, t, found, found - 2.0 * target)
        if self.jumping:
            return quadratic + jnp.sum(self.process.f(y, t) * target)
        return quadratic - divergence(self.process, y, t)

    def _start(self, score, x: State, key) -> tuple[State, State, Array]:
        """y_δ from the kernel at x, the score there, and `log p(x|y_δ) − log q(y_δ|x)`."""
        return self._start_from(score, x, jax.random.normal(key, x.shape, x.dtype))

    def _start_from(self, score, x: State, eps: State) -> tuple[State, State, Array]:
        delta = jnp.asarray(self.law.t0, x.dtype)
        encoder = transition(self.process, x, 0.0, delta)
        y = encoder.sample(eps)
        wanted = score(y, delta)

        def closer(point, _):
            kernel = transition(self.process, point, 0.0, delta)
            return point + y + kernel.covary(wanted) - kernel.mean, None

        point, _ = jax.lax.scan(closer, y, length=4)  # each time the error shrinks by a factor of order δ
        kernel = transition(self.process, point, 0.0, delta)
        structure = kernel.structure
        _, A = structure.jacobian(lambda p: transition(self.process, p, 0.0, delta).mean, point)
        off = structure.join(structure.matvec(A, structure.split(x - point)))
        log_det = jnp.sum(jnp.log(jnp.abs(A)) if isinstance(structure, Elementwise) else inverse_and_log_det(A)[1])
        return y, wanted, kernel.log_prob(kernel.mean + off) + log_det - encoder.log_prob(y)


def _widths(process: Process, prior) -> np.ndarray | None:
    """The width of the prior in each coordinate, half the way from its 16 % to its 84 % quantile; None where it is not
    known for each entry of the noise."""
    if not callable(getattr(prior, "sample", None)):
        return None
    shape = prior_shape(prior) or ((2,) if isinstance(prior, WithVelocity) else ())
    with jax.ensure_compile_time_eval():
        y = np.asarray(draw_prior(prior, 1024, shape, key=jax.random.key(0)), float)
        entries = jax.eval_shape(lambda: noise_diagonal(process.g(0.0))).size
    low, high = np.quantile(y, [0.16, 0.84], axis=0)
    widths = 0.5 * (high - low)
    return widths if widths.shape else np.full(entries, widths)


def _bound(bound: ELBO, score: Callable, x: State, key: PRNGKey) -> Array:
    return bound(score, x, key=key)


@suggest_options(ELBO.__init__)
def elbo(process: Process, score: Callable, prior, x: StateLike, *, key: PRNGKey, **options) -> Float[Array, ""]:
    """A lower bound of `log p(x)` for one example, estimated without bias; `options` are those of `ELBO`.

    value = elbo(process, score, prior, x, key=key, kind="ism")
    """
    return ELBO(process, prior, **options)(score, x, key=key)


_USED = {
    "ism": {"steps", "divergence", "probes"},
    "local-dsm": {"steps", "lam"},
    "pathwise": {"steps"},
    "tabulated": {"y_range", "shape"},
}


def _check_used(kind: str, **options) -> None:
    for name, value in options.items():
        if value is not None and name not in _USED[kind]:
            raise ValueError(f"{name}={value} has no meaning for kind={kind!r}.")
