"""Performers: encoder, decoder, or both, of layers with linear attention; a decoder generates in constant memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bochner._checks import BochnerError, is_int, positive_int, spawn_seed
from bochner.attention.state import State
from bochner.maps import MapLike
from bochner.maps.base import FeatureMap
from bochner.nn.attention import Attention, DecodingState, MultiheadAttention


@dataclass(frozen=True)
class LayerOptions:
    """What a layer has besides its attention.

    - `hidden`: width of the feed-forward part, default four times that of the layer.
    - `dropout`: after attention and after the feed-forward part.
    - `chunk`: tokens that the feed-forward part takes at a time, None for all. Its memory is that of one chunk: the
      backward pass computes a chunk again.
    - `local_heads`, `local_window`: so many of the heads attend exactly to their window, and to nothing else.
    """

    hidden: int | None = None
    dropout: float = 0.0
    chunk: int | None = None
    local_heads: int = 0
    local_window: int = 128

    def __post_init__(self) -> None:
        for name in ("hidden", "chunk", "local_window"):
            if getattr(self, name) is not None:
                positive_int(getattr(self, name), name, "LayerOptions")
        if not is_int(self.local_heads) or self.local_heads < 0:
            raise BochnerError(f"The 'local_heads' of LayerOptions must be an int >= 0, got {self.local_heads!r}.")


class LayerState(NamedTuple):
    """What a layer carries from token to token: the states of its attention, and the source it attends to."""

    attention: tuple[DecodingState | None, ...]
    source: State | None = None


class PerformerState(NamedTuple):
    """What `Performer.step` carries from token to token, one state per layer; its size does not grow."""

    layers: tuple[LayerState, ...]
    position: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        states = [s.attention for layer in self.layers for s in layer.attention if s is not None]
        states += [layer.source for layer in self.layers]
        return sum(state.nbytes for state in states if state is not None)


class PerformerLayer(nn.Module):
    """Attention, cross-attention in a decoder with a source, and a feed-forward part, each normalised before and added.

    Heads with the map and local heads are modules of their own, whose outputs are added: that is one layer with the
    heads of both.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        attention: Attention | MapLike = "positive",
        options: LayerOptions | None = None,
        *,
        is_causal: bool = False,
        has_source: bool = False,
    ) -> None:
        super().__init__()
        options = LayerOptions() if options is None else options
        attention = Attention.of(attention)
        if options.local_heads > num_heads or (attention.head_dim is None and width % num_heads):
            raise BochnerError(
                f"A layer of width {width} cannot have {num_heads} heads with {options.local_heads} local ones; make "
                "'local_heads' at most 'num_heads', and 'width' a multiple of it, or give 'head_dim'."
            )
        attention = replace(attention, head_dim=attention.head_dim or width // num_heads)
        local = replace(attention, feature_map=None, window=options.local_window, map_options={})
        split = ((num_heads - options.local_heads, attention), (options.local_heads, local))
        self.attention = nn.ModuleList(
            MultiheadAttention(width, heads, batch_first=True, attention=how) for heads, how in split if heads
        )
        self.is_causal, self.chunk = is_causal, options.chunk
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(options.dropout)
        hidden = 4 * width if options.hidden is None else options.hidden
        self.feed = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(options.dropout), nn.Linear(hidden, width)
        )
        self.source_norm = nn.LayerNorm(width) if has_source else None
        if has_source:  # positions of the source are its encoder's business
            plain = replace(attention, window=None, sinks=0, rotary=False)
            self.source_attention = MultiheadAttention(width, num_heads, batch_first=True, attention=plain)

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
    ) -> Tensor:
        """x (b, n, width) to the same shape; `padding` (b, n) and `source_padding` (b, s) are True at padding."""
        y = self.norm(x)
        heads = [a(y, y, y, key_padding_mask=padding, is_causal=self.is_causal)[0] for a in self.attention]
        x = x + self.dropout(sum(heads[1:], heads[0]))
        if self.source_norm is not None:
            y = self.source_norm(x)
            x = x + self.dropout(self.source_attention(y, source, source, key_padding_mask=source_padding)[0])
        return self._fed(x)

    def start(self, source: Tensor | None = None, source_padding: Tensor | None = None) -> LayerState:
        """The state before the first token."""
        told = None if source is None else self.source_attention.remember(source, source_padding)
        return LayerState((None,) * len(self.attention), told)

    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """The rows of the next tokens x (b, n, width) of a causal layer, and the state after them."""
        y = self.norm(x)
        made = [a.step(y, s) for a, s in zip(self.attention, state.attention, strict=True)]  # type: ignore[operator]
        x = x + self.dropout(sum((out for out, _ in made[1:]), made[0][0]))
        if self.source_norm is not None and state.source is not None:
            x = x + self.dropout(self.source_attention.recall(self.source_norm(x), state.source))
        return self._fed(x), LayerState(tuple(s for _, s in made), state.source)

    def _fed(self, x: Tensor) -> Tensor:
        if self.chunk is None or x.shape[1] <= self.chunk:
            return x + self.dropout(self.feed(self.feed_norm(x)))
        parts = x.split(self.chunk, dim=1)
        more = [checkpoint(lambda t: self.feed(self.feed_norm(t)), part, use_reentrant=False) for part in parts]
        return x + self.dropout(torch.cat(more, dim=1))


class Performer(nn.Module):
    """A transformer with linear attention: an encoder, a decoder, or both, from token ids to logits.

    - `vocab_size`, `width`, `num_heads`: of tokens, embeddings and layers. The head weighs rows by the embeddings.
    - `encoder_layers`, `decoder_layers`: a decoder alone is causal; with an encoder it attends to a source as well.
    - `attention`: an `Attention` or a map, for every layer. Each layer draws from its own seed.
      `Attention(head_dim=64)` makes the size of a head independent of `width`.
    - `positions`: `"rotary"`, or the number of learned positions, which no sequence may exceed.
    - `options`: a `LayerOptions`.

    >>> model = Performer(100, 32, 4, decoder_layers=2, attention=Attention("relu", 16))
    >>> model(torch.zeros(1, 10, dtype=torch.long)).shape
    torch.Size([1, 10, 100])
    >>> model.generate(torch.zeros(1, 10, dtype=torch.long), 5).shape
    torch.Size([1, 15])
    """

    def __init__(
        self,
        vocab_size: int,
        width: int = 256,
        num_heads: int = 8,
        *,
        encoder_layers: int = 0,
        decoder_layers: int = 0,
        attention: Attention | MapLike = "positive",
        positions: str | int = "rotary",
        options: LayerOptions | None = None,
    ) -> None:
        super().__init__()
        for value, name in ((encoder_layers, "encoder_layers"), (decoder_layers, "decoder_layers")):
            if not is_int(value) or value < 0:
                raise BochnerError(f"The {name!r} of Performer must be an int >= 0, got {value!r}.")
        if not encoder_layers and not decoder_layers:
            raise BochnerError("A Performer needs layers: give 'encoder_layers', 'decoder_layers' or both.")
        if positions != "rotary":
            positive_int(positions, "positions", "Performer ('rotary' apart)")
        attention = Attention.of(attention)
        if positions == "rotary":
            attention = replace(attention, rotary=attention.rotary or True)
        self.tokens = nn.Embedding(positive_int(vocab_size, "vocab_size", "Performer"), width)
        self.places = None if positions == "rotary" else nn.Embedding(int(positions), width)
        for table in (self.tokens, self.places):
            if table is not None:
                nn.init.normal_(table.weight, std=width**-0.5)

        def stack(count: int, first: int, **kind: bool) -> nn.ModuleList:
            settings = [_of_layer(attention, first + i) for i in range(count)]
            return nn.ModuleList(PerformerLayer(width, num_heads, s, options, **kind) for s in settings)

        self.encoder = stack(encoder_layers, 0)
        self.decoder = stack(decoder_layers, encoder_layers, is_causal=True, has_source=encoder_layers > 0)
        self.encoder_norm, self.norm = (
            nn.LayerNorm(width) if n else nn.Identity() for n in (encoder_layers, decoder_layers)
        )
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(
        self,
        ids: Tensor,
        padding: Tensor | None = None,
        *,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
    ) -> Tensor:
        """Logits (b, n, vocab_size) of ids (b, n); `padding` is True at padding. `source`: ids, for an encoder-decoder.

        A decoder's logits are of the token that comes next, an encoder's of the token in the same place.
        """
        self._check_source(source)
        if not self.decoder:
            return self._logits(self.encode(ids, padding))
        rows = None if source is None else self.encode(source, source_padding)
        x = self._embed(ids, 0)
        for layer in self.decoder:
            x = layer(x, padding, rows, source_padding)
        return self._logits(self.norm(x))

    def encode(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """The encoder's rows (b, n, width) of ids (b, n)."""
        if not self.encoder:
            raise BochnerError("This Performer has no encoder; build it with 'encoder_layers'.")
        x = self._embed(ids, 0)
        for layer in self.encoder:
            x = layer(x, padding)
        return self.encoder_norm(x)

    def start(self, source: Tensor | None = None, source_padding: Tensor | None = None) -> PerformerState:
        """The state of a decoder before its first token."""
        if not self.decoder:
            raise BochnerError("This Performer has no decoder, so that it cannot generate; give 'decoder_layers'.")
        self._check_source(source)
        rows = None if source is None else self.encode(source, source_padding)
        return PerformerState(tuple(layer.start(rows, source_padding) for layer in self.decoder))  # type: ignore[operator]

    def step(self, ids: Tensor, state: PerformerState) -> tuple[Tensor, PerformerState]:
        """Logits (b, n, vocab_size) of the next ids (b, n) behind a state, and the state after them."""
        x, after = self._embed(ids, state.position), []
        for layer, held in zip(self.decoder, state.layers, strict=True):
            x, held = layer.step(x, held)  # type: ignore[operator]
            after.append(held)
        return self._logits(self.norm(x)), PerformerState(tuple(after), state.position + ids.shape[1])

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        num_tokens: int,
        *,
        temperature: float = 0.0,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ids (b, n) with `num_tokens` more, in memory that does not grow with them.

        `temperature`: 0 takes the likeliest token, any other samples. Dropout is off if the model is in eval mode.
        """
        positive_int(num_tokens, "num_tokens", "Performer.generate")
        logits, state = self.step(ids, self.start(source, source_padding))
        found = [ids]
        for left in reversed(range(num_tokens)):
            last = logits[:, -1].float()
            if temperature:
                token = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
            else:
                token = last.argmax(-1, keepdim=True)
            found.append(token)
            if left:
                logits, state = self.step(token, state)
        return torch.cat(found, dim=1)

    def _embed(self, ids: Tensor, position: int) -> Tensor:
        x = self.tokens(ids)
        if self.places is None:
            return x
        end, most = position + ids.shape[1], self.places.num_embeddings
        if end > most:
            raise BochnerError(f"A sequence of {end} tokens exceeds the {most} learned 'positions'; build with more.")
        return x + self.places.weight[position:end]

    def _logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.tokens.weight, self.bias)

    def _check_source(self, source: Any) -> None:
        wanted = bool(self.encoder and self.decoder)
        if (source is not None) != wanted:
            said = "needs a 'source'" if wanted else "takes no 'source': it has not both an encoder and a decoder"
            raise BochnerError(f"This Performer {said}.")


def _of_layer(attention: Attention, layer: int) -> Attention:
    """The settings of one layer, with a seed of its own; an instance of a map is shared by all."""
    if attention.feature_map is None or isinstance(attention.feature_map, FeatureMap):
        return attention
    seed = attention.map_options.get("seed", 0)
    own = {} if seed is None or "generator" in attention.map_options else {"seed": spawn_seed(seed, layer)}
    return replace(attention, map_options={**attention.map_options, **own})
