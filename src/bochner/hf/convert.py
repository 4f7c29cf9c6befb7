"""`convert`: a pretrained transformer with linear attention, calibrated on its own activations; `revert` undoes it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from bochner._checks import BochnerError, BochnerWarning, is_int
from bochner._progress import speaker
from bochner.hf import capture, inputs, io, measure
from bochner.hf.adapters import check_lora
from bochner.hf.aim import Found, TargetReport, aim, goal_of, shapes_of, target_data
from bochner.hf.choose import ExactHeads, Recipe, choose_exact, drop_useless_kernels
from bochner.hf.cost import check_border, crossover
from bochner.hf.distill import DistillReport
from bochner.hf.distill import distill as transfer
from bochner.hf.layer import LinearAttention
from bochner.hf.measure import Statistics
from bochner.hf.patches import register_once
from bochner.hf.plan import LayerPlan, Plan
from bochner.maps.generalized import function_name

ROWS_PER_DIMENSION = 4  # calibration tokens wanted per head dimension
BLIND_WINDOW = 32  # beside moments, where there is no calibration and no window is given
Batches = Sequence[dict[str, Tensor]]


def convert(
    model: Any,
    feature_map: str | None = "auto",
    num_features: int | None = None,
    *,
    window: int | None = None,
    sinks: int = 0,
    window_kind: str | None = None,
    exact_heads: ExactHeads = 0.0,
    exact_unit: str = "head",
    select: bool | None = None,
    exact_below: int | str | None = None,
    keep: float | None = None,
    memory: float | None = None,
    minimize: str | None = None,
    length: int | None = None,
    judge_length: int | None = None,
    unsupported: str = "keep",
    parts: Sequence[str] | None = None,
    train: bool = False,
    plan: Plan | None = None,
    distill: Any = None,
    calibration: Any = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    progress: bool | None = None,
) -> Any:
    """Replace a model's attention by linear attention, in place; returns the model.

    Every attention module gets maps of its own. In a pretrained model they are calibrated on the activations of
    `calibration` and fixed afterwards; with `train=True`, for a model that is going to be trained, they need no
    calibration, and their learned parts are parameters of the model. Decoding needs constant memory for every linear
    head. Nothing is changed if anything is refused.

    `model`: a transformers model or a part of one, or a SentenceTransformer. `feature_map`, `num_features` (m),
    `options`: the map of linear heads. `"auto"` is `landmark`, m = 64; for a model that is going to be trained
    `calibrated`; without calibration `moments`, beside a window of 32 and one sink unless others are given. Other maps
    have m = 128 by default; `feature_map=None` is a window and sinks and nothing else.
    `window`, `sinks`, `window_kind`: exact softmax on near keys and on the first ones, jointly normalised with the
    kernel, as in `linear_attention`; cross-attention has none. The kind is `"block"` unless given: up
    to 2 w keys are exact, and a decoder holds as many.
    `exact_heads`: a fraction of all heads, `"auto"`, or pairs (layer, head): they stay softmax. Fractions and "auto"
    take the heads that retrieve. In a language model these are the heads whose exactness lowers the loss most when a
    passage of the calibration text is repeated; elsewhere those whose attention outside window and sinks peaks highest.
    `exact_unit`: choose single heads, or with `"group"` whole key-value groups: less memory for as many heads.
    `select`: a linear head keeps its kernel term only if it lowers the head's error on the calibration data (default:
    in decoders; in encoders the noise of many kernels averages out, the bias of windows does not).
    `keep`: a target in place of a recipe, the share of its quality that the model is to keep, at `length` tokens
    (default 4096, in encoders the longest calibration text), with the least `minimize`: `"memory"` of decoding (default
    of language models) or `"time"`. What each head becomes is then searched for on a part of the calibration texts and
    verified on another, end to end; `bochner.hf.report_of(model)` has the frontier. Where nothing that costs less keeps
    it the model stays as it was, with a warning.
    `memory`: the share of the decoding memory at `length` tokens that the model may take, as 0.5 to halve it, in place
    of `keep` or with it. The search is then for what keeps most within it. Where that is less than `keep` the model
    stays as it was, unless `distill` is to make up for it; where that trains weights, no kernels are tried.
    A language model keeps the least of 1 / (ratio of perplexities) and of the share of what it gains on a passage that
    comes again after `length` tokens; an encoder the least of cosine and rank correlation of its embeddings.
    `judge_length`: the tokens of the texts that tell what is kept, if they are shorter than the `length` at which
    memory and time count; the report then says what is left of it at `length`.
    `exact_below`: calls with fewer keys than this are left to the attention that the model had before, bit by bit; a
    decoder keeps its keys until there are so many tokens and then absorbs them into its states. Default: what a `plan`
    says, else 0, which converts every call; `"auto"`: where conversion begins to be faster, measured on this machine.
    `unsupported`: layers that linear attention cannot honour (windows and chunks of their own, soft caps, position
    biases, other masks) stay as they were and the plan says why, or with `"raise"` refuse the model.
    `parts`: of an encoder-decoder, which of `"encoder"`, `"decoder"` and `"cross"` to convert; default all.
    `plan`: a `Plan` instead of all this. That of a report brings the maps that were verified and needs no calibration;
    one that was loaded or edited has its maps fitted anew. `distill`: True, or a dict of options of `bochner.distill`:
    training on the calibration data after converting; with a target on all of it but the texts held back, by which
    what is kept is told again, and of a language model with passages that come again.
    `calibration`: a list of texts (with `tokenizer`; each cut to `max_length` tokens, by default 256 or as many as the
    plan was fitted to), one batch or an iterable of them, such as a DataLoader: dicts of tensors, arrays or lists by
    the names of the model's inputs, as a tokenizer or processor makes them (`{"pixel_values": x}`). An encoder-decoder
    takes the inputs of its decoder from `labels` if there are no `decoder_input_ids`, else from the text itself.
    `progress`: say what is being done and print the frontier, on the standard error stream; by default for a target,
    if that is a terminal.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    >>> model = convert(BertModel(config), "positive", 32, exact_below=0)
    >>> from bochner.hf import plan_of
    >>> print(plan_of(model))
    Plan: 1 layers, 2 heads: 2 kernel
      encoder.layer.0.attention.self  KK  positive m=32
    """
    inner, tokenizer = capture.unwrap(model, tokenizer)
    register_once()
    _check_model(inner)
    _check_options(distill, seed)
    border = check_border(exact_below, "convert")
    if feature_map == "auto":
        blind = calibration is None and plan is None and keep is None and memory is None and not train
        feature_map = "moments" if blind else "calibrated" if train else "landmark"
        if blind and window is None and not sinks:
            window, sinks = BLIND_WINDOW, 1
    if num_features is None:
        num_features = 64 if feature_map == "landmark" else 128
    recipe = Recipe(
        feature_map, num_features, window, sinks, window_kind, exact_heads, exact_unit, select, train, seed,
        {name: function_name(value) or value for name, value in (options or {}).items()},
    )  # fmt: skip
    progress = keep is not None and sys.stderr.isatty() if progress is None else progress
    say = speaker(progress)
    found: Found | None = None
    if keep is not None or memory is not None:
        _check_target(recipe, plan, calibration, train)
        data = target_data(inner, calibration, tokenizer, judge_length or length, batch_size)
        shapes = shapes_of(inner, data, unsupported, parts)
        goal = goal_of(inner, shapes, data, keep, minimize, length, judge_length, memory, _trains(distill))
        settings: dict[str, Any] = {"num_features": num_features, "exact_below": border, "seed": seed, "say": say}
        found = aim(inner, shapes, goal, data, **settings)
        draft, layers, data = found.report.plan, found.layers, found.training
    else:
        if not (minimize is None and length is None and judge_length is None):
            raise BochnerError(
                "'minimize', 'length' and 'judge_length' belong to a target: give 'keep', the share of quality to "
                "keep, or 'memory', the share of memory to take."
            )
        data = []
        if calibration is not None:
            if max_length is None:
                max_length = getattr(plan, "fit_length", 0) or 256
            data = inputs.batches(calibration, tokenizer, model=inner, max_length=max_length, batch_size=batch_size)
        # 1. Observe the exact model; 2. choose what each head becomes; 3. build the maps; 4. only now change the model.
        shapes = shapes_of(inner, data, unsupported, parts)
        draft, statistics = _observe(inner, shapes, recipe, plan, data, say)
        if plan is None:
            choose_exact(inner, draft, recipe, statistics, data)
        if plan is None or exact_below is not None:  # a plan says it itself
            _set_border(inner, draft, border, recipe.train, say)
        layers = _build(inner, draft, recipe if plan is None else None, statistics, data, say)
    io.equip(inner, draft, layers)
    if found is not None and not draft.converted and _trains(distill):
        distilled: DistillReport | None = DistillReport(note="Nothing was distilled: nothing is converted.")
    else:
        distilled = _distilled(inner, data, distill, progress)
    if found is not None:
        if distilled is not None and not distilled.note:
            found.verify_again()
        _tell(found.report, say)
    inner._bochner_report = ConversionReport(found and found.report, distilled)
    return model


@dataclass
class ConversionReport:
    """What `convert` found and did beside the plan: the search for a target, and distillation, where asked for."""

    target: TargetReport | None = None
    distillation: DistillReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for reports."""
        distilled = None if self.distillation is None else asdict(self.distillation)
        return {"target": None if self.target is None else self.target.to_dict(), "distillation": distilled}

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self.target, self.distillation) if part is not None)


def report_of(model: Any) -> ConversionReport:
    """The report of a model that `convert` has changed in this process."""
    inner, _ = capture.unwrap(model)
    io.layers_of(inner)
    return getattr(inner, "_bochner_report", None) or ConversionReport()


def _tell(found: TargetReport, say: Callable[[str], None]) -> None:
    say(f"\n{found}")
    if not found.met:
        warnings.warn(found.reasons[0], BochnerWarning, stacklevel=3)


def _distilled(model: Any, data: Batches, distill: Any, progress: bool) -> DistillReport | None:
    """Attention transfer after converting, if it is wanted; a failure undoes the conversion."""
    if not _trains(distill):
        return None
    try:
        return transfer(model, data, progress=progress, **(distill if isinstance(distill, dict) else {}))
    except BaseException:
        revert(model)
        raise


def _trains(distill: Any) -> str:
    """What distillation is going to train: nothing, maps, or weights of the model beside them."""
    if distill is None or distill is False:
        return ""
    options = distill if isinstance(distill, dict) else {}
    return "weights" if options.get("lora") or options.get("part", "maps") not in (None, "maps") else "maps"


def _check_options(distill: Any, seed: Any) -> None:
    """Refuse before anything is measured what would be refused after it."""
    if not is_int(seed) or seed < 0:
        raise BochnerError(f"The 'seed' of convert must be an int >= 0, got {seed!r}.")
    if not (distill is None or isinstance(distill, (bool, dict))):
        raise BochnerError(f"The 'distill' of convert must be True or a dict of options of distill, got {distill!r}.")
    valid = set(inspect.signature(transfer).parameters) - {"model", "calibration", "progress"}
    unknown = sorted(set(distill) - valid) if isinstance(distill, dict) else []
    if isinstance(distill, dict) and not unknown:
        check_lora(distill.get("lora", 0), distill.get("part"), distill.get("end_to_end", 1))
    if unknown:
        raise BochnerError(f"The 'distill' of convert has no option {unknown[0]!r}; the options are {sorted(valid)}.")


def _check_target(recipe: Recipe, plan: Plan | None, calibration: Any, train: bool) -> None:
    default = Recipe(recipe.feature_map, recipe.num_features, seed=recipe.seed, train=train)
    if plan is not None or train or recipe != default or recipe.feature_map != "landmark":
        raise BochnerError(
            "With a target ('keep', 'memory') the heads' kinds, maps and windows are searched for: leave out "
            "'feature_map', 'window', 'sinks', 'exact_heads', 'select', 'options', 'plan' and 'train', or the target."
        )
    if calibration is None:
        raise BochnerError(
            "A target ('keep', 'memory') needs 'calibration': texts to search on and texts to verify on."
        )


def revert(model: Any, attn_implementation: str | None = None) -> Any:
    """Undo `convert`: softmax attention again, nothing of the conversion left; returns the model.

    `attn_implementation`: which softmax; default the one the model had before.
    """
    inner, _ = capture.unwrap(model)
    io.strip(inner)
    inner.__dict__.pop("_bochner_report", None)
    if attn_implementation is not None:
        inner.set_attn_implementation(attn_implementation)
    return model


def relative_errors(model: Any, data: Batches) -> dict[str, Tensor]:
    """Relative error of every head of a converted model, on the inputs its original attention would see.

    The model is run with exact attention, and each layer's linear attention is compared on the same queries and keys.
    """
    return measure.head_errors(model, io.layers_of(model), data)


def _set_border(model: Any, plan: Plan, border: int | None, trains: bool, say: Callable[[str], None]) -> None:
    """Below which number of tokens the model is as it was."""
    if border is None:
        say("measuring from how many tokens on conversion is faster")
        border = 0 if trains else crossover(plan)
    positions: Any = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if is_int(positions) and 0 < positions < border and plan.converted:
        warnings.warn(
            f"The model has {positions} positions and is as it was below exact_below={border} tokens: its conversion "
            "never acts. Give a smaller 'exact_below', or leave the model as it is.",
            BochnerWarning,
            stacklevel=3,
        )
    for layer in plan.converted:
        layer.exact_below = border


def _observe(
    model: Any,
    shapes: dict[str, capture.Shape],
    recipe: Recipe,
    plan: Plan | None,
    data: Batches,
    say: Callable[[str], None],
) -> tuple[Plan, Statistics | None]:
    """The plan before any choice, and the statistics of the exact attention, in one pass."""
    model_type = getattr(model.config, "model_type", "")
    draft = recipe.draft(shapes, model_type) if plan is None else _check_plan(plan, shapes)
    if draft.maps and not any(_needs_maps(layer, draft) for layer in draft.layers):
        return draft, None
    if not data:
        _check_needs_no_data(draft, recipe if plan is None else None)
        return draft, None
    statistics = measure.observe(model, draft, data, say)
    for layer in draft.converted:
        rows, wanted = statistics.rows[layer.name], ROWS_PER_DIMENSION * layer.head_dim
        if rows < wanted:
            raise BochnerError(
                f"Too little calibration text: {rows} tokens for heads of size {layer.head_dim}, at least {wanted} are "
                "needed and some thousands are better; give more texts."
            )
    return draft, statistics


def _build(
    model: Any,
    plan: Plan,
    recipe: Recipe | None,
    statistics: Statistics | None,
    data: Batches,
    say: Callable[[str], None],
) -> dict[str, LinearAttention]:
    """The maps of every module, calibrated, on the model's device; without a recipe, exactly as planned."""
    device = next(model.parameters()).device
    layers = {layer.name: LinearAttention(layer) for layer in plan.layers}
    for name, layer in layers.items():
        known = plan.fitted(layer.plan)
        if known is not None:
            layer.load_state_dict(known)
        elif statistics is not None and not layer.plan.untouched:
            statistics.calibrate(name, layer)
    if statistics is not None and recipe is not None and recipe.feature_map is not None and plan.count("hybrid"):
        decoder = all(layer.is_causal for layer in plan.converted)
        if recipe.select or (recipe.select is None and decoder):
            say("measuring which heads gain from the kernel")
            layers = drop_useless_kernels(model, plan, layers, data)
    return {name: layer.to(device) for name, layer in layers.items()}


def _check_plan(plan: Plan, shapes: dict[str, capture.Shape]) -> Plan:
    if not isinstance(plan, Plan):
        raise BochnerError(f"The 'plan' of convert must be a bochner.hf.Plan, got {type(plan).__name__}.")
    maps = plan.maps
    plan = Plan.from_dict(plan.copy().to_dict())  # checked again: it may have been edited
    plan.maps = maps
    for layer in plan.layers:
        shape = shapes.get(layer.name)
        if shape is None:
            raise BochnerError(f"The plan names {layer.name!r}, which is not an attention module of this model.")
        theirs = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)
        if theirs != (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim):
            raise BochnerError(f"The plan of {layer.name!r} is for other head sizes than this model's {theirs}.")
        if shape.obstacle is not None and not layer.untouched:
            raise BochnerError(f"The plan converts {layer.name!r}, which cannot be: {shape.obstacle.reason}.")
    missing = set(shapes) - {layer.name for layer in plan.layers}
    if missing:
        raise BochnerError(
            f"The plan leaves out {sorted(missing)[0]!r}; give every attention module, if only as exact."
        )
    return plan


def _needs_maps(layer: LayerPlan, plan: Plan) -> bool:
    """Whether a layer has maps that its plan does not bring."""
    return bool({"hybrid", "kernel"} & set(layer.kinds)) and plan.fitted(layer) is None


def _check_needs_no_data(plan: Plan, recipe: Recipe | None) -> None:
    mapped = [layer for layer in plan.layers if _needs_maps(layer, plan) and not layer.train]
    needy = [layer.feature_map for layer in mapped if layer.feature_map in ("landmark", "calibrated", "optimal")]
    if needy:
        raise BochnerError(
            f"The feature map {needy[0]!r} needs 'calibration': some texts of the kind the model will see. Without "
            "any, use feature_map='moments'."
        )
    if recipe is not None and recipe.ranks_heads:
        raise BochnerError("Choosing 'exact_heads' needs 'calibration': the heads are chosen by what they attend to.")


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise BochnerError(f"The 'model' of convert must be a transformers model, got {type(model).__name__}.")
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise BochnerError("The 'model' of convert has no parameters.")
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if quantized or not parameter.is_floating_point():
        raise BochnerError(
            f"The 'model' of convert must have floating-point weights, got {parameter.dtype}"
            f"{' and a quantization config' if quantized else ''}; load it dequantized."
        )
    if parameter.is_meta:
        raise BochnerError("The 'model' of convert is on the meta device, without weights; load them first.")
