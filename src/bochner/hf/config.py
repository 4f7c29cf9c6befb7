"""What a conversion is asked for: a recipe, or a target and the training that may help to meet it; and its data.

>>> print(Recipe("landmark", 16, window=32, sinks=1))
Recipe(feature_map='landmark', num_features=16, window=32, sinks=1)
>>> Target(keep=0.99, length=4096) == Target.from_dict(Target(keep=0.99, length=4096).to_dict())
True
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from bochner._checks import BochnerError, flag, is_int, one_of, positive_float, positive_int
from bochner.attention.checks import check_window as check_near
from bochner.hf import inputs
from bochner.maps import named

AUTO_FEATURES = {"landmark": 64}  # num_features of a map where none is given; others have 128
WINDOW_WITHOUT_DATA = 32  # beside moments, where nothing can be calibrated and no window is given
C = TypeVar("C", bound="Config")


@dataclass(frozen=True)
class Config:
    """Plain settings: they print what differs from the defaults and become dictionaries of plain data."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, Any]) -> C:
        known = sorted(f.name for f in fields(cls))
        unknown = [name for name in data if name not in known]
        if unknown:
            raise BochnerError(f"{cls.__name__} has no setting {unknown[0]!r}; the settings are {known}.")
        return cls(**data)

    def __repr__(self) -> str:
        standard = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        shown = [f"{n}={getattr(self, n)!r}" for n, default in standard.items() if getattr(self, n) != default]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Recipe(Config):
    """What every head becomes.

    `feature_map`, `num_features` (m), `options`: the kernel of the approximate heads. `"auto"` is `landmark` with
    m = 64, and `calibrated` for models that are going to be trained. Without calibration data it is `moments` with a
    window of 32. `None` is no kernel: a window and attention sinks alone.
    `window`, `sinks`, `window_kind`: exact softmax on near keys and on the first ones, normalised together with the
    kernel, as in `linear_attention`. Cross-attention has none.
    `exact_heads`: key heads that stay softmax. A fraction takes the heads that retrieve; pairs (layer, key head) name
    them. With grouped heads a key head stands for all its query heads.
    `trainable`: the learned parts of the maps are parameters of the model, which is going to be trained.
    """

    feature_map: str | None = "auto"
    num_features: int | None = None
    window: int | None = None
    sinks: int = 0
    window_kind: str = "block"
    exact_heads: Any = 0.0
    trainable: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.feature_map not in (None, "auto"):
            named(self.feature_map, "Recipe")
        if self.num_features is not None:
            positive_int(self.num_features, "num_features", "Recipe")
        check_near(self.window, self.sinks, self.window_kind, "Recipe")
        flag(self.trainable, "trainable", "Recipe")
        if not isinstance(self.options, Mapping):
            raise BochnerError(f"The 'options' of Recipe must be a dict of the map's options, got {self.options!r}.")
        if self.feature_map is None and self.window is None and not self.sinks:
            raise BochnerError("A Recipe without a map needs a 'window' or 'sinks': nothing else would be attended to.")
        _check_exact_heads(self.exact_heads)

    @property
    def ranks_heads(self) -> bool:
        """Whether the exact heads are to be chosen by what they attend to."""
        return isinstance(self.exact_heads, (int, float)) and self.exact_heads > 0

    def resolved(self, has_data: bool) -> Recipe:
        """The recipe without `"auto"`."""
        name, window, sinks = self.feature_map, self.window, self.sinks
        if name == "auto":
            name = "calibrated" if self.trainable else "landmark" if has_data else "moments"
            if name == "moments" and window is None and not sinks:
                window, sinks = WINDOW_WITHOUT_DATA, 1
        m = self.num_features or AUTO_FEATURES.get(name or "", 128)
        return replace(self, feature_map=name, num_features=m, window=window, sinks=sinks)


@dataclass(frozen=True, repr=False)
class Distillation(Config):
    """How a converted model is trained on unlabelled data: first each layer's maps, then the whole model.

    `steps`, `rate`: Adam steps of each layer and their rate; a layer ends early when nothing improves.
    `end_to_end`: steps of the second stage, 0 for none, at half of the rate. `loss`: what that lowers, the distance of
    its `"outputs"` from the original's, or the `"model"`'s own loss. `lora`: the rank of adapters that are made for it
    at the attention's projections, and merged. `seconds`: a time limit.
    """

    steps: int = 60
    rate: float = 2e-3
    end_to_end: int = 60
    loss: str = "outputs"
    lora: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        positive_int(self.steps, "steps", "Distillation")
        positive_float(self.rate, "rate", "Distillation")
        for name in ("end_to_end", "lora"):
            value = getattr(self, name)
            if not is_int(value) or value < 0:
                raise BochnerError(f"The {name!r} of Distillation must be an int >= 0, got {value!r}.")
        one_of(self.loss, "loss", "Distillation", ("outputs", "model"))
        if self.seconds is not None:
            positive_float(self.seconds, "seconds", "Distillation")
        if self.lora and not self.end_to_end:
            raise BochnerError("The 'lora' of Distillation makes adapters to train end to end, but 'end_to_end' is 0.")


@dataclass(frozen=True, repr=False)
class Target(Config):
    """What a conversion has to reach; what each head becomes is then searched for.

    `keep`: the share of its quality that the model retains, in [0.5, 1); 0.99 unless `memory` is given. `memory`: the
    share of the decoding memory that it may take; alone, the search is for the best quality within it.
    `minimize`: `"memory"` of decoding (default of language models) or `"time"`. `length`: the tokens at which memory
    and time count; default 4,096, in encoders the longest calibration text. `judge_length`: the tokens of the texts
    that measure quality, if they are shorter. `train`: a `Distillation` that follows the search.
    """

    keep: float | None = None
    memory: float | None = None
    minimize: str | None = None
    length: int | None = None
    judge_length: int | None = None
    train: Distillation | None = None

    def __post_init__(self) -> None:
        _check_share(self.keep, "keep", 0.5)
        _check_share(self.memory, "memory", 0.0)
        one_of(self.minimize, "minimize", "Target", (None, "memory", "time"))
        if self.memory is not None and self.minimize == "time":
            raise BochnerError("The 'memory' of Target is what decoding may take: leave out minimize='time'.")
        for name in ("length", "judge_length"):
            if getattr(self, name) is not None:
                positive_int(getattr(self, name), name, "Target")
        if self.length is not None and self.judge_length is not None and self.judge_length > self.length:
            raise BochnerError(
                f"The 'judge_length' of Target must be at most its 'length', got {self.judge_length} and {self.length}."
            )
        if self.train is not None and not isinstance(self.train, Distillation):
            raise BochnerError(f"The 'train' of Target must be a Distillation, got {type(self.train).__name__}.")
        if self.keep is None and self.memory is None:
            object.__setattr__(self, "keep", 0.99)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Target:
        train = data.get("train")
        made = Distillation.from_dict(train) if isinstance(train, Mapping) else train
        return super().from_dict({**data, "train": made})


@dataclass(frozen=True, repr=False)
class Calibration(Config):
    """Data of the kind that the model will see: texts with their tokenizer, or batches of its inputs.

    `data`: texts; or one batch or an iterable of them, dicts by the names of the model's inputs. `tokenizer`: default
    the one stored with the model. `max_length`: the tokens that each text is cut to; default 256, for a `Target`
    none. `batch_size`: texts that are run at a time.
    """

    data: Any
    tokenizer: Any = None
    max_length: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.max_length is not None:
            positive_int(self.max_length, "max_length", "Calibration")
        positive_int(self.batch_size, "batch_size", "Calibration")
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise BochnerError(
                f"The 'tokenizer' of Calibration must be the model's tokenizer, got {self.tokenizer!r}; make it by "
                "transformers.AutoTokenizer.from_pretrained."
            )
        if inputs.is_several(self.data):  # an iterator can be read once
            object.__setattr__(self, "data", list(self.data))

    @classmethod
    def of(cls, data: Any, tokenizer: Any = None) -> Calibration:
        """Whatever was given as data."""
        if isinstance(data, Calibration):
            return data if tokenizer is None or data.tokenizer is not None else replace(data, tokenizer=tokenizer)
        return cls(data, tokenizer)

    @property
    def is_texts(self) -> bool:
        """Whether the data is one text or several, and not batches."""
        several = isinstance(self.data, list) and bool(self.data) and all(isinstance(t, str) for t in self.data)
        return several or isinstance(self.data, str)

    def batches(self, model: Any, max_length: int, *, labels: bool = False) -> list[dict[str, Any]]:
        """The data as inputs of a model; `max_length`: of texts, unless the calibration says it."""
        items = inputs.listed(self.data, model)
        if self.max_length is not None and not all(isinstance(t, str) for t in items):
            raise BochnerError(
                f"The 'max_length' of Calibration cuts texts, and the data is batches: leave out max_length="
                f"{self.max_length}, or cut the batches."
            )
        sizes: dict[str, Any] = {"max_length": self.max_length or max_length, "batch_size": self.batch_size}
        return inputs.batches(items, self.tokenizer, model=model, labels=labels, **sizes)

    def __repr__(self) -> str:
        count = f"{len(self.data)} items" if hasattr(self.data, "__len__") else type(self.data).__name__
        return f"Calibration({count})"


def _check_share(value: Any, name: str, least: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < 1 and value >= least):
        interval = f"[{least:g}, 1)" if least else "(0, 1)"
        raise BochnerError(f"The {name!r} of Target must be a share in {interval}, got {value!r}.")


def _check_exact_heads(wanted: Any) -> None:
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        is_valid = 0 <= wanted <= 1
    else:
        pairs = wanted if isinstance(wanted, Collection) and not isinstance(wanted, str) else [None]
        is_valid = all(isinstance(p, Sequence) and len(p) == 2 and all(is_int(i) and i >= 0 for i in p) for p in pairs)
    if not is_valid:
        raise BochnerError(
            f"The 'exact_heads' of Recipe must be a fraction in [0, 1] or pairs (layer, key head), got {wanted!r}."
        )
