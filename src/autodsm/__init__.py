"""autodsm: learn the score of any diffusion `dy = f(y,t) dt + g(t) dw`, given only f and g."""

from . import data, fokker_planck, network, priors, products, reference, systems, targets
from .clock import Clock
from .fit import Model, fit
from .ism import ISM
from .kernel import Gaussian, transition
from .linearize import Affine, linearize
from .objective import DSM, LocalDSM, PathwiseDSM, TabulatedDSM
from .priors import (
    ConstantBeta,
    CosineBeta,
    InverseBeta,
    LinearBeta,
    cld,
    langevin,
    linear,
    sub_vp,
    ve,
    vp,
)
from .process import Process
from .schedule import ConstantGap, FromZero, KLBound, ScheduledPairs, kl_bound
from .simulate import simulate
from .systems import System

__all__ = [
    "DSM",
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
    "cld",
    "data",
    "fit",
    "fokker_planck",
    "kl_bound",
    "langevin",
    "linear",
    "linearize",
    "network",
    "priors",
    "products",
    "reference",
    "simulate",
    "sub_vp",
    "systems",
    "targets",
    "transition",
    "ve",
    "vp",
]
