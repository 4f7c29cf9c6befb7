"""Which keys each head of a decoder should hold: scores fitted in closed form to a few passages, each read twice.

The target is what letting a key go would do to the loss (`bochner.hf.scores.damages`). One backward pass a passage
gives it for all heads. Damages of all heads are in the same unit, so that one threshold for all of them gives each
head its budget: heads differ by orders of magnitude in how many keys they need, and equal shares fail.

The gradient is taken half-way between the original and a model that sees sinks and windows alone. The original is so
sure of a passage that comes again that its loss has hardly a slope there, and the heads that recall would seem idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bochner._checks import BochnerError, positive_int
from bochner._progress import speaker
from bochner.hf import drift, inputs
from bochner.hf.attention import LinearAttention
from bochner.hf.calls import Call, exact
from bochner.hf.config import Calibration
from bochner.hf.evaluate import is_language_model
from bochner.hf.fates import Fate, window_rows
from bochner.hf.interface import unwrap
from bochner.hf.observe import Shape, discover, frozen, recording, run
from bochner.hf.plan import Fitted, Plan
from bochner.hf.precision import Basis, balance
from bochner.hf.scores import Ridge, budgets, damages, features, logarithm, scores, threshold
from bochner.hf.selected_heads import Selected, SelectedHeads
from bochner.maps.landmark_fit import Near

PASSAGES, PASSAGE = 4, 768  # how many, and of how many tokens, scores are fitted to
LEAST = 32  # tokens of a passage
WINDOW, SINKS = 128, 4
FAR_ROWS = 64  # rows beyond the window that a key needs to be fitted to
LOGITS = 256  # rows whose logits are there at a time
COARSE, FINE = "int4", "int8"  # how older keys and values are stored, and how in layers that need more
MUCH = 2  # times the mean of what coarse keys do to the loss: a layer with more needs more bits
Say = Callable[[str], None]


class LayerScores(NamedTuple):
    """What was fitted for a layer: score weights (g, 2 D + 1), its basis, and scores (g, n) of its keys.

    `lost`: what rounding older keys coarsely does to the loss. `first`: the first queries and keys of each passage,
    scaled, to tell inputs of another kind.
    """

    weights: Tensor
    basis: Basis
    lost: float
    found: Tensor
    first: list[tuple[Tensor, Tensor]]


@dataclass
class FittedScores:
    """The scores of all layers, and the plans that follow from a threshold."""

    layers: dict[str, LayerScores]
    window: int
    sinks: int
    tokens: int

    def plan(self, draft: Plan, share: float, precision: str, length: int) -> Plan:
        """A plan that holds a share of the older keys of a text of `length` tokens, counted over all heads.

        With the precision `COARSE`, they have 8 bits in the few layers that hold most of what rounding them costs.
        """
        names = list(self.layers)
        mean = sum(x.lost for x in self.layers.values()) / len(names)
        found = budgets([self.layers[name].found for name in names], share, length, self.window)
        made = dict(zip(names, found, strict=True))
        layers = []
        for layer in draft.layers:
            if layer.name in made:
                mine = self.layers[layer.name]
                width = (mine.weights.shape[-1] - 1) // 2
                fine = precision == COARSE and mine.lost > MUCH * mean
                stored = FINE if fine else precision
                fates: list[Fate] = [Selected(self.window, self.sinks, n, stored, width) for n in made[layer.name]]
                layer = replace(layer, fates=fates)
            layers.append(layer)
        return Plan(layers, draft.model_type, self.tokens)

    def note(self, draft: Plan) -> Plan:
        """Note in a plan what the passages looked like (`bochner.hf.drift`)."""
        for layer in draft.layers:
            if layer.name in self.layers:
                drift.note(layer, *zip(*self.layers[layer.name].first, strict=True))
        return draft

    def damage(self, share: float) -> float:
        """What letting the other keys of the passages go does to the loss, to first order and squared."""
        every = torch.cat([x.found.flatten().double() for x in self.layers.values()])
        return float((2 * every[every < threshold([every], share)]).exp().sum())

    def build(self, plan: Plan, device: Any = "cpu") -> dict[str, LinearAttention]:
        """All layers of a plan, with their scores."""
        built = {layer.name: LinearAttention(layer).to(device) for layer in plan.layers}
        for name, layer in built.items():
            for part in layer.parts.values():
                if isinstance(part, SelectedHeads):
                    mine = self.layers[name]
                    part.weights.copy_(mine.weights[part.heads])
                    for key, x in mine.basis._asdict().items():
                        getattr(part, key).copy_(x[part.heads])
        return built


class _Sums:
    """What the passages add up to for one layer; second moments are of rows (d + 1) that end with a one."""

    def __init__(self, width: int) -> None:
        self.ridge, self.hidden = Ridge(2 * width + 1), list[Tensor]()
        self.moments: list[Tensor] | None = None
        self.first: list[tuple[Tensor, Tensor]] = []

    def add(self, call: Call, gradient: Tensor, window: int, sinks: int) -> None:
        """A passage that was read twice."""
        (q, k, v), h = (x[0].detach().float() for x in call[:3]), call.hidden
        assert h is not None
        n = k.shape[1] // 2
        damage = damages(q, k, v, gradient[0].float(), call.scale, window, sinks)
        rows = [F.pad(x[:, sinks:], (0, 1), value=1.0) for x in (k, v)]
        new = [*damage[1:], *(x.mT @ x for x in rows)]
        self.moments = new if self.moments is None else [a + b for a, b in zip(self.moments, new, strict=True)]
        root = call.scale**0.5
        self.first.append((root * q[:, : drift.PLACES].cpu(), root * k[:, : drift.PLACES].cpu()))
        place = torch.arange(n, device=k.device)
        known = (place >= sinks) & (n - window - place >= min(FAR_ROWS, (n - window) // 4))
        mine = h[0, :n].detach()[known]
        self.ridge.add(features(mine).cpu(), logarithm(damage.dropped).mT[known].cpu())
        self.hidden.append(mine.half().cpu())

    def solve(self) -> LayerScores:
        weights = self.ridge.solve()
        assert self.moments is not None
        by_key, by_value, k, v = (x.cpu().double() for x in self.moments)
        k, v = (x / x[:, -1:, -1:] for x in (k, v))
        centre = k[:, :-1, -1]
        spread = k[:, :-1, :-1] - centre[:, :, None] * centre[:, None]
        keys, lost = balance(spread, by_key, 2 - centre.shape[-1] % 2)
        values, _ = balance(v[:, :-1, :-1], by_value)
        basis = Basis(centre.float(), keys, values)
        found = scores(torch.cat(self.hidden)[None], weights)[0]
        return LayerScores(weights, basis, float(lost.sum()), found, self.first)


def window_for(length: int) -> int:
    """The window at a length: a small part of it."""
    return max(4, min(WINDOW, length // 8))


def passages_of(model: Any, tokens: Tensor) -> list[Tensor]:
    """Passages (1, n) from all over some tokens (n,), short enough to be read twice."""
    made_for = inputs.positions(model).get("input_ids") or inputs.trained_positions(model) or 2 * PASSAGE
    size = min(PASSAGE, made_for // 2, max(len(tokens) // PASSAGES, LEAST), len(tokens))
    if size < LEAST:
        raise BochnerError(f"Too little text to fit scores to: {len(tokens)} tokens; give more texts.")
    pieces = tokens[: len(tokens) // size * size].view(-1, size)
    places = torch.linspace(0, len(pieces) - 1, min(PASSAGES, len(pieces))).round().long()
    return [piece[None] for piece in pieces[places]]


def fit_scores(
    model: Any,
    names: Sequence[str],
    passages: Sequence[Tensor],
    window: int,
    sinks: int = SINKS,
    *,
    length: int = 0,
    say: Say = print,
) -> FittedScores:
    """Fit the scores of some attention modules to passages (1, n), each read twice.

    With rotary positions the passages lie at places from all over a text of `length` tokens: keys are stored after
    they were rotated, and what is far from the places that a basis was fitted to would be rounded badly.
    """
    sums: dict[str, _Sums] = {}
    window, size = min(window, passages[0].shape[1] // 4), 2 * passages[0].shape[1]
    last = max(0, length - size) if inputs.has_rotary_positions(model) else 0
    starts = torch.linspace(0, last, len(passages)).long().tolist()
    with frozen(model):
        for i, (ids, start) in enumerate(zip(passages, starts, strict=True)):
            say(f"reading passage {i + 1} of {len(passages)} twice, {ids.shape[1]:,} tokens")
            for name, (call, gradient) in _calls(model, names, torch.cat([ids, ids], dim=1), start, window, sinks):
                if name not in sums:
                    assert call.hidden is not None
                    sums[name] = _Sums(call.hidden.shape[-1])
                sums[name].add(call, gradient, window, sinks)
    layers = {name: sums[name].solve() for name in names}
    return FittedScores(layers, window, sinks, passages[0].shape[1])


def _calls(
    model: Any, names: Sequence[str], ids: Tensor, start: int, window: int, sinks: int
) -> Iterator[tuple[str, tuple[Call, Tensor]]]:
    """The attention calls of one pass, with the gradient of the loss by their outputs; each is let go after use.

    Positions count from `start`.

    The outputs are half-way between those of all keys and those of sinks and windows alone.
    """
    seen: dict[str, tuple[Call, Tensor]] = {}
    near = Near(True, window, sinks, "sliding")

    def look(name: str, call: Call) -> Tensor | None:
        if name not in names:
            return None
        q, k, v = call[:3]
        first = k[..., :sinks, :], v[..., :sinks, :]
        out = 0.5 * (exact(call) + window_rows(q, k, v, first, near, 0, call.scale))
        out = out if out.requires_grad else out.requires_grad_()
        out.retain_grad()
        hidden = None if call.hidden is None else call.hidden.detach()
        seen[name] = (Call(q.detach(), k.detach(), v.detach(), *call[3:-1], hidden), out)
        return out

    with recording(model, look, hidden=names):
        _backward(model, ids, start)
    for name in names:
        call, out = seen.pop(name)
        assert out.grad is not None
        yield name, (call, out.grad)


def _backward(model: Any, ids: Tensor, start: int) -> None:
    """Differentiate the sum of the losses of all tokens, with few rows of logits at a time."""
    ids = ids.to(next(model.parameters()).device)
    base, head = model.base_model, model.get_output_embeddings()
    with torch.enable_grad():
        places = {"position_ids": start + torch.arange(ids.shape[1], device=ids.device)[None]} if start else {}
        rows = base(input_ids=ids, use_cache=False, **places).last_hidden_state[0, :-1]
        inner = rows.detach().requires_grad_()
        for part, wanted in zip(inner.split(LOGITS), ids[0, 1:].split(LOGITS), strict=True):
            F.cross_entropy(head(part).float(), wanted, reduction="sum").backward()
        rows.backward(inner.grad)


def can_select(model: Any, shapes: Mapping[str, Shape], ids: Tensor) -> bool:
    """Whether the attention of a language model tells the hidden states that enter it, and needs nothing else."""
    names = [name for name, shape in shapes.items() if shape.obstacle is None]
    if not names or not is_language_model(model, dict(shapes)):
        return False
    found: dict[str, bool] = {}

    def look(name: str, call: Call) -> None:
        found[name] = call.hidden is not None and call.hidden.shape[:2] == call.query.shape[::2]

    with recording(model, look, hidden=names):
        run(model, {"input_ids": ids})
    return all(found.get(name, False) for name in names) and model.base_model is not model


def fit_selected(
    model: Any,
    texts: Any,
    *,
    share: float = 0.25,
    length: int = 4096,
    precision: str = COARSE,
    window: int | None = None,
    sinks: int = SINKS,
    progress: bool | None = None,
) -> Plan:
    """A plan for a decoder whose heads hold the keys that matter, with its fitted scores: `convert(model, plan)`.

    `share`: of the keys beyond the window of a text of `length` tokens, counted over all heads; see `Selected` for
    `precision`, `window` and `sinks`. A `Target(memory=...)` finds the share, and verifies it.
    """
    # What is wrong is said before a minute of work.
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise BochnerError(f"The 'share' of keys to hold must lie between 0 and 1, got {share!r}.")
    positive_int(length, "length", "fit_selected")
    Selected(window_for(length) if window is None else window, sinks, 0, precision)
    inner, tokenizer = unwrap(model)
    calibration = Calibration.of(texts, tokenizer)
    size = calibration.max_length or 2**20
    data = inputs.batches(calibration.data, calibration.tokenizer, model=inner, max_length=size, batch_size=1)
    tokens = torch.cat([batch["input_ids"].flatten() for batch in data])
    shapes = discover(inner, {"input_ids": tokens[None, :16]})
    if not can_select(inner, shapes, tokens[None, :16]):
        raise BochnerError(f"{type(inner).__name__} is no decoder whose attention can select keys; use a Recipe.")
    names = [name for name, shape in shapes.items() if shape.obstacle is None]
    passages = passages_of(inner, tokens)
    if sinks > passages[0].shape[1] // 4:
        most = passages[0].shape[1] // 4
        raise BochnerError(f"The 'sinks' must be at most {most}, a quarter of a passage of these texts, got {sinks}.")
    fitted = fit_scores(
        inner, names, passages, window or window_for(length), sinks, length=length, say=speaker(progress)
    )
    draft = fitted.note(Plan.of(shapes, getattr(inner.config, "model_type", "")))
    plan = fitted.plan(draft, share, precision, length)
    for name, layer in fitted.build(plan).items():
        if layer.plan.has_map:
            plan.maps[name] = Fitted(list(layer.plan.fates), layer.state_dict())
    return plan
