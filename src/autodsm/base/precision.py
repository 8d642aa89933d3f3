"""Double precision for a while, whatever the setting outside; and states that single precision does not resolve."""

import contextlib
import warnings

import jax
import numpy as np
from jax._src import dtypes, literals


@contextlib.contextmanager
def double_precision():
    """Double precision inside of the block.

        with double_precision():
            value = jax.jit(process.f)(y, t)

    JAX remembers what it made of each numpy array without asking for the precision it was made in. A function that
    holds one and ran in single precision could then not run here, so nothing is remembered inside of the block.
    """
    handlers = dtypes.canonicalize_value_handlers
    remembered = handlers[np.ndarray]
    handlers[np.ndarray] = _converted
    try:
        with jax.enable_x64(True):
            yield
    finally:
        handlers[np.ndarray] = remembered


def _converted(x: np.ndarray):
    return literals.TypedNdArray(np.asarray(x, dtypes.canonicalize_dtype(x.dtype)))


ROUNDED = 3e-4
"""A rounding of a state, as a share of its deviation, above which it is felt: over the thousand steps of a path
roundings add up to a hundredth of the deviation."""


def warn_if_rounded(mean: np.ndarray, std: np.ndarray, dtype) -> None:
    """Warn of coordinates whose deviation is lost in the rounding of their mean; (..., *shape) each.

    A deviation of zero is that of a coordinate that stays where it is, which loses nothing.
    """
    std = np.broadcast_to(std, mean.shape)
    rounding = np.finfo(dtype).eps * np.abs(mean) / np.where(std > 0, std, np.inf)
    if not (worst := float(rounding.max(initial=0.0))) > ROUNDED:
        return
    i = np.unravel_index(np.argmax(rounding), rounding.shape)
    warnings.warn(
        f"states lie {np.abs(mean[i]) / std[i]:.2g} of their deviations away from 0 (mean {mean[i]:.6g}, deviation "
        f"{std[i]:.3g}), and {np.dtype(dtype).name} rounds them by {worst:.1g} of a deviation. Shift the origin of the "
        f"coordinate by {mean[i]:.3g}, or compute in double precision: jax.config.update('jax_enable_x64', True).",
        stacklevel=3,
    )
