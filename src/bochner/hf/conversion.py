"""`convert`: a pretrained transformer with linear attention, changed in place, and the handle of what was done."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bochner._checks import BochnerError, BochnerWarning
from bochner._progress import speaker
from bochner.hf import calibrate, drift
from bochner.hf.attention import LinearAttention
from bochner.hf.config import Calibration, Recipe, Target
from bochner.hf.evaluate import is_language_model
from bochner.hf.fates import EXACT, FateModule, Window, fate_of
from bochner.hf.interface import MISFIT, attach, check_model, detach, for_model, layers_of, settings_of, unwrap
from bochner.hf.observe import Shape, discover, discover_parts
from bochner.hf.plan import Fitted, LayerPlan, Plan
from bochner.nn.torch_layers import convert_torch, is_torch_model

ROWS_PER_DIMENSION = 4  # calibration tokens wanted per head dimension
MAX_LENGTH = 256  # tokens that calibration texts are cut to, unless their Calibration says otherwise
NEED_DATA = ("landmark", "calibrated", "optimal")  # maps that are nothing without calibration
PLAN, MAPS, REPORT = "plan.json", "maps.safetensors", "report.json"  # the files of a saved conversion
Batches = Sequence[dict[str, Tensor]]
Say = Callable[[str], None]
AUTO = Recipe()


def convert(
    model: Any,
    spec: Any = AUTO,
    data: Any = None,
    *,
    parts: Sequence[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Any:
    """Replace a model's attention by linear attention, in place; returns a `Conversion`.

    `model`: a transformers model, a SentenceTransformer or a PeftModel; or a torch.nn.TransformerEncoder or Decoder,
    see `bochner.nn.convert_torch`. Nothing is changed if anything is refused.
    `spec`: a `Recipe`, which says what every head becomes; a `Target`, for which that is searched for; a `Plan`; or the
    directory of a saved conversion.
    `data`: texts, batches of the model's inputs, or a `Calibration` with its tokenizer and lengths. Maps are fitted to
    them. A plan that brings its maps needs none.
    `parts`: what to convert, default all: "encoder", "decoder" and "cross" of an encoder-decoder, or names of modules.
    Layers with windows and chunks of their own, soft caps, position biases or other masks stay as they were. The plan
    says why.
    `seed`: of random projections, and of what a search draws.
    `progress`: say what is being done, on the standard error stream; default if that is a terminal.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    >>> print(convert(BertModel(config), Recipe("positive", 32)).plan)
    Plan: 1 layer, 2 key heads: 2 kernel
      encoder.layer.0.attention.self  KK  positive m=32
    """
    if is_torch_model(model):
        return convert_torch(model, spec, data)
    inner, tokenizer = unwrap(model)
    check_model(inner)
    if not isinstance(spec, (Recipe, Target, Plan, str, Path)):
        raise BochnerError(
            f"The 'spec' of convert must be a Recipe, a Target, a Plan or the directory of a saved conversion, got "
            f"{type(spec).__name__}."
        )
    if not isinstance(spec, (Recipe, Target)) and (parts is not None or seed != 0):
        what, name = "A plan" if isinstance(spec, Plan) else "A saved conversion", "seed" if parts is None else "parts"
        raise BochnerError(f"{what} says it all, for every layer: leave out {name!r}, or edit the plan.")
    calibration = None if data is None else Calibration.of(data, tokenizer)
    if isinstance(spec, Target):
        return _to_target(model, spec, calibration, {"parts": parts, "seed": seed, "progress": progress})
    if isinstance(spec, (str, Path)):
        if data is not None and Path(spec).is_dir():
            raise BochnerError("A saved conversion brings its maps: leave out 'data', or convert by a Recipe or Plan.")
        return Conversion.from_pretrained(model, spec)
    fit_length = spec.fit_length if isinstance(spec, Plan) else 0
    batches = [] if calibration is None else calibration.batches(inner, fit_length or MAX_LENGTH)
    shapes, say = discover_parts(inner, batches, parts), speaker(progress)
    if isinstance(spec, Plan):
        plan = _fitting(spec, inner, shapes)
        new = [layer for layer in plan.layers if layer.has_map and plan.fitted(layer) is None]
        samples = _observed(inner, new, batches, say)
    else:
        plan, samples = _by_recipe(inner, spec, shapes, batches, seed, say)
    attach(inner, plan, _build(inner, plan, samples))
    return Conversion(model)


class Conversion:
    """A converted model, and what can be done with the conversion.

    `model`: the model, as it was given. `plan`: what every head became, a copy that brings the fitted maps.
    `report`: of the search for a `Target`; `distillation`: of the training that followed. A loaded conversion has none.
    """

    def __init__(self, model: Any, report: Any = None, distillation: Any = None) -> None:
        self.model, self.report, self.distillation = model, report, distillation
        layers_of(model)

    @classmethod
    def of(cls, model: Any) -> Conversion:
        """The conversion of a model that was converted, or loaded as a converted one."""
        return cls(model)

    @property
    def plan(self) -> Plan:
        """What every head became; `convert` takes it, with its maps, for another copy of the model."""
        inner, _ = unwrap(self.model)
        layers = layers_of(inner)
        plan = Plan([replace(layer.plan, name=name) for name, layer in layers.items()]).copy()
        plan.model_type = getattr(inner.config, "model_type", "")
        plan.fit_length = getattr(getattr(settings_of(inner), "plan", None), "fit_length", 0)
        plan.maps = {name: layer.fitted() for name, layer in layers.items()}
        return plan

    def errors(self, data: Any) -> dict[str, Tensor]:
        """Relative error of every head by the name of its module, on the inputs that its original attention would see.

        The model is run with exact attention, and each layer's linear attention is compared on the same queries and
        keys.
        """
        inner, tokenizer = unwrap(self.model)
        batches = Calibration.of(data, tokenizer).batches(inner, MAX_LENGTH)
        found = calibrate.option_errors(inner, {n: {"": layer} for n, layer in layers_of(inner).items()}, batches)
        return {name: errors[""].relative().cpu() for name, errors in found.items()}

    def revert(self) -> Any:
        """Undo the conversion; returns the model with the attention it had."""
        return revert(self.model)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the plan, the fitted maps and the report, a hundredth of the model, to be loaded onto the original.

        A part that was converted by itself is saved alone; to save it in the whole model, convert that with `parts`.
        """
        from safetensors.torch import save_file

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        plan = self.plan
        plan.save(folder / PLAN)
        if self.report is not None:
            (folder / REPORT).write_text(json.dumps(self.report.to_dict(), indent=1), encoding="utf-8")
        tensors = {f"{n}.{key}": x.contiguous() for n, maps in plan.maps.items() for key, x in maps.tensors.items()}
        save_file(tensors, folder / MAPS, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, model: Any, directory: str | Path) -> Conversion:
        """Convert the original model as a saved conversion says, with its maps; it then computes what that computed."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder, (inner, _) = Path(directory), unwrap(model)
        check_model(inner)
        if not folder.is_dir():
            raise BochnerError(
                f"There is no directory {str(directory)!r} with a saved conversion; a Recipe, Target or Plan is given "
                "as an object, as in bochner.convert(model, bochner.Recipe('landmark'), texts)."
            )
        if not (folder / PLAN).exists():
            raise BochnerError(
                f"The directory {str(directory)!r} holds no {PLAN}, which Conversion.save_pretrained writes; a whole "
                "model that was saved is loaded by its own from_pretrained."
            )
        plan = Plan.load(folder / PLAN)
        try:
            tensors = load_file(folder / MAPS)
        except (OSError, SafetensorError) as error:
            raise BochnerError(f"No maps could be read from {str(folder / MAPS)!r}: {error}.") from error
        for layer in plan.layers:
            own = f"{layer.name}."
            mine = {key.removeprefix(own): value for key, value in tensors.items() if key.startswith(own)}
            plan.maps[layer.name] = Fitted(list(layer.fates), mine)
        try:
            shapes = discover(inner)
        except BochnerError:  # made-up inputs do not do for every model
            plan = for_model(plan, inner)
        else:
            plan = _fitting(plan, inner, shapes)
        attach(inner, plan, _build(inner, plan, {}))
        return cls(model)

    def __repr__(self) -> str:
        return f"Conversion of {type(self.model).__name__}\n{self.plan}"

    def __str__(self) -> str:
        reports = (self.report, self.distillation)
        return "\n".join([repr(self), *(str(report) for report in reports if report is not None)])


def revert(model: Any) -> Any:
    """Undo `convert`: the softmax attention there was, nothing of the conversion left; returns the model."""
    detach(unwrap(model)[0])
    return model


def _to_target(model: Any, target: Target, data: Calibration | None, asked: dict[str, Any]) -> Conversion:
    """Search, change the model, train what the target allows, and say what was reached; `asked`: of `search`."""
    from bochner.hf.distill import DistillReport, distill
    from bochner.hf.search import search

    if target.train is not None and target.train.loss == "model" and data is not None:
        given = data.data if isinstance(data.data, list) else [data.data]
        if any(hasattr(batch, "keys") and "labels" in batch for batch in given):
            raise BochnerError(
                "The training of a Target uses no 'labels': convert without 'train', then call bochner.distill(model, "
                "data, bochner.Distillation(loss='model'))."
            )
    report = search(model, target, data, **asked)
    inner, _ = unwrap(model)
    attach(inner, report.plan, _build(inner, report.plan, {}))
    distilled = None
    if target.train is not None and not report.plan.converted:
        distilled = DistillReport(note="Nothing was distilled: nothing is converted.")
    elif target.train is not None:
        try:
            distilled = distill(model, report.training, target.train, progress=asked["progress"])
        except BaseException:
            revert(model)
            raise
        if not distilled.note:
            report.verify_again(inner)
    if not report.met:
        warnings.warn(report.reasons[0], BochnerWarning, stacklevel=3)
    return Conversion(model, report, distilled)


# What every head becomes


def _by_recipe(
    model: Any, recipe: Recipe, shapes: Mapping[str, Shape], data: Batches, seed: int, say: Say
) -> tuple[Plan, dict[str, calibrate.Samples]]:
    """The plan of a recipe, and what was seen of the layers whose maps are to be fitted."""
    recipe = recipe.resolved(bool(data))
    plan = Plan.of(shapes, getattr(model.config, "model_type", ""), seed, lambda x: fate_of(recipe, x.is_cross))
    for layer in plan.layers:
        layer.trainable = recipe.trainable
    LinearAttention(plan.layers[0])  # wrong options are refused here, before anything is measured
    if recipe.ranks_heads and not data:
        raise BochnerError("Choosing 'exact_heads' needs 'data': the heads are chosen by what they attend to.")
    looked_at = plan.converted if recipe.ranks_heads else [layer for layer in plan.layers if layer.has_map]
    samples = _observed(model, looked_at, data, say)
    if recipe.ranks_heads:
        say("measuring which heads retrieve")
        _score(model, plan, recipe, samples, data)
    make_exact(plan, recipe.exact_heads)
    return plan, samples


def _score(model: Any, plan: Plan, recipe: Recipe, samples: Mapping[str, calibrate.Samples], data: Batches) -> None:
    """Note in the plan how much each key head retrieves.

    In a language model that is how far the loss on a repeated passage falls when the head is exact; elsewhere how high
    its attention peaks outside window and sinks.
    """
    near: dict[str, Any] = {"window": recipe.window, "sinks": recipe.sinks, "window_kind": recipe.window_kind}
    if is_language_model(model, {x.name: x for x in plan.converted}) and "input_ids" in data[0]:
        far = Window(**near) if recipe.window is not None or recipe.sinks else None
        bare = {x.name: replace(x, fates=[far or x.fates[0]] * x.num_kv_heads) for x in plan.converted}
        device = next(model.parameters()).device
        layers = {name: LinearAttention(layer).to(device) for name, layer in bare.items()}
        scores = calibrate.retrieval_scores(model, layers, data)
    else:
        scores = {
            x.name: calibrate.peak_scores(samples[x.name], x.is_causal, **({} if x.is_cross else near))
            for x in plan.converted
        }
    for layer in plan.converted:
        by_head = scores[layer.name].reshape(layer.num_kv_heads, layer.group).sum(-1)
        layer.scores = [round(x, 6) for x in by_head.tolist()]


def make_exact(plan: Plan, wanted: Any) -> None:
    """Give the key heads that stay softmax their fate: a fraction, those with the highest scores first, or pairs."""
    if isinstance(wanted, (int, float)):
        free = [(i, g) for i, x in enumerate(plan.layers) if not x.untouched for g in range(x.num_kv_heads)]
        scores = {(i, g): (plan.layers[i].scores or [0.0] * (g + 1))[g] for i, g in free}
        wanted = sorted(free, key=lambda pair: -scores[pair])[: round(wanted * len(free))]
    for i, g in wanted:
        if not (i < len(plan.layers) and g < plan.layers[i].num_kv_heads):
            raise BochnerError(
                f"There is no key head {(i, g)} among the {len(plan.layers)} attention layers; 'exact_heads' are pairs "
                "(layer, key head)."
            )
        plan.layers[i].fates[g] = EXACT


def _fitting(plan: Plan, model: Any, shapes: Mapping[str, Shape]) -> Plan:
    """A plan by the model's names, checked again, for it may have been edited, and against what the model is."""
    checked = Plan.from_dict(plan.to_dict())
    checked.maps = plan.maps
    checked = for_model(checked, model)
    for layer in checked.layers:
        shape = shapes.get(layer.name)
        if shape is None:
            raise BochnerError(f"The plan names {layer.name!r}, which is not an attention module of this model.")
        theirs = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)
        if theirs != (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim):
            raise BochnerError(f"The plan of {layer.name!r} is for other head sizes than this model's {theirs}.")
        if shape.obstacle is not None and not layer.untouched:
            raise BochnerError(f"The plan converts {layer.name!r}, which cannot be: {shape.obstacle.reason}.")
    missing = set(shapes) - {layer.name for layer in checked.layers}
    if missing:
        raise BochnerError(
            f"The plan leaves out {sorted(missing)[0]!r}; give every attention module, if only as exact."
        )
    return checked


def _observed(model: Any, layers: Sequence[LayerPlan], data: Batches, say: Say) -> dict[str, calibrate.Samples]:
    """What the exact attention of some layers looks like; it is noted in their plans as well."""
    if not data:
        needy = [
            name
            for layer in layers
            for fate in layer.fates
            if (name := getattr(fate, "feature_map", None)) in NEED_DATA and not layer.trainable
        ]
        if needy:
            raise BochnerError(
                f"The feature map {needy[0]!r} needs 'data': some texts of the kind the model will see. Without any, "
                "use Recipe('moments')."
            )
    if not data or not layers:
        return {}
    found = calibrate.observe(model, [layer.name for layer in layers], data, say)
    for layer in layers:
        samples, wanted = found[layer.name], ROWS_PER_DIMENSION * layer.head_dim
        if samples.rows < wanted:
            raise BochnerError(
                f"Too little calibration text: {samples.rows} tokens for heads of size {layer.head_dim}, at least "
                f"{wanted} are needed and 2,000 are enough; give more texts, of every kind that the model will see."
            )
        if layer.has_map:
            drift.note(layer, samples.q, samples.k)
    return found


def _build(model: Any, plan: Plan, samples: Mapping[str, calibrate.Samples]) -> dict[str, LinearAttention]:
    """The maps of every module on the model's device: those that the plan brings, the others fitted to samples."""
    device = next(model.parameters()).device
    layers = {layer.name: LinearAttention(layer).to(device) for layer in plan.layers}
    for name, layer in layers.items():
        known, fates = plan.fitted(layer.plan), layer.plan.fates
        if known is not None:
            try:
                layer.load_state_dict(known)
            except RuntimeError as error:
                raise BochnerError(MISFIT) from error
        elif any(fates[part.heads[0]].has_map and type(part).fit is FateModule.fit for part in layer.parts.values()):
            raise BochnerError(
                f"The plan brings no maps for {name!r}, and texts alone do not fit them: take the plan that a search "
                "or fit_selected returned, or the directory of the saved conversion."
            )
        elif name in samples and not layer.plan.untouched:
            layer.fit(samples[name])
    return {name: layer.to(device) for name, layer in layers.items()}
