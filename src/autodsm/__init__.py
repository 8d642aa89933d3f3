"""autodsm: learn the score of any diffusion `dy = f(y,t) dt + g(t) dw`, given only f and g."""

from . import data, fokker_planck, priors, reference, systems
from .kernel import Gaussian, transition
from .linearize import Affine, linearize
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
    "Affine",
    "ConstantBeta",
    "ConstantGap",
    "CosineBeta",
    "FromZero",
    "Gaussian",
    "InverseBeta",
    "KLBound",
    "LinearBeta",
    "Process",
    "ScheduledPairs",
    "System",
    "cld",
    "data",
    "fokker_planck",
    "kl_bound",
    "langevin",
    "linear",
    "linearize",
    "priors",
    "reference",
    "simulate",
    "sub_vp",
    "systems",
    "transition",
    "ve",
    "vp",
]
