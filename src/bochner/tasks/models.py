"""The model of a task with a given attention: transformers' own, freshly initialised."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import ArgumentError, extra, positive_int
from bochner.hf.config import Recipe
from bochner.hf.conversion import convert
from bochner.hf.masks import Mask
from bochner.maps import FEATURE_MAPS, feature_map
from bochner.tasks import peers
from bochner.tasks.base import IGNORE, PAD, Preset, Task

transformers = extra("transformers", "train", "bochner.tasks")

REPLACED = ("identity", "linformer", "performer_pytorch")
RENAMED = {"identity_kernel": "identity"}  # the generalised kernel f(x) = x; "identity" is attention that returns v
BASE = {"classify": "bert", "match": "bert", "masked": "bert", "causal": "gpt2", "ctc": "conformer"}
AUTO = {
    "classify": "AutoModelForSequenceClassification",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "ctc": "AutoModelForCTC",
}


def attentions() -> list[str]:
    """Every name that `train` takes; with `window+` before a map, exact attention near and the kernel elsewhere."""
    maps = sorted({*FEATURE_MAPS, *RENAMED} - {"identity"})
    return ["exact", *REPLACED, "window", *maps, *(f"window+{m}" for m in maps), *peers.PEERS]


@dataclass(frozen=True)
class Attention:
    """A choice of attention, checked: `features` m and `window` where they mean something, else 0.

    `options`: keywords of the feature map, such as `learnable` of Fastfood.
    """

    name: str
    features: int = 0
    window: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def feature_map(self) -> str | None:
        base = self.name.removeprefix("window+")
        base = RENAMED.get(base, base)
        taken = self.name in ("exact", "window", *REPLACED, *peers.PEERS)
        return base if base in FEATURE_MAPS and not taken else None

    @property
    def leaves_weights_out(self) -> bool:
        """Whether a step may use some parameters of the model not at all; Reformer's passes cannot be asked."""
        return not self.is_ours and self.name not in ("exact", "reformer")

    @property
    def is_ours(self) -> bool:
        return self.name == "window" or self.feature_map is not None

    @property
    def multiple(self) -> int:
        return peers.PEERS[self.name].multiple if self.name in peers.PEERS else 1

    @property
    def takes_mask(self) -> bool:
        return self.name not in peers.PEERS or peers.PEERS[self.name].takes_mask


def choose(
    task: Task,
    name: str,
    preset: Preset,
    features: int | None = None,
    window: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Attention:
    """The attention of that name with the preset's sizes; refused if it cannot do the task or take the options."""
    if name not in attentions():
        short = [a for a in attentions() if not a.startswith("window+")]
        raise ArgumentError(f"Unknown attention {name!r}; the valid names are {short}, and 'window+' before any map.")
    able: tuple[str, ...] = (*peers.BOTH_WAYS, "causal", "ctc")
    if name in peers.PEERS:
        able = peers.PEERS[name].kinds
    elif name == "linformer":
        able = peers.BOTH_WAYS
    elif name == "performer_pytorch":
        able = (*peers.BOTH_WAYS, "causal")
    if task.kind not in able and task.kind != "own":
        wanted = {"causal": "causal attention", "ctc": "a Conformer"}[task.kind]
        raise ArgumentError(f"The task {task.name!r} needs {wanted}, which {name!r} has not; take 'exact' or a map.")
    chosen = Attention(name)
    m = preset.features_of.get(chosen.feature_map or name, preset.features) if features is None else features
    needs = chosen.feature_map is not None or name in ("linformer", "performer_pytorch")
    near = name.startswith("window")
    if options:
        _check_options(chosen, options, preset, m)
    return Attention(
        name,
        positive_int(m, "features", "train") if needs else 0,
        positive_int(preset.window if window is None else window, "window", "train") if near else 0,
        dict(options or {}),
    )


def _check_options(attention: Attention, options: Mapping[str, Any], preset: Preset, m: int) -> None:
    """Refuse options that the map does not take, by making one."""
    if attention.feature_map is None:
        raise ArgumentError(
            f"The attention {attention.name!r} has no feature map that could take the options {sorted(options)}."
        )
    ours = sorted({"num_heads", "seed", "generator"} & set(options))
    if ours:
        raise ArgumentError(f"The option {ours[0]!r} of a map is set by the training; leave it out.")
    try:
        json.dumps(dict(options))
    except TypeError as error:
        raise ArgumentError(
            f"The options of a map are kept in the run's file: numbers, strings, true or null only ({error})."
        ) from error
    feature_map(attention.feature_map, preset.width // preset.heads, m, **options)


class Pooled(nn.Module):
    """An encoder whose rows are made one: the first, or the mean of those that are not padding."""

    def __init__(self, encoder: Any, pooling: str, *, takes_mask: bool = True) -> None:
        super().__init__()
        self.encoder, self.pooling, self.takes_mask = encoder, pooling, takes_mask

    def rows(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        masked = {"attention_mask": mask} if self.takes_mask else {}
        rows: Tensor = self.encoder(input_ids=ids, **masked).last_hidden_state
        return rows

    def pool(self, rows: Tensor, ids: Tensor) -> Tensor:
        if self.pooling == "first":
            return rows[:, 0]
        keep = (ids != PAD).to(rows.dtype)[..., None]
        return (rows * keep).sum(1) / keep.sum(1)


class Standardized(nn.Module):
    """Batch norm without parameters, (b, c), over the batch of all processes: torch's own is for GPUs only.

    The mean rows of long sequences are nearly equal, and what tells them apart is small: without this a classifier
    first learns what they have in common.
    """

    mean: Tensor
    var: Tensor
    MOMENTUM, EPS = 0.1, 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            mean = over_processes(x.mean(0))
            var = over_processes((x - mean).square().mean(0))
            with torch.no_grad():
                self.mean.lerp_(mean, self.MOMENTUM)
                self.var.lerp_(var, self.MOMENTUM)
        return (x - mean) / (var + self.EPS).sqrt()


def over_processes(x: Tensor) -> Tensor:
    """The mean of x over the processes, gradients included; they have equal shares of the batch."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return x
    from torch.distributed.nn.functional import all_reduce

    total: Tensor = all_reduce(x)
    return total / torch.distributed.get_world_size()


class Classifier(Pooled):
    """One sequence and a linear classifier on its pooled rows, standardised; `symbols` that are hidden are guessed."""

    def __init__(
        self, encoder: Any, pooling: str, width: int, classes: int, *, symbols: int = 0, takes_mask: bool = True
    ) -> None:
        super().__init__(encoder, pooling, takes_mask=takes_mask)
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

    def __init__(self, encoder: Any, pooling: str, width: int, classes: int, *, takes_mask: bool = True) -> None:
        super().__init__(encoder, pooling, takes_mask=takes_mask)
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
    length = -(-preset.length // attention.multiple) * attention.multiple
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(task, preset, attention, length, seed)


def _build(task: Task, preset: Preset, attention: Attention, length: int, seed: int) -> nn.Module:
    peer = peers.PEERS.get(attention.name)
    own = None if task.model is None else task.model(preset)
    if isinstance(own, nn.Module):
        if attention.is_ours:
            convert(
                own, Recipe(attention.feature_map, attention.features or 1, window=attention.window or None), seed=seed
            )
        return own
    config = own or (peer.config if peer else getattr(peers, BASE[task.kind]))(task, preset, length)
    options: dict[str, Any] = {}
    if attention.name in REPLACED:
        peers.register()
        options["attn_implementation"] = "bochner_peer"
    pooled = task.kind == "match" or (task.kind == "classify" and preset.pooling == "mean" and own is None)
    if pooled and peer is None:
        options["add_pooling_layer"] = False
    model = getattr(transformers, "AutoModel" if pooled else AUTO[task.kind]).from_config(config, **options)
    if preset.positions == "sinusoidal" and task.kind != "ctc":
        sinusoids_(model, preset.width**-0.5)
    elif preset.positions == "grid":
        grid_(model, preset.width**-0.5, preset.length, length)
    if attention.name == "linformer":
        peers.attach(model, lambda _: peers.Linformer(length, attention.features))
    elif attention.name == "performer_pytorch":
        size = preset.width // preset.heads
        peers.attach(model, lambda _: peers.Favor(size, attention.features, task.is_causal))
    elif attention.is_ours:
        redrawn = {"redraw_every": preset.redraw} if attention.feature_map and preset.redraw else {}
        recipe = Recipe(
            attention.feature_map,
            attention.features or 1,
            window=attention.window or None,
            trainable=True,
            options={**redrawn, **attention.options},
        )
        inputs = None
        if task.kind == "ctc":  # what goes in cannot be told from the config
            inputs = {"input_features": torch.randn(8, 512, config.encoder_config.num_mel_bins)}
            plain_masks_(model)
        convert(model, recipe, inputs, seed=seed)
    if pooled:
        width = preset.width * (2 if attention.name == "reformer" else 1)  # its two streams side by side
        common: tuple[Any, ...] = (model, preset.pooling, width, task.classes)
        if task.kind == "match":
            return Matcher(*common, takes_mask=attention.takes_mask)
        symbols = task.symbols if preset.guess else 0
        return Classifier(*common, symbols=symbols, takes_mask=attention.takes_mask)
    return model


def plain_masks_(model: nn.Module) -> None:
    """Give the convolutions of a Conformer, which see the mask of its attention too, the mask they understand."""

    def unpack(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Mask):
            keep = None if mask.keep is None else mask.keep.bool()[:, None, None, :]
            kwargs = {**kwargs, "attention_mask": keep}
        return args, kwargs

    for module in model.modules():
        if type(module).__name__ == "LasrEncoderConvolutionModule":
            module.register_forward_pre_hook(unpack, with_kwargs=True)


def sinusoids_(model: nn.Module, size: float) -> None:
    """Fixed sinusoidal positions of about the size of the other embeddings (Vaswani et al. 2017)."""
    for table in _positions(model):
        n, d = table.shape
        rate = torch.exp(torch.arange(0, d, 2) * (-math.log(10_000.0) / d))
        angle = torch.arange(n)[:, None] * rate
        with torch.no_grad():
            table[:, 0::2] = size * math.sqrt(2) * angle.sin()
            table[:, 1::2] = size * math.sqrt(2) * angle.cos()[:, : d // 2]


def grid_(model: nn.Module, size: float, length: int, padded: int) -> None:
    """Fixed positions of a square picture read row by row after CLS: sinusoids of the row, then of the column.

    Wavelengths go from 8 pixels to 4 sides. `padded`: the length of a batch; some models count positions from 1 or 2.
    """
    side = math.isqrt(length - 1)
    for table in _positions(model):
        n, d = table.shape
        rate = torch.logspace(math.log10(math.pi / 4), math.log10(math.pi / (2 * side)), d // 4)
        angle = torch.arange(side)[:, None] * rate
        line = size * math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], dim=1)
        begin = n - padded + 1
        with torch.no_grad():
            table.zero_()
            pixels = table[begin : begin + side * side].view(side, side, d)
            pixels[:, :, : d // 2] = line[:, None]
            pixels[:, :, d // 2 :] = line


def _positions(model: nn.Module) -> Iterator[Tensor]:
    """The tables of positions, which are not to be trained."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and ("position_embeddings" in name or name.endswith("wpe")):
            yield module.weight.requires_grad_(False)
