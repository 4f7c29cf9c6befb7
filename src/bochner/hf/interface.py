"""All that touches the insides of transformers: attention functions, conversion of a model in place, save and load.

Public parts of transformers carry most of it: the attention and mask interfaces under the names `NAME` and `CONVERTED`,
cache layers, and a registered quantizer, through which `from_pretrained` rebuilds the maps of a saved conversion. No
method of transformers is replaced. Importing this module registers the names, which changes no model.

What is used beyond that, and why; `tests/test_hf_interface.py` has a test for each:

| what | why |
|---|---|
| `config._attn_implementation_internal` | `set_attn_implementation` switches all sub-configurations at once |
| `model._can_set_attn_implementation()` | says whether a family's attention goes through the interface |
| `eager_attention_forward` beside a class | eager attention is registered under no name |
| `model._keep_in_fp32_modules_strict` | maps are read in float32 into a model of lower precision |
| `is_quantized`, `quantization_method`, `hf_quantizer`, `config._is_quantized` | a conversion is not a quantization |
| `cache.layers`, `cache.layer_class_to_replicate` | the layer of a converted module is put into any cache |
| `config.attn_implementation` of the configuration that was there | says that a part was converted by itself |
| an attribute of the key tensor | its attention call finds the cache layer that handed it out |
| a mask with `ndim = 4` and `contiguous` | `generate` takes what our mask function makes for a tensor |
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, BochnerWarning, extra
from bochner.hf import drift
from bochner.hf.attention import CHILD, LinearAttention
from bochner.hf.calls import Call, attend
from bochner.hf.masks import Mask, Obstacle, make_mask, plain_mask
from bochner.hf.plan import Plan
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap

extra("transformers", "hf", "bochner.hf")
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.cache_utils import Cache, EncoderDecoderCache  # noqa: E402
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

from bochner.hf.cache import RecurrentLayer, layer_of, make_recurrent  # noqa: E402

NAME = "bochner"  # the attention implementation of models that `convert` has not seen
# That of converted models: modules without maps stay softmax. Where it is not known transformers shows its name.
CONVERTED = "bochner_converted (call bochner.hf.register() before loading)"
# What a whole model is saved with after a part of it was converted by itself: nobody knows it, transformers shows it.
AROUND = (
    "bochner (a part of this model was converted by itself, and the maps are not in the plan of the whole: convert the "
    "whole model with 'parts' before saving it, or load it as it was by attn_implementation='sdpa')"
)
DEFAULT_MAP, DEFAULT_FEATURES = "positive", 256  # of modules that `convert` has not seen
MISFIT = (
    "The saved maps are not those of the plan beside them, which was edited or comes from another conversion: convert "
    "the original model again with this plan."
)
UNSUPPORTED = (
    "{} cannot use linear attention: its attention does not go through transformers' attention interface, so that a "
    "replacement would silently be ignored."
)
# Keywords of transformers' attention calls that change the result; each with the reason why a layer stays exact.
REFUSED = {
    "position_bias": "a position bias added to the logits (T5) is not a kernel of query and key",
    "bias": "a bias added to the logits is not a kernel of query and key",
    "softcap": "a soft cap on the logits (Gemma-2) is not a softmax kernel",
    "s_aux": "a learned sink logit (gpt-oss) is a key without a value",
    "sliding_window": "its own sliding window is linear already",
    "cache": "the paged cache of continuous batching is not supported",
    "indices": "sparse attention by indices is linear already",
    "block_indices": "block-sparse attention is linear already",
}
_functions = AttentionInterface()
_default_maps: dict[tuple[int, int, torch.device], FeatureMap] = {}
_hidden: ContextVar[Tensor | None] = ContextVar("hidden", default=None)  # what entered the attention module at work


def register() -> None:
    """Make `attn_implementation="bochner"` known to transformers; importing `bochner.hf.interface` does the same.

    Every attention module of such a model uses one frozen map, `positive` with 256 features, drawn from seed 0: the
    same in every layer, copy and process. For other maps load the model and convert it.

    >>> register()
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    >>> model = BertModel._from_config(config, attn_implementation="bochner")
    """


# The attention call


def read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> tuple[Call, Obstacle | None]:
    """An attention call as transformers makes it, and what of it linear attention cannot honour."""
    if not isinstance(mask, Mask):  # of a model that has none made, and says beside it whether it is causal
        asked = kwargs.get("is_causal")
        mask = plain_mask(mask, key.shape[-2], getattr(module, "is_causal", False) if asked is None else asked)
    obstacle, passed = mask.obstacle, next((name for name in REFUSED if kwargs.get(name) is not None), None)
    if passed is not None:
        limit = kwargs[passed] if passed == "sliding_window" and isinstance(kwargs[passed], int) else 0
        obstacle = Obstacle(f"it passes {passed!r}, and {REFUSED[passed]}", limit)
    if mask.length < key.shape[-2]:  # the slots of a fixed cache beyond the mask hold zeros; the feature of 0 is not 0
        key, value = key[..., : mask.length, :], value[..., : mask.length, :]
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    _check_packing(module, mask.segments, kwargs)
    return Call(query, key, value, mask.is_causal, mask.padding, scale, mask.segments), obstacle


def _check_packing(module: nn.Module, segments: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse a batch whose sequences only flash-attention would tell apart."""
    if segments is None and kwargs.get("cu_seq_lens_q") is not None:
        raise BochnerError(
            f"{type(module).__name__} cannot honour 'cu_seq_lens_q'; pack by 'position_ids' that begin again at 0 with "
            "every sequence."
        )


def original_attention(
    module: nn.Module, implementation: str, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Any:
    """The call through the attention function that the module had before."""
    if "flash" not in implementation:
        _check_packing(module, getattr(mask, "segments", None), kwargs)
    if isinstance(mask, Mask):
        mask = mask.original(implementation, key.shape[-2])
    return _function(module, implementation)(module, query, key, value, mask, **kwargs)


def _function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    if implementation in _functions:
        return _functions[implementation]
    for cls in type(module).__mro__:  # eager attention stands beside the module, and is not registered
        function: Callable[..., Any] | None = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise BochnerError(f"No {implementation!r} attention of {type(module).__name__} was found to go back to.")


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attention in linear time under transformers' calling convention; returns (b, n, h, v) and no weights."""
    if CHILD in module._modules:
        return converted_forward(module, query, key, value, attention_mask, **kwargs)
    call = _linear_call(module, query, key, value, attention_mask, kwargs)
    return attend(call, _default_map(call.key)).transpose(1, 2).contiguous(), None


def converted_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The same for converted models, in which modules that are not converted go the way they went before."""
    own: Any = module._modules.get(CHILD)
    if own is None or own.plan.untouched:
        implementation = "sdpa" if own is None else own.original
        return original_attention(module, implementation, query, key, value, attention_mask, kwargs)
    cache = layer_of(key) if own.plan.is_causal else None
    call = _linear_call(module, query, key, value, attention_mask, kwargs)
    if own.needs_hidden:
        call = call._replace(hidden=hidden_states())
    drift.warn(own, call, None if cache is None else cache.seen)
    out = own(call) if cache is None else _go_on(own, call, cache)
    return out.transpose(1, 2).contiguous(), None


def _linear_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Call:
    """A call that linear attention is going to answer; what it cannot honour is refused."""
    call, obstacle = read_call(module, query, key, value, mask, kwargs)
    if obstacle is not None:
        raise BochnerError(f"{type(module).__name__} cannot use linear attention: {obstacle.reason}.")
    if kwargs.get("dropout") and not torch.compiler.is_compiling():
        warnings.warn(
            f"{type(module).__name__} asks for attention dropout {kwargs['dropout']}; linear attention forms no "
            "weights to drop and goes without. Set the config's attention dropout to 0.",
            BochnerWarning,
            stacklevel=4,
        )
    return call


@torch.compiler.disable
def _go_on(own: LinearAttention, call: Call, cache: RecurrentLayer) -> Tensor:
    """Attention from a cache. A graph would hold the number of its tokens, and be another one for the next."""
    out: Tensor = own(call, cache)
    return out


def note_hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of attention modules whose fates ask for the hidden states that enter them."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    _hidden.set(hidden if isinstance(hidden, Tensor) else None)


def hidden_states() -> Tensor | None:
    """What entered the attention module at work, if `note_hidden` is hooked to it."""
    return _hidden.get()


def prepare_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of attention modules that makes the cache layer they will use a recurrent one.

    A function of what the module holds, so that copies and pickles of a converted model decode by their own plans.
    """
    child: Any = module._modules[CHILD]
    for given in (*args, *kwargs.values()):
        if isinstance(given, (Cache, EncoderDecoderCache)):
            make_recurrent(getattr(given, "self_attention_cache", given), child.cache_index)


@torch.compiler.disable
def _make_default_map(dim: int, heads: int, device: torch.device) -> FeatureMap:
    phi = feature_map(DEFAULT_MAP, dim=dim, num_features=DEFAULT_FEATURES, num_heads=heads, seed=0)
    return _default_maps.setdefault((dim, heads, device), phi.requires_grad_(False).to(device))


def _default_map(key: Tensor) -> FeatureMap:
    dim, heads = key.shape[-1], key.shape[1]
    return _default_maps.get((dim, heads, key.device)) or _make_default_map(dim, heads, key.device)


# Models


def supported(model: nn.Module | type) -> bool:
    """Whether the model's own attention goes through transformers' interface, as its source tells."""
    check = getattr(model, "_can_set_attn_implementation", None)
    return bool(check()) if check is not None else False


def unwrap(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """The transformers model in a PeftModel, that and the tokenizer of a SentenceTransformer; others as they are."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not (hasattr(model, "tokenize") and hasattr(model, "encode")):
        return model, tokenizer
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise BochnerError("This SentenceTransformer holds no transformers model.")
    return inner, tokenizer or model.tokenizer


def settings_of(model: Any) -> BochnerConfig | None:
    """What a converted model's configuration says of the conversion; None if nothing."""
    settings = getattr(getattr(unwrap(model)[0], "config", None), "quantization_config", None)
    return settings if isinstance(settings, BochnerConfig) else None


def check_model(model: Any) -> None:
    """Refuse what cannot be converted, before anything is done."""
    if not isinstance(model, nn.Module):
        raise BochnerError(f"The 'model' of convert must be a transformers model, got {type(model).__name__}.")
    if attached_to(model):
        raise BochnerError("This model is converted already; call bochner.revert(model) first.")
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise BochnerError("The 'model' of convert has no parameters.")
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if (quantized and settings_of(model) is None) or not parameter.is_floating_point():
        raise BochnerError(
            f"The 'model' of convert must have floating-point weights, got {parameter.dtype}"
            f"{' and a quantization config' if quantized else ''}; load it dequantized."
        )
    if parameter.device == torch.device("meta"):
        raise BochnerError("The 'model' of convert is on the meta device, without weights; load them first.")


def configs_of(model: nn.Module) -> list[Any]:
    """Every configuration of the model and its parts, once."""
    waiting, found = [getattr(module, "config", None) for module in model.modules()], dict[int, Any]()
    while waiting:
        config = waiting.pop(0)
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())


def _above_maps(model: nn.Module) -> list[tuple[Any, LinearAttention]]:
    """The configurations of the modules that hold an attached one, and the first that each of them holds."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        child = next((m for m in module.modules() if isinstance(m, LinearAttention)), None)
        if child is not None and isinstance(config, PreTrainedConfig):
            found.setdefault(id(config), (config, child))
    return list(found.values())


def softmax_of(model: Any, config: Any) -> str:
    """The softmax implementation of a configuration, a fitting one if it is ours."""
    present = getattr(config, "_attn_implementation_internal", None)
    if present is None or present in (NAME, CONVERTED):
        present = "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
    return str(present)


def attached_to(model: Any) -> dict[str, LinearAttention]:
    """What `attach` gave a model, by the name of its attention module in the transformers model; empty if nothing."""
    inner, _ = unwrap(model)
    found = {}
    for name, module in getattr(inner, "named_modules", dict)():
        child: Any = module._modules.get(CHILD)
        copies, active = getattr(child, "modules_to_save", {}), getattr(child, "active_adapters", None)
        if active and active[0] in copies:  # PEFT's `modules_to_save`: the copy of the adapter in use
            child = copies[active[0]]
        if isinstance(child, LinearAttention):
            found[name] = child
    return found


def layers_of(model: Any) -> dict[str, LinearAttention]:
    """What is attached to a converted model, by the name of the attention module."""
    found = attached_to(model)
    if not found:
        raise BochnerError(f"This {type(model).__name__} is not converted; call bochner.convert first.")
    return found


def trainable_maps_(model: Any, *, projections: bool = False) -> list[nn.Parameter]:
    """Make the learned parts of a converted model's maps parameters that require gradients; returns them.

    Random frequencies stay buffers unless `projections`. All are named under `linear_attn.map_norm`, which trainers
    leave out of weight decay and PEFT can be told to train by `modules_to_save=["linear_attn"]`. A model converted with
    `trainable=True` has this done already, and is saved and loaded that way.
    """
    found = [p for layer in layers_of(model).values() for p in layer.unfreeze_(projections=projections)]
    if not found:
        raise BochnerError(
            "The maps of this model have nothing to learn; convert it with 'calibrated' or a learned map."
        )
    return found


def for_model(plan: Plan, model: nn.Module) -> Plan:
    """The plan by the names that a model's modules have: a head on top or its absence does not matter."""
    modules, prefix = dict(model.named_modules()), f"{getattr(model, 'base_model_prefix', '')}."
    layers, maps = [], {}
    for layer in plan.layers:
        names = (layer.name, prefix + layer.name, layer.name.removeprefix(prefix))
        name = next((n for n in names if n in modules), None)
        if name is None:
            raise BochnerError(
                f"The plan names {layer.name!r}, which is not an attention module of this {type(model).__name__}: it "
                "was made for another model."
            )
        layers.append(replace(layer, name=name))
        if layer.name in plan.maps:
            maps[name] = plan.maps[layer.name]
    return replace(plan, layers=layers, maps=maps)


def attach(model: Any, plan: Plan, layers: dict[str, LinearAttention]) -> None:
    """Give every attention module of a plan its `LinearAttention`, and switch the configurations above them.

    The model gets configurations of its own, so that no other model is switched with it. A plan that converts nothing
    leaves them alone.
    """
    given, memo = model.config, dict[int, Any]()
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, memo)
    alarms = {
        kind: drift.Alarm(x.name for x in plan.converted if x.seen is not None and x.is_causal == kind)
        for kind in (False, True)
    }
    for place, layer in enumerate(plan.layers):
        child, module = layers[layer.name], model.get_submodule(layer.name)
        index = getattr(module, "layer_idx", None)
        child.given, child.original = given, softmax_of(model, getattr(module, "config", None) or model.config)
        child.drift, child.cache_index = alarms[child.plan.is_causal], place if index is None else index
        module.add_module(CHILD, child)
        hooks: list[Any] = [note_hidden] if child.needs_hidden else []
        if child.plan.is_causal and not child.plan.is_cross and not child.plan.untouched:
            hooks.append(prepare_cache)
        child.hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for hook in hooks]
    if not plan.converted:
        return
    for config, _ in _above_maps(model):
        config._attn_implementation_internal = CONVERTED
    model.config.quantization_config = BochnerConfig(plan=plan)
    model.config.attn_implementation = CONVERTED  # in config.json, where softmax would not tell that maps are missing
    if model.base_model is model:  # without a head it may be a part of another model
        given.attn_implementation = AROUND


def detach(model: Any) -> None:
    """Remove what `attach` gave a model, and give its configurations their implementations back."""
    layers_of(model)
    for config, child in _above_maps(model):
        config._attn_implementation_internal = child.original
        for changed in (config, child.given):
            changed.__dict__.pop("attn_implementation", None)
        config.__dict__.pop("quantization_config", None)
    for module in list(model.modules()):
        if CHILD in module._modules:
            for hook in getattr(module, CHILD).hooks:
                hook.remove()
            delattr(module, CHILD)


@contextlib.contextmanager
def attached(model: Any, plan: Plan, layers: dict[str, LinearAttention]) -> Iterator[None]:
    """A conversion for a while; the model then is what it was, configurations included."""
    before = [(m, m.config) for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)]
    attach(model, plan, layers)
    try:
        yield
    finally:
        detach(model)
        for module, config in before:
            module.config = config


# Saving and loading by transformers' own methods


@register_quantization_config(NAME)
class BochnerConfig(QuantizationConfigMixin):
    """What config.json says of a conversion: its plan, from which `from_pretrained` builds the maps."""

    def __init__(self, quant_method: str = NAME, plan: Any = None, **unknown: Any) -> None:
        self.quant_method: Any = quant_method
        self.plan = plan if isinstance(plan, Plan) else Plan.from_dict(plan)

    @torch.compiler.disable  # an encoder-decoder asks for it while it makes a cache
    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "plan": self.plan.to_dict()}


@register_quantizer(NAME)
class MapLoader(HfQuantizer):
    """Attaches the maps of a saved conversion to a model before `from_pretrained` reads its weights."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        config.plan = for_model(config.plan, model)
        layers = {layer.name: LinearAttention(layer) for layer in config.plan.layers}
        _check_files(layers, checkpoint_files)
        asked = model.config._attn_implementation
        attach(model, config.plan, layers)
        if asked != CONVERTED:  # by `from_pretrained(..., attn_implementation=)`
            for above, _ in _above_maps(model):
                above._attn_implementation_internal = asked
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), CHILD}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            model.__dict__.pop(name, None)
        for config in configs_of(model):
            config.__dict__.pop("_is_quantized", None)
            if config is not model.config or not attached_to(model):
                config.__dict__.pop("quantization_config", None)
        for layer in attached_to(model).values():  # tensors of a file lie anywhere in memory, which changes rounding
            for tensor in (*layer.parameters(), *layer.buffers()):
                tensor.data = tensor.data.clone()
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _check_files(layers: dict[str, LinearAttention], files: Any) -> None:
    """Refuse a checkpoint whose maps are not those of its plan; transformers would leave them without values.

    Names of modules are left out: some families change them in files.
    """
    from safetensors import safe_open

    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return
    found: Counter[Any] = Counter()
    for file in files:
        with safe_open(Path(file), framework="pt") as opened:
            names = [(key, key.partition(f".{CHILD}.")[2]) for key in opened.keys()]  # noqa: SIM118
            found.update((name, tuple(opened.get_slice(key).get_shape())) for key, name in names if name)
    if found != Counter((key, tuple(x.shape)) for layer in layers.values() for key, x in layer.state_dict().items()):
        raise BochnerError(MISFIT)


for _name, _forward in ((NAME, attention_forward), (CONVERTED, converted_forward)):
    AttentionInterface.register(_name, _forward)
    AttentionMaskInterface.register(_name, make_mask)
