"""Decoding in constant memory: a cache layer that holds states instead of keys and values.

The layer's `update` hands the new keys and values back unchanged and waits for the attention call that gets them: the
call finds its layer by the identity of the key tensor (`layer_of`), advances the states of the linear heads and appends
to the keys of the exact ones. Below `exact_below` tokens the layer is an ordinary one, with all keys; the call that
reaches that many gets all of them, to be absorbed. Keys belong to one call, so that any number of threads and models
may decode at once. Any `DynamicCache` or `StaticCache`, made by `generate` or by the user, gets such layers when the
first converted module sees it.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, extra
from bochner.attention.state import State

if TYPE_CHECKING:
    from bochner.hf.plan import LayerPlan

extra("transformers", "hf", "bochner.hf")
from transformers.cache_utils import (  # noqa: E402
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
    StaticLayer,
)

GROWTH = 256  # tokens by which the keys of exact heads grow at a time


class Waiting:
    """Layers between `update` and their attention call, by the id of the key tensor.

    The layer holds the tensor until then, so that no other tensor can have its id. What finds tensors by their identity
    cannot be compiled: a compiled model leaves its graph for a cache, and stays in it where `some` says there is none.
    """

    def __init__(self) -> None:
        self._layers: WeakValueDictionary[int, RecurrentLayer] = WeakValueDictionary()
        self._lock = Lock()
        self.some = False

    def add(self, layer: RecurrentLayer, key: Tensor) -> None:
        with self._lock:
            layer.handed_out = key
            self._layers[id(key)] = layer
            self.some = True

    @torch.compiler.disable
    def take(self, key: Tensor) -> RecurrentLayer | None:
        with self._lock:
            layer = self._layers.pop(id(key), None)
            self.some = len(self._layers) > 0
        if layer is None or layer.handed_out is not key:
            return None
        layer.handed_out = None
        return layer


waiting = Waiting()


def layer_of(key: Tensor) -> RecurrentLayer | None:
    """The cache layer that handed out `key`, for the attention call that got it; None for keys from elsewhere."""
    return waiting.take(key) if waiting.some else None


class RecurrentLayer(CacheLayerMixin):
    """The cache of one converted attention module: a state per kind of linear head, keys of the exact heads only.

    `exact_below`: until there are so many tokens, all keys and values, as the attention before conversion has them.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, exact_below: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.exact_below = exact_below
        self.seen = 0
        self.states: dict[str, State] = {}
        self.filled = 0
        self.handed_out: Tensor | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.handed_out is not None:
            raise BochnerError(
                "The keys that this cache handed out last did not reach the attention function: the model changes them "
                "after the cache, or the call was interrupted; use a new cache, or use_cache=False."
            )
        short = self.seen < self.exact_below
        self.seen += key_states.shape[-2]
        if short:
            if self.keys is not None and self.values is not None:
                key_states = torch.cat([self.keys, key_states], dim=-2)
                value_states = torch.cat([self.values, value_states], dim=-2)
            if self.seen < self.exact_below:
                self.keys, self.values = key_states, value_states
                return key_states, value_states
            self.keys = self.values = None  # the attention call that gets them now absorbs them
        waiting.add(self, key_states)
        return key_states, value_states

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (b, g, n, .) of the exact heads; returns all of them so far."""
        n = key.shape[-2]
        if self.keys is None or self.values is None:
            self.keys, self.values = (t.new_empty(*t.shape[:2], 0, t.shape[-1]) for t in (key, value))
        if self.filled + n > self.keys.shape[-2]:
            room = -(-(self.filled + n) // GROWTH) * GROWTH - self.filled
            self.keys, self.values = (
                torch.cat([old[..., : self.filled, :], old.new_zeros(*old.shape[:2], room, old.shape[-1])], dim=-2)
                for old in (self.keys, self.values)
            )
        self.keys[..., self.filled : self.filled + n, :] = key
        self.values[..., self.filled : self.filled + n, :] = value
        self.filled += n
        return self.keys[..., : self.filled, :], self.values[..., : self.filled, :]

    @property
    def state_bytes(self) -> int:
        """Bytes of the linear heads: they do not grow."""
        return sum(state.nbytes for state in self.states.values())

    @property
    def nbytes(self) -> int:
        kept = sum(t.numel() * t.element_size() for t in (self.keys, self.values) if t is not None)
        return kept + self.state_bytes

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # what older releases of transformers call it
        return -1

    def reset(self) -> None:
        self.keys = self.values = None
        self.states, self.seen, self.filled, self.handed_out = {}, 0, 0, None

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

    def _select(self, f: Any) -> None:
        """Apply f to every tensor; all have the batch in front."""
        self.states = {kind: state.map(f) for kind, state in self.states.items()}
        if self.keys is not None and self.values is not None:
            self.keys, self.values = f(self.keys), f(self.values)


def install_hook(module: nn.Module, index: int, plan: LayerPlan) -> Any:
    """Before each call of an attention module, make the cache layer it will use a recurrent one; returns the handle.

    `plan`: that of the module's attention, whose border may change.
    """

    def prepare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, (Cache, EncoderDecoderCache))), None)
        if cache is None:
            return
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        make_recurrent(cache, index, plan.exact_below)

    return module.register_forward_pre_hook(prepare, with_kwargs=True)


def make_recurrent(cache: Cache, index: int, exact_below: int = 0) -> None:
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
    cache.layers[index] = RecurrentLayer(exact_below)


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds: states and keys of a converted model, keys and values of any other."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            total += layer.nbytes
        else:
            total += sum(t.numel() * t.element_size() for t in (layer.keys, layer.values) if isinstance(t, Tensor))
    return total
