"""The mask function that transformers calls for our attention: what linear attention can honour of a mask.

transformers describes a mask by a function of indices, `mask_function(batch, head, query, key) -> bool`, and a padding
mask (b, s). `make_mask` asks that function what it hides, instead of looking at what it is made of. It also keeps what
it was asked, so that a layer which stays as it was gets the very mask that its own implementation would have got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import extra

extra("transformers.masking_utils", "hf", "bochner.hf")
from transformers import masking_utils  # noqa: E402

ROWS = 512  # of a mask that are compared at a time
NOT_PLAIN = (
    "A compiled model attends to whole rows: this batch packs several sequences into a row, or its mask is not causal. "
    "Run it without torch.compile, or give every sequence a row of its own."
)


class Obstacle(NamedTuple):
    """Why a layer stays exact, and how many keys it holds if it has a window of its own."""

    reason: str
    limit: int = 0


@dataclass(eq=False)
class Mask:
    """What our mask function makes, for linear attention and for the original one.

    `padding` (b, s): which of the first `length` keys do not count, None for none; `is_causal`: whether later ones are
    hidden from earlier rows; `segments` (b, n): the sequence that each token of a packed batch belongs to; `obstacle`:
    what of the mask these do not say. `asked`: the mask function's arguments, from which the original mask is made.
    """

    padding: Tensor | None
    length: int
    is_causal: bool
    segments: Tensor | None = None
    obstacle: Obstacle | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)

    # `generate` makes masks before the model does if the cache is a static one, and takes them for tensors: with four
    # axes the model leaves them as they are.
    ndim = 4

    def contiguous(self) -> Mask:
        return self

    def original(self, implementation: str, keys: int) -> Any:
        """The mask that an attention implementation would have got for so many keys.

        Before a static cache becomes states, a mask is asked for as long as its slots; the attention gets the keys that
        there are.
        """
        if (implementation, keys) not in self.made:
            function = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
            asked = {**self.asked, "kv_length": min(keys, self.asked["kv_length"])}
            self.made[implementation, keys] = None if function is None else function(**asked)
        return self.made[implementation, keys]


def make_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | Mask | None = None, **kwargs: Any
) -> Mask:
    """The mask function of our attention functions."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    asked = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "attention_mask": attention_mask}
    asked |= kwargs
    function: Any = kwargs.get("mask_function")
    first = kwargs.get("q_offset", 0)
    causal, segments, obstacle = function is not masking_utils.bidirectional_mask_function, None, None
    if function not in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        causal, segments, obstacle = _read(function, batch_size, q_length, kv_length, kwargs)
    length = kv_length
    if causal and not torch.compiler.is_compiling():  # slots of a fixed-size cache that are not filled yet
        length = min(kv_length, int(first) + q_length)
    start = kwargs.get("kv_offset", 0)
    keep = None if attention_mask is None else attention_mask[:, start : start + length]
    made = plain_mask(keep, length, causal)
    made.segments, made.obstacle, made.asked = segments, made.obstacle or obstacle, asked
    return made


def plain_mask(keep: Tensor | None, length: int, is_causal: bool) -> Mask:
    """That of keys that count (b, s), or of all."""
    if keep is None:
        return Mask(None, length, bool(is_causal))
    if keep.ndim == 2:
        padding, there = ~keep.bool(), keep.shape[1]
        some = torch.compiler.is_compiling() or bool(padding.any())  # looked at once for all layers
        return Mask(padding if some else None, there, bool(is_causal))
    reason = (
        f"it passes a mask of shape {tuple(keep.shape)}, and only padding masks (b, s) can be honoured; pass the 2-D "
        "attention mask of the tokenizer"
    )
    return Mask(None, length, bool(is_causal), obstacle=Obstacle(reason))


def _read(
    function: Callable[..., Tensor], batch: int, n: int, s: int, kwargs: dict[str, Any]
) -> tuple[bool, Tensor | None, Obstacle | None]:
    """What a mask function says: is it causal, the sequences of a packed batch, and what neither of them is."""
    window = kwargs.get("local_size")
    if window is not None:
        return True, None, Obstacle(f"its own window or chunks, of {window} tokens, are linear already", abs(window))
    other = Obstacle("its mask is more than causal or bidirectional with padding")
    compiling = torch.compiler.is_compiling()
    if kwargs.get("use_vmap") or (compiling and n != s):  # such functions need not take tensors of indices
        return True, None, other
    device = kwargs.get("device") or "cpu"
    i = torch.arange(n, device=device) + kwargs.get("q_offset", 0)
    j = torch.arange(s, device=device) + kwargs.get("kv_offset", 0)
    b, head = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    if compiling:  # Llama then always reports packing, and whether there is any shows only when the model runs
        before = function(b, head, i[None, 1:], j[None, :-1]).all()
        after = function(b, head, i[None, :-1], j[None, 1:]).any()
        torch._assert_async(before & ~after, NOT_PLAIN)
        return True, None, None
    if n != s:
        return True, None, other
    borders = ~function(b, head, i[None, 1:], j[None, :-1]).expand(batch, n - 1)
    segments = torch.nn.functional.pad(borders.long().cumsum(-1), (1, 0))
    for rows in torch.arange(n, device=device).split(ROWS):
        shown = function(b[:, :, None], head, i[None, rows, None], j[None, None, :])
        wanted = (j <= i[rows, None]) & (segments[:, rows, None] == segments[:, None, :])
        if not torch.equal(shown.expand_as(wanted), wanted):
            return True, None, other
    return True, segments, None
