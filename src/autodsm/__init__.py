"""autodsm: learn the score of any diffusion `dy = f(y,t) dt + g(t) dw`, given only f and g."""

from . import (
    data,
    fokker_planck,
    fokker_planck_2d,
    likelihood,
    metrics,
    network,
    observables,
    priors,
    products,
    reference,
    systems,
    targets,
)
from .clock import Clock
from .fit import Model, fit
from .ism import ISM
from .kernel import Gaussian, transition
from .likelihood import ELBO, bits_per_dim, elbo, log_likelihood
from .linearize import Affine, linearize
from .objective import DSM, LocalDSM, PathwiseDSM, TabulatedDSM
from .priors import (
    ConstantBeta,
    CosineBeta,
    InverseBeta,
    LinearBeta,
    WithVelocity,
    cld,
    langevin,
    linear,
    sub_vp,
    underdamped,
    ve,
    vp,
)
from .probability_flow import flow
from .process import Process
from .sample import sample
from .schedule import ConstantGap, FromZero, KLBound, ScheduledPairs, kl_bound
from .simulate import simulate
from .systems import System

__all__ = [
    "DSM",
    "ELBO",
    "ISM",
    "Affine",
    "Clock",
    "ConstantBeta",
    "ConstantGap",
    "CosineBeta",
    "FromZero",
    "Gaussian",
    "InverseBeta",
    "KLBound",
    "LinearBeta",
    "LocalDSM",
    "Model",
    "PathwiseDSM",
    "Process",
    "ScheduledPairs",
    "System",
    "TabulatedDSM",
    "WithVelocity",
    "bits_per_dim",
    "cld",
    "data",
    "elbo",
    "fit",
    "flow",
    "fokker_planck",
    "fokker_planck_2d",
    "kl_bound",
    "langevin",
    "likelihood",
    "linear",
    "linearize",
    "log_likelihood",
    "metrics",
    "network",
    "observables",
    "priors",
    "products",
    "reference",
    "sample",
    "simulate",
    "sub_vp",
    "systems",
    "targets",
    "transition",
    "underdamped",
    "ve",
    "vp",
]
