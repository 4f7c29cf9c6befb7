"""The fate `Selected`: a head holds the first keys, the last keys, and the older keys with the highest scores.

Scores are linear in the hidden state that enters the attention module (`bochner.hf.scores`); `bochner.hf.selected` is
the cache itself. `bochner.hf.fit_selected` fits them, and a search for memory does. There is no gradient.

>>> Selected(budget=300, width=64)
Selected(window=128, sinks=4, budget=300, precision='int4', width=64)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, is_int, lookup, positive_int
from bochner.hf.calls import Call
from bochner.hf.fates import Fate, FateModule, Layer, register_fate
from bochner.hf.precision import INT8, PRECISIONS, Basis, Turns, row_bytes
from bochner.hf.scores import scores
from bochner.hf.selected import SLOT_BYTES, SelectedKeys, SelectedState, counters, sink_dtype, spare_of

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by the bytes of an element
NO_GRADIENT = "Heads that select their keys are for inference and have no gradient; train the model before converting."


@register_fate
@dataclass(frozen=True)
class Selected(Fate):
    """Softmax over the first keys (`sinks`), the last ones (`window`), and the best older ones (`budget` at most).

    `precision`: how older keys and values are stored, `"int4"` or `"int8"`; see `bochner.hf.precision`. `width`: the
    size of the hidden states that scores are computed from.
    """

    window: int = 128
    sinks: int = 4
    budget: int = 0
    precision: str = "int4"
    width: int = 0

    name = "selected"
    letter = "S"
    has_map = True

    def __post_init__(self) -> None:
        owner = f"the fate {self.name!r}"
        positive_int(self.window, "window", owner)
        for name in ("sinks", "budget", "width"):
            value = getattr(self, name)
            if not is_int(value) or value < 0:
                raise BochnerError(f"The {name!r} of {owner} must be an int >= 0, got {value!r}.")
        lookup(PRECISIONS, self.precision, "precision")

    def check(self, layer: Layer) -> None:
        owner = f"The plan of {layer.name!r}"
        if not layer.is_causal or layer.is_cross:
            raise BochnerError(f"{owner} is not self-attention of a decoder, which alone selects keys; use 'exact'.")
        if layer.trainable:
            raise BochnerError(f"{owner} is to be trained. {NO_GRADIENT}")
        if not self.width:
            raise BochnerError(f"{owner} has no 'width' of hidden states; bochner.hf.fit_selected makes such plans.")
        self._bytes_of_keys(layer)  # refuses head sizes that cannot be packed

    def shared(self) -> Fate:
        return replace(self, budget=0)

    def _bytes_of_keys(self, layer: Layer) -> int:
        """Of all slots of a head, those of its window and those of older keys."""
        size = max(layer.head_dim, layer.value_dim)
        near, older = (row_bytes(x, size) + SLOT_BYTES for x in (INT8, PRECISIONS[self.precision]))
        return self.window * near + (spare_of(self.window) + self.budget) * older

    def cache_bytes(self, layer: Layer, length: int, element_size: int) -> int:
        """All slots are there before the first token. The counters of a layer are counted for every head."""
        dtype = DTYPES[element_size]
        first = self.sinks * (2 * max(layer.head_dim, layer.value_dim) * sink_dtype(dtype).itemsize + SLOT_BYTES + 4)
        return self._bytes_of_keys(layer) + first + counters(self.window)

    def build(self, layer: Layer, heads: Sequence[int], seed: int) -> FateModule:
        return SelectedHeads(layer, heads, self)

    def __str__(self) -> str:
        return f"window {self.window}, sinks {self.sinks}, {self.precision}"


class SelectedHeads(FateModule):
    """Heads that select their keys, all of a layer in one cache.

    `weights` (g, 2 width + 1): of the scores. `centre` (g, d), `keys`, `values` (g, d, d): the basis of what is stored.
    """

    needs_hidden = True
    weights: Tensor
    centre: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, layer: Layer, heads: Sequence[int], fate: Selected) -> None:
        super().__init__(layer, heads)
        budgets = tuple(layer.fates[g].budget for g in heads)
        self.kept = SelectedKeys(fate.window, budgets, fate.sinks, fate.precision)
        self.width = fate.width
        self._held: tuple[Any, Turns] | None = None
        self.register_buffer("weights", torch.zeros(len(heads), 2 * fate.width + 1))
        self.register_buffer("centre", torch.zeros(len(heads), layer.head_dim))
        for name, size in (("keys", layer.head_dim), ("values", layer.value_dim)):
            self.register_buffer(name, torch.eye(size).repeat(len(heads), 1, 1))

    def forward(self, call: Call) -> Tensor:
        return self.decode(call, None)[0]

    def decode(self, call: Call, state: SelectedState | None) -> tuple[Tensor, SelectedState]:
        n = call.key.shape[-2]
        self._check(call, n)
        if state is None:
            state = self._empty(call.key, call.value)
            out = self._attend(call, state, n)
        else:
            with torch.inference_mode():  # which takes a thirtieth off a step
                out = self._attend(call, state, n)
            out = out.clone()  # a tensor that other modes take
        if torch.is_grad_enabled() and call.query.requires_grad:
            out = _WithoutGradient.apply(out, call.query)
        return out, state

    def _attend(self, call: Call, state: SelectedState, n: int) -> Tensor:
        assert call.hidden is not None
        padding = None if call.padding is None else call.padding[:, -n:]
        worth = scores(call.hidden.detach(), self.weights)
        return state.attend(call.query, call.key, call.value, scores=worth, scale=call.scale, padding=padding)

    def _empty(self, key: Tensor, value: Tensor) -> SelectedState:
        sizes = key.shape[-1], value.shape[-1]
        return SelectedState(
            self.kept, key.shape[0], *sizes, key.dtype, device=key.device, turns=self._turns(key.dtype)
        )

    def _turns(self, dtype: torch.dtype) -> Turns:
        """What the basis makes of queries and outputs: all caches share it, until its numbers change."""
        basis = Basis(self.centre, self.keys, self.values)
        made_for = (dtype, *((x.data_ptr(), x._version, x.dtype) for x in basis))
        if self._held is None or self._held[0] != made_for:
            exact = torch.promote_types(dtype, torch.float32)
            self._held = made_for, Turns.of(basis, PRECISIONS[self.kept.precision], exact)
        return self._held[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}  # copies and files make their own

    def _check(self, call: Call, n: int) -> None:
        hidden = call.hidden
        if hidden is None or hidden.ndim != 3 or hidden.shape[-1] != self.width or hidden.shape[1] != n:
            found = "none" if hidden is None else str(tuple(hidden.shape))
            raise BochnerError(
                f"Keys are selected by the hidden states (b, {n}, {self.width}) that enter the attention module, and "
                f"there are {found}; leave such layers exact."
            )


class _WithoutGradient(torch.autograd.Function):
    """What is handed on; a backward pass is refused, for it would leave attention out."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        raise BochnerError(NO_GRADIENT)
