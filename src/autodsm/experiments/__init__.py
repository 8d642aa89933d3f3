"""Experiments: one file for each figure or table, run by `autodsm reproduce NAME`.

Each file has a `trial`, what is made of the trials, and an `EXPERIMENT` that holds them; see `experiment`. `quick`
makes a trial small enough for continuous integration without changing what it does.
"""

from . import (
    checkerboard,
    cifar10_bpd,
    cifar10_lambda,
    cifar10_samples,
    demo,
    entropy,
    gradient_variance,
    lambda_sweep,
    local_kernels,
    mean_error,
    particles,
    swimmer,
)
from .experiment import AGREES as AGREES
from .experiment import DIFFERS as DIFFERS
from .experiment import Experiment as Experiment
from .experiment import Grid as Grid

EXPERIMENTS: dict[str, Experiment] = {
    "demo": demo.EXPERIMENT,
    "mean-error": mean_error.EXPERIMENT,
    "local-kernels": local_kernels.EXPERIMENT,
    "gradient-variance": gradient_variance.EXPERIMENT,
    "checkerboard": checkerboard.EXPERIMENT,
    "swimmer": swimmer.EXPERIMENT,
    "particles": particles.EXPERIMENT,
    "lambda-sweep": lambda_sweep.EXPERIMENT,
    "entropy": entropy.EXPERIMENT,
    "cifar10-bpd": cifar10_bpd.EXPERIMENT,
    "cifar10-lambda": cifar10_lambda.EXPERIMENT,
    "cifar10-samples": cifar10_samples.EXPERIMENT,
}
