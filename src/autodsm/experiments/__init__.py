"""Experiments: one file for each figure or table, run by `autodsm reproduce NAME`.

An experiment is a function `run(folder, quick, seed) -> numbers` that saves its figures in the folder; `quick` makes
it small enough for continuous integration without changing what it does.
"""

from collections.abc import Callable

from . import demo, gradient_variance, lambda_sweep, local_kernels, mean_error

EXPERIMENTS: dict[str, Callable[..., dict]] = {
    "demo": demo.run,
    "gradient-variance": gradient_variance.run,
    "lambda-sweep": lambda_sweep.run,
    "local-kernels": local_kernels.run,
    "mean-error": mean_error.run,
}
