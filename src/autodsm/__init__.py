"""autodsm: learn the score of any diffusion `dy = f(y,t) dt + g(t) dw`, given only f and g.

Names are found in their modules when they are first used, so that to import the package takes no time.
"""

import difflib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and checkers of types; what runs is the table below
    from . import data, network, targets
    from .exact import gaussian as reference
    from .exact import grid1d as fokker_planck
    from .exact import grid2d as fokker_planck_2d
    from .exact import products
    from .kernels.gaussian import Gaussian, transition
    from .kernels.linearize import Affine, linearize
    from .kernels.schedule import ConstantGap, FromZero, KLBound, ScheduledPairs, kl_bound
    from .learn.builders import KineticDSM, LocalDSM, PathwiseDSM, TabulatedDSM
    from .learn.fit import fit
    from .learn.ism import ISM
    from .learn.model import Model
    from .learn.objective import DSM
    from .learn.saved import load
    from .paths.simulate import simulate
    from .process import priors, systems
    from .process.clock import Clock
    from .process.priors import (
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
    from .process.process import Process
    from .process.systems import System
    from .use import likelihood, metrics, observables
    from .use.diagnose import diagnose
    from .use.elbo import ELBO, elbo
    from .use.flow import flow
    from .use.likelihood import bits_per_dim, log_likelihood
    from .use.sample import sample

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
    "KineticDSM",
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
    "diagnose",
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
    "load",
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

_HOMES = {
    "DSM": "learn.objective:DSM",
    "ELBO": "use.elbo:ELBO",
    "ISM": "learn.ism:ISM",
    "Affine": "kernels.linearize:Affine",
    "Clock": "process.clock:Clock",
    "ConstantBeta": "process.priors:ConstantBeta",
    "ConstantGap": "kernels.schedule:ConstantGap",
    "CosineBeta": "process.priors:CosineBeta",
    "FromZero": "kernels.schedule:FromZero",
    "Gaussian": "kernels.gaussian:Gaussian",
    "InverseBeta": "process.priors:InverseBeta",
    "KLBound": "kernels.schedule:KLBound",
    "KineticDSM": "learn.builders:KineticDSM",
    "LinearBeta": "process.priors:LinearBeta",
    "LocalDSM": "learn.builders:LocalDSM",
    "Model": "learn.model:Model",
    "PathwiseDSM": "learn.builders:PathwiseDSM",
    "Process": "process.process:Process",
    "ScheduledPairs": "kernels.schedule:ScheduledPairs",
    "System": "process.systems:System",
    "TabulatedDSM": "learn.builders:TabulatedDSM",
    "WithVelocity": "process.priors:WithVelocity",
    "bits_per_dim": "use.likelihood:bits_per_dim",
    "cld": "process.priors:cld",
    "data": "data:",
    "diagnose": "use.diagnose:diagnose",
    "elbo": "use.elbo:elbo",
    "fit": "learn.fit:fit",
    "flow": "use.flow:flow",
    "fokker_planck": "exact.grid1d:",
    "fokker_planck_2d": "exact.grid2d:",
    "kl_bound": "kernels.schedule:kl_bound",
    "langevin": "process.priors:langevin",
    "likelihood": "use.likelihood:",
    "linear": "process.priors:linear",
    "linearize": "kernels.linearize:linearize",
    "load": "learn.saved:load",
    "log_likelihood": "use.likelihood:log_likelihood",
    "metrics": "use.metrics:",
    "network": "network:",
    "observables": "use.observables:",
    "priors": "process.priors:",
    "products": "exact.products:",
    "reference": "exact.gaussian:",
    "sample": "use.sample:sample",
    "simulate": "paths.simulate:simulate",
    "sub_vp": "process.priors:sub_vp",
    "systems": "process.systems:",
    "targets": "targets:",
    "transition": "kernels.gaussian:transition",
    "underdamped": "process.priors:underdamped",
    "ve": "process.priors:ve",
    "vp": "process.priors:vp",
}
"""Where each name is: "module:name", or "module:" for a module itself."""


def __getattr__(name: str):
    if name not in _HOMES:
        known = {each.lower(): each for each in _HOMES}
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f". Did you mean {known[near[0]]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    found = globals()[name] = pkgutil.resolve_name(f"{__name__}.{_HOMES[name]}")
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
