"""The registry of feature maps, and `feature_map`, which builds one from its name, its class or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bochner._checks import ArgumentError, BochnerError, lookup
from bochner._products import is_fake
from bochner.maps import (
    clustered,
    exponential,
    generalized,
    hybrid,
    landmark,
    learned,
    local,
    moments,
    polynomial,
)
from bochner.maps.base import FeatureMap, Features, ProjectedFeatures, kernel_estimate, to_features
from bochner.maps.own import FunctionMap, build, check_class, check_contract
from bochner.projections import Projection

__all__ = [
    "FEATURE_MAPS",
    "FeatureMap",
    "Features",
    "FunctionMap",
    "ProjectedFeatures",
    "feature_map",
    "kernel_estimate",
    "register_map",
    "to_features",
]

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "trig": exponential.TrigFeatures,
    "positive": exponential.PositiveFeatures,
    "hyperbolic": exponential.HyperbolicFeatures,
    "regularized": exponential.RegularizedFeatures,
    "optimal": exponential.OptimalFeatures,
    "calibrated": exponential.CalibratedFeatures,
    "landmark": landmark.LandmarkFeatures,
    "moments": moments.MomentsFeatures,
    "relu": generalized.ReluFeatures,
    "exp": generalized.ExpFeatures,
    "sigmoid": generalized.SigmoidFeatures,
    "abs": generalized.AbsFeatures,
    "gelu": generalized.GeluFeatures,
    "cos": generalized.CosFeatures,
    "tanh": generalized.TanhFeatures,
    "identity": generalized.IdentityFeatures,
    "elu": generalized.EluFeatures,
    "linear_elu": generalized.LinearEluFeatures,
    "generalized": generalized.FunctionFeatures,
    "complex_exponential": hybrid.ComplexExponentialFeatures,
    "angular_hybrid": hybrid.AngularHybridFeatures,
    "gaussian_hybrid": hybrid.GaussianHybridFeatures,
    "clustered": clustered.ClusteredFeatures,
    "gmm_rks": learned.GMMSinkFeatures,
    "gmm_prf": learned.GMMPositiveFeatures,
    "fastfood_rks": learned.FastfoodSinkFeatures,
    "fastfood_prf": learned.FastfoodPositiveFeatures,
    "generative_rks": learned.GenerativeSinkFeatures,
    "generative_prf": learned.GenerativePositiveFeatures,
    "hedgehog": learned.HedgehogFeatures,
    "sum_poly": polynomial.SumPolyFeatures,
    "tensor_sketch": polynomial.TensorSketchFeatures,
    "maclaurin": polynomial.MaclaurinFeatures,
    "nonnegative_poly": polynomial.NonnegativePolyFeatures,
    "local_l1": local.LocalL1Features,
    "local_laplace": local.LocalLaplaceFeatures,
    "local_gaussian": local.LocalGaussianFeatures,
}

MapLike = str | FeatureMap | type[FeatureMap] | Callable[[Tensor, str], Tensor | Features]


def register_map(name: str, cls: type[FeatureMap]) -> None:
    """Make a map of your own known by a name, wherever a map is given by its name: in layers, models and tasks.

    `cls`: a subclass of `FeatureMap` whose constructor takes `(dim, num_features)`. It is built once and tried on a few
    rows: a class that breaks the contract of `FeatureMap` is refused.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise BochnerError(f"The 'name' of register_map must be letters, digits and underscores, got {name!r}.")
    cls = check_class(cls, "register_map")
    known = FEATURE_MAPS.get(name, cls)
    if known is not cls:
        raise BochnerError(
            f"The name {name!r} is taken by {known.__name__}; register {cls.__name__} under another name, or remove "
            f"the old one first by bochner.maps.FEATURE_MAPS.pop({name!r})."
        )
    if name not in FEATURE_MAPS:
        check_contract(build(cls), cls.__name__)
        FEATURE_MAPS[name] = cls


def named(name: Any, owner: str) -> type[FeatureMap]:
    """The class of a map whose name alone is stored."""
    if not isinstance(name, str):
        kind = name.__name__ if isinstance(name, type) else type(name).__name__
        raise BochnerError(
            f"The 'feature_map' of {owner} must be a name, got {kind}; register a class of your own by "
            "bochner.register_map(name, cls), give that name, and the keywords of the map as options."
        )
    return _known(name)


def _known(name: Any) -> type[FeatureMap]:
    try:
        return lookup(FEATURE_MAPS, name, "feature map")
    except ArgumentError as error:
        raise ArgumentError(f"{str(error)[:-1]}; register one of your own by bochner.register_map first.") from None


def feature_map(
    name: MapLike,
    dim: int | None = None,
    num_features: int | None = 256,
    projection: str | Projection = "orthogonal",
    **options: Any,
) -> FeatureMap:
    """A feature map by name, from its class or from a plain function `f(x, role)`; an instance is returned as it is.

    `dim`: d, the head size. `num_features`: m. `projection`: the law of the directions, for the maps that have any.
    Further keywords go to the map: `num_heads`, `seed` or `generator`, `kernel`, and those that its class documents.
    `redraw_every`: see `FeatureMap.schedule_redraws_`. A function takes `positive=True` if it is never negative.

    >>> feature_map("positive", dim=64, num_features=256, projection="orthogonal", num_heads=None, seed=0)
    PositiveFeatures(
      dim=64, num_features=256, kernel='softmax'
      (projection): OrthogonalProjection(dim=64, num_features=256)
    )
    """
    if isinstance(name, FeatureMap):
        return name
    label = repr(name) if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)
    if isinstance(name, type):
        cls = check_class(name, "feature_map")
    elif callable(name):
        cls, options["function"] = FunctionMap, name
    else:
        cls = _known(name)
    if dim is None:
        raise BochnerError(f"The 'dim' of feature map {label} is missing; give the head size d.")
    every, valid = options.pop("redraw_every", None), options_of(cls)
    if "projection" in valid:
        options["projection"] = projection
    elif projection != "orthogonal":
        raise BochnerError(f"The feature map {label} has no 'projection', got {projection!r}; leave it out.")
    # Layers and models give these to every map: one that does not take them draws nothing and is shared by all heads.
    spare = {"seed"} if options.get("num_heads") is not None else {"seed", "num_heads"}
    unknown = sorted(set(options) - valid - spare)
    if unknown:
        raise BochnerError(f"The feature map {label} does not take the options {unknown}; it takes {sorted(valid)}.")
    taken: dict[str, Any] = {key: value for key, value in options.items() if key in valid}
    try:
        phi: FeatureMap = cls(dim, num_features, **taken)  # type: ignore[arg-type]
    except RuntimeError as error:
        if not is_fake():
            raise
        raise BochnerError(
            f"The feature map {label} cannot be made under FakeTensorMode, where nothing has values; make it before."
        ) from error
    if isinstance(name, type) and name not in FEATURE_MAPS.values():
        check_contract(phi, name.__name__)
    if every is not None:
        phi.schedule_redraws_(every, options.get("seed", 0), generator=options.get("generator"))
    return phi


def options_of(cls: type[FeatureMap]) -> set[str]:
    """The keywords of a map's constructor, and of those it passes the rest on to; `kernel` only where there is one."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            names |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    alone = issubclass(cls, ProjectedFeatures) and len(cls.kernels) == 1
    return names - {"dim", "num_features"} - ({"kernel"} if alone else set())
