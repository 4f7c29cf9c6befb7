"""The registry of feature maps and `feature_map`, which builds one by name."""

from __future__ import annotations

import inspect
from typing import Any

from bochner._checks import BochnerError, lookup
from bochner._products import is_fake
from bochner.maps import clustered, exponential, generalized, hybrid, landmark, learned, local, polynomial, trig
from bochner.maps.base import FeatureMap, Features, kernel_estimate
from bochner.projections import Projection

__all__ = ["FEATURE_MAPS", "FeatureMap", "Features", "feature_map", "kernel_estimate"]

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "trig": trig.TrigFeatures,
    "positive": exponential.PositiveFeatures,
    "hyperbolic": exponential.HyperbolicFeatures,
    "regularized": exponential.RegularizedFeatures,
    "optimal": exponential.OptimalFeatures,
    "calibrated": exponential.CalibratedFeatures,
    "landmark": landmark.LandmarkFeatures,
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

# These draw something other than Gaussian directions.
WITHOUT_PROJECTION = frozenset(
    {
        "fastfood_rks",
        "fastfood_prf",
        "hedgehog",
        "landmark",
        "linear_elu",
        "sum_poly",
        "tensor_sketch",
        "maclaurin",
        "nonnegative_poly",
        "local_l1",
        "local_laplace",
    }
)


def feature_map(
    name: str | FeatureMap,
    dim: int | None = None,
    num_features: int | None = 256,
    projection: str | Projection = "orthogonal",
    **options: Any,
) -> FeatureMap:
    """A feature map by name, or the given instance.

    `dim`: d, the head size. `num_features`: m. `projection`: the law of the directions, for the maps that have any.
    Further keywords go to the map: `num_heads`, `seed` or `generator` for all, `kernel` for most; each class documents
    its own.

    >>> feature_map("positive", dim=64, num_features=256, projection="orthogonal", num_heads=None, seed=0)
    PositiveFeatures(
      dim=64, num_features=256, kernel='softmax'
      (projection): OrthogonalProjection(dim=64, num_features=256)
    )
    """
    if isinstance(name, FeatureMap):
        return name
    cls = lookup(FEATURE_MAPS, name, "feature map")
    if dim is None:
        raise BochnerError(f"The 'dim' of feature map {name!r} is missing; give the head size d.")
    if name not in WITHOUT_PROJECTION:
        options["projection"] = projection
    elif projection != "orthogonal":
        raise BochnerError(f"The feature map {name!r} has no 'projection', got {projection!r}; leave it out.")
    valid = options_of(cls)
    unknown = sorted(set(options) - valid)
    if unknown:
        raise BochnerError(f"The feature map {name!r} does not take the options {unknown}; it takes {sorted(valid)}.")
    try:
        return cls(dim, num_features, **options)  # type: ignore[arg-type]
    except RuntimeError as error:
        if not is_fake():
            raise
        raise BochnerError(
            f"The feature map {name!r} cannot be made under FakeTensorMode, where nothing has values; make it before."
        ) from error


def options_of(cls: type[FeatureMap]) -> set[str]:
    """The keywords of a map's constructor, and of those it passes the rest on to."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names
