"""`convert`: a pretrained transformer with linear attention, calibrated on its own activations; `revert` undoes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from bochner._checks import BochnerError, one_of, positive_int
from bochner.hf import capture
from bochner.hf.calibration import of_heads
from bochner.hf.interface import register
from bochner.hf.layer import LinearAttention
from bochner.hf.observe import Statistics, head_errors, observe, observe_retrieval
from bochner.hf.plan import LayerPlan, Plan
from bochner.hf.serialize import equip, strip
from bochner.maps.exponential import CalibratedFeatures

AUTO_SHARE = 0.005  # exact_heads="auto": heads with at least this share of all scores
AUTO_FRACTION = 0.1  # and at most this fraction of all heads
ROWS_PER_DIMENSION = 4  # calibration tokens wanted per head dimension


def convert(
    model: Any,
    feature_map: str | None = "calibrated",
    num_features: int = 128,
    *,
    window: int | None = None,
    sinks: int = 0,
    exact_heads: float | str | Iterable[tuple[int, int]] = 0.0,
    exact_unit: str = "head",
    calibration: Any = None,
    tokenizer: Any = None,
    plan: Plan | None = None,
    distill: Any = None,
    select: bool | None = None,
    max_length: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    progress: bool = False,
) -> Any:
    """Replace a pretrained model's attention by linear attention, in place; returns the model.

    Every attention module gets maps of its own, calibrated on the activations of `calibration` and fixed afterwards.
    Decoding needs constant memory for every linear head. Nothing is changed if anything is refused.

    `model`: a transformers model, or a SentenceTransformer. `feature_map`, `num_features` (m), `options`: the map of
    linear heads; `feature_map=None` is a window and sinks and nothing else. `window`, `sinks`: exact softmax
    on near keys and on the first ones, jointly normalised with the kernel; cross-attention has none.
    `exact_heads`: a fraction of all heads, `"auto"`, or pairs (layer, head): they stay softmax. Fractions and "auto"
    take the heads that retrieve. In a language model these are the heads whose exactness lowers the loss most when a
    passage of the calibration text is repeated; elsewhere those whose attention outside window and sinks peaks highest.
    `exact_unit`: choose single heads, or with `"group"` whole key-value groups: less memory for as many heads.
    `calibration`: texts (with `tokenizer`), one batch or several. `select`: a linear head keeps its kernel term only if
    it lowers the head's error on the calibration data (default: in decoders; in encoders the noise of many kernels
    averages out, the bias of windows does not). `plan`: a `Plan` instead of all this. `distill`: True, or a dict of
    options of `bochner.distill.distill`: attention transfer on the calibration data after converting.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    >>> model = convert(BertModel(config), "positive", 32)
    >>> print(plan_of(model))
    Plan: 1 layers, 2 heads: 2 kernel
      encoder.layer.0.attention.self  KK  positive m=32
    """
    if hasattr(model, "tokenize") and hasattr(model, "encode"):  # a SentenceTransformer
        inner, tokenizer = _inside(model)
        convert(
            inner,
            feature_map,
            num_features,
            window=window,
            sinks=sinks,
            exact_heads=exact_heads,
            exact_unit=exact_unit,
            calibration=calibration,
            tokenizer=tokenizer,
            plan=plan,
            distill=distill,
            select=select,
            max_length=max_length,
            batch_size=batch_size,
            seed=seed,
            options=options,
            progress=progress,
        )
        return model
    register_once()
    _check_model(model)
    say = _speaker(progress)
    data = None
    if calibration is not None:
        tokenizer = tokenizer or _tokenizer_of(model, calibration)
        data = capture.batches(calibration, tokenizer, max_length=max_length, batch_size=batch_size)
    shapes = capture.discover(model, None if data is None else _first_row(data[0]))
    if plan is None:
        draft = _draft(model, shapes, feature_map, num_features, window, sinks, seed, options)
    else:
        draft = _check_plan(plan, shapes)
    _check_calibration(draft, data, exact_heads if plan is None else 0.0)
    # 1. Statistics of the exact attention, in one pass.
    statistics = None
    if data is not None:
        statistics = observe(model, draft, data, say)
        _check_enough(draft, statistics)
        if plan is None and _retrieves(model, draft, data) and _wants_choice(exact_heads):
            say("looking for heads that retrieve")
            has_head = getattr(model, "get_output_embeddings", lambda: None)() is not None
            observe_retrieval(model, draft, data, statistics, "gradient" if has_head else "peak")
    # 2. The heads that stay exact.
    if plan is None:
        _choose_exact(draft, exact_heads, exact_unit, statistics)
    # 3. Maps, calibrated.
    layers = {layer.name: LinearAttention(layer) for layer in draft.layers}
    if statistics is not None:
        calibrate(layers, statistics)
        select = all(layer.is_causal for layer in draft.layers) if select is None else select
        if plan is None and select and feature_map is not None and draft.count("hybrid"):
            layers = _drop_useless_kernels(model, draft, layers, data or [], say)
    device = next(model.parameters()).device
    for module in layers.values():
        module.to(device)
        module.requires_grad_(False)
    # 4. Only now the model changes.
    equip(model, draft, layers)
    if distill is not None and distill is not False:
        from bochner.distill import distill as transfer

        settings = dict(distill) if isinstance(distill, dict) else {}
        try:
            transfer(model, data, progress=progress, **settings)
        except BaseException:
            revert(model)
            raise
    return model


def revert(model: Any, attn_implementation: str | None = None) -> Any:
    """Undo `convert`: softmax attention again, nothing of the conversion left; returns the model.

    `attn_implementation`: which softmax; default the one the model had before.
    """
    if hasattr(model, "tokenize") and hasattr(model, "encode"):
        revert(_inside(model)[0], attn_implementation)
        return model
    plan_of(model)
    strip(model)
    before = model.__dict__.pop("_bochner_before", "sdpa")
    model.set_attn_implementation(attn_implementation or before)
    return model


def redraw_(model: Any, step: int, *, seed: int = 0) -> Any:
    """New random frequencies for every map, from the training step and the layer: ranks and resumed runs agree.

    For training with random maps. Calibration and learned parts stay; frequencies that were made trainable are learned
    parts and stay too.
    """
    for i, layer in enumerate(layers_of(model).values()):
        for phi in layer.map_norm.values():
            fixed = not any(p.requires_grad for n, p in phi.named_parameters() if "projection" in n)
            if fixed:
                phi.redraw_(seed=(seed * 1_000_003 + step) * 1_009 + i)  # type: ignore[operator]
    return model


def plan_of(model: Any) -> Plan:
    """The plan of a converted model, a copy."""
    saved = getattr(getattr(model, "config", None), "bochner", None)
    if saved is None:
        raise BochnerError(f"This {type(model).__name__} is not converted; call bochner.convert first.")
    return Plan.from_dict(saved)


def layers_of(model: Any) -> dict[str, LinearAttention]:
    """The attached modules of a converted model, by the name of their attention module."""
    plan_of(model)
    return {
        name.rpartition(".")[0]: module
        for name, module in model.named_modules()
        if isinstance(module, LinearAttention) and name.endswith("linear_attn")
    }


def calibrate(layers: dict[str, LinearAttention], statistics: Statistics) -> None:
    """Fit every map to the statistics of its module."""
    for name, module in layers.items():
        for kind in module.map_norm:
            phi, heads = module.map_of(kind), module.plan.kv_heads_of(kind)
            if type(phi) is CalibratedFeatures:
                phi.fit_(of_heads(statistics.moments[name], heads))
            else:
                statistics.samples[name].calibrate(phi, heads, module.plan.group)


def _drop_useless_kernels(
    model: Any, draft: Plan, layers: dict[str, LinearAttention], data: Sequence[dict[str, Tensor]], say: Any
) -> dict[str, LinearAttention]:
    """Turn hybrid key heads whose kernel term does not lower their error into window heads."""
    say("measuring which heads gain from the kernel")
    bare = draft.copy()
    for layer in bare.layers:
        layer.kinds = ["window" if kind == "hybrid" else kind for kind in layer.kinds]
    sample = list(data)[: max(1, len(data) // 2)]
    with_kernel = head_errors(model, layers, sample)
    without = head_errors(model, {x.name: LinearAttention(x) for x in bare.layers}, sample)
    chosen = {}
    for layer in draft.layers:
        gains = (without[layer.name] ** 2 - with_kernel[layer.name] ** 2).view(layer.num_kv_heads, -1).sum(-1)
        old = layers[layer.name]
        before = layer.kv_heads_of("hybrid")
        layer.kinds = [
            "window" if kind == "hybrid" and gains[h // layer.group] <= 0 else kind
            for h, kind in enumerate(layer.kinds)
        ]
        chosen[layer.name] = _keep_maps(LinearAttention(layer), old, before)
    return chosen


def _keep_maps(new: LinearAttention, old: LinearAttention, before: list[int]) -> LinearAttention:
    """Copy the maps of the key heads that stay hybrid."""
    if "hybrid" in new.map_norm:
        rows = [before.index(g) for g in new.plan.kv_heads_of("hybrid")]
        source = old.map_norm["hybrid"].state_dict()
        new.map_norm["hybrid"].load_state_dict({k: v[rows] if v.ndim else v for k, v in source.items()})
    return new


def _draft(
    model: Any,
    shapes: dict[str, capture.Shape],
    name: str | None,
    num_features: int,
    window: int | None,
    sinks: int,
    seed: int,
    options: dict[str, Any] | None,
) -> Plan:
    positive_int(num_features, "num_features", "convert")
    if name is not None and not isinstance(name, str):
        raise BochnerError(
            f"The 'feature_map' of convert must be a name or None, got {type(name).__name__}: every layer gets a map "
            "of its own; pass the map's keywords as 'options'."
        )
    if window is not None:
        positive_int(window, "window", "convert")
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise BochnerError(f"The 'sinks' of convert must be an int >= 0, got {sinks!r}.")
    near = window is not None or sinks > 0
    if name is None and not near:
        raise BochnerError(
            "With feature_map=None there must be a 'window' or 'sinks': nothing else would be attended to."
        )
    layers = []
    for i, shape in enumerate(shapes.values()):
        local = near and not shape.is_cross
        kind = "kernel" if not local else ("window" if name is None else "hybrid")
        if shape.is_cross and name is None:
            kind = "exact"
        layers.append(
            LayerPlan(
                name=shape.name,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                value_dim=shape.value_dim,
                kinds=[kind] * shape.num_heads,
                window=window if local else None,
                sinks=sinks if local else 0,
                feature_map=name or "calibrated",
                num_features=num_features,
                options=dict(options or {}),
                seed=seed + 1000 * i,
                is_causal=shape.is_causal,
                is_cross=shape.is_cross,
            )
        )
    return Plan(layers, getattr(model.config, "model_type", ""))


def _choose_exact(draft: Plan, wanted: Any, unit: str, statistics: Statistics | None) -> None:
    """Mark the heads that stay exact, and note every head's score in the plan."""
    if statistics is not None:
        for layer in draft.layers:
            score = statistics.retrieval.get(layer.name, statistics.heads[layer.name].mean("peak"))
            layer.scores = [round(x, 6) for x in score.tolist()]
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        if not 0 <= wanted <= 1:
            raise BochnerError(f"The 'exact_heads' of convert must be a fraction in [0, 1], got {wanted!r}.")
        pairs = ranked(draft, unit)[: round(wanted * draft.num_heads)] if wanted else []
    elif isinstance(wanted, str):
        one_of(wanted, "exact_heads", "convert", ("auto",))
        pairs = ranked(draft, unit)[: int(AUTO_FRACTION * draft.num_heads)]
        least = AUTO_SHARE * sum(max(s, 0.0) for layer in draft.layers for s in layer.scores or [])
        pairs = [(i, h) for i, h in pairs if (draft.layers[i].scores or [])[h] > least]
    else:
        try:
            pairs = [(int(i), int(h)) for i, h in wanted]
        except (TypeError, ValueError) as error:
            raise BochnerError(
                f"The 'exact_heads' of convert must be a fraction, 'auto' or pairs (layer, head), got {wanted!r}."
            ) from error
        for i, h in pairs:
            if not (0 <= i < len(draft.layers) and 0 <= h < draft.layers[i].num_heads):
                raise BochnerError(f"There is no head {(i, h)} among the {len(draft.layers)} attention layers.")
    for i, h in pairs:
        draft.layers[i].kinds[h] = "exact"


def _wants_choice(exact_heads: Any) -> bool:
    return isinstance(exact_heads, str) or (isinstance(exact_heads, (int, float)) and exact_heads > 0)


def _retrieves(model: Any, draft: Plan, data: Any) -> bool:
    """Whether probes with a repeated passage make sense: a causal model over tokens."""
    causal = all(layer.is_causal for layer in draft.layers)
    return causal and not getattr(model.config, "is_encoder_decoder", False) and "input_ids" in data[0]


def ranked(plan: Plan, unit: str = "head") -> list[tuple[int, int]]:
    """All heads, the one with the highest score first; by whole groups, the one with the highest sum first."""
    one_of(unit, "exact_unit", "convert", ("head", "group"))
    scored = []
    for i, layer in enumerate(plan.layers):
        scores = layer.scores or [0.0] * layer.num_heads
        size = layer.group
        sums = [sum(scores[h - h % size : h - h % size + size]) for h in range(layer.num_heads)]
        scored += [(-(sums[h] if unit == "group" else scores[h]), i, h) for h in range(layer.num_heads)]
    return [(i, h) for _, i, h in sorted(scored)]


def _check_plan(plan: Plan, shapes: dict[str, capture.Shape]) -> Plan:
    if not isinstance(plan, Plan):
        raise BochnerError(f"The 'plan' of convert must be a bochner.hf.Plan, got {type(plan).__name__}.")
    plan = Plan.from_dict(plan.copy().to_dict())  # checked again: it may have been edited
    for layer in plan.layers:
        shape = shapes.get(layer.name)
        if shape is None:
            raise BochnerError(f"The plan names {layer.name!r}, which is not an attention module of this model.")
        theirs = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)
        if theirs != (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim):
            raise BochnerError(f"The plan of {layer.name!r} is for other head sizes than this model's {theirs}.")
    missing = set(shapes) - {layer.name for layer in plan.layers}
    if missing:
        raise BochnerError(
            f"The plan leaves out {sorted(missing)[0]!r}; give every attention module, if only as exact."
        )
    return plan


def _check_calibration(draft: Plan, data: Any, exact_heads: Any) -> None:
    needs = draft.count("hybrid") + draft.count("kernel")
    names = {layer.feature_map for layer in draft.layers}
    if data is None and needs and names & {"calibrated", "optimal"}:
        raise BochnerError(
            "The feature map 'calibrated' needs 'calibration': some texts of the kind the model will see. Without any, "
            "use feature_map='positive', and expect much worse."
        )
    if data is None and _wants_choice(exact_heads):
        raise BochnerError("Choosing 'exact_heads' needs 'calibration': the heads are chosen by what they attend to.")


def _check_enough(draft: Plan, statistics: Statistics) -> None:
    for layer in draft.layers:
        rows = int(statistics.heads[layer.name].rows)
        wanted = ROWS_PER_DIMENSION * layer.head_dim
        if rows < wanted:
            raise BochnerError(
                f"Too little calibration text: {rows} tokens for heads of size {layer.head_dim}, at least {wanted} are "
                "needed and some thousands are better; give more texts."
            )


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


def _first_row(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v[:1] for k, v in batch.items()}


def _tokenizer_of(model: Any, calibration: Any) -> Any:
    """The tokenizer beside a locally stored model, when texts were given without one."""
    texts = isinstance(calibration, str) or (
        isinstance(calibration, Sequence) and len(calibration) > 0 and isinstance(calibration[0], str)
    )
    path = getattr(model.config, "_name_or_path", "")
    if not texts or not path:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # whatever is wrong with it, the caller is told to pass one
        return None


def _inside(model: Any) -> tuple[Any, Any]:
    """The transformers model and the tokenizer of a SentenceTransformer."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module, model.tokenizer
    raise BochnerError("This SentenceTransformer holds no transformers model.")


def _speaker(progress: bool) -> Any:
    def say(text: str) -> None:
        if progress:
            print(f"bochner: {text}", file=sys.stderr, flush=True)

    return say


def register_once() -> None:
    """Register under the current defaults, unless that was done."""
    from transformers import AttentionInterface

    from bochner.hf.interface import NAME

    if NAME not in AttentionInterface._global_mapping:
        register()


def relative_errors(model: Any, data: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Relative error of every head of a converted model, on the inputs its original attention would see.

    The model is run with exact attention, and each layer's linear attention is compared on the same queries and keys.
    """
    return head_errors(model, layers_of(model), data)
