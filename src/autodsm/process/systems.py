"""Physical systems with their initial laws; every parameter can be overridden.

The active swimmer and the trapped particles follow Boffi & Vanden-Eijnden (2023), "Probability flow solution of
the Fokker–Planck equation"; the harmonic particles have exact Gaussian marginals (see `reference`). The potential of
Müller and Brown, the neuron of FitzHugh and Nagumo, and Lorenz's weather are the customary tests of their fields.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.errors import check_count, check_key, check_number, check_positive, check_shape
from .process import Process
from .recipe import recorded


class NormalStart(eqx.Module):
    """`y_0 ~ N(mean, std²)`, every coordinate independently: a sampler `y0(key, n)` with a density."""

    mean: Array
    """Of the shape of a state."""
    std: float

    def __call__(self, key, n: int) -> Array:
        return self.sample(key, (n,))

    def sample(self, key, sample_shape: tuple[int, ...] = ()) -> Array:
        check_key(key)
        return self.mean + self.std * jax.random.normal(key, (*sample_shape, *self.mean.shape))

    def log_prob(self, y) -> Array:
        log_std = jnp.log(self.std) + 0.5 * np.log(2.0 * np.pi)
        return jnp.sum(-0.5 * ((y - self.mean) / self.std) ** 2 - log_std)


class System(NamedTuple):
    """A process together with the law of `y_0`."""

    process: Process
    y0: NormalStart
    """`y0(key, n)` draws n initial states, shape (n, *shape)."""
    shape: tuple[int, ...]


@recorded
def ornstein_uhlenbeck(
    dim: int = 1,
    *,
    rate: float = 1.0,
    noise: float = np.sqrt(2.0),
    mean0: float = 0.0,
    std0: float = 1.0,
    t1=5.0,
) -> System:
    """`dy = −a y dt + σ dw`, `y_0 ~ N(mean0, std0²)`."""
    check_count("dim", dim)
    _check_numbers(rate=rate, noise=noise, mean0=mean0, std0=std0)
    return System(Process(lambda y, t: -rate * y, noise, t1), _gaussian((dim,), mean0, std0), (dim,))


@recorded
def double_well(dim: int = 1, *, noise: float = 0.7, mean0: float = 0.0, std0: float = 0.5, t1=5.0) -> System:
    """`dy = (y − y³) dt + σ dw` in each coordinate; stationary law `∝ exp((y² − y⁴/2)/σ²)`."""
    check_count("dim", dim)
    _check_numbers(noise=noise, mean0=mean0, std0=std0)
    return System(Process(lambda y, t: y - y**3, noise, t1), _gaussian((dim,), mean0, std0), (dim,))


@recorded
def swimmer(*, gamma: float = 0.1, D: float = 1.0, mean0: float = 0.0, std0: float = 1.0, t1: float = 5.0) -> System:
    """Active swimmer: `dx = (−x³ + v) dt`, `dv = −γ v dt + √(2γD) dw`, from
    `x_0, v_0 ~ N(mean0, std0²)`.

    State (x, v). There is no noise in x. With the defaults v is stationary: v ~ N(0, 1) at all times.
    """
    check_positive("gamma", gamma)
    check_positive("D", D)
    _check_numbers(mean0=mean0, std0=std0)

    def drift(y, t):
        x, v = y
        return jnp.stack([-(x**3) + v, -gamma * v])

    g = np.array([0.0, np.sqrt(2.0 * gamma * D)])
    return System(Process(drift, g, t1), _gaussian((2,), mean0, std0), (2,))


@recorded
def particles(
    n: int = 5,
    *,
    A: float = 10.0,
    r: float = 0.5,
    a: float = 2.0,
    omega: float = 1.0,
    D: float = 0.25,
    gamma: float = 5.0,
    exponent: float = 1.0,
    mean0: float = 0.0,
    std0: float = 0.5,
    t1: float = 10.0,
) -> System:
    """Repelling particles in the plane, dragged by a moving quartic trap; state (n, 2).

    `dy_i = 4B (β_t − y_i) |y_i − β_t|² dt + A/(n r²) Σ_j (y_i − y_j) exp(−c |y_i − y_j|²/(2r²)) dt + √(2D) dw`,
    `β_t = a (cos πωt, sin πωt)`, `B = D/R²`, `R = √(γ n) r`, from `y_i ~ N(mean0, std0²)`.

    `exponent` is c: 1 makes the repulsion the gradient of a Gaussian bump; the published value is 2.
    """
    check_count("n", n)
    check_positive("r", r)
    check_positive("D", D)
    check_positive("gamma", gamma)
    _check_numbers(A=A, a=a, omega=omega, exponent=exponent, mean0=mean0, std0=std0)
    strength = D / (gamma * n * r**2)
    # Each pair once, as the row of a matrix: on CPU four times as fast as all differences y_i − y_j for n = 5, and as
    # fast for 20 and 50.
    first, second = np.triu_indices(n, 1)
    pairs = np.eye(n)[first] - np.eye(n)[second]

    def drift(y, t):
        check_shape(y, (n, 2), f"{n} particles")
        trap = a * jnp.stack([jnp.cos(np.pi * omega * t), jnp.sin(np.pi * omega * t)])
        pull = 4.0 * strength * (trap - y) * jnp.sum((y - trap) ** 2, axis=-1, keepdims=True)
        differences = jnp.asarray(pairs, y.dtype)
        apart = jnp.matmul(differences, y, precision="highest")
        weight = jnp.exp(-exponent * jnp.sum(apart**2, axis=-1, keepdims=True) / (2.0 * r**2))
        return pull + A / (n * r**2) * jnp.matmul(differences.T, apart * weight, precision="highest")

    return System(Process(drift, np.sqrt(2.0 * D), t1), _gaussian((n, 2), mean0, std0), (n, 2))


@recorded
def harmonic_particles(
    n: int = 50, *, a: float = 2.0, omega: float = np.pi, D: float = 0.25, std0: float = 0.25, t1: float = 5.0
) -> System:
    """Particles in a rotating harmonic trap, attracted to their centre; state (n, 2), Gaussian at all times.

    `dy_i = (β_t − ½ y_i − ½ ȳ) dt + √(2D) dw`, `β_t = a (cos ωt, sin ωt)`, from `y_i ~ N(β_0, std0²)`.
    """
    check_count("n", n)
    check_positive("D", D)
    _check_numbers(a=a, omega=omega, std0=std0)

    def trap(t):
        return a * jnp.stack([jnp.cos(omega * t), jnp.sin(omega * t)])

    def drift(y, t):
        check_shape(y, (n, 2), f"{n} particles")
        return trap(t) - 0.5 * y - 0.5 * jnp.mean(y, axis=0)

    with jax.ensure_compile_time_eval():
        y0 = NormalStart(jnp.broadcast_to(trap(0.0), (n, 2)), float(std0))
    return System(Process(drift, np.sqrt(2.0 * D), t1), y0, (n, 2))


def mueller_brown(
    *, height: float = 0.05, temperature: float = 1.0, mean0=(0.6, 0.05), std0: float = 0.1, t1: float = 1.0
) -> System:
    """Overdamped motion in Müller & Brown's potential (1979), three wells on a bent path: `dy = −∇V dt + √(2T) dw`.

    `V = height · Σ_k A_k exp(a_k (y_1 − X_k)² + b_k (y_1 − X_k)(y_2 − Y_k) + c_k (y_2 − Y_k)²)`, from
    `y_0 ~ N(mean0, std0²)`, by default in one of the lesser wells.
    """
    check_positive("temperature", temperature)
    _check_numbers(height=height, std0=std0)

    def energy(y):
        u, v = y[0] - _MB_X, y[1] - _MB_Y
        return height * jnp.sum(_MB_HEIGHT * jnp.exp(_MB_A * u**2 + _MB_B * u * v + _MB_C * v**2))

    def drift(y, t):
        return -jax.grad(energy)(y)

    return System(Process(drift, np.sqrt(2.0 * temperature), t1), _gaussian((2,), mean0, std0), (2,))


_MB_HEIGHT = np.array([-200.0, -100.0, -170.0, 15.0])
_MB_A, _MB_B, _MB_C = (
    np.array([-1.0, -1.0, -6.5, 0.7]),
    np.array([0.0, 0.0, 11.0, 0.6]),
    np.array([-10.0, -10.0, -6.5, 0.7]),
)
_MB_X, _MB_Y = np.array([1.0, 0.0, -0.5, -1.0]), np.array([0.0, 0.5, 1.5, 1.0])


def fitzhugh_nagumo(
    *,
    rate: float = 10.0,
    current: float = 0.5,
    a: float = 0.7,
    b: float = 0.8,
    noise: float = 0.3,
    mean0=(-1.2, -0.6),
    std0: float = 0.1,
    t1: float = 3.0,
) -> System:
    """A neuron that fires, noise in its slow variable alone; state (x, w).

    `dx = rate · (x − x³/3 − w + current) dt`, `dw = (x + a − b w) dt + noise · dW`, from `N(mean0, std0²)`.
    """
    check_positive("noise", noise)
    _check_numbers(rate=rate, current=current, a=a, b=b, std0=std0)

    def drift(y, t):
        x, w = y
        return jnp.stack([rate * (x - x**3 / 3.0 - w + current), x + a - b * w])

    return System(Process(drift, np.array([0.0, noise]), t1), _gaussian((2,), mean0, std0), (2,))


def lorenz96(dim: int = 20, *, forcing: float = 8.0, noise: float = 1.0, std0: float = 1.0, t1: float = 2.0) -> System:
    """Lorenz's chaotic model of weather on a circle of latitude (1996), with noise.

    `dy_i = ((y_{i+1} − y_{i−2}) y_{i−1} − y_i + forcing) dt + noise · dw_i`, from `N(forcing, std0²)`, the first
    coordinate pushed by one.
    """
    check_count("dim", dim)
    if dim < 4:
        raise ValueError(f"dim={dim} must be at least 4: each coordinate is moved by three others.")
    check_positive("noise", noise)
    _check_numbers(forcing=forcing, std0=std0)

    def drift(y, t):
        check_shape(y, (dim,), f"{dim} coordinates")
        return (jnp.roll(y, -1) - jnp.roll(y, 2)) * jnp.roll(y, 1) - y + forcing

    return System(Process(drift, noise, t1), _gaussian((dim,), forcing + np.eye(dim)[0], std0), (dim,))


def _check_numbers(**values) -> None:
    for name, value in values.items():
        check_number(name, value)


def _gaussian(shape: tuple[int, ...], mean, std: float) -> NormalStart:
    """`mean`: one number, or one for each coordinate."""
    if np.shape(mean) not in ((), shape):
        raise ValueError(f"mean0 has shape {np.shape(mean)}; it must be one number, or one for each of {shape}.")
    for value in np.ravel(mean):
        check_number("mean0", value)
    with jax.ensure_compile_time_eval():
        return NormalStart(jnp.broadcast_to(jnp.asarray(mean, float), shape), float(std))


SYSTEMS: dict[str, Callable[..., System]] = {
    "ornstein-uhlenbeck": ornstein_uhlenbeck,
    "double-well": double_well,
    "swimmer": swimmer,
    "particles": particles,
    "harmonic-particles": harmonic_particles,
    "mueller-brown": mueller_brown,
    "fitzhugh-nagumo": fitzhugh_nagumo,
    "lorenz96": lorenz96,
}
