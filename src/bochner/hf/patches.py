"""What transformers is given, and all that is changed of it: `register` and, to take it back, `unregister`.

Two attention implementations are registered. `"bochner"`, for models that `convert` has not seen: every attention
module gets a frozen map, drawn from a seed, at its first call. `"bochner_converted"`, for those it has: modules with
maps of their own use them, and the others stay as they were. Five methods of `PreTrainedModel` are replaced, below with
their reasons.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, BochnerWarning, spawn_seed
from bochner.hf import io
from bochner.hf.capture import (
    RECORDER,
    supported,
    unsupported_message,
)
from bochner.hf.familiar import FAR, distance, fitted_length
from bochner.hf.io import CONVERTED, NAME
from bochner.hf.layer import CHILD, Call, LinearAttention, attend
from bochner.hf.original import as_before, make_mask, softmax_of, transformers_module, understand
from bochner.maps import feature_map as make_feature_map
from bochner.maps.base import FeatureMap

if TYPE_CHECKING:
    from bochner.hf.cache import RecurrentLayer


@dataclass(frozen=True)
class Settings:
    """The map of attention modules that `convert` has not equipped; one for the whole process."""

    feature_map: str = "positive"
    num_features: int = 256
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, dim: int, num_heads: int, place: int) -> FeatureMap:
        return make_feature_map(
            self.feature_map,
            dim=dim,
            num_features=self.num_features,
            num_heads=num_heads,
            seed=spawn_seed(self.seed, place),
            **self.options,
        ).requires_grad_(False)


_settings = Settings()
_default_maps: WeakKeyDictionary[nn.Module, FeatureMap] = WeakKeyDictionary()
_places: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of modules in their model, for their seeds
_replaced: dict[str, Any] = {}  # methods of PreTrainedModel as they were


def register(feature_map: str = "positive", num_features: int = 256, *, seed: int = 0, **options: Any) -> None:
    """Make `attn_implementation="bochner"` known to transformers; call it once, before loading a model.

    Registers the attention functions and their mask function (without it padding would silently be ignored), makes
    models saved after `convert` load with their maps, and makes families whose attention ignores the interface refuse
    the name instead of silently staying softmax. `unregister` takes all of it back.

    `feature_map`, `num_features`, `seed`, `options`: the map of attention modules that `convert` has not equipped, one
    per module and key head. They are frozen and no part of the model's state: for training use
    `bochner.convert(model, ..., train=True)`, for pretrained models `bochner.convert` with calibration.

    >>> register()
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    >>> model = BertModel._from_config(config, attn_implementation="bochner")
    """
    global _settings
    transformers = transformers_module()
    settings = Settings(feature_map, num_features, seed, options)
    trial = settings.make(4, 1, 0)  # a wrong name fails here
    if any(True for _ in trial.parameters()):
        warnings.warn(
            f"The feature map {feature_map!r} is a learned one, and maps made by register are frozen at their initial "
            f"values and not saved; to train it, use bochner.convert(model, {feature_map!r}, train=True).",
            BochnerWarning,
            stacklevel=2,
        )
    _settings = settings
    _default_maps.clear()
    for name, function in ((NAME, attention_forward), (CONVERTED, converted_forward)):
        transformers.AttentionInterface.register(name, function)
        transformers.masking_utils.AttentionMaskInterface.register(name, make_mask)
    if not _replaced:
        _replace_methods(transformers.PreTrainedModel)


def unregister() -> None:
    """Take back what `register` changed of transformers; converted models have to be reverted first."""
    global _settings
    transformers = transformers_module()
    for name in (NAME, CONVERTED, RECORDER):
        transformers.AttentionInterface._global_mapping.pop(name, None)
        transformers.masking_utils.AttentionMaskInterface._global_mapping.pop(name, None)
    for name, method in _replaced.items():
        setattr(transformers.PreTrainedModel, name, method)
    _replaced.clear()
    _default_maps.clear()
    _places.clear()
    _settings = Settings()


def register_once() -> None:
    """Register under the defaults, unless that was done."""
    if not _replaced:
        register()


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attention in linear time under transformers' calling convention; returns (b, n, h, v) and no weights."""
    dropout = kwargs.pop("dropout", 0.0)
    call = understand(module, query, key, value, attention_mask, **kwargs)
    return _by_default(module, call, dropout).transpose(1, 2).contiguous(), None


def converted_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The same for converted models, in which modules and calls that are not converted go the way they went before."""
    from bochner.hf.cache import layer_of

    own: Any = module._modules.get(CHILD)
    if own is None:
        _check_plan(module)
        return as_before(module, softmax_of(getattr(module, "config", None)), query, key, value, attention_mask, kwargs)
    cache = layer_of(key) if own.plan.is_causal else None
    if cache is None and own.leaves(key.shape[-2]):
        implementation = own.origins[0].implementation
        return as_before(module, implementation, query, key, value, attention_mask, kwargs)
    _warn_of_dropout(module, kwargs.pop("dropout", 0.0))
    call = understand(module, query, key, value, attention_mask, **kwargs)
    _warn_of_strangers(own, call, cache)
    out = own(call) if cache is None else _go_on(own, call, cache)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable
def _go_on(own: LinearAttention, call: Call, cache: RecurrentLayer) -> Tensor:
    """Attention from a cache. A graph would hold the number of its tokens, and be another one for the next."""
    out: Tensor = own(call, cache)
    return out


def _by_default(module: nn.Module, call: Call, dropout: float) -> Tensor:
    """Attention by a frozen map, made at the module's first call; one seed gives one map everywhere."""
    _warn_of_dropout(module, dropout)
    phi = _default_maps.get(module)
    heads, dim = call.key.shape[1], call.key.shape[-1]
    if phi is None or (phi.num_heads, phi.dim) != (heads, dim):
        phi = _default_maps[module] = _settings.make(dim, heads, _places.get(module, 0))
    part = next(chain(phi.buffers(), phi.parameters()), None)
    if part is not None and part.device != call.key.device:
        phi.to(call.key.device)
    return attend(call, phi)


def _check_plan(module: nn.Module) -> None:
    if getattr(getattr(module, "config", None), io.KEY, None) is not None:
        raise BochnerError(
            f"The model's configuration holds a conversion plan, but {type(module).__name__} has no maps: the plan was "
            "made for another model."
        )


def _warn_of_dropout(module: nn.Module, dropout: float) -> None:
    if dropout and not torch.compiler.is_compiling():
        warnings.warn(
            f"{type(module).__name__} asks for attention dropout {dropout}; linear attention forms no weights to drop "
            "and goes without. Set the config's attention dropout to 0.",
            BochnerWarning,
            stacklevel=4,
        )


def _warn_of_strangers(own: LinearAttention, call: Call, cache: Any) -> None:
    """Warn of inputs unlike those that were calibrated on; pieces of a sequence after its first for length alone."""
    if own.alarm is None or own.trained or not len(own.map_norm) or torch.compiler.is_compiling():
        return
    tokens = call.key.shape[-2] if cache is None else cache.seen
    if not own.alarm.rung_of_length and (fitted := fitted_length(own.plan, tokens)) is not None:
        own.alarm.ring_of_length(own.plan.name, tokens, fitted)
    if not own.alarm.rung and tokens == call.key.shape[-2]:
        far = distance(own.plan, call)
        if far is not None and far > FAR:
            own.alarm.ring(own.plan.name, far)


def _replace_methods(base: Any) -> None:
    """Replace the methods of `PreTrainedModel`, remembering what they were."""
    for name in (
        "_check_and_adjust_attn_implementation",
        "set_attn_implementation",
        "post_init",
        "save_pretrained",
        "from_pretrained",
    ):
        _replaced[name] = base.__dict__[name]
    adjust, switch, post_init = (
        base._check_and_adjust_attn_implementation,
        base.set_attn_implementation,
        base.post_init,
    )
    save, load = base.save_pretrained, base.from_pretrained.__func__

    # Where a family ignores the interface, transformers only logs, or stays silent, and goes on with softmax.
    def refuse(self: Any, wanted: Any) -> None:
        if wanted in (NAME, CONVERTED) and not supported(self):
            raise BochnerError(unsupported_message(self))

    @functools.wraps(adjust)
    def check_and_adjust(self: Any, attn_implementation: Any = None, *args: Any, **kwargs: Any) -> Any:
        refuse(self, attn_implementation)
        return adjust(self, attn_implementation, *args, **kwargs)

    @functools.wraps(switch)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(self, attn_implementation)
        if attn_implementation == NAME:
            if any(CHILD in m._modules for m in self.modules()):
                attn_implementation = CONVERTED
            _number_modules(self)
        return switch(self, attn_implementation, *args, **kwargs)

    # A saved conversion gets its maps before the weights are read, and says so if they do not fit.
    @functools.wraps(post_init)
    def equipped_post_init(self: Any) -> None:
        post_init(self)
        io.equip_as_saved(self)
        if self.config._attn_implementation == NAME:
            _number_modules(self)

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        try:
            model, info = load(cls, *args, output_loading_info=True, **kwargs)
        except RuntimeError as error:
            if "mismatched_sizes" in str(error) and _is_conversion(*args, **kwargs):
                raise BochnerError(io.MISFIT) from error
            raise
        lost = [str(k) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for k in info.get(kind, ())]
        # A conversion read as what it is has all its maps; one read without its plan is refused by its name.
        if any(f".{CHILD}." in key for key in lost):
            raise BochnerError(io.MISFIT)
        return (model, info) if output_loading_info else model

    # The plans belong to the modules; the configuration holds them in the file only.
    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        with io.plan_in_config(self):
            return save(self, *args, **kwargs)

    base._check_and_adjust_attn_implementation = check_and_adjust
    base.set_attn_implementation = set_attn_implementation
    base.post_init = equipped_post_init
    base.save_pretrained = save_pretrained
    base.from_pretrained = classmethod(from_pretrained)


def _number_modules(model: nn.Module) -> None:
    for place, module in enumerate(model.modules()):
        _places[module] = place


def _is_conversion(name_or_path: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether there is a plan in a saved model's config.json."""
    if name_or_path is None:
        return False
    found, _ = transformers_module().PreTrainedConfig.get_config_dict(name_or_path)
    return io.KEY in found
