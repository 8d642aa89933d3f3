"""What a regression target is: states y_t and random vectors whose mean given y_t is the score."""

import abc
from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Float

from ..base.types import PRNGKey, State


class Draw(NamedTuple):
    """Draws at one time for one example. Leading axis p: 1, or 2 for an antithetic pair."""

    t: Float[Array, "..."]
    y: Float[Array, "..."]
    """(p, *shape), states y_t."""
    score: Float[Array, "..."]
    """(p, *shape), with `E[score | y_t] = ∇ log q_t(y_t)`."""
    scale: Float[Array, "..."]
    """Deviation of the noise behind the score, which varies as 1/scale; broadcasts against a state. It weighs losses,
    so it must not depend on anything but t that the score given y_t depends on."""
    anchor: Float[Array, "..."] | None
    """The mean of y given what the noise was added to, where that noise is Gaussian; else None."""


class AbstractForward(eqx.Module):
    """A way to draw y_t given y_0 = x."""

    @abc.abstractmethod
    def states(self, x: State, times: Float[Array, " k"], *, key: PRNGKey) -> Float[Array, "k ..."]:
        """One state at each of `times`, in any order; together they need not form a path."""

    def prepared(self, pilot) -> "AbstractForward":
        """The same, with what was not given chosen for the data of a `Pilot`."""
        return self

    def covers(self, x) -> str | None:
        """Why the examples `x` cannot be used, or None when they can."""
        return None


class AbstractTarget(AbstractForward):
    """A way to draw (y_t, target) given y_0 = x."""

    averaging = None
    """Over which starts of a training's round targets are averaged, an `Averaging`; or None."""

    @abc.abstractmethod
    def draw(self, x: State, times: Float[Array, " k"], *, key: PRNGKey) -> Draw:
        """One draw at each of `times`: a `Draw` whose leaves have a leading axis k."""

    def together(self, xs: Float[Array, "m ..."], t, members: int, *, key: PRNGKey) -> Draw:
        """A draw at t from each of the first of m starts, targets averaged over all m: leaves have a leading axis."""
        raise NotImplementedError(f"{type(self).__name__} does not average over starts.")

    def draws_per_path(self, shape: tuple[int, ...]) -> int:
        """How many draws of one example, by one call, train soonest for states of this shape."""
        return 1
