"""The registry of feature maps and `feature_map`, which builds one by name."""

from __future__ import annotations

from typing import Any

from bochner import features, generalized
from bochner._checks import BochnerError, lookup
from bochner.features import FeatureMap

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "trig": features.TrigFeatures,
    "positive": features.PositiveFeatures,
    "hyperbolic": features.HyperbolicFeatures,
    "regularized": features.RegularizedFeatures,
    "optimal": features.OptimalFeatures,
    "calibrated": features.CalibratedFeatures,
    "relu": generalized.ReluFeatures,
    "exp": generalized.ExpFeatures,
    "sigmoid": generalized.SigmoidFeatures,
    "abs": generalized.AbsFeatures,
    "gelu": generalized.GeluFeatures,
    "cos": generalized.CosFeatures,
    "tanh": generalized.TanhFeatures,
    "identity": generalized.IdentityFeatures,
    "elu": generalized.EluFeatures,
}


def feature_map(
    name: str | FeatureMap, dim: int | None = None, num_features: int | None = 256, **options: Any
) -> FeatureMap:
    """A feature map by name, or the given instance.

    `dim`: d, the head size. `num_features`: m. Further keywords go to the map: `projection`, `num_heads`, `kernel`,
    `seed` or `generator` for most; each class documents its own.

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
    try:
        return cls(dim, num_features, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise BochnerError(f"The feature map {name!r} does not take these options: {error}.") from error
