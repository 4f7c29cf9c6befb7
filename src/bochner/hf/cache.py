"""Decoding in constant memory: a cache layer that holds the states of the fates instead of keys and values.

The layer's `update` hands the new keys and values back unchanged and waits for the attention call that gets them: the
key tensor itself says which layer handed it out, and the call advances that layer's states. Any number of threads and
models may decode at once. Any `DynamicCache` or `StaticCache`, made by `generate` or by the user, gets such layers when
the first converted module sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, extra

extra("transformers", "hf", "bochner.hf")
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer  # noqa: E402


class RecurrentLayer(CacheLayerMixin):
    """The cache of one converted attention module: a state for every part of its `LinearAttention`."""

    is_sliding = False
    is_croppable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen = 0
        self.states: dict[str, Any] = {}
        self.waits = False  # for the attention call that gets the keys handed out last
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A state is made with the first keys."""

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.waits:
            raise BochnerError(
                "The keys that this cache handed out last did not reach the attention function: the model changes them "
                "after the cache, or the call was interrupted; use a new cache, or use_cache=False."
            )
        self.seen += key_states.shape[-2]
        self.waits, key_states.cache_layer = True, self  # type: ignore[attr-defined]
        return key_states, value_states

    @property
    def nbytes(self) -> int:
        return sum(int(state.nbytes) for state in self.states.values())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # what older releases call it

    def reset(self) -> None:
        self.states, self.seen, self.waits = {}, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise BochnerError(
                "The state of linear attention cannot forget tokens, so that assisted decoding, which takes tokens "
                "back, is not possible; generate without an assistant."
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda t: t[indices])

    def offload(self) -> None:
        """States are small: they stay where they are."""

    def prefetch(self) -> None:
        """There is nothing to bring back."""

    def _select(self, f: Callable[[Tensor], Tensor]) -> None:
        self.states = {name: state.map(f) for name, state in self.states.items()}


@torch.compiler.disable
def _take(key: Any) -> RecurrentLayer:
    layer: RecurrentLayer = key.cache_layer
    del key.cache_layer
    layer.waits = False
    return layer


def layer_of(key: Tensor) -> RecurrentLayer | None:
    """The cache layer that handed out `key`, once; None for keys from elsewhere."""
    return _take(key) if hasattr(key, "cache_layer") else None


def make_recurrent(cache: Cache, index: int) -> None:
    """Put a recurrent layer in place `index` of a cache, unless it is there already."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, RecurrentLayer):
        return
    # A static layer would allocate its slots at the first token: the state has none and is of constant size anyway.
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise BochnerError(
            f"Linear attention decodes with its own state, not with {type(layer).__name__} of {type(cache).__name__}; "
            "leave cache_implementation unset, or pass a DynamicCache or a StaticCache."
        )
    if int(layer.get_seq_length()):  # type: ignore[union-attr]
        raise BochnerError(
            "This cache holds keys and values of another attention; start from an empty cache with a converted model."
        )
    cache.layers[index] = RecurrentLayer()


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds: states and keys of a converted model, keys and values of any other."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            total += layer.nbytes
        else:
            total += sum(t.numel() * t.element_size() for t in (layer.keys, layer.values) if isinstance(t, Tensor))
    return total
