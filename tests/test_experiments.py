"""Experiments: the runner, results that know their sources, verdicts with evidence, and the gallery."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
TOOLS = ("gallery", "pictures", "run")
SCRIPTS = [p for folder in ("experiments", "benchmarks", "examples") for p in sorted((ROOT / folder).glob("*.py"))]
DECLARED = '''"""{first}"""
from pathlib import Path

from _framework import Said, Store, experiment

from bochner.theory import rank


@experiment(claim="It holds.", {items} quick={quick})
def measure(store: Store, number: int = 3) -> None:
    with (Path(__file__).parent / "{name}.runs").open("a") as file:
        file.write(f"{{number}}\\n")
    {body}
    store.cell("value", lambda: rank.times_one(number))


def judge(found):
    return Said(f"value {{found['value']}}", {verdict})
'''


LIBRARY = '''"""A library of one module."""
from dataclasses import dataclass
from functools import wraps


def kept(f):
    @wraps(f)
    def inner(x):
        return f(x)

    return inner


def table(size):
    return tuple(cell(i) for i in range(size))


def cell(i):
    return float(i)


class Base:
    factor = 1


@dataclass
class Size(Base):
    """What is multiplied by."""

    unit: int = 1

    def times(self, x):
        return self.unit * self.factor * x

    def never(self):
        return OTHER


class Limit:
    most = 100


ONES = table(2)
OTHER = 5


@kept
def times_one(x):
    # A comment.
    x = min(x, Limit.most)
    product = Size().times(x)
    return int(product * ONES[1])


def unused(x):
    return x
'''


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("_framework")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the runner with three experiments: one that holds, one that does not, one that breaks."""
    home = tmp_path / "experiments"
    (home / "results").mkdir(parents=True)
    for name in ("_framework", "_pictures", "_sources", "run"):
        (home / f"{name}.py").write_text((EXPERIMENTS / f"{name}.py").read_text())
    library = tmp_path / "src" / "bochner"
    (library / "theory").mkdir(parents=True)
    (library / "__init__.py").write_text("")
    (library / "theory" / "__init__.py").write_text("from . import rank\n")
    (library / "theory" / "rank.py").write_text(LIBRARY)
    ours = {"items": "", "verdict": '"holds"', "body": ""}
    declare(home, "holds", **ours, quick='{"number": 1}')
    paper = {"items": 'items=("003 Figure 1",),', "body": ""}
    declare(home, "fails", **paper, quick='"takes hours"', verdict='"not", "for a reason"')
    declare(home, "breaks", **{**ours, "body": "raise ZeroDivisionError"}, quick="{}")
    return home


def declare(home: Path, name: str, **parts: str) -> None:
    (home / f"{name}.py").write_text(DECLARED.format(first=name.title(), name=name, **parts))


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(home / "run.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(home.parent / "src")}
    )


def runs(home: Path, name: str) -> list[str]:
    file = home / f"{name}.runs"
    return file.read_text().split() if file.exists() else []


def test_a_typo_is_refused_and_help_runs_nothing(folder: Path) -> None:
    assert "unknown experiment typo; there are breaks, fails, holds" in run(folder, "typo").stderr
    assert run(folder, "typo").returncode == 2
    assert "--resume" in run(folder, "--help").stdout
    assert "number=3" in run(folder, "--list").stdout
    said = run(folder, "holds", "--set", "nummer=1")
    assert "holds has no option 'nummer'; it has number" in said.stderr
    assert not any(runs(folder, n) for n in ("holds", "fails", "breaks"))


def edit(home: Path, before: str, after: str) -> None:
    """A change of the library of the fixture."""
    source = home.parent / "src" / "bochner" / "theory" / "rank.py"
    assert before in source.read_text()
    source.write_text(source.read_text().replace(before, after))


def test_what_is_up_to_date_is_not_run_again_until_a_source_changes(folder: Path) -> None:
    first = run(folder)
    assert first.returncode == 1
    assert "broke down: breaks" in first.stdout
    assert [len(runs(folder, n)) for n in ("holds", "fails", "breaks")] == [1, 1, 1]
    run(folder)
    assert [len(runs(folder, n)) for n in ("holds", "fails", "breaks")] == [1, 1, 2]
    edit(folder, "self.unit * self.factor * x", "self.factor * self.unit * x")
    assert "stale: bochner.theory.rank.Size.times\n" in run(folder, "--status").stdout
    assert len(runs(folder, "holds")) == 1  # stale is reported; nothing was measured
    run(folder)
    assert len(runs(folder, "holds")) == 2
    assert "stale" not in run(folder, "--status").stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""A library of one module."""', '"""Another."""\n\n'),
        ('"""What is multiplied by."""', '"""The factor."""'),
        ("    # A comment.\n", ""),
        (
            "    product = Size().times(x)\n    return int(product * ONES[1])",
            "    y = Size().times( x )\n    return int(y*ONES[1])",
        ),
        ("def times(self, x):", "def times(self, x: int) -> int:"),
        ("def unused(x):\n    return x", "def unused(x):\n    return -x"),
        ("return OTHER", "return -OTHER"),
        ("OTHER = 5", "OTHER = 6\nMORE = 7"),
    ],
)
def test_an_edit_that_no_figure_depends_on_leaves_a_result_fresh(folder: Path, before: str, after: str) -> None:
    run(folder, "holds")
    edit(folder, before, after)
    assert "stale" not in run(folder, "--status", "holds").stdout


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ("    product = Size().times(x)", "    product = Size().times(x) + 0", "times_one"),
        ("unit: int = 1", "unit: int = 2", "Size.times"),  # a field of a class that a function makes
        ("factor = 1", "factor = 2", "Size.times"),  # and of its base
        ("most = 100", "most = 101", "times_one"),  # the body of a class that has no methods
        ("ONES = table(2)", "ONES = table(3)", "times_one"),  # a constant that a function names
        ("for i in range(size)", "for i in reversed(range(size))", "times_one"),  # what the constant is made by
        ("return float(i)", "return float(i * i)", "times_one"),
        ("        return f(x)", "        return f(x + 1)", "kept"),  # a function in another
        ("def times_one", "def times_one(x):\n    return x\n\n\ndef times_two", "times_one"),
    ],
)
def test_a_change_of_what_was_executed_or_named_makes_a_result_stale(
    folder: Path, before: str, after: str, where: str
) -> None:
    run(folder, "holds")
    edit(folder, before, after)
    said = run(folder, "--status", "holds").stdout
    assert "1 of 1 results are older" in said
    assert f"bochner.theory.rank.{where}" in said


def test_a_result_without_its_functions_is_stale_and_what_other_processes_run_counts_as_a_whole(folder: Path) -> None:
    run(folder, "holds")
    path = folder / "results" / "holds.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "made": {"options": {}, "sources": {"bochner.theory": "0123456789ab"}}}))
    assert "made before functions were recorded" in run(folder, "--status", "holds").stdout
    experiment = folder / "holds.py"
    declared = 'claim="It holds.", sources=("bochner.theory",),'
    experiment.write_text(experiment.read_text().replace('claim="It holds.",', declared))
    run(folder, "holds")
    edit(folder, "# A comment.", "# Another.")
    assert "stale" not in run(folder, "--status", "holds").stdout
    edit(folder, "return OTHER", "return -OTHER")
    assert "stale: bochner.theory.*" in run(folder, "--status", "holds").stdout


def test_a_change_of_the_judgement_is_no_change_of_the_figures(folder: Path) -> None:
    run(folder, "holds")
    path = folder / "holds.py"
    path.write_text(path.read_text().replace("value {found", "the value is {found"))
    assert "stale" not in run(folder, "--status", "holds").stdout
    assert "ours: the value is 3" in run(folder, "holds", "--judge").stdout
    path.write_text(path.read_text().replace('claim="It holds."', 'claim="It holds, says one."'))
    assert "stale" not in run(folder, "--status", "holds").stdout
    path.write_text(path.read_text().replace("times_one(number)", "times_one(number + 1)"))
    assert "stale: holds.measure" in run(folder, "--status", "holds").stdout


def test_quick_runs_small_forms_elsewhere_and_says_what_it_leaves_out(folder: Path) -> None:
    (folder / "breaks.py").unlink()
    done = run(folder, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs(folder, "holds") == ["1"]
    assert "left out, fails: takes hours" in done.stdout
    assert list((folder / "results").iterdir()) == []
    small = folder.parent / ".quick/experiments/results/holds.json"
    assert json.loads(small.read_text())["figures"] == {"value": 1}
    assert re.search(r"^1 experiments +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert "up to date: holds" in run(folder, "--quick").stdout
    assert runs(folder, "holds") == ["1"]  # a run that was stopped goes on behind what is done
    edit(folder, "self.unit * self.factor * x", "self.factor * self.unit * x")
    run(folder, "--quick")
    (folder / "holds.py").write_text((folder / "holds.py").read_text().replace('{"number": 1}', '{"number": 2}'))
    run(folder, "--quick")
    assert runs(folder, "holds") == ["1", "1", "2"]


def test_options_and_resuming(folder: Path) -> None:
    run(folder, "holds", "--set", "number=7")
    result = json.loads((folder / "results" / "holds.json").read_text())
    assert result["figures"] == {"value": 7}
    assert result["made"]["options"] == {"number": 7}
    assert result["said"]["verdict"] == "holds"
    run(folder, "holds", "--resume")  # the figure is there
    assert json.loads((folder / "results" / "holds.json").read_text())["figures"] == {"value": 7}
    run(folder, "holds")
    assert json.loads((folder / "results" / "holds.json").read_text())["figures"] == {"value": 3}


@pytest.mark.parametrize(
    ("options", "change", "measured"),
    [((), "", "3"), (("--set", "number=4"), "", "4"), ((), "OTHER = 5", "3"), ((), "return float(i)", "changed")],
)
def test_a_stopped_run_goes_on_unless_its_code_or_options_have_changed(
    folder: Path, options: tuple[str, ...], change: str, measured: str
) -> None:
    body = "store.cell('first', lambda: (folder / 'now').read_text() + str(rank.times_one(number)))\n"
    body = f"folder = Path(__file__).parent\n    {body}    if (folder / 'stop').exists(): raise KeyboardInterrupt"
    declare(folder, "holds", items="", verdict='"holds"', body=body, quick="{}")
    (folder / "stop").touch()
    (folder / "now").write_text("before ")
    run(folder, "holds")
    (folder / "stop").unlink()
    (folder / "now").write_text("after ")
    if change:
        edit(folder, change, change + " + 0")
    run(folder, "holds", *options)
    found = json.loads((folder / "results" / "holds.json").read_text())["figures"]["first"]
    assert found == ("before 3" if measured == "3" else f"after {4 if measured == '4' else 3}")


def test_figures_kept_by_resuming_stay_as_old_as_they_are(folder: Path) -> None:
    run(folder, "holds")
    edit(folder, "ONES = table(2)", "ONES = table(3)")
    run(folder, "holds", "--resume")
    assert "stale: bochner.theory.rank.times_one" in run(folder, "--status", "holds").stdout


def test_a_claim_that_is_known_to_fail_is_no_failure_of_a_run(folder: Path) -> None:
    assert run(folder, "fails").returncode == 0  # the first run is what is known from then on
    declare(folder, "holds", items="", quick="{}", body="", verdict='"fails", "it changed"')
    (folder / "results" / "holds.json").write_text('{"said": {"verdict": "holds"}, "made": {"sources": {}}}')
    done = run(folder, "--quick", "holds")
    assert done.returncode == 1
    assert "fail, though the gallery says they do not: holds" in done.stdout


def test_a_verdict_of_the_wrong_kind_or_without_a_reason_is_refused(folder: Path) -> None:
    for verdict in ('"reproduced"', '"fails"'):
        declare(folder, "holds", items="", quick="{}", body="", verdict=verdict)
        assert "the verdict must be one of ('holds', 'fails')" in run(folder, "holds").stderr


def test_verdicts_name_the_parts_that_fail_and_a_good_one_has_no_reason(folder: Path, framework: ModuleType) -> None:
    assert [framework.graded(*x) for x in ((1, 1), (0, 2), (0,))] == ["reproduced", "partly", "not"]
    assert [framework.kept(x) for x in (True, 0)] == ["holds", "fails"]
    assert framework.missed({"a": 1, "b": 0, "c": False}) == "not: b; not: c"
    declare(folder, "holds", items="", quick="{}", body="", verdict='"holds", "a reason"')
    run(folder, "holds")
    assert json.loads((folder / "results" / "holds.json").read_text())["said"]["why"] == ""


def gallery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("gallery")


def test_every_figure_and_table_of_the_papers_has_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    papers = {p.key: p for p in gallery(monkeypatch).PAPERS}
    counts = {"001": (11, 5), "002": (4, 0), "003": (20, 2), "004": (6, 7)}
    for key, (figures, tables) in counts.items():
        labels = [item.label for item in papers[key].items]
        for kind, count in (("Figure", figures), ("Table", tables)):
            missing = [n for n in range(1, count + 1) if not any(x.split(",")[0] == f"{kind} {n}" for x in labels)]
            assert missing == [], f"{kind} of {key}"
    theorems = " ".join(item.label for p in papers.values() for item in p.items)
    for wanted in ("Theorems 3.1", "Theorem 3.5", "Theorem 1.1", "Theorem 4", "Lemmas 1, 2", "Theorems 2, 6"):
        assert wanted in theorems


def test_what_a_run_would_take_rests_on_a_stored_time(monkeypatch: pytest.MonkeyPatch, framework: ModuleType) -> None:
    """Items that were not tried for their cost: seconds of a step, scaled up to the run that the paper made."""
    step = {n: t["positive"] for n, t in framework.figures_of("train_speed")["papers"]["regular"].items()}
    untried = {i.label: i.why for p in gallery(monkeypatch).PAPERS for i in p.items if i.verdict == "not tried"}
    days = 24 * 3600
    for item, length, told, taken, close in (
        ("Figure 6", "1024", "eleven days", 36 / 6 * 1e5 * step["1024"] / days, 11),
        ("Figure 7", "4096", "two weeks", 2 * 1e5 * step["4096"] / days, 14),
    ):
        assert f"{step[length]:.1f} s" in untried[item]
        assert told in untried[item]
        assert taken == pytest.approx(close, rel=0.15)


def unfounded(item: Any, tests: set[str], results: set[str]) -> str:
    """Why an item's verdict has no evidence; empty if it has."""
    if item.verdict == "not tried":
        return (
            "" if item.why and not item.experiment and not item.tests else "not tried needs a reason and nothing else"
        )
    if item.experiment and item.experiment not in results:
        return f"no stored result of {item.experiment}"
    if not item.experiment and not item.tests:
        return "neither an experiment nor a test"
    if set(item.tests) - tests:
        return f"no such test: {sorted(set(item.tests) - tests)}"
    if item.verdict not in ("", "reproduced") and not item.why:
        return "no reason"
    return "" if item.baseline else "no baseline"


def known_tests() -> set[str]:
    return {t for p in (ROOT / "tests").glob("test_*.py") for t in re.findall(r"^def (test_\w+)", p.read_text(), re.M)}


def test_no_verdict_without_stored_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    module = gallery(monkeypatch)
    results = {p.stem for p in (EXPERIMENTS / "results").glob("*.json")}
    for paper in module.PAPERS:
        for item in paper.items:
            assert unfounded(item, known_tests(), results) == "", f"{paper.key} {item.label}"
            verdict, why = module.verdict_of(item)
            assert verdict in module.ORDER
            assert why or verdict == "reproduced", f"{paper.key} {item.label}"
            assert verdict == "not tried" or all(module.sizes_of(item)), f"{paper.key} {item.label}: no sizes"
            assert not item.page or (ROOT / "docs" / item.page).exists(), item.page


def test_planted_verdicts_without_evidence_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = gallery(monkeypatch).Item
    tests, results = {"test_a"}, {"some"}
    assert unfounded(make("Figure 1", "x", "some", baseline="b"), tests, results) == ""
    for bad in (
        make("Figure 1", "x", verdict="reproduced", baseline="b"),
        make("Figure 1", "x", "other", baseline="b"),
        make("Figure 1", "x", "some"),
        make("Figure 1", "x", verdict="reproduced", tests=("test_b",), baseline="b"),
        make("Figure 1", "x", verdict="not", tests=("test_a",), baseline="b"),
        make("Figure 1", "x", verdict="not tried"),
    ):
        assert unfounded(bad, tests, results) != "", bad


def test_every_experiment_is_declared_indexed_and_judged_from_its_stored_figures(
    framework: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gallery(monkeypatch)
    scripts = {p.stem for p in EXPERIMENTS.glob("[!_]*.py")} - {*TOOLS}
    assert scripts == set(framework.names())
    indexed = {item.experiment for p in module.PAPERS for item in p.items if item.experiment}
    assert scripts == indexed | set(module.BEYOND)
    assert not indexed & set(module.BEYOND)
    for name in sorted(scripts):
        try:
            declared = framework.load(name)
        except ImportError:
            continue
        result = framework.stored(name)
        assert result["experiment"] == name
        assert result["claim"] == declared.claim, f"run experiments/run.py {name} --judge"
        assert result["said"] == declared.judge(result["figures"])._asdict(), f"run experiments/run.py {name} --judge"
        assert isinstance(declared.quick, dict) or declared.quick
        assert bool(declared.items) == (name in indexed)
        served = {f"{p.key} {i.label}" for p in module.PAPERS for i in p.items if i.experiment == name}
        assert set(declared.items) == served, name


def test_every_declared_source_exists(framework: ModuleType) -> None:
    for name in framework.names():
        try:
            declared = framework.load(name)
        except ImportError:
            continue
        assert all(importlib.util.find_spec(m) for m in declared.sources), name


def test_limits_and_own_verdicts_of_an_item_are_stronger_than_its_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    module = gallery(monkeypatch)
    said = {"verdict": "reproduced", "why": ""}
    monkeypatch.setattr(module, "result_of", lambda name: {"said": said, "paper": "p", "ours": "o"})
    make = module.Item
    assert module.verdict_of(make("F", "x", "some")) == ("reproduced", "")
    assert module.verdict_of(make("F", "x", "some", limits="one layer")) == ("partly", "one layer")
    assert module.verdict_of(make("F", "x", "some", "not", "because")) == ("not", "because")
    said |= {"verdict": "not", "why": "it fails"}
    assert module.verdict_of(make("F", "x", "some", limits="one layer")) == ("not", "one layer; it fails")
    monkeypatch.setattr(module, "result_of", lambda name: None)
    assert module.verdict_of(make("F", "x", "some"))[0] == "not tried"


def test_named_figures_are_shown_as_a_table_and_clauses_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "time: exact 9 ms, m = 8 4 ms, relu 5 ms; memory: exact 1 MB, m = 8 2 MB, relu 3 MB; m = 2 wins. It is 3, 4."
    lines = [line for line in gallery(monkeypatch).findings(said) if line]
    table = ["|  | time | memory |", "| --- | --- | --- |", "| exact | 9 ms | 1 MB |", "| m = 8 | 4 ms | 2 MB |"]
    assert lines == [*table, "| relu | 5 ms | 3 MB |", "- m = 2 wins.", "- It is 3, 4."]
    framework = importlib.import_module("_framework")
    told = "what follows:" + framework.table({"a": {"x": "1", "y": "2"}}, "name") + "it ends"
    assert gallery(monkeypatch).findings(told) == [
        *("- What follows:", "", "| name | x | y |\n| --- | --- | --- |\n| a | 1 | 2 |", "", "- It ends.")
    ]
    half = "novel: 1.01 of exact, recall -0.3 % at 500, -3.5 % at 2,000, -8.7 % at 3,500."
    assert gallery(monkeypatch).findings(half) == [f"- N{half[1:]}"]  # no names, and no table


def test_the_pages_have_one_section_for_every_experiment_and_are_what_the_results_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = gallery(monkeypatch)
    pages = module.pages()
    for paper in module.PAPERS:
        own = pages[f"gallery-{paper.key}.md"]
        for item in paper.items:
            assert f"| {item.label} |" in own
            if item.experiment:
                home = re.search(rf"\[result\]\(([\w.-]+)#{item.experiment}\)", own)
                assert home is not None
                assert [n for n, t in pages.items() if f'<a id="{item.experiment}"></a>' in t] == [home[1]]
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run experiments/gallery.py"
    summary = module.summary(module.Counter({"reproduced": 3, "not": 1}))
    assert summary.startswith("Of 4 items of the papers: 3 reproduced, 0 partly, 1 not, 0 not tested, 0 not tried.")


def test_every_experiment_has_its_pictures_and_none_is_older_than_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    module = gallery(monkeypatch)
    pictures = importlib.import_module("_pictures")
    drawn = json.loads((ROOT / "docs" / "images" / "gallery" / "drawn.json").read_text())
    for name in importlib.import_module("_framework").names():
        draws = "\ndef draw(" in (EXPERIMENTS / f"{name}.py").read_text(encoding="utf-8")
        wanted = module.PICTURES.get(name, (name,) if draws else ())
        assert module.pictures(name) == list(wanted), name
    stale = [picture for picture, entry in drawn.items() if pictures.digest(entry["results"]) != entry["sha256"]]
    assert stale == [], f"run python experiments/run.py NAME --draw for {stale}"


def test_pictures_are_drawn_from_stored_figures_alone(tmp_path: Path, framework: ModuleType, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    pictures = importlib.import_module("_pictures")
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    for name in ("clustered_table", "projection_bias", "turing_machine", "softmax_metrics"):
        framework.draw(framework.load(name))
    assert {"clustered_table", "projection_bias", "turing_machine", "softmax_metrics", "softmax_lengths"} == set(
        json.loads((tmp_path / "drawn.json").read_text())
    )


FAST = ("angular_limits", "attention_output_error", "gaussian_coefficients", "hybrid_surface", "iterated_bernstein")
FAST += ("kernel_complexity", "massive_pairs", "positive_variance")


@pytest.mark.parametrize("name", FAST)
def test_a_small_form_runs_and_says_no_worse_than_the_stored_result(
    name: str, tmp_path: Path, framework: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    before = framework.stored(name)["said"]["verdict"]
    monkeypatch.setattr(framework, "RESULTS", tmp_path)
    monkeypatch.setattr(importlib.import_module("_pictures"), "IMAGES", tmp_path)
    declared = framework.load(name)
    said = framework.run(declared, dict(declared.quick))
    assert said.verdict in framework.GOOD or before not in framework.GOOD, said
    assert json.loads((tmp_path / f"{name}.json").read_text())["made"]["options"] == json.loads(
        json.dumps(declared.quick)
    )


# Experiments whose arithmetic is their own.


def naive_ratios(kernel: np.ndarray, first: int) -> np.ndarray:
    rows = []
    for i in range(first, kernel.shape[-1] + 1):
        entries = -np.sort(-kernel[:, :i, :i].reshape(len(kernel), -1), axis=1)
        rows.append(entries[:, i:].sum(1) / entries[:, :i].sum(1))
    return np.stack(rows, 1)


@pytest.mark.parametrize("shift", [0.0, -40.0, -300.0, 500.0])
def test_prefix_ratios_have_no_scale(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    """A kernel of any size has the ratios of its shape: a matrix far below 1 is not one of equal entries."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("sparsity_prefixes")
    log = np.random.default_rng(0).normal(scale=4.0, size=(3, 70, 70))
    found = module.prefix_ratios(log + shift)
    wanted = naive_ratios(np.exp(log - log.max()), module.FIRST)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0.02)
    np.testing.assert_allclose(found, module.prefix_ratios(log), rtol=1e-6)
    assert found.max() < 20  # equal entries would have 69


def test_neighbouring_entries_are_those_of_the_sorted_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("sparsity_prefixes")
    log = np.random.default_rng(1).normal(size=(2, 20, 20))
    following, double = module.neighbour_ratios(log - 200)
    entries = -np.sort(-log.reshape(2, -1), axis=1)
    np.testing.assert_allclose(following, np.exp(entries[:, 19] - entries[:, 20]))
    np.testing.assert_allclose(double, np.exp(entries[:, 19] - entries[:, 39]))


def test_the_clusters_are_those_that_the_paper_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("clustered_table")
    for spread, wanted in module.DATA.values():
        q, k, reached = module.data(spread, wanted)
        assert q.shape == k.shape == (2 * module.ROWS, module.DIM)
        torch.testing.assert_close(q.norm(dim=-1), torch.full((2 * module.ROWS,), module.LENGTH, dtype=torch.float64))
        np.testing.assert_allclose(reached, wanted, atol=0.01)
        centres = torch.stack([t[i : i + module.ROWS].mean(0) for t in (q, k) for i in (0, module.ROWS)])
        np.testing.assert_allclose(module.losses(centres).tolist(), wanted, atol=0.02)
    assert type(module.maps(4, q, k)[module.FAVOR]).__name__ == "HyperbolicFeatures"


def test_the_points_of_the_product_have_the_tail_they_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("kernel_product_time")
    found = {kind: module.shares(make(1024)) for kind, make in module.POINTS.items()}
    assert 1 < found["tail"]["tail over head"] < 4
    assert found["tail"]["light"] > 0.5
    assert found["clusters"]["light"] < 0.02


def test_verdicts_say_what_the_figures_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    sampled = importlib.import_module("sampled_softmax")
    losses = {"exact": 6.0, "tree": 6.1, "uniform": 9.0}
    for paper, verdict in ((6.05, "reproduced"), (8.0, "partly"), (9.5, "not")):
        runs = {f"{k}/0": {"loss": v} for k, v in {**losses, "trig, as the paper": paper}.items()}
        found = {"sizes": {"small": {"steps": 500}, "paper": {"steps": 5200}}, "runs": runs}
        assert sampled.judge(found).verdict == verdict
        found["runs at the paper's sizes"] = runs | {"trig, as the paper/0": {"loss": 9.5}}
        assert sampled.judge(found).verdict == "not"  # the paper's sizes decide
    policies = importlib.util.find_spec("cma") and importlib.import_module("attention_policies")
    for solved, verdict in ((0.36, "not"), (0.95, "partly")) if policies else ():
        found = {f"{n}/0": {"return": solved, "solved": solved} for n in policies.attentions(0)}
        assert policies.judge({"runs": found}).verdict == verdict


def test_the_ablations_of_the_landmark_fit_run_and_keep_what_they_have(
    monkeypatch: pytest.MonkeyPatch, framework: ModuleType
) -> None:
    """On a tiny random model with words for texts; what is there already is not measured again."""
    models = pytest.importorskip("transformers")
    ablations = importlib.import_module("landmark_ablations")
    torch.manual_seed(0)
    config = models.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    model = models.BertModel(config).eval()
    g = torch.Generator().manual_seed(0)
    texts = [" ".join(str(int(i)) for i in torch.randint(50, (160,), generator=g)) for _ in range(12)]

    def tokenizer(text: str, max_length: int, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()[:max_length]]])}

    monkeypatch.setattr(ablations.demo, "load_minilm", lambda: (model, tokenizer))
    monkeypatch.setattr(ablations.data, "paragraphs", lambda split, count: texts[:8] if count > 16 else texts[8:])
    monkeypatch.setattr(ablations, "reviews", lambda count, words: texts[10:])
    small = {n: v._replace(m=4, M=8, texts=8) for n, v in ablations.VARIANTS.items() if n in ("window", "positive")}
    monkeypatch.setattr(ablations, "VARIANTS", {**small, "as it is": ablations.Variant(m=4, M=8)})
    store = framework.Store("landmark_ablations")
    monkeypatch.setattr(store, "save", lambda: None)
    measure = framework.load("landmark_ablations").measure
    measure(store, layers=1, only="window")
    assert 0 < store.figures["window"]["other authors"] < 2
    assert 0 <= store.figures["in the stated interval"]["window"]["same books"] <= 1
    assert set(store.figures) == {"window", "in the stated interval"}
    monkeypatch.setattr(ablations, "run", None)  # nothing left to measure
    measure(store, layers=1, only="window")


# Names of the library, also those inside functions that no test calls.


def outdated(text: str) -> list[str]:
    """What a script asks of the library and the library does not have: names, and keywords of functions.

    A keyword that a function takes by `**old` is one of an earlier version.
    """
    tree, known, wrong = ast.parse(text), dict[str, Any](), list[str]()

    def imported(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "bochner":
                return None  # a package that is not installed here
            wrong.append(f"no module {name}")
            return None

    def resolved(node: ast.AST) -> Any:
        """What a dotted name stands for; None if that is not the library's, or known."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        owner = resolved(node.value) if isinstance(node, ast.Attribute) else None
        if not inspect.ismodule(owner):
            return None
        assert isinstance(node, ast.Attribute)
        if not hasattr(owner, node.attr):
            wrong.append(f"no {owner.__name__}.{node.attr}")
        return getattr(owner, node.attr, None)

    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in (a for a in node.names if a.name.split(".")[0] == "bochner"):
                module = imported(alias.name)
                known[alias.asname or "bochner"] = module if alias.asname else importlib.import_module("bochner")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bochner":
            module = imported(node.module or "")
            for alias in node.names if module is not None else ():
                if not hasattr(module, alias.name) and importlib.util.find_spec(f"{module.__name__}.{alias.name}"):
                    importlib.import_module(f"{module.__name__}.{alias.name}")
                if not hasattr(module, alias.name):
                    wrong.append(f"no {module.__name__}.{alias.name}")
                known[alias.asname or alias.name] = getattr(module, alias.name, None)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            resolved(node)
        elif isinstance(node, ast.Call) and callable(resolved(node.func)):
            wrong += [f"{ast.unparse(node.func)} has no {k}" for k in foreign(resolved(node.func), node.keywords)]
    return sorted(set(wrong))


def foreign(function: Any, keywords: list[ast.keyword]) -> list[str]:
    """Those keywords of a call that a function does not have."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    if any(p.kind is p.VAR_KEYWORD and p.name != "old" for p in parameters.values()):
        return []
    return [k.arg for k in keywords if k.arg is not None and k.arg not in parameters]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_name_and_keyword_that_a_script_asks_for_exists(path: Path) -> None:
    pytest.importorskip("transformers")
    assert outdated(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("from bochner.hf import plan_of", "no bochner.hf.plan_of"),
        ("def f():\n    from bochner.hf.judge import read", "no module bochner.hf.judge"),
        ("def f():\n    import bochner\n    bochner.maps.landmark_map()", "no bochner.maps.landmark_map"),
        ("import bochner.maps.landmark_fit as fit\nfit.NO_SUCH", "no bochner.maps.landmark_fit.NO_SUCH"),
        ("from bochner import convert\nconvert(1, calibration=[])", "convert has no calibration"),
        ("from bochner import Recipe\nRecipe(None, exact_unit='group')", "Recipe has no exact_unit"),
    ],
)
def test_planted_names_and_keywords_of_an_older_version_are_found(planted: str, found: str) -> None:
    pytest.importorskip("transformers")
    assert outdated(planted) == [found]
    assert outdated("import torch\nfrom bochner import Recipe, convert\nconvert(1, Recipe(None), seed=3)") == []


def test_reports_of_searches_are_read_in_the_form_of_this_version_and_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    searches = importlib.import_module("_searches")
    before = {"verified": {"kept": 0.98}, "candidates": [{"memory": 0.5, "kept": 0.9}]}
    now = {"verified": {"retained": 0.98}, "frontier": [{"memory": 0.5, "quality": {"retained": 0.9}}]}
    for report in (before, now):
        assert searches.search_of(report) == report
        assert searches.retained(report["verified"]) == 0.98
        assert searches.tried(report) == [(0.5, 0.9)]
    assert searches.search_of({"target": before, "distillation": None}) == before


@pytest.mark.parametrize("name", ["positive", "hyperbolic", "angular_hybrid", "gaussian_hybrid"])
def test_the_law_of_all_classes_is_that_of_a_tree_down_to_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from bochner import feature_map
    from bochner.sampling import FeatureTree

    classes = importlib.import_module("sampled_softmax").AllClasses
    g = torch.Generator().manual_seed(0)
    y, b, x = 0.3 * torch.randn(50, 64, generator=g), torch.randn(50, generator=g), torch.randn(7, 64, generator=g)
    split = {"num_coefficients": 4} if name.endswith("hybrid") else {}
    phi, ids = feature_map(name, 64, 32, projection="iid", **split), torch.arange(50).expand(7, -1)
    tree = FeatureTree(y, b, feature_map=phi, normalize=1.0, leaf_size=1)
    torch.testing.assert_close(classes(y, b, phi).log_prob(x, ids), tree.log_prob(x, ids), atol=1e-4, rtol=1e-4)
