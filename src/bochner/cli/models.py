"""`bochner demo`, `bochner search`, `bochner convert`: pretrained models."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bochner._checks import ArgumentError, BochnerError
from bochner._progress import quietly
from bochner.cli.common import (
    KNOWN,
    Json,
    Threads,
    books,
    check_place,
    check_tokenizer,
    console,
    load,
    print_json,
    say,
    show,
    texts,
    use_threads,
)

LENGTHS = (512, 1024, 2048, 4096, 8192)  # that attention is timed at for a report
HELD_SHARE = 4  # one of so many passages validates the report of a recipe


def option(help: str, *names: str, panel: str | None = None, **limits: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **limits)


target = partial(option, panel="Target: a search chooses")
recipe = partial(option, panel="Recipe: you choose")
training = partial(option, panel="Training")
Keep = Annotated[float | None, target("quality target: the share of the quality to retain, such as 0.99")]
Memory = Annotated[float | None, target("memory target: the share of the decoder's cache to use, such as 0.1")]
Minimize = Annotated[str | None, target("with --keep, what to save: memory or time; by default what suits the model")]
Length = Annotated[int | None, target("tokens of the sequences you care about", min=1)]
JudgeLength = Annotated[int | None, target("with --keep: judge by texts of so many tokens; default --length", min=1)]
TextFile = Annotated[
    Path | None, option("a file of text as the model will read it, a passage a paragraph; default: books")
]
Passages = Annotated[int, option("how many passages of the text to use", min=1)]
ReportFile = Annotated[Path | None, option("write an HTML report to this file")]
Model = Annotated[str, typer.Argument(help="a directory with a transformers model, a GGUF file, minilm or smollm2")]


def demo(
    out: Annotated[Path, typer.Option(help="where to write the report")] = Path("bochner-demo.html"),
    quick: Annotated[bool, typer.Option("--quick", help="use less text")] = False,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Shrink the cache of a real language model to a tenth, and report what that costs.

    Example: `bochner demo --quick --out report.html`
    """
    from bochner import demo as demonstration
    from bochner.report import show as shown

    check_place(out, "--out")
    use_threads(threads)
    rows, path = demonstration.run(say, out, quick=quick)
    if as_json:
        table = [dict(zip(demonstration.HEAD, row, strict=True)) for row in rows]
        print_json({"table": table, "report": str(path)})
        return
    show(demonstration.HEAD, [[shown(cell) for cell in row] for row in rows])
    console.print(f"report: {path}", highlight=False)


def search(
    model: Model,
    text: TextFile = None,
    passages: Passages = 48,
    keep: Keep = None,
    memory: Memory = None,
    minimize: Minimize = None,
    length: Length = None,
    judge_length: JudgeLength = None,
    report: ReportFile = None,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Say whether a model is worth converting; change nothing.

    The search looks for the cheapest conversion that reaches the target: 99 % of the quality unless you say otherwise.
    It verifies the result on text that it did not use before. Times are those of this machine.

    Example: `bochner search my-model --text sample.txt --length 8192 --report found.html`
    """
    from bochner.hf.config import Calibration, Target
    from bochner.hf.conversion import convert as to_linear
    from bochner.hf.search import search as find

    goal = by_options(Target, keep, memory, minimize, length, judge_length)
    check_place(report, "--report")
    use_threads(threads)
    loaded, tokenizer, read, source = inputs(model, text, passages, memory)
    found = find(loaded, goal, Calibration(read, tokenizer), progress=not as_json)
    if report is not None:
        to_linear(loaded, found.plan)
        write_report(report, found, loaded, tokenizer, source, (model, "", str(text or "")))
    if as_json:
        print_json(found.to_dict())
    else:
        given = {"--text": text, "--keep": keep, "--memory": memory, "--minimize": minimize, "--length": length}
        print(in_commands(str(found), model, given | {"--judge-length": judge_length}))


def in_commands(said: str, model: str, given: dict[str, Any]) -> str:
    """What a search says, with the command that applies its plan in place of the call."""
    from bochner.hf.search.report import APPLY

    options = [part for name, x in given.items() if x is not None for part in (name, str(x))]
    return said.replace(APPLY, shlex.join(["bochner", "convert", model, "OUT", *options]))


def convert(
    model: Model,
    out: Annotated[Path, typer.Argument(help="where to save the converted model")],
    keep: Keep = None,
    memory: Memory = None,
    minimize: Minimize = None,
    length: Length = None,
    judge_length: JudgeLength = None,
    feature_map: Annotated[str, recipe("name of the feature map", "--feature-map", "--map")] = "auto",
    num_features: Annotated[
        int, recipe("features of every head; 0 for no kernel", "--num-features", "--features", min=0)
    ] = 64,
    window: Annotated[int, recipe("tokens around each query that stay exact; 0 for none", min=0)] = 0,
    sinks: Annotated[int, recipe("first tokens that stay exact (attention sinks)", min=0)] = 0,
    exact_heads: Annotated[float, recipe("share of the key heads that stay exact")] = 0.0,
    steps: Annotated[int, training("distillation steps of every layer; 0 for none", min=0)] = 0,
    lora: Annotated[int, training("rank of adapters to train and merge; 0 for none", min=0)] = 0,
    text: TextFile = None,
    passages: Passages = 48,
    report: ReportFile = None,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Convert a model and save it: to a target, or by a recipe.

    With --keep or --memory a search chooses for every head. Without them every head follows the recipe. With --steps
    or --lora the converted model is trained on the text.

    To a target: `bochner convert my-model out --keep 0.99 --length 8192`

    By a recipe: `bochner convert my-model out --features 64 --window 32 --sinks 1`
    """
    from bochner.hf.config import Calibration, Distillation, Recipe, Target
    from bochner.hf.conversion import convert as to_linear
    from bochner.hf.distill import distill

    use_threads(threads)
    # What can be refused is refused before anything is loaded or measured.
    spec: Any = None
    if keep is not None or memory is not None:
        recipe_only = {"--map": None if feature_map == "auto" else feature_map, "--exact-heads": exact_heads or None}
        recipe_only |= {"--window": window or None, "--sinks": sinks or None}
        refuse(recipe_only, "is chosen by the search; drop it, or drop --keep and --memory")
        spec = by_options(Target, keep, memory, minimize, length, judge_length)
    else:
        goal = {"--minimize": minimize, "--length": length, "--judge-length": judge_length}
        refuse(goal, "needs a target; give --keep or --memory too, as --keep 0.99")
        near = {"window": window or None, "sinks": sinks, "exact_heads": exact_heads}
        kernel = (feature_map, num_features) if num_features else (None,)
        spec = by_options(Recipe, *kernel, **near)
    by_recipe = isinstance(spec, Recipe)
    if str(out) in KNOWN:
        raise ArgumentError(
            f"The place to save to, {str(out)!r}, has the name of a built-in model, which the commands would take "
            f"instead of it; give another, as {str(out) + '-linear'!r}."
        )
    if out.is_file():
        raise BochnerError(f"The place to save to, {str(out)!r}, is a file; give a directory.")
    check_place(out / "config.json", "place to save to")
    check_place(report, "--report")
    loaded, tokenizer, found, source = inputs(model, text, passages, memory)
    how = held = None
    if steps or lora:
        loss = "model" if lora and type(loaded).__name__.endswith("ForCausalLM") else "outputs"
        how = Distillation(steps=steps or 60, lora=lora, loss=loss)
    if report is not None and by_recipe:
        found, held = hold_back(loaded, tokenizer, found, own=text is not None)
    calibration = Calibration(found, tokenizer)
    conversion = to_linear(loaded, spec if by_recipe else replace(spec, train=how), calibration, progress=not as_json)
    if how is not None and by_recipe:
        distill(loaded, calibration, how, progress=not as_json)
    plan, searched = conversion.plan, conversion.report
    save(loaded, tokenizer, out)
    if report is not None:
        write_report(report, searched or held, loaded, tokenizer, source, (model, str(out), str(text or "")))
    if as_json:
        print_json(
            {
                "plan": plan.to_dict(),
                "calibration": source,
                "saved": str(out),
                "target": searched and searched.to_dict(),
            }
        )
        return
    console.print(str(plan), highlight=False, soft_wrap=True)
    console.print(f"calibrated on {len(found)} passages of {source}", highlight=False)
    console.print(f"saved to {out}; import bochner.hf before from_pretrained", highlight=False)


def inputs(model: str, text: Path | None, passages: int, memory: float | None) -> tuple[Any, Any, list[str], str]:
    """The model, its tokenizer, passages, and what these are; refused where they do not belong together."""
    found, source = texts(text, passages)
    loaded, tokenizer = load(model)
    check_tokenizer(loaded, tokenizer, found)
    if memory is not None and not loaded.can_generate():
        raise ArgumentError(f"The --memory is that of decoding, and {model!r} does not decode: give --keep instead.")
    return loaded, tokenizer, found, source


def by_options(config: Any, *settings: Any, **more: Any) -> Any:
    """A Target or Recipe of what the options say; what is refused is told by the names of the options."""
    try:
        return config(*settings, **more)
    except BochnerError as error:
        named = r"'(\w+)' of (?:Target|Recipe)"
        raise ArgumentError(re.sub(named, lambda m: "--" + m[1].replace("_", "-"), str(error))) from None


def refuse(options: dict[str, Any], why: str) -> None:
    """Refuse the options that were given: silently ignored, they would mislead."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(f"The option {name} {why}.")


def hold_back(model: Any, tokenizer: Any, found: list[str], *, own: bool) -> tuple[list[str], Any]:
    """Calibration texts, and validation texts with the original's answers, for the report of a recipe.

    Of the user's `own` passages every fourth validates; for the books there are others.
    """
    from bochner.report.model import Held

    if not own:
        return found, Held(model, tokenizer, books("heldout", 12)[0])
    held = found[HELD_SHARE - 1 :: HELD_SHARE]
    if not held:
        raise BochnerError(
            f"The --report needs validation texts: {len(found)} passages were given, {HELD_SHARE} are the least; give "
            "more, parted by empty lines."
        )
    say(f"{len(held)} of {len(found)} passages are validation texts for the report")
    rest = [text for i, text in enumerate(found) if i % HELD_SHARE != HELD_SHARE - 1]
    return rest, Held(model, tokenizer, held)


def write_report(path: Path, found: Any, model: Any, tokenizer: Any, source: str, place: tuple[str, str, str]) -> None:
    """The page of a converted model. `found`: a search's report, or the validation texts of a recipe.

    `place`: the model's name, where it was saved, and the file of the text.
    """
    from bochner.hf.conversion import Conversion
    from bochner.hf.inputs import positions
    from bochner.report.cost import layer_times, typical_layer
    from bochner.report.model import Held, Place, head_pictures, recipe_page, target_page

    title = f"{Path(place[0]).name} with linear attention"
    plan = Conversion.of(model).plan if isinstance(found, Held) else found.plan
    pictures = head_pictures(model, tokenizer, books("heldout", 1)[0][0]) if plan.converted else None
    shown: dict[str, Any] = {"pictures": pictures, "source": source}
    where = Place(*place, loader=type(model).__name__)
    if isinstance(found, Held):
        most = positions(model).get("input_ids")
        lengths = sorted({*LENGTHS[:-1], min(most or LENGTHS[-2], LENGTHS[-2])})
        times = layer_times(typical_layer(plan), lengths)
        page = recipe_page(title, plan, found.quality(model), found, times, where, positions=most, **shown)
    else:
        lengths = [n for n in LENGTHS if n <= 2 * max(found.goal.length, 1024)]
        page = target_page(title, found, times=layer_times(typical_layer(plan), lengths), place=where, **shown)
    say(f"report: {page.save(path)}")


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write elsewhere and move into place at the end: what is stopped half way leaves nothing half written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as tmp:
        with quietly():
            model.save_pretrained(tmp)
            tokenizer.save_pretrained(tmp)
        out.mkdir(exist_ok=True)
        for file in sorted(Path(tmp).iterdir()):
            os.replace(file, out / file.name)
