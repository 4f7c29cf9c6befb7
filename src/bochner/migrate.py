"""Models trained with performer-pytorch: their projections and settings in our maps.

`performer_(model)` replaces every `FastAttention` inside a model, in place; weights, projections and settings are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError
from bochner.attention import absorb, empty_state, linear_attention, read
from bochner.maps import feature_map
from bochner.maps.base import Features

GENERALIZED_EPSILON = 1e-3  # performer-pytorch adds it to f(w . x)
SOFTMAX_EPSILON = 1e-4  # and this to positive features, after their maximum is taken off
FUNCTIONS = {None: "positive", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid", "Tanh": "tanh"}


class PerformerAttention(nn.Module):
    """What a trained `performer_pytorch.FastAttention` computes: q, k, v (b, h, n, d) to (b, h, n, v).

    A generalised kernel is our map of that function with the stored projection. To the softmax kernel performer-pytorch
    adds an epsilon relative to the largest projection of the whole sequence, and trained models rely on it:

        phi(q_i) = exp(w . q_i - |q_i|^2/2 - max_w w . q_i) + epsilon
        psi(k_j) = exp(w . k_j - |k_j|^2/2 - max_{w, j} w . k_j) + epsilon

    Without it (`epsilon=0`, always when causal, where that maximum would look into the future) they are
    `PositiveFeatures`. `feature_map` is the map to use elsewhere.
    """

    def __init__(self, source: Any, *, epsilon: float | None = None) -> None:
        super().__init__()
        for name in ("projection_matrix", "generalized_attention", "causal"):
            if not hasattr(source, name):
                raise BochnerError(
                    f"A FastAttention of performer-pytorch was expected; {type(source).__name__} has no {name!r}."
                )
        if getattr(source, "no_projection", False):
            raise BochnerError(
                "FastAttention with 'no_projection' is a softmax of queries and of keys, not a feature map."
            )
        function = type(source.kernel_fn).__name__ if source.generalized_attention else None
        if function not in FUNCTIONS:
            known = sorted(name for name in FUNCTIONS if name)
            raise BochnerError(f"The 'kernel_fn' {function!r} has no counterpart; the known ones are {known}.")
        self.kernel, self.causal, w = FUNCTIONS[function], bool(source.causal), source.projection_matrix.detach()
        default = GENERALIZED_EPSILON if function else SOFTMAX_EPSILON
        self.epsilon = default if epsilon is None else epsilon
        options: dict[str, Any] = {"kernel_epsilon": self.epsilon} if function else {}
        self.feature_map = feature_map(self.kernel, w.shape[1], w.shape[0], projection="iid", **options).to(w.device)
        with torch.no_grad():
            self.feature_map.get_submodule("projection").get_buffer("weight").copy_(w)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kernel != "positive" or self.causal or not self.epsilon:
            return linear_attention(q, k, v, self.feature_map, is_causal=self.causal)
        queries, keys = self._softmax(q, "query"), self._softmax(k, "key")
        state = empty_state(tuple(k.shape[:-2]), keys.values.shape[-1], v.shape[-1], dtype=v.dtype, device=v.device)
        return read(absorb(state, keys, v), queries).to(v.dtype)

    def _softmax(self, x: Tensor, role: str) -> Features:
        x = x * x.shape[-1] ** -0.25
        t: Tensor = self.feature_map.get_submodule("projection")(x)
        peak = t.detach().amax((-1,) if role == "query" else (-1, -2), keepdim=True)
        values = (t - 0.5 * x.square().sum(-1, keepdim=True) - peak).exp() + self.epsilon
        # The peak of a query cancels; that of the keys is one number for all of them and cancels too.
        return Features(values, torch.zeros_like(values[..., :1]))


def performer_(model: nn.Module, *, epsilon: float | None = None) -> nn.Module:
    """Replace every `FastAttention` of performer-pytorch inside `model` by our attention; returns the model.

    Padding is left as the model has it: performer-pytorch takes padded keys out of the values only.
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    found = [name for name, m in modules if type(m).__name__ == "FastAttention"]
    if not found:
        raise BochnerError(f"This {type(model).__name__} has no FastAttention of performer-pytorch inside.")
    for name in found:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner.get_submodule(child), PerformerAttention):
            continue  # the same module under a second name
        setattr(owner, child, PerformerAttention(owner.get_submodule(child), epsilon=epsilon))
    for module in model.modules():
        if type(module).__name__ == "ProjectionUpdater":
            module.feature_redraw_interval = None  # type: ignore[assignment]  # what was stored is what was trained
    return model
