"""The search for a target: what each head becomes, so that the model retains its quality at the least cost.

The units u are key heads; the options o of a head are the fates that are registered (`bochner.hf.fates`), exact
attention among them. D[u, o] is the measured damage of an option to a head, C[u, o] its cost: bytes of the decoding
cache, or seconds. A choice c gives each head one option. The problem is

    minimise  sum_u C[u, c(u)]   subject to   quality(c) >= keep,

or, where the memory is given, to maximise quality(c) subject to sum_u C[u, c(u)] <= memory. quality(c) is measured end
to end on the choice texts, and its lower confidence bound over them has to reach `keep`, because a choice is the best
of several. Where time is saved, the heads of a layer that are not exact share one option and a mixture has a price.

1. `options`: make every option of every layer, measure C, and fit maps (on the first texts). 2. `damage`: measure D. 3.
`knapsack`: for sums of D and C the best choices are the corners of a convex hull, found exactly. 4. `refine`: bisect
along them by measured quality. 5. `verify`: look at texts that nothing has used, and state the interval. What is looked
at if that fails is declared before: choices of less and less damage. They have to pass by the lower bound, because the
texts have told something by then, and the interval is corrected for the number of looks.

The memory of a decoder's cache is another matter, unless it is trained: `selected` holds the keys that matter in every
head, and searches for how many.

`refine` and `knapsack` are pure functions over `refine.Problem` and know nothing of transformers.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from bochner._checks import BochnerError, BochnerWarning
from bochner._progress import speaker
from bochner.hf import inputs
from bochner.hf.config import Calibration, Target
from bochner.hf.interface import check_model, unwrap
from bochner.hf.observe import Shape, discover_parts
from bochner.hf.search import selected
from bochner.hf.search.damage import MeasuredProblem, measure_damages, tables
from bochner.hf.search.knapsack import Choice, all_exact, frontier, totals
from bochner.hf.search.options import Say, Space
from bochner.hf.search.refine import best_within, cheapest_that_keeps, ladder
from bochner.hf.search.report import Point, SearchReport
from bochner.hf.search.selected import SelectedSpace
from bochner.hf.search.texts import Split, batches_for, settle, split
from bochner.hf.search.verify import TOKENS, Verdict, Verifier

__all__ = ["SearchReport", "search"]


def search(
    model: Any,
    target: Target,
    data: Any,
    *,
    parts: Sequence[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> SearchReport:
    """What `convert` would do to reach a target, without changing the model; the arguments are those of `convert`.

    Returns a `SearchReport`, whose `plan` brings the maps that were verified: `convert(model, report.plan)` applies it.
    """
    model, tokenizer = unwrap(model)
    check_model(model)
    if not isinstance(target, Target):
        raise BochnerError(f"The 'target' of search must be a bochner.Target, got {type(target).__name__}.")
    if data is None:
        raise BochnerError("A Target needs 'data', of which a part is for validation.")
    say, began = speaker(progress), time.monotonic()
    batches = batches_for(model, Calibration.of(data, tokenizer), target)
    shapes = discover_parts(model, batches, parts)
    obstacle, most = _obstacle(model, shapes), inputs.positions(model).get("input_ids")
    goal = settle(target, model, shapes, batches)
    selects = selected.applies(model, goal, shapes, batches)
    texts = selected.split_for(model, batches, goal) if selects else split(batches, goal, most)
    space = (SelectedSpace if selects else Space)(model, shapes, goal, seed)
    space.fit(texts.fit, say)
    problem = _problem(space, texts, shapes, say)
    choices = _choose(problem)
    one = problem.texts.held is texts.held
    report = _verified(problem, choices, problem.texts if one else Verifier(model, texts.held, goal, shapes, say))
    report.positions = most
    report.training = texts.training(goal.judged) if target.train is not None else []
    report.seconds = time.monotonic() - began
    report.reasons += _remarks(report, space, obstacle)
    say(f"\n{report}")
    return report


def _problem(space: Space, texts: Split, shapes: dict[str, Shape], say: Say) -> MeasuredProblem:
    """What each head can become, or how many keys all of them hold, with measured costs and damages."""
    goal = space.goal
    say("running the original on the choice texts")
    part = texts.choice[: max(goal.judged, TOKENS // 2)] if goal.is_language else texts.choice
    if isinstance(space, SelectedSpace) and goal.memory is not None:
        part = texts.held  # there is one choice: it is verified at once
    known = Verifier(space.model, part, goal, shapes, say)
    if isinstance(space, SelectedSpace):
        return MeasuredProblem(space, known, selected.tables(space), say)
    return MeasuredProblem(space, known, tables(space, measure_damages(space, known, say)), say)


def _choose(problem: MeasuredProblem) -> list[Choice]:
    """The choice, and what is looked at in turn if it fails verification; all are settled before any look."""
    goal, space = problem.space.goal, problem.space
    if goal.memory is None:
        assert goal.keep is not None
        return ladder(problem.tables, cheapest_that_keeps(problem, goal.keep))
    if isinstance(space, SelectedSpace):
        return [((1,),)]  # the rung that fills the memory
    fixed = space.original_bytes - problem.whole  # of layers that cannot change
    found = best_within(problem.tables, goal.memory * space.original_bytes - fixed)
    if found is None:
        least = (fixed + totals(problem.tables, frontier(problem.tables)[0])[1]) / space.original_bytes
        raise BochnerError(
            f"The 'memory' of Target must be at least {least:.3f} for this model at "
            f"{goal.length:,} tokens, got {goal.memory!r}: the smallest options take so much."
        )
    problem.quality(found)
    return [found]


def _verified(problem: MeasuredProblem, choices: Sequence[Choice], verifier: Verifier) -> SearchReport:
    """The report of the first choice that passes; of the original if none does."""
    goal, space, failed, slow = problem.space.goal, problem.space, list[Verdict](), ""
    demanded = None if goal.memory is not None and goal.trains else goal.keep
    waiting = [*choices, all_exact(problem.tables)]
    while waiting:
        choice = waiting.pop(0)
        plan = space.plan_of(choice)
        layers = space.build(plan)
        found = verifier.verify(plan, layers) if plan.converted else verifier.original()
        if plan.converted and not goal.by_memory and found.length >= goal.length and found.time_share >= 1:
            waiting = waiting[-1:]  # what is nearer to the original is no faster
            slow = (
                f"Nothing is converted: attention would be faster at {goal.length:,} tokens, but the whole model takes "
                f"{found.time_share:.0%} of the original's time."
            )
        elif demanded is None or found.passes(demanded):
            break
        else:
            failed.append(found)
    plan.maps = {name: layer.fitted() for name, layer in layers.items() if layer.plan.has_map}
    if verifier is problem.texts:
        problem.tried[choice] = found.quality
    problem.quality(choice)
    measured = sorted(problem.tried, key=problem.share)
    place, points = measured.index(choice), [_point(problem, c) for c in measured]
    points[place].plan = plan
    report = SearchReport(goal, plan, points, place, bool(plan.converted) or not failed, found, failed)
    report.further, report.verifier = verifier.further(plan, layers), verifier
    report.reasons = [slow] if slow else []
    if goal.is_language and plan.converted:
        report.ablations = selected.ablations(problem, plan, layers)
    return report


def _point(problem: MeasuredProblem, choice: Choice) -> Point:
    """What was measured of a choice, for the report."""
    space, plan = problem.space, problem.space.plan_of(choice)
    memory = space.bytes_of(plan) / space.original_bytes if space.original_bytes else 1.0
    attention = None if space.goal.by_memory else problem.share(choice)
    return Point(plan, problem.quality(choice), totals(problem.tables, choice)[0], memory, attention)


def _remarks(report: SearchReport, space: Space, obstacle: str) -> list[str]:
    """Sentences for people; `obstacle`: why nothing can be converted at all."""
    goal, verified, failed, found = report.goal, report.verified, report.failed, list[str]()
    if obstacle:
        found.append(f"Nothing can be converted: {obstacle}.")
    elif report.plan.converted and goal.by_memory:
        before, after = space.original_bytes, space.bytes_of(report.plan)
        usual = before * torch.bfloat16.itemsize / space.dtype.itemsize
        found.append(
            f"Decoding one text of {goal.length:,} tokens holds {after / 1e6:,.3g} MB in place of {before / 1e6:,.3g} "
            f"MB: {after / before:.1%} of the original's cache, {after / usual:.1%} of the same cache in bfloat16."
        )
    elif report.plan.converted:
        found.append(f"Attention takes {report.time_share:.1%} of the original's time at {goal.length:,} tokens.")
        found.append(f"The whole model takes {verified.time_share:.1%} at {verified.length:,} tokens.")
    elif failed:
        best = max(verdict.quality.retained for verdict in failed)
        found.append(
            f"The model stays as it was: on texts that the search never used, the best choice retains {best:.2%} of "
            f"the quality, and {goal.keep:.2%} was asked for. Ask for less, give more texts, or train it "
            "(Target(train=Distillation()))."
        )
    elif not report.reasons:
        found.append(f"Nothing is converted: at {goal.length:,} tokens nothing that meets the target costs less.")
    if failed and report.plan.converted:
        found.append(
            f"{len(failed)} of the choices failed verification; what comes after them was declared before, has to pass "
            "by its lower bound, and has a wider interval."
        )
    readable, longest = min(goal.length, report.positions or goal.length), max([verified.length, *report.further])
    if longest < readable:
        found.append(f"The texts held back have {longest:,} tokens only: give more of them to verify at {readable:,}.")
    keep = verified.quality.retained if goal.keep is None else goal.keep
    found += [
        f"Quality was judged at {verified.length:,} tokens; at {n:,} it is {longer.quality.retained:.2%}. Name a "
        "longer 'judge_length' if your texts are longer."
        for n, longer in report.further.items()
        if longer.quality.retained < keep
    ]
    return [*found, *goal.notes]


def _obstacle(model: Any, shapes: dict[str, Any]) -> str:
    """Why nothing of a model can be converted, of which it warns; "" if something can."""
    reasons = [shape.obstacle.reason for shape in shapes.values() if shape.obstacle is not None]
    if len(reasons) < len(shapes):
        return ""
    warnings.warn(
        f"Nothing of this {type(model).__name__} can be converted, it stays as it was: {reasons[0]}.",
        BochnerWarning,
        stacklevel=4,
    )
    return str(reasons[0])
