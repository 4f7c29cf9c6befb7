"""Figures in the sentences of the pages are those of the stored results; tables are filled from them by a script."""

from __future__ import annotations

import importlib
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_style_of_pages import WRITTEN, prose

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NUMBER = r"([-+]?\d[\d,]*(?:\.\d+)?)"


def experiment(name: str) -> Any:
    return json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def benchmark(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def module(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / folder))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def page(name: str) -> str:
    path = ROOT / name if name == "README.md" else DOCS / name
    return " ".join(path.read_text(encoding="utf-8").split())


def agrees(printed: str, value: float) -> bool:
    """Whether a number is a value rounded to the digits that are printed; half a digit and a little of slack."""
    text = printed.replace(",", "").lstrip("+")
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.51 * 10.0**-digits


def find(name: str, pattern: str) -> re.Match[str]:
    found = re.search(re.escape(pattern).replace("N", NUMBER), page(name))
    assert found is not None, f"{name} does not say: {pattern}"
    return found


def check(name: str, pattern: str, values: Sequence[float]) -> None:
    """That a page says something, with N for every number, and that the numbers are these."""
    found = find(name, pattern)
    assert len(found.groups()) == len(values), pattern
    wrong = [(a, b) for a, b in zip(found.groups(), values, strict=True) if not agrees(a, b)]
    assert not wrong, f"{name}: {found[0]!r}; printed and stored: {wrong}"


def claim(what: str) -> float:
    (found,) = (c["value"] for c in benchmark("attention")["claims"] if c["what"] == what)
    return float(found)


def further(recipe: str) -> list[float]:
    return [100 * row[recipe] for row in experiment("further_models").values()]


def search_seconds() -> list[float]:
    decoder = [experiment("smollm_target")[n]["row"]["convert_seconds"] for n in ("512", "1000", "4000")]
    return [*decoder, *(row["seconds"] for row in experiment("further_models").values())]


def kernel_cases() -> list[float]:
    """Cases with faster products, all cases, the largest loss, and what `cells` would have gained."""
    parts = benchmark("matvec")["parts"]
    kinds = ("patches", "casp", "california", "colours", "covers", "rims", "words", "normal", "mixture")
    rows = [row for kind in kinds for row in parts[kind]]
    exact = [row for row in rows if row["method"] == "exact"]
    gain = max(1 - row["cells_s"] / row["exact_s"] for row in exact)
    return [len(rows) - len(exact), len(rows), 100 * max(row["ratio"] for row in rows) - 100, 100 * gain]


def clustered_share() -> list[float]:
    found = experiment("certified_heads")["clusters"]["0.01"]
    return [100 * found["visited"], 100 * found["time"]]


def certified_reach() -> list[float]:
    rows = experiment("certified_heads")["SmolLM2"]
    return [(rows["512/0.01"]["reach"] - rows["8192/0.01"]["reach"]) / 4]


def certified_nearer() -> list[float]:
    return [100 * experiment("certified_heads")["nearer"]["4"]["time"]]


FITTED = "window 32, sink, landmark m=64"
# What pages say, in words in which N stands for a number, and where the numbers are stored.
STATEMENTS: list[tuple[str, str, Callable[[], list[float]]]] = [
    (
        "how-it-works.md",
        "takes N times the floor at 16,384 tokens",
        lambda: [claim("bidirectional forward at 16,384, of the floor")],
    ),
    (
        "distil.md",
        "search and training took N minutes together",
        lambda: [experiment("smollm_distilled")["target"]["convert_seconds"] / 60],
    ),
    (
        "speed-up-an-encoder.md",
        "a window alone loses N to N % of the quality",
        lambda: [f(100 - x for x in further("window 32, sink")) for f in (min, max)],
    ),
    (
        "results-models.md",
        "The longest search took N minutes on one core, the shortest N seconds",
        lambda: [max(search_seconds()) / 60, min(search_seconds())],
    ),
    (
        "results-models.md",
        "At N tokens the plan holds N % of the same cache in bfloat16",
        lambda: [4000, 200 * experiment("smollm_target")["4000"]["row"]["memory"]],
    ),
    (
        "speed-up-an-encoder.md",
        "transcript of N words, so one word is N %",
        lambda: [experiment("speech_encoder")[FITTED]["words"], 100 / experiment("speech_encoder")[FITTED]["words"]],
    ),
    (
        "results-kernels.md",
        "another method is faster in N of N cases. In the others `auto` takes up to N % longer. The methods that it "
        "left out would have gained at most N %",
        kernel_cases,
    ),
    ("certificates.md", "it visits N % of the pairs, in N % of the time of exact attention", clustered_share),
    ("certificates.md", "falls by N with each doubling", certified_reach),
    ("certificates.md", "With keys four times nearer it takes N % of the time", certified_nearer),
    (
        "results-kernels.md",
        "The median ratio of tail to head is N",
        lambda: [statistics.median(experiment("sparsity_prefixes")["models"]["smollm2"]["heads"])],
    ),
    (
        "results-attention.md",
        "gives N % of the protein letters",
        lambda: [100 * experiment("train_baselines")["protein"]["copying"]],
    ),
]
# Figures that are settings or definitions and not measurements, by page.
SETTINGS = {
    "README.md": {"99 %", "3.10", "2.0"},
    "results-attention.md": {"25 %", "0.1"},
    "which-map.md": {"95 %"},
    "install.md": {"3.10", "0.1"},
    "certificates.md": {"0.01"},
    "encoder-decoders.md": {"2.0"},
    "errata.md": {"1.1", "1.2", "2.2", "3.2", "3.5", "4.1", "4.2"},  # numbers of theorems and sections
}


@pytest.mark.parametrize(
    ("name", "pattern", "stored"), STATEMENTS, ids=[f"{p}: {text[:30]}" for p, text, _ in STATEMENTS]
)
def test_a_statement_is_what_is_stored(name: str, pattern: str, stored: Callable[[], list[float]]) -> None:
    check(name, pattern, stored())


def measured(text: str) -> list[str]:
    """Figures in sentences that look like measurements: decimals, percentages and factors."""
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+| %|x\b|\.\d+ %)", text)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda p: p.name)
def test_every_measurement_in_a_sentence_is_tied_to_a_result(path: Path) -> None:
    text = " ".join(prose(path.read_text(encoding="utf-8")).split())
    for name, pattern, _ in STATEMENTS:
        if name == path.name:
            text = text.replace(prose(find(name, pattern)[0]), "")
    assert [x for x in measured(text) if x not in SETTINGS.get(path.name, set())] == []


def test_a_wrong_number_would_be_seen() -> None:
    assert agrees("0.81", 0.8149)
    assert agrees("1,868", 1867.9)
    assert not agrees("0.81", 0.798)
    assert not agrees("684", 685.2)
    with pytest.raises(AssertionError, match="printed and stored"):
        check("distil.md", "search and training took N minutes together", [0.5])
    with pytest.raises(AssertionError, match="does not say"):
        check("distil.md", "search and training took N hours together", [0.5])
    assert measured("It takes 0.55x, 12 % or 1.34 of 4,000 tokens.") == ["0.55", "12 %", "1.34"]


# What pages say in words


def test_a_fitted_map_halves_the_error_with_an_eighth_of_the_features() -> None:
    assert "halves the error with an eighth of the features" in page("which-map.md")
    case = experiment("landmark_frontier")["minilm"]
    assert case["landmark"]["16"] < 0.52 * case["FAVOR+"]["128"]
    assert "is about a tenth closer" in page("which-map.md")
    closer = [1 - case["landmark, signed"][m] / case["landmark"][m] for m in ("16", "32", "64", "128")]
    assert all(0.05 < x < 0.15 for x in closer)


def test_the_crossover_of_a_small_encoder_lies_where_the_page_says() -> None:
    assert "400 to 800 tokens" in page("does-it-pay.md")
    for shape in ("encoder, landmark 16", "encoder, landmark 64"):
        cases = [c for c in benchmark("windows")["windows"] if c["shape"] == shape]
        lengths = [math.log(c["length"]) for c in cases]
        ratios = [math.log(c["seconds"]["block"] / c["seconds"]["exact"]) for c in cases]
        last = max(i for i, ratio in enumerate(ratios) if ratio > 0)  # it is faster from the next length on
        part = ratios[last] / (ratios[last] - ratios[last + 1])
        assert 400 <= math.exp(lengths[last] + part * (lengths[last + 1] - lengths[last])) <= 800


def test_windows_lose_far_tokens_as_the_page_says() -> None:
    assert "more than a quarter of the perplexity after 2,000" in page("results-models.md")
    found = experiment("long_context")
    for place in ("2000-4000", "4000-6500"):
        assert 1.25 < found["window 128"]["perplexity"][place] / found["exact"]["perplexity"][place] < 1.35
    assert found["window 128"]["perplexity"]["0-500"] <= 1.01 * found["exact"]["perplexity"]["0-500"]


def test_a_learned_kernel_is_worth_what_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at best a tenth of what attention is worth" in page("train-a-performer.md")
    assert "The gain is a tenth of the distance from `identity` to `exact`" in page("results-attention.md")
    table, found = module("experiments", "train_table", monkeypatch), experiment("train_table")
    worth = {task: table.learned_or_fixed(found, task) for task in ("image", "lm")}
    assert abs(worth["image"][0]) <= worth["image"][1]
    gain, spread = worth["lm"]
    none, exact = (statistics.mean(table.seeds_of(found, "lm", a)) for a in ("identity", "exact"))
    assert gain > spread
    assert 0.08 < gain / (none - exact) < 0.12
    assert min(len(table.seeds_of(found, "lm", a)) for a in ("gmm_prf", "hyperbolic", "relu", "positive")) == 3
    said = module("experiments", "recall", monkeypatch).say_learned(experiment("recall"))
    assert "the best learned kernel, hedgehog, ties with the best fixed one, hyperbolic" in said


def test_random_features_are_as_good_as_the_page_says() -> None:
    assert "a half to three quarters of theirs, in a third of the time" in page("results-kernels.md")
    found = benchmark("estimators")
    errors = [c["kernel_error"]["ours"] / c["kernel_error"]["scikit-learn"] for c in found["features"]]
    assert min(errors) > 0.45
    assert max(errors) < 0.77
    took = [t["ours"] / t["scikit-learn"] for data in ("california", "casp") for t in found["times"][data].values()]
    assert max(took) < 0.37


def test_large_tables_and_densities_are_as_the_page_says() -> None:
    text, found = page("results-kernels.md"), benchmark("estimators")
    rows = {(r["data"].split()[0], r["model"]): r for r in found["tables"] if r["rows"] != 200_000}

    def error(data: str, model: str) -> float:
        row = rows[data, model]
        return float(row.get("rmse", row.get("log_loss")))

    assert "A million rows take less than 1 GB" in text
    ours = {key: r for key, r in rows.items() if key[1].startswith("Kernel")}
    assert max(r["memory_gb"] for r in ours.values() if r["rows"] == 1_000_000) < 1
    assert "With 2,000 and 1,000 centres our estimators beat `Nystroem` with a linear model in less time" in text
    for data, model in (("patches", "KernelRidge(centers=2000)"), ("contrast", "KernelClassifier(centers=1000)")):
        peers = [key for key in rows if key[0] == data and key[1].startswith("Nystroem")]
        assert peers
        assert all(error(data, model) < error(*key) for key in peers)
        assert all(rows[data, model]["seconds"] < rows[key]["seconds"] for key in peers)
    assert "better at contrast and worse at pixels and words" in text
    for data, model, ahead in (
        ("contrast", "Classifier", True),
        ("patches", "Ridge", False),
        ("words", "Classifier", False),
    ):
        assert (error(data, "HistGradientBoosting") < error(data, f"Kernel{model}")) == ahead
    assert "is the best on proteins" in text
    assert error("CASP", "KernelRidgeCV") == min(error(*key) for key in rows if key[0] == "CASP")
    assert "takes less than half the time" in text
    row, density = found["serving"]["row_ms"], found["serving"]["density_s"]
    assert row["ours"] < 0.5 * row["scikit-learn"]
    assert "take a tenth of the time of its tree" in text
    assert density["auto"] < 0.1 * density["scikit-learn"]


def test_the_gallery_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for runs of training, which go on: their sections say how many there are so far."""
    texts = module("experiments", "gallery", monkeypatch).pages()

    def sections(text: str) -> list[str]:
        return [part for part in text.split("\n## ")[1:] if not part.startswith("train_")]

    for name, text in texts.items():
        if name != "gallery.md":
            assert sections((DOCS / name).read_text(encoding="utf-8")) == sections(text), "run experiments/gallery.py"
