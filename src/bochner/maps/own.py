"""Maps of your own: what they must keep to, tried once on a few rows, and plain functions as maps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, accumulation_dtype, flag
from bochner._products import is_composed
from bochner.maps.base import ROLES, FeatureMap, Features, kernel_estimate, to_features

SIZES = ((4, 8), (16, 64), (64, 256))  # (dim, num_features) to build a class with: the first that it takes


class FunctionMap(FeatureMap):
    """A plain function `f(x, role)` as a map: x (..., n, d) to features, a tensor (..., n, m) or `Features`.

    m is the length of what `function` gives for a few rows; `num_features` means nothing here. `positive`: whether its
    features are never negative: attention relies on that. The parameters of an `nn.Module` are the map's own.

    >>> phi = FunctionMap(4, function=lambda x, role: torch.cat([x.exp(), (-x).exp()], dim=-1), positive=True)
    >>> phi.feature_dim
    8
    """

    unbiased = False

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        function: Callable[[Tensor, str], Tensor | Features],
        positive: bool = False,
    ) -> None:
        super().__init__(dim, 1, kernel="function")
        self.function, self.positive = function, flag(positive, "positive", "FunctionMap")
        owner = f"the function {getattr(function, '__name__', type(function).__name__)!r}"
        found = _tried(self, _rows(self), "query", owner)
        values = found.values if isinstance(found, Features) else found
        self.num_features = self.feature_dim = values.shape[-1] if isinstance(values, Tensor) and values.ndim else 1
        check_contract(self, owner)

    def _features(self, x: Tensor, role: str) -> Features:
        found = self.function(x, role)
        return to_features(found) if isinstance(found, Tensor) else found

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        return kernel_estimate(self, x, y)


def check_class(cls: Any, owner: str) -> type[FeatureMap]:
    """A subclass of `FeatureMap`, or one sentence."""
    if isinstance(cls, type) and issubclass(cls, FeatureMap):
        return cls
    found = f"the class {cls.__name__}" if isinstance(cls, type) else f"an instance of {type(cls).__name__}"
    remedy = "give its class" if isinstance(cls, FeatureMap) else "derive a class from bochner.FeatureMap"
    raise BochnerError(f"{owner} needs a subclass of FeatureMap, got {found}; {remedy}.")


def build(cls: type[FeatureMap]) -> FeatureMap:
    """A small map of a class, built as `feature_map` builds it."""
    name, errors = cls.__name__, []
    try:
        inspect.signature(cls).bind(*SIZES[0])
    except TypeError as error:
        raise BochnerError(
            f"The constructor of {name} does not take (dim, num_features) alone: {error}; make these its first two "
            "arguments and give all others a default."
        ) from error
    for dim, m in SIZES:
        try:
            with torch.random.fork_rng(devices=[]):
                phi = cls(dim, m)
            if getattr(phi, "dim", None) != dim:
                raise BochnerError(f"its constructor does not call super().__init__({dim}, {m}) of FeatureMap")
            return phi
        except Exception as error:
            errors.append(error)
    raise BochnerError(f"{name}(4, 8) cannot be built: {_said(errors[0])}; repair its constructor.") from errors[0]


def check_contract(phi: FeatureMap, name: str) -> None:
    """Refuse a map whose features of a few rows are not what attention relies on, in one sentence."""
    x = _rows(phi)
    lead = tuple(x.shape[:-1])
    for role in ROLES:
        found, what = _tried(phi, x, role, name), f"{role} features of {name}"
        if not (isinstance(found, Features) and all(isinstance(t, Tensor) for t in found)):
            raise BochnerError(
                f"The {what} must be Features(values, log_scale) of two tensors, got {type(found).__name__}; return "
                "bochner.maps.to_features(tensor) for a plain tensor (..., n, m)."
            )
        values, log_scale = found
        if tuple(values.shape) != (*lead, phi.feature_dim):
            raise BochnerError(
                f"The {what} have shape {tuple(values.shape)} for x of shape {tuple(x.shape)}, but its feature_dim "
                f"is {phi.feature_dim}; give values (..., n, m) in both roles and set self.feature_dim = m."
            )
        if tuple(log_scale.shape) != (*lead, 1):
            raise BochnerError(
                f"The log_scale of the {what} must have shape {(*lead, 1)}, one number a row, got "
                f"{tuple(log_scale.shape)}; keep the last axis, as sum(-1, keepdim=True) does."
            )
        if {t.dtype for t in found} != {x.dtype}:
            raise BochnerError(
                f"The {what} have dtypes {values.dtype} and {log_scale.dtype} for x of {x.dtype}; cast what they are "
                "made of, as weight.to(x.dtype)."
            )
        if is_composed():  # no values to look at
            continue
        if not all(bool(torch.isfinite(t).all()) for t in found):
            raise BochnerError(f"The {what} are not finite; move what is large into log_scale.")
        if phi.positive and bool((values < 0).any()):
            raise BochnerError(
                f"The {what} go down to {float(values.min()):.3g} although it says positive=True; make them "
                "non-negative, or say positive=False."
            )


def _rows(phi: FeatureMap) -> Tensor:
    """Two sequences of seven rows, per head if the map has heads."""
    heads = () if phi.num_heads is None else (phi.num_heads,)
    x = torch.randn(2, *heads, 7, phi.dim, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    device = next((t.device for t in (*phi.parameters(), *phi.buffers())), x.device)
    return x.to(device, accumulation_dtype(x.dtype))


def _tried(phi: FeatureMap, x: Tensor, role: str, name: str) -> Any:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return phi(x, role)
    except NotImplementedError as error:
        raise BochnerError(f"{name} has no features; define _features(self, x, role) in its class.") from error
    except Exception as error:
        raise BochnerError(
            f"The {role} features of {name} cannot be computed for x of shape {tuple(x.shape)}: {_said(error)}; repair "
            "what computes them from (x, role)."
        ) from error


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, BochnerError) else f"{type(error).__name__}: "
    return f"{kind}{error}".split("\n")[0].rstrip(".")
