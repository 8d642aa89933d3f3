"""Networks, laws and processes as plain data and arrays, and back. What is read makes objects of the classes below, and
of no others; no code comes out of a file.

    {"part": "Linear", "fields": {"weight": {"array": 0}, "bias": {"array": 1}}}
    {"law": "Logistic", "parameters": {"loc": 0.0, "scale": 1.0}}
    {"process": "vp", "arguments": {"beta": {"part": "LinearBeta", …}, "t1": null}}
    {"process": "model"}        the process of the model itself, such as in the score 2 Q⁻¹ f of an equilibrium
    {"method": "score", "of": {"part": "Marginals", …}}

A class may move and have new fields with defaults; its name here stays.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..exact.gaussian import GaussianMarginals, HarmonicParticles
from ..network import MLP, Equivariant, Framed, Frozen, Odd, Relaxation, Score, TimeFeatures, UNet, mlp, unet
from ..paths.initial import Law
from ..process import systems
from ..process.clock import Clock
from ..process.equilibrium import EquilibriumScore
from ..process.priors import ConstantBeta, CosineBeta, InverseBeta, LinearBeta, PriorScore, WithVelocity
from ..process.process import Process
from ..process.recipe import CONSTRUCTORS
from ..targets.correlations import Full, LowRank
from ..targets.marginals import Marginals

PARTS: dict[str, type] = {
    "Clock": Clock,
    "ConstantBeta": ConstantBeta,
    "CosineBeta": CosineBeta,
    "Dropout": eqx.nn.Dropout,
    "EquilibriumScore": EquilibriumScore,
    "Equivariant": Equivariant,
    "Framed": Framed,
    "Frozen": Frozen,
    "FullCorrelations": Full,
    "GaussianMarginals": GaussianMarginals,
    "HarmonicParticles": HarmonicParticles,
    "Inputs": mlp.Inputs,
    "InverseBeta": InverseBeta,
    "Law": Law,
    "Linear": mlp.Linear,
    "LinearBeta": LinearBeta,
    "LowRankCorrelations": LowRank,
    "MLP": MLP,
    "Marginals": Marginals,
    "NormalStart": systems.NormalStart,
    "Odd": Odd,
    "PriorScore": PriorScore,
    "Relaxation": Relaxation,
    "Score": Score,
    "TimeFeatures": TimeFeatures,
    "UNet": UNet,
    "UNetAffine": unet._Affine,
    "UNetAttention": unet._Attention,
    "UNetNorm": unet._Norm,
    "UNetResidual": unet._Residual,
    "UNetStage": unet._Stage,
    "WithVelocity": WithVelocity,
}
_NAMES = {kind: name for name, kind in PARTS.items()}
METHODS = {"GaussianMarginals": "score", "HarmonicParticles": "score", "Law": "score", "Marginals": "score"}
"""The one method of a part that a network may hold."""

LAWS = {
    "AsymmetricLaplace": ("loc", "scale", "asymmetry"),
    "CategoricalLogits": ("logits",),
    "CategoricalProbs": ("probs",),
    "Cauchy": ("loc", "scale"),
    "ExpandedDistribution": ("base_dist", "batch_shape"),
    "Exponential": ("rate",),
    "Gamma": ("concentration", "rate"),
    "Gumbel": ("loc", "scale"),
    "Independent": ("base_dist", "reinterpreted_batch_ndims"),
    "Laplace": ("loc", "scale"),
    "LogNormal": ("loc", "scale"),
    "Logistic": ("loc", "scale"),
    "LowRankMultivariateNormal": ("loc", "cov_factor", "cov_diag"),
    "MixtureGeneral": ("mixing_distribution", "component_distributions"),
    "MixtureSameFamily": ("mixing_distribution", "component_distribution"),
    "MultivariateNormal": ("loc", "scale_tril"),
    "MultivariateStudentT": ("df", "loc", "scale_tril"),
    "Normal": ("loc", "scale"),
    "SoftLaplace": ("loc", "scale"),
    "StudentT": ("df", "loc", "scale"),
    "Uniform": ("low", "high"),
}
"""Distributions of numpyro, and the parameters that make one."""


class Unknown(TypeError):
    """Something of the user's own, which no file can hold."""


class Damaged(ValueError):
    """Data that describe nothing known."""


class NoProcessError(ValueError):
    """A process is asked for that a file does not hold."""


class NoProcess:
    """Stands for a process of the user's own, which a file does not hold."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoProcessError(
            "this model was trained with a drift of your own, which its file does not hold, and which is asked for "
            "here. Give it: ad.load(path, process=process)."
        )


class Writer:
    """Describes things, and collects their arrays; equal arrays once."""

    def __init__(self, process: Process | None = None):
        self.process = process
        self.arrays: list[np.ndarray] = []
        self._known: dict[tuple, int] = {}

    def array(self, value) -> int:
        array = np.asarray(value)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = len(self.arrays)
            self.arrays.append(array)
        return self._known[key]

    def describe(self, thing) -> Any:
        """The thing as plain data, or `Unknown`."""
        if thing is None or isinstance(thing, bool | str) or type(thing) is int:
            return thing
        if type(thing) is float:
            return thing if math.isfinite(thing) else {"number": repr(thing)}
        if isinstance(thing, jax.Array | np.ndarray | np.generic):
            if isinstance(thing, jax.Array) and jax.dtypes.issubdtype(thing.dtype, jax.dtypes.prng_key):
                raise Unknown("a random key")
            kinds = {jax.Array: {}, np.ndarray: {"kind": "numpy"}, np.generic: {"kind": "scalar"}}
            return {"array": self.array(thing), **next(v for kind, v in kinds.items() if isinstance(thing, kind))}
        if isinstance(thing, list):
            return [self.describe(each) for each in thing]
        if type(thing) is tuple:
            return {"tuple": [self.describe(each) for each in thing]}
        if isinstance(thing, Process):
            return self._process(thing)
        if type(thing) in _NAMES:
            values = {name: self.describe(getattr(thing, name)) for name in _fields(type(thing))}
            return {"part": _NAMES[type(thing)], "fields": values}
        owner = _NAMES.get(type(getattr(thing, "__self__", None)))
        if owner in METHODS and thing.__func__.__name__ == METHODS[owner]:  # bound by Python or by Equinox
            return {"method": METHODS[owner], "of": self.describe(thing.__self__)}
        if (name := _dtype_name(thing)) is not None:
            return {"dtype": name}
        return self._law(thing)

    def _process(self, process: Process):
        if self.process is not None and process.drift is self.process.drift and process.t1 == self.process.t1:
            return {"process": "model"}
        return self.recipe(process)

    def recipe(self, process: Process):
        """A process by name and arguments, or `Unknown`."""
        if process.recipe is None:
            raise Unknown("a drift")
        arguments = {name: self.describe(value) for name, value in process.recipe.arguments.items()}
        return {"process": process.recipe.name, "arguments": arguments}

    def _law(self, thing):
        from numpyro import distributions as dist  # here: what has no prior needs none

        name = type(thing).__name__
        if name not in LAWS or type(thing) is not getattr(dist, name):
            raise Unknown(getattr(thing, "__qualname__", name))
        found = {"law": name, "parameters": {each: self.describe(getattr(thing, each)) for each in LAWS[name]}}
        again = Reader(self.arrays).build(found)  # a law with more to it than its parameters is told apart here
        same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), thing, again)
        if not all(jax.tree.leaves(same)):
            raise Unknown(name)
        return found


class Reader:
    """Builds things from what a `Writer` made of them; `process` is that of the model."""

    def __init__(self, arrays: list[np.ndarray], process: Process | NoProcess | None = None):
        self.arrays, self.process = arrays, process

    def build(self, found) -> Any:
        if found is None or isinstance(found, bool | int | float | str):
            return found
        if isinstance(found, list):
            return [self.build(each) for each in found]
        if not isinstance(found, dict):
            raise Damaged(f"{type(found).__name__} describes nothing")
        for kind, build in _BUILDERS.items():
            if kind in found:
                return build(self, found)
        raise Damaged(f"{sorted(found)[:4]} describe nothing")

    def _number(self, found):
        if found["number"] not in ("inf", "-inf", "nan"):
            raise Damaged(f"{found['number']!r} is no number")
        return float(found["number"])

    def _array(self, found):
        kind, i = found.get("kind"), found["array"]
        if type(i) is not int or not 0 <= i < len(self.arrays):
            raise Damaged(f"there is no array {i!r}")
        array = self.arrays[i]
        if kind == "numpy":
            return array.copy()  # one that may be written to
        if kind == "scalar":
            return array[()]
        with jax.enable_x64(True):  # the dtype as it was saved, whatever the setting now
            return jnp.asarray(array)

    def _tuple(self, found):
        return tuple(self.build(each) for each in _list(found["tuple"]))

    def _part(self, found):
        name, given = found["part"], _dict(found["fields"])
        if name not in PARTS:
            raise Damaged(f"this release has no part {name!r}")
        kind = PARTS[name]
        known = _fields(kind)
        if unknown := sorted({*given} - {*known}):
            raise Damaged(f"this release's {name} has no field {unknown[0]!r}")
        if missing := [field for field, default in known.items() if field not in given and default is MISSING]:
            raise Damaged(f"it does not say the field {missing[0]!r} of a {name}")
        values = {field: self.build(given[field]) if field in given else known[field] for field in known}
        if kind is PriorScore:
            return PriorScore(**values)
        part = object.__new__(kind)  # as it was: what its constructor would check and choose was checked and chosen
        for field, value in values.items():
            object.__setattr__(part, field, value)
        return part

    def _method(self, found):
        of = _dict(found["of"])
        if METHODS.get(str(of.get("part"))) != found["method"]:
            raise Damaged(f"{found['method']!r} is no method that a network holds")
        return getattr(self.build(of), found["method"])

    def _law(self, found):
        from numpyro import distributions as dist

        name, given = found["law"], _dict(found["parameters"])
        if name not in LAWS or {*given} != {*LAWS[name]}:
            raise Damaged(f"this release has no law {name!r} of {sorted(given)}")
        return getattr(dist, name)(**{each: self.build(value) for each, value in given.items()})

    def _process(self, found):
        name = found["process"]
        if name == "model":
            if self.process is None:
                raise Damaged("it names a process that it does not have")
            return self.process
        if name not in CONSTRUCTORS:
            raise Damaged(f"this release has no process {name!r}")
        given = {each: self.build(value) for each, value in _dict(found["arguments"]).items()}
        made = CONSTRUCTORS[name](**given)
        return made if isinstance(made, Process) else made.process

    def _dtype(self, found):
        if found["dtype"] not in _FLOATS:
            raise Damaged(f"{found['dtype']!r} is no precision")
        return jnp.dtype(found["dtype"])


_BUILDERS: dict[str, Callable] = {
    "array": Reader._array,
    "tuple": Reader._tuple,
    "part": Reader._part,
    "law": Reader._law,
    "process": Reader._process,
    "method": Reader._method,
    "dtype": Reader._dtype,
    "number": Reader._number,
}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _fields(kind: type) -> dict[str, Any]:
    """The fields of a class and their defaults."""
    if kind is PriorScore:
        return {"prior": MISSING}
    return {field.name: field.default for field in fields(kind)}


def _dtype_name(thing) -> str | None:
    """The name of a precision, as numpy or JAX write one."""
    if not isinstance(thing, np.dtype | type):
        return None
    try:
        name = jnp.dtype(thing).name
    except TypeError:
        return None
    return name if name in _FLOATS else None


def _list(found) -> list:
    if not isinstance(found, list):
        raise Damaged(f"{type(found).__name__} in place of a list")
    return found


def _dict(found) -> dict:
    if not isinstance(found, dict):
        raise Damaged(f"{type(found).__name__} in place of an object")
    return found
