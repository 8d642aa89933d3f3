"""Random processes for `fuzz.py`, and the exact moments of those that are linear, by a route of their own.

In natural units `du = F(u, τ) dτ + G(τ) dw` on 0 ≤ τ ≤ 1; then `y = L u`, `t = T τ`, with L and T powers of two. For
`F = A(τ) u + c(τ)` the moments follow from scipy alone,

    m' = A m + c,        P' = A P + P Aᵀ + G Gᵀ,

by a matrix exponential where A, c and G are constant, else by an adaptive solution in double precision.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import autodsm as ad

KINDS = (
    "linear", "linear", "linear in time", "elementwise", "coupled", "kinetic", "time", "stiff", "jumping", "runaway",
)  # fmt: skip
SHAPES = ((), (1,), (2,), (3,), (2, 2), (1, 4, 4))


class Linear(NamedTuple):
    """Coefficients in natural units, as functions of τ that numpy can call: A (d, d), c (d,) and Q (d, d)."""

    A: Callable
    c: Callable
    Q: Callable
    constant: bool

    def moments(self, mean, cov, end: float, start: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance at `end`, from those at `start`."""
        mean, cov, h = np.asarray(mean, float), np.asarray(cov, float), end - start
        d = len(mean)
        if self.constant:
            A, c, Q = self.A(0.0), self.c(0.0), self.Q(0.0)
            moved = expm(h * np.block([[A, c[:, None]], [np.zeros((1, d + 1))]]))
            # P' = A P + P Aᵀ + Q for the vector of P: as exact for stiff A as for any other.
            twice = np.kron(A, np.eye(d)) + np.kron(np.eye(d), A)
            grown = expm(h * np.block([[twice, Q.reshape(-1, 1)], [np.zeros((1, d * d + 1))]]))
            found = grown[:-1, :-1] @ cov.ravel() + grown[:-1, -1]
            return moved[:-1, :-1] @ mean + moved[:-1, -1], found.reshape(d, d)

        def rates(tau, x):
            A, P = self.A(tau), x[d:].reshape(d, d)
            return np.concatenate([A @ x[:d] + self.c(tau), (A @ P + P @ A.T + self.Q(tau)).ravel()])

        begun = np.concatenate([mean, cov.ravel()])
        solution = solve_ivp(rates, (start, end), begun, method="DOP853", rtol=1e-10, atol=1e-12)
        return solution.y[:d, -1], solution.y[d:, -1].reshape(d, d)


class Made(NamedTuple):
    """A process, with what is known about it."""

    kind: str
    process: ad.Process
    shape: tuple[int, ...]
    L: float
    T: float
    linear: Linear | None
    mean: np.ndarray
    """Of u at τ = 0, (d,)."""
    std: float
    """Of every coordinate of u there."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def states(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """n states from N(mean, std²), (n, *shape), in the units of the process and single precision."""
        u = self.mean + self.std * rng.normal(size=(n, self.size))
        return (self.L * u).reshape(n, *self.shape).astype(np.float32)

    def natural(self, y) -> np.ndarray:
        """States as rows of u."""
        y = np.asarray(y, float)
        return y.reshape(*y.shape[: y.ndim - len(self.shape)], self.size) / self.L

    def exact(self, tau: float) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of u at τ, of a linear process."""
        assert self.linear is not None
        return self.linear.moments(self.mean, self.std**2 * np.eye(self.size), tau)

    def range(self, axis: int) -> tuple[tuple[float, float], float]:
        """Ends for a coordinate of a grid, in the units of the process, and its least deviation; a rough guess where
        the process is not linear."""
        guess = (self.mean, 2 * np.eye(self.size))
        found = [self.exact(tau) for tau in np.linspace(0, 1, 9)] if self.linear else [guess]
        means = np.array([mean[axis] for mean, _ in found])
        stds = np.array([math.sqrt(cov[axis, axis]) for _, cov in found])
        low, high = np.min(means - 7 * stds), np.max(means + 7 * stds)
        return (self.L * float(low), self.L * float(high)), self.L * float(stds.min())

    def marginals(self) -> Any:
        """The library's own marginals, in the units of the process."""
        mean = (self.L * self.mean).reshape(self.shape)
        return ad.reference.gaussian_marginals(self.process, mean, (self.L * self.std) ** 2 * np.eye(self.size))


def random_process(
    rng: np.random.Generator, *, kinds=KINDS, shapes=SHAPES, units: float = 0.25, noise: tuple[str, ...] | None = None
) -> Made:
    """A process of one of the kinds and shapes; in a share `units` of cases in units far from one."""
    kind, shape = str(rng.choice(kinds)), tuple(shapes[rng.integers(len(shapes))])
    if kind == "kinetic":
        shape = (2,)
    if kind == "coupled" and len(shape) != 1:
        shape = (3,)
    d = math.prod(shape)
    far = int(rng.choice([10, 30])) if rng.random() < units else 0
    L, T = (2.0 ** int(power) for power in rng.integers(-far, far + 1, 2))
    coupled = kind.startswith("linear") and len(shape) == 1 and d > 1
    names = noise or ("number", "diagonal", "function", *(["matrix", "zeros"] if coupled else []))
    name = "kinetic" if kind == "kinetic" else str(rng.choice(names))
    G, Q = _noise(rng, name, shape, d)
    F, parts = _drift(rng, kind, shape, d, coupled)

    def drift(y, t):
        return (L / T) * F(y / L, t / T)

    unit = L / math.sqrt(T)
    diffusion = (lambda t: unit * G(t / T)) if name == "function" else unit * np.asarray(G(0.0), np.float32)
    drift.__name__ = f"{kind}, noise: {name}, L=2^{math.log2(L):g}, T=2^{math.log2(T):g}"
    process = ad.Process(drift, diffusion, T)
    linear = None if parts is None else Linear(*parts, Q, kind != "linear in time" and name != "function")
    return Made(kind, process, shape, L, T, linear, rng.normal(size=d), float(rng.uniform(0.3, 1.0)))


def _noise(rng, name: str, shape, d: int) -> tuple[Callable, Callable]:
    """G(τ) as the process takes it, and `G Gᵀ` as a matrix."""
    size = float(rng.uniform(0.3, 1.5))
    if name == "kinetic":
        diagonal = np.array([0.0, size])
    elif name in ("diagonal", "zeros") and shape:
        diagonal = rng.uniform(0.3, 1.5, shape[0])
        diagonal[0] *= name != "zeros"
    elif name == "matrix":
        root = rng.normal(size=(d, int(rng.integers(1, d + 1))))
        return lambda tau: root, lambda tau: root @ root.T
    elif name == "function":
        return lambda tau: size * (0.5 + tau), lambda tau: (size * (0.5 + tau)) ** 2 * np.eye(d)
    else:
        return lambda tau: size, lambda tau: size**2 * np.eye(d)
    every = np.repeat(diagonal, d // len(diagonal))
    return lambda tau: diagonal, lambda tau: np.diag(every**2)


def _drift(rng, kind: str, shape, d: int, coupled: bool) -> tuple[Callable, tuple[Callable, Callable] | None]:
    """F(u, τ), and A and c if it is linear."""
    a = float(rng.uniform(0.3, 3.0))
    W = rng.normal(size=(d, d)) / math.sqrt(d)
    if kind in ("linear", "linear in time", "stiff", "kinetic"):
        c, wave = rng.normal(size=d), float(rng.uniform(1.0, 6.0)) if kind == "linear in time" else 0.0
        A = W - (1 + a) * np.eye(d) if coupled else -a * np.eye(d)
        if kind == "stiff":
            A = -np.diag(10.0 ** rng.uniform(0, 5, d)) if len(shape) == 1 else -(10.0 ** rng.uniform(1, 4)) * np.eye(d)
        if kind == "kinetic":
            A, c = np.array([[0.0, 1.0], [-a, -float(rng.uniform(0.1, 2.0))]]), c * [0.0, 1.0]
        rate = A.astype(np.float32) if coupled or kind == "kinetic" else np.diag(A).reshape(shape).astype(np.float32)
        offset = c.reshape(shape).astype(np.float32)

        def linear(u, tau):
            moved = rate.astype(u.dtype) @ u if rate.ndim == 2 and len(shape) == 1 else rate.astype(u.dtype) * u
            return moved * (1 + 0.5 * jnp.sin(wave * tau)) + offset * jnp.cos(wave * tau)

        given, added = A.astype(np.float32).astype(float), offset.astype(float).ravel()
        return linear, (lambda tau: given * (1 + 0.5 * np.sin(wave * tau)), lambda tau: added * np.cos(wave * tau))
    functions: dict[str, list[Callable]] = {
        "elementwise": [lambda u, t: u - u**3, lambda u, t: -jnp.tanh(a * u), lambda u, t: jnp.sin(a * u)],
        "coupled": [
            lambda u, t: -u + jnp.tanh(W.astype(u.dtype) @ u),
            lambda u, t: a * jnp.roll(u, 1) - u * jnp.sum(u**2),
        ],
        "time": [lambda u, t: -jnp.tanh(u) + 2 * jnp.sin(10 * t), lambda u, t: -u * (1 + t) + jnp.cos(u)],
        "jumping": [
            lambda u, t: -jnp.sign(u), lambda u, t: jnp.where(u > 0, -2.0, 1.0) - u,
            lambda u, t: -jnp.clip(u, -0.5, 0.5), lambda u, t: -jnp.maximum(u, 0.0),
        ],
        "runaway": [lambda u, t: u**3, lambda u, t: jnp.exp(u), lambda u, t: -jnp.log(u)],
    }  # fmt: skip
    options = functions[kind]
    return options[rng.integers(len(options))], None
