"""What `attention` may be, and the model of a task with it: transformers' own, freshly initialised."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import ArgumentError, BochnerError, extra, lookup, positive_int, spawn_seed
from bochner.attention import linear_attention
from bochner.hf.config import Recipe
from bochner.hf.conversion import convert
from bochner.hf.masks import Mask
from bochner.maps import FEATURE_MAPS, FeatureMap, feature_map, register_map
from bochner.maps.own import FunctionMap
from bochner.tasks.base import IGNORE, PAD, Preset, Task
from bochner.tasks.peers import PEERS, Peer, attach, bert, conformer, gpt2, register

transformers = extra("transformers", "train", "bochner.tasks")

RENAMED = {"identity_kernel": "identity"}  # the generalised kernel f(x) = x; "identity" is attention that returns v
CONFIGS = {"classify": bert, "match": bert, "masked": bert, "causal": gpt2, "ctc": conformer}
AUTO = {
    "classify": "AutoModelForSequenceClassification",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "ctc": "AutoModelForCTC",
}


# `paper+MAP`: what paper 004 sets otherwise than we do, and after how many steps it redraws the noise.
PAPER: dict[str, dict[str, Any]] = {
    "gmm_prf": {"g": 1.0, "shared_noise": True},
    "fastfood_prf": {"g": 1.0},
    "generative_prf": {"g": 1.0, "residual": False},
}
PAPER_REDRAW = 100


def attentions() -> list[str]:
    """Every name that `train` takes.

    With `window+` before a map, exact attention near and the kernel elsewhere; with `decay+`, weights that fade with
    the distance, as far as each head learns to want it; with `paper+`, the settings of paper 004.
    """
    maps = sorted({*FEATURE_MAPS, *RENAMED} - {"identity"})
    mixed = [f"{how}+{m}" for how, names in (("window", maps), ("decay", maps), ("paper", PAPER)) for m in names]
    return ["exact", *PEERS, "window", *maps, *mixed]


@dataclass(frozen=True)
class Attention:
    """A choice of attention, checked: `features` m, `window` and `redraw` where they mean something, else 0.

    `options`: keywords of the feature map, such as `learnable` of Fastfood.
    """

    name: str
    features: int = 0
    window: int = 0
    redraw: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """What stands before the map: `"window"`, `"decay"`, `"paper"` or nothing."""
        return self.name.rpartition("+")[0]

    @property
    def feature_map(self) -> str | None:
        """The name of the map, if there is any."""
        if not self.is_ours or self.name == "window":
            return None
        base = self.name.rpartition("+")[2]
        return RENAMED.get(base, base)

    @property
    def is_ours(self) -> bool:
        return self.name not in ("exact", *PEERS)

    @property
    def peer(self) -> Peer:
        """What it can do and needs, by the words for attentions of others; all tasks and nothing if it is not one."""
        return PEERS.get(self.name, Peer(tuple(CONFIGS)))


def choose(task: Task, name: str, preset: Preset) -> Attention:
    """The attention of that name with the preset's sizes; refused if it cannot do the task or take the options."""
    lookup(dict.fromkeys(attentions()), name, "attention")
    chosen, options, redraw = Attention(name), dict(preset.options), preset.redraw
    if task.kind not in (*chosen.peer.kinds, "own"):
        wanted = {"causal": "causal attention", "ctc": "a Conformer"}[task.kind]
        raise ArgumentError(f"The task {task.name!r} needs {wanted}, which {name!r} has not; take 'exact' or a map.")
    if chosen.how == "decay" and not task.is_causal:
        raise ArgumentError(f"The task {task.name!r} is not causal: {name!r} counts from a key to the rows after it.")
    if chosen.how == "paper":
        options, redraw = {**PAPER[str(chosen.feature_map)], **options}, redraw or PAPER_REDRAW
    if options and chosen.feature_map is None:
        raise ArgumentError(f"The attention {name!r} has no feature map that could take the options {sorted(options)}.")
    m = window = 0
    if chosen.feature_map or chosen.peer.module:
        m = positive_int(preset.features_of.get(chosen.feature_map or name, preset.features), "features", "train")
    if name.startswith("window"):
        window = positive_int(preset.window, "window", "train")
    if chosen.feature_map:
        _check_map(task, chosen.feature_map, preset.width // preset.heads, m, options)
    return Attention(name, m, window, redraw if chosen.feature_map else 0, options)


def _check_map(task: Task, name: str, size: int, m: int, options: dict[str, Any]) -> None:
    """Refuse by making one: options that a map does not take, another head size, keys to come in a causal task."""
    ours = sorted({"num_heads", "seed", "generator"} & set(options))
    if ours:
        raise ArgumentError(f"The option {ours[0]!r} of a map is set by the training; leave it out.")
    try:
        json.dumps(options)
    except TypeError as error:
        raise ArgumentError(
            f"The options of a map are kept in the run's file: numbers, strings, true or null only ({error})."
        ) from error
    phi = feature_map(name, size, m, **options)
    if not task.is_causal:
        return
    try:
        phi.check_causal()
    except BochnerError as error:
        raise BochnerError(f"The task {task.name!r} is causal, and {name!r} cannot be: {error}") from error


def map_name(attention: Any) -> str:
    """The name of an attention; a map's class, or an instance that every layer gets a copy of, is registered first.

    A function `f(x, role)` gives features; an `nn.Module` does so with parameters of its own in every layer.
    """
    if isinstance(attention, str):
        return attention
    if isinstance(attention, type) and issubclass(attention, FeatureMap):
        for name, known in FEATURE_MAPS.items():
            if known is attention:
                return name
        if not is_ours(attention.__name__):
            FEATURE_MAPS.pop(attention.__name__, None)  # the same class defined anew, as in a notebook
        register_map(attention.__name__, attention)
        return attention.__name__
    if isinstance(attention, type) or not callable(attention):
        raise ArgumentError(
            "The 'attention' of train must be a name, a subclass of bochner.FeatureMap, an instance of one or a "
            f"function f(x, role), got {type(attention).__name__}."
        )
    made = copies_of(attention) if isinstance(attention, FeatureMap) else calls_of(attention)
    FEATURE_MAPS[made.__name__] = made
    return made.__name__


def copies_of(phi: FeatureMap) -> type[FeatureMap]:
    """A class whose instances are copies of a map, whatever number of features they are asked for."""

    class Copy(type(phi)):  # type: ignore[misc]
        def __init__(self, dim: int, num_features: int, *, num_heads: int | None = None) -> None:
            if dim != phi.dim:
                raise BochnerError(
                    f"The map given to train has 'dim' {phi.dim} and the heads of the model have size {dim}; make it "
                    f"with dim={dim}, or change 'width' or 'heads'."
                )
            nn.Module.__init__(self)
            self.__dict__.update(copy.deepcopy(phi.__dict__))

    Copy.__name__ = f"{type(phi).__name__}Copy"
    return Copy


def calls_of(function: Callable[..., Any]) -> type[FeatureMap]:
    """A class of maps whose features are those of a function."""

    class Call(FunctionMap):
        def __init__(self, dim: int, num_features: int, *, num_heads: int | None = None) -> None:
            super().__init__(dim, function=copy.deepcopy(function))

    name = getattr(function, "__name__", type(function).__name__)
    Call.__name__ = f"{name}Call" if is_ours(name) else name
    return Call


def is_ours(name: str) -> bool:
    """Whether the library has a map of that name, which no one may replace."""
    return name in FEATURE_MAPS and FEATURE_MAPS[name].__module__.startswith("bochner.maps.")


class MaskedBert(transformers.BertForMaskedLM):  # type: ignore[name-defined]
    """BERT that guesses hidden symbols; in training its head, wide where symbols are many, sees their rows alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        if labels is None or not self.training:
            return super().forward(input_ids, attention_mask=attention_mask, labels=labels)
        rows, asked = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state, labels != IGNORE
        return {"loss": nn.functional.cross_entropy(self.cls(rows[asked]), labels[asked])}


class Pooled(nn.Module):
    """An encoder whose rows are made one: the first, or the mean of those that are not padding."""

    def __init__(self, encoder: Any, pooling: str) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling

    def rows(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        masked = {} if mask is None else {"attention_mask": mask}  # a batch has none for models that take none
        rows: Tensor = self.encoder(input_ids=ids, **masked).last_hidden_state
        return rows

    def pool(self, rows: Tensor, ids: Tensor) -> Tensor:
        if self.pooling == "first":
            return rows[:, 0]
        keep = (ids != PAD).to(rows.dtype)[..., None]
        return (rows * keep).sum(1) / keep.sum(1)


class Standardized(nn.BatchNorm1d):
    """Batch norm without parameters, (b, c), over the batch of all processes: torch's own is for GPUs only.

    The mean rows of long sequences are nearly equal, and what tells them apart is small: without this a classifier
    first learns what they have in common.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.distributed.is_available() and torch.distributed.is_initialized()):
            return super().forward(x)
        from torch.distributed.nn.functional import all_reduce

        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        every: Tensor = all_reduce(torch.cat([x if i == rank else torch.zeros_like(x) for i in range(world)]))
        return super().forward(every).chunk(world)[rank]


class Classifier(Pooled):
    """One sequence and a linear classifier on its pooled rows, standardised; `symbols` that are hidden are guessed."""

    def __init__(self, encoder: Any, pooling: str, width: int, classes: int, symbols: int = 0) -> None:
        super().__init__(encoder, pooling)
        self.head = nn.Sequential(Standardized(width), nn.Linear(width, classes))
        self.guess = nn.Linear(width, symbols) if symbols else None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> dict[str, Tensor]:
        rows = self.rows(input_ids, attention_mask)
        out = _judged(self.head(self.pool(rows, input_ids)), labels)
        if self.guess is not None and hidden is not None:
            where = hidden != IGNORE
            out["loss"] = out["loss"] + nn.functional.cross_entropy(self.guess(rows[where]), hidden[where])
        return out


class Matcher(Pooled):
    """Two sequences, encoded apart by one encoder, and a small classifier on both: [a, b, a - b, a * b].

    Mean rows are standardised, as those of `Classifier`.
    """

    def __init__(self, encoder: Any, pooling: str, width: int, classes: int) -> None:
        super().__init__(encoder, pooling)
        self.standard = Standardized(width) if pooling == "mean" else nn.Identity()
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, classes))

    def forward(
        self,
        input_ids: Tensor,
        other_ids: Tensor,
        attention_mask: Tensor | None = None,
        other_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        pairs = ((input_ids, attention_mask), (other_ids, other_mask))
        both = torch.cat([self.pool(self.rows(ids, mask), ids) for ids, mask in pairs])
        a, b = self.standard(both).chunk(2)
        return _judged(self.head(torch.cat([a, b, a - b, a * b], dim=-1)), labels)


def _judged(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    if labels is None:
        return {"logits": logits}
    return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def build(task: Task, preset: Preset, attention: Attention, *, seed: int = 0) -> nn.Module:
    """A fresh model for the task; the global random state is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = own_model(task, preset)
        if not isinstance(own, nn.Module):
            return _build(task, preset, attention, own, seed)
        if attention.is_ours and attention.how != "decay":
            convert(own, _recipe(attention), seed=seed)
        elif attention.name != "exact":
            raise BochnerError(
                f"The task {task.name!r} has a model of its own, in which {attention.name!r} cannot stand; take a map, "
                "or 'exact' for the model as it is."
            )
        return own


def own_model(task: Task, preset: Preset) -> Any:
    """The torch module or the configuration that a task brings, None if it brings none."""
    given, config = task.model, transformers.PretrainedConfig
    if given is None:
        return None
    own = copy.deepcopy(given) if isinstance(given, (nn.Module, config)) else given(preset)
    if isinstance(own, nn.Module) or (isinstance(own, config) and task.kind != "own"):
        return own
    raise BochnerError(
        f"The 'model' of the task {task.name!r} must be or make a torch module"
        f"{', as its kind is own' if task.kind == 'own' else ' or a configuration of transformers'}, got "
        f"{type(own).__name__}."
    )


def _build(task: Task, preset: Preset, attention: Attention, own: Any, seed: int) -> nn.Module:
    """The body of the model and its positions; its attention; and what pools its rows, if anything does."""
    peer = attention.peer
    length = -(-preset.length // peer.multiple) * peer.multiple
    config = own or (peer.config or CONFIGS[task.kind])(task, preset, length)
    pooled = task.kind == "match" or (task.kind == "classify" and preset.pooling == "mean" and own is None)
    options: dict[str, Any] = {"add_pooling_layer": False} if pooled and not peer.config else {}
    if attention.how == "decay" or (attention.name in PEERS and not peer.config):
        register()
        options["attn_implementation"] = "bochner_peer"
    is_bert = task.kind == "masked" and isinstance(config, transformers.BertConfig)
    kind = (
        MaskedBert._from_config
        if is_bert
        else getattr(transformers, "AutoModel" if pooled else AUTO[task.kind]).from_config
    )
    model = kind(config, **options)
    if preset.positions != "learned" and task.kind != "ctc":
        fix_positions_(model, preset, length)
    if attention.how == "decay":
        seeds = (spawn_seed(seed, i) for i in count())
        attach(model, lambda: Fading(attention, preset, next(seeds)))
    elif peer.module is not None:
        put, size = peer.module, preset.width // preset.heads
        attach(model, lambda: put(length, size, attention.features, task.is_causal))
    elif attention.is_ours:
        inputs = None
        if task.kind == "ctc":  # what goes in cannot be told from the config
            inputs = {"input_features": torch.randn(8, 512, config.encoder_config.num_mel_bins)}
            plain_masks_(model)
        convert(model, _recipe(attention), inputs, seed=seed)
    if not pooled:
        return model
    width = preset.width * (2 if attention.name == "reformer" else 1)  # its two streams side by side
    if task.kind == "match":
        return Matcher(model, preset.pooling, width, task.classes)
    return Classifier(model, preset.pooling, width, task.classes, task.symbols if preset.guess else 0)


def _map_options(attention: Attention) -> dict[str, Any]:
    redrawn = {"redraw_every": attention.redraw} if attention.redraw else {}
    return {**redrawn, **attention.options}


def _recipe(attention: Attention) -> Recipe:
    how: dict[str, Any] = {"window": attention.window or None, "options": _map_options(attention)}
    return Recipe(attention.feature_map, attention.features or 1, trainable=True, **how)


class Fading(nn.Module):
    """Causal attention in a kernel whose weights fade: by a factor a token that each head learns."""

    def __init__(self, attention: Attention, preset: Preset, seed: int) -> None:
        super().__init__()
        size, options = (
            preset.width // preset.heads,
            {"num_heads": preset.heads, "seed": seed, **_map_options(attention)},
        )
        self.feature_map = feature_map(str(attention.feature_map), size, attention.features, **options)
        self.rate = nn.Parameter(torch.linspace(-3.0, -5.0, preset.heads))  # at first half after 14 to 100 tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, scale: float) -> Tensor:
        fade: dict[str, Any] = {"is_causal": True, "decay": -nn.functional.softplus(self.rate)}
        out: Tensor = linear_attention(q, k, v, self.feature_map, key_padding_mask=padding, scale=scale, **fade)
        return out


def plain_masks_(model: nn.Module) -> None:
    """Give the convolutions of a Conformer, which see the mask of its attention too, the mask they understand."""

    def unpack(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Mask):
            keep = None if mask.padding is None else ~mask.padding[:, None, None, :]
            kwargs = {**kwargs, "attention_mask": keep}
        return args, kwargs

    for module in model.modules():
        if type(module).__name__ == "LasrEncoderConvolutionModule":
            module.register_forward_pre_hook(unpack, with_kwargs=True)


def fix_positions_(model: nn.Module, preset: Preset, padded: int) -> None:
    """Positions that are not trained, of about the size of the other embeddings.

    `"sinusoidal"`: those of Vaswani et al. 2017. `"grid"`: of a square picture read row by row after CLS, sinusoids of
    the row and of the column with wavelengths from 8 pixels to 4 sides; `padded` is the length of a batch, as some
    models count positions from 1 or 2.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not ("position_embeddings" in name or name.endswith("wpe")):
            continue
        table = module.weight.requires_grad_(False)
        n, d = table.shape
        if preset.positions == "sinusoidal":
            rate = torch.exp(torch.arange(0, d, 2) * (-math.log(10_000.0) / d))
            table.copy_(sinusoids(n, rate, preset.width).transpose(1, 2).flatten(1)[:, :d])  # sine, cosine, sine, ...
        else:
            side, begin = math.isqrt(preset.length - 1), n - padded + 1
            rate = torch.logspace(math.log10(math.pi / 4), math.log10(math.pi / (2 * side)), d // 4)
            line = sinusoids(side, rate, preset.width).flatten(1)
            pixels = torch.cat([line.repeat_interleave(side, 0), line.repeat(side, 1)], dim=1)
            table.zero_()[begin : begin + side * side] = pixels


def sinusoids(n: int, rate: Tensor, width: int) -> Tensor:
    """The sines and the cosines of places 0 to n - 1, (n, 2, rates), with mean square 1 / width."""
    angle = torch.arange(n)[:, None] * rate
    return (2 / width) ** 0.5 * torch.stack([angle.sin(), angle.cos()], dim=1)
