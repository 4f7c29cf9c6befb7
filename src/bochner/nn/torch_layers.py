"""torch's own encoder and decoder layers with linear attention: their modules replaced, their weights kept."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, BochnerWarning
from bochner.nn.attention import Attention, MultiheadAttention

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class TorchConversion:
    """A torch model whose self-attention was replaced; `model` is it, `revert` puts the old modules back."""

    def __init__(self, model: nn.Module, replaced: Sequence[tuple[nn.Module, nn.MultiheadAttention]]) -> None:
        self.model, self._replaced = model, list(replaced)

    def revert(self) -> nn.Module:
        """The model with the attention it had; weights that were trained since stay trained."""
        for layer, old in self._replaced:
            trained = layer.self_attn.state_dict()  # type: ignore[union-attr]
            old.load_state_dict({name: trained[name] for name in old.state_dict()})
            layer.self_attn = old
        return self.model


def is_torch_model(model: Any) -> bool:
    """Whether a module is no transformers model and holds layers of torch's own transformer."""
    named = not isinstance(model, nn.Module) or hasattr(model, "config")
    return not named and any(isinstance(m, LAYERS) for m in model.modules())


def settings_of(spec: Any, has_data: bool) -> Attention:
    """What a layer's attention becomes by an `Attention`, a map or a `Recipe`, as `bochner.convert` takes it."""
    if not hasattr(spec, "resolved"):
        return Attention.of(spec)
    recipe = spec.resolved(has_data)
    if recipe.exact_heads:
        raise BochnerError("The 'exact_heads' of a Recipe are for transformers models; leave them out for torch.nn.")
    near = {"window": recipe.window, "sinks": recipe.sinks, "options": {"window_kind": recipe.window_kind}}
    return Attention(recipe.feature_map, recipe.num_features, **near, map_options=recipe.options)


def convert_torch(model: nn.Module, attention: Any = "positive", data: Any = None) -> TorchConversion:
    """Replace self-attention in torch's `TransformerEncoder`, `TransformerDecoder` and their layers, in place.

    `attention`: an `Attention`, a map or a `bochner.Recipe`. `data`: inputs of the model to calibrate the maps by, a
    tensor or a list of tensors or tuples of arguments. Weights are kept, cross-attention stays exact, and dropout of
    attention weights is left out, since they are never formed.
    """
    layers = [m for m in model.modules() if isinstance(m, LAYERS) and not isinstance(m.self_attn, MultiheadAttention)]
    if not layers:
        raise BochnerError(f"This {type(model).__name__} has no attention of torch.nn left to replace.")
    settings, seen = settings_of(attention, data is not None), _inputs(model, layers, data)
    new = [_replacement(layer.self_attn, settings) for layer in layers]
    for i, module in enumerate(new):
        if seen:
            module.calibrate_(seen[i])
    dropped = max(layer.self_attn.dropout for layer in layers)
    if dropped:
        warnings.warn(
            f"The dropout of attention weights, {dropped}, is left out: linear attention never forms them.",
            BochnerWarning,
            stacklevel=2,
        )
    replaced = [(layer, layer.self_attn) for layer in layers]
    for layer, module in zip(layers, new, strict=True):
        layer.self_attn = module
    for stack in model.modules():
        if isinstance(stack, nn.TransformerEncoder):
            stack.use_nested_tensor = False
    return TorchConversion(model, replaced)


def _replacement(old: nn.MultiheadAttention, settings: Attention) -> MultiheadAttention:
    weight = old.out_proj.weight
    module = MultiheadAttention(
        old.embed_dim, old.num_heads, bias=old.in_proj_bias is not None, add_bias_kv=old.bias_k is not None,
        add_zero_attn=old.add_zero_attn, kdim=old.kdim, vdim=old.vdim, batch_first=old.batch_first,
        device=weight.device, dtype=weight.dtype, attention=settings,
    )  # fmt: skip
    module.load_state_dict(old.state_dict())
    return module.train(old.training)


@torch.no_grad()
def _inputs(model: nn.Module, layers: Sequence[nn.Module], data: Any) -> list[list[Tensor]]:
    """What enters the attention of every layer, batch first, when the model is run on data."""
    if data is None:
        return []
    found: list[list[Tensor]] = [[] for _ in layers]

    def watch(i: int, batch_first: bool) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs["query"]
            found[i].append(x if batch_first else x.transpose(0, 1))

        return hook

    modules = [layer.self_attn for layer in layers]
    handles = [
        m.register_forward_pre_hook(watch(i, m.batch_first), with_kwargs=True)  # type: ignore[union-attr,arg-type]
        for i, m in enumerate(modules)
    ]
    was = [m.training for m in model.modules()]
    try:
        model.train()  # in evaluation mode torch goes past its own attention module
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.eval()
        for batch in [data] if isinstance(data, Tensor) else data:
            model(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
    finally:
        for handle in handles:
            handle.remove()
        for m, training in zip(model.modules(), was, strict=True):
            m.training = training
    return found
