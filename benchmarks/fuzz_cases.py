"""The cases of `fuzz.py`: a public function, random arguments for it, and what is known of its result.

`make(seed, number)` is the same case at each call. Its function follows from the number alone, so that every hundred
cases meet all of them; every twentieth is a training. In a share of cases one argument is replaced by something that
does not belong there; of the result nothing is then asked but that it is finite.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_processes import Made

import autodsm as ad

MUTATED = 0.35
"""Share of cases with an argument that does not belong."""
EVERY = 20
"""One of so many cases is a training."""
SURE = 5.0
"""Standard errors beyond which a value is wrong."""
GAUSSIAN = ("linear", "linear in time", "kinetic")
"""Kinds of processes whose marginals are Gaussian and easy to resolve."""
SMALL = ((1,), (2,), (3,))


class Case(NamedTuple):
    """A call, and `check(result)`, which says what is wrong with it; None where nothing exact is known."""

    name: str
    call: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[Any], str | None] | None = None
    pointwise: bool = False
    """A formula at one point, or a loss: a NaN that it is given it may return."""
    mutated: str | None = None

    def __str__(self) -> str:
        given = ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())
        return f"{self.name}({given})" + (f", {self.mutated} replaced" if self.mutated else "")


def make(seed: int, number: int) -> Case:
    rng = np.random.default_rng([seed, number])
    names = sorted(name for name in GENERATORS if name != "fit")
    name = "fit" if is_training(number) else names[number % len(names)]
    case = GENERATORS[name](rng)._replace(name=name)
    if rng.random() >= MUTATED or not case.arguments:
        return case
    wrong = str(rng.choice(list(case.arguments)))
    value = _hostile(rng, case.arguments[wrong])
    return case._replace(arguments=case.arguments | {wrong: value}, check=None, mutated=wrong)


def is_training(number: int) -> bool:
    return number % EVERY == EVERY - 1


def _short(value) -> str:
    if isinstance(value, ad.Process):
        return f"<{getattr(value.drift, '__name__', 'process')}>"
    text = f"array{value.shape} of {value.dtype}" if isinstance(value, np.ndarray | jax.Array) else repr(value)
    text = " ".join(re.sub(r" at 0x[0-9a-f]+", "", text).split())
    return text if len(text) < 60 else text[:57] + "..."


def _hostile(rng: np.random.Generator, value) -> Any:
    """Something that does not belong where `value` was, or that seldom does."""
    options: list[Any] = [
        None, "text", [], [1.0, 2.0], {}, -1, 0, 1, 0.5, True, math.nan, math.inf, -1.0, 1e30, 1e-30, 1j,
        object(), np.zeros((2, 3)), np.zeros(0), np.array([1, 2, 3]), np.float16(0.5), lambda: 0.0, (3,), (0,),
    ]  # fmt: skip
    if isinstance(value, np.ndarray | jax.Array) and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        array = np.array(value, float)
        holed, endless = array.copy(), array.copy()
        if array.size:
            holed.flat[rng.integers(array.size)], endless.flat[rng.integers(array.size)] = np.nan, np.inf
        options = [
            *options[::3],
            holed, holed, endless, array[None], array.ravel()[:-1], array.astype(np.float16), array.astype(int),
            array.tolist(), array > 0, array + 0j, 1e20 * array, np.atleast_1d(array)[..., :0],
        ]  # fmt: skip
    return options[rng.integers(len(options))]


def off(found, exact, *, stderr=0.0, tol: float = 0.0) -> str | None:
    """What is wrong with numbers that may be off by `SURE` standard errors and by `tol`."""
    found, exact = np.asarray(found, float), np.asarray(exact, float)
    if found.shape != exact.shape:
        return f"shape {found.shape}, not {exact.shape}"
    excess = np.abs(found - exact) - SURE * np.asarray(stderr) - tol
    if np.all(excess <= 0):
        return None
    at = np.unravel_index(np.argmax(excess), excess.shape)
    return f"{found[at]:.6g}, exact {exact[at]:.6g}, at {tuple(map(int, at))}"


def moments_off(made: Made, ys, tau: float, *, tol: float) -> str | None:
    """Whether samples have the moments of the process at τ; `tol` is in deviations, and relative for the covariance."""
    assert made.linear is not None
    u = made.natural(ys)
    mean, cov = made.exact(tau)
    std = np.sqrt(np.diag(cov))
    spread = np.where(std > 0, std, 1e-3)
    of_mean = off(u.mean(0) / spread, mean / spread, stderr=1 / math.sqrt(len(u)), tol=tol)
    pairs = np.einsum("ni,nj->nij", u - mean, u - mean) / np.outer(spread, spread)
    stderr = pairs.std(0) / math.sqrt(len(u)) + 1e-6
    of_cov = off(pairs.mean(0), cov / np.outer(spread, spread), stderr=stderr, tol=2 * tol)
    return (of_mean and f"mean {of_mean}") or (of_cov and f"covariance {of_cov}")


def key_of(rng) -> jax.Array:
    return jax.random.key(int(rng.integers(1 << 30)))


def is_key(value) -> bool:
    return jax.dtypes.issubdtype(getattr(value, "dtype", float), jax.dtypes.prng_key) and value.ndim == 0


def pick(rng, *options):
    return options[rng.integers(len(options))]


def typed(rng, array) -> Any:
    """The array in one of the forms that a user may give."""
    return pick(rng, array, jnp.asarray(array), array.astype(np.float64), array.tolist(), array)


GENERATORS: dict[str, Callable[[np.random.Generator], Case]] = {}
"""By name: the function that makes a case of it."""


def case(generator: Callable) -> Callable:
    GENERATORS[generator.__name__] = generator
    return generator
