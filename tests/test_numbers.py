"""Numbers on the pages and in the README are those of the stored results, and the same on every page."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


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


def check(name: str, pattern: str, values: Sequence[float]) -> None:
    """That a page says something, with N for every number, and that the numbers are these."""
    number = r"([-+]?\d[\d,]*(?:\.\d+)?)"
    found = re.search(re.escape(pattern).replace("N", number), page(name))
    assert found is not None, f"{name} does not say: {pattern}"
    assert len(found.groups()) == len(values), pattern
    wrong = [(a, b) for a, b in zip(found.groups(), values, strict=True) if not agrees(a, b)]
    assert not wrong, f"{name}: {found[0]!r}; printed and stored: {wrong}"


def recipes() -> dict[str, dict[str, float]]:
    return {row["recipe"]: row for row in experiment("smollm_recipes")["rows"]}


FITTED = "window 32, sink, landmark m=64"


def speech(name: str) -> list[float]:
    return [experiment("speech_encoder")[name][k] for k in ("cosine", "word_error_rate")]


def distilled(stage: str) -> list[float]:
    row = experiment("smollm_distilled")[stage]
    return [
        row["512"]["kept"],
        row["512"]["recall"],
        row["4000"]["kept"],
        row["ratio"],
        row["ratio_long"],
        row["recall"],
    ]


def further(name: str) -> list[float]:
    """Of a model that had no part in development: time of the whole, what is kept by the target and by two recipes."""
    row = experiment("further_models")[name]
    time = row["whole"]["converted"]["seconds"] / row["whole"]["original"]["seconds"]
    return [time, *(row[k] for k in ("kept", "window 32, sink", "window 32, sink, landmark m=64"))]


def tiled() -> list[float]:
    """Of MiniLM with 4,096 positions: heads that are converted, what is kept, the whole model's time over before."""
    found = experiment("minilm_target")["tiled"]
    heads = found["report"]["candidates"][found["report"]["chosen"]]["heads"]
    times = [found["seconds"][n]["converted"] / found["seconds"][n]["original"] for n in ("2048", "4096")]
    return [sum(heads.values()) - heads["exact"], found["report"]["verified"]["kept"], *times]


def by_memory() -> list[float]:
    """Of the call that converts and trains: memory, kept before and after, and figures of other authors' texts."""
    row = experiment("smollm_distilled")["target"]
    found = row["report"]["target"]
    kept = [found["verified"]["kept"], found["trained"]["4000"]["kept"]]
    return [row["memory"], *kept, row["ratio"], row["ratio_long"], row["recall"], row["4000"]["kept"]]


def target(judged: str) -> list[float]:
    found = experiment("smollm_target")[judged]
    row, kept = found["row"], found["report"]["verified"]
    memory = row["memory"]
    return [memory, kept["perplexity_ratio"], kept["recall_kept"], memory, row["ratio_long"], row["recall"]]


def single_draws() -> list[float]:
    took = benchmark("sampling")["speed"][-1]["microseconds"]
    return [took["softmax"] / took["draw"], took["softmax, one query"] / took["draw, one query"]]


def rates() -> list[float]:
    """Tokens a second of reading, each but the original's with its ratio to that."""
    first, *others = experiment("smollm_rates")["prefill"].values()
    return [first, *(x for rate in others for x in (rate, rate / first))]


def frontier(case: str, name: str, *sizes: int) -> list[float]:
    row = experiment("landmark_frontier")[case][name]
    return [row[str(m)] for m in sizes] if sizes else [row["all"]]


def beside_window(name: str) -> list[float]:
    """Of a map beside a window: MiniLM's error in and out of domain and its time, SmolLM2's out of domain and time."""
    encoder, decoder = (experiment("moments_frontier")[f"{model}, window"] for model in ("minilm", "smollm2"))
    times = [case["seconds"][name] / case["seconds"]["exact"] for case in (encoder, decoder)]
    out = "out of domain"
    return [encoder["in domain"][name], encoder[out][name], times[0], decoder[out][name], times[1]]


WINDOW_BLOCKS, RECIPE = "window + sinks, blocks", "window 128 + sinks, 10 % exact, blocks"


def long_ratio(name: str, place: str) -> float:
    found = experiment("long_context")
    return float(found[name]["perplexity"][place] / found["exact"]["perplexity"][place])


def claim(what: str) -> float:
    (found,) = (c["value"] for c in benchmark("attention")["claims"] if c["what"] == what)
    return float(found)


def slower(name: str, than: str, *lengths: int) -> list[float]:
    """Times of a training step over those of another attention."""
    times = experiment("train_speed")["time"]
    return [times[name][str(n)] / times[than][str(n)] for n in lengths]


def without(task: str, *names: str) -> list[float]:
    """Percent, or bits, that can be had without learning."""
    found = experiment("train_baselines")[task]
    return [found[n] if n in ("frequencies", "difference", "perplexity") else 100 * found[n] for n in names]


def tis(name: str) -> list[float]:
    return [row[name] for row in experiment("train_tis").values()]


# What pages say, in words in which N stands for a number, and where the numbers are stored.
STATEMENTS: list[tuple[str, str, Callable[[], list[float]]]] = [
    (
        "kernel-operator.md",
        "Of N deterministic statements on random hostile data",
        lambda: [benchmark("coverage")["hostile"]["statements"]],
    ),
    (
        "README.md",
        "| plain FAVOR+, no window | N | N / N |",
        lambda: [0.64, *(recipes()["kernel only, positive m=128"][k] for k in ("ratio", "recall"))],
    ),
    (
        "README.md",
        "| a window and sinks, no kernel (decoder: window N) | N | N / N |",
        lambda: [64, 0.970, *(recipes()["window + sinks, blocks"][k] for k in ("ratio", "recall"))],
    ),
    (
        "README.md",
        "| window 64, sinks and a tenth of the heads exact | | N / N |",
        lambda: [recipes()["window + sinks, 10 % exact, blocks"][k] for k in ("ratio", "recall")],
    ),
    (
        "README.md",
        "| window 128, sinks and a tenth of the heads exact | | **N / N** |",
        lambda: [recipes()["window 128 + sinks, 10 % exact, blocks"][k] for k in ("ratio", "recall")],
    ),
    ("README.md", "| exact softmax, O(L²) | 1 | 1 / N |", lambda: [experiment("smollm_recipes")["exact"][2]]),
    (
        "README.md",
        "(ratio N to N at 450 tokens)",
        lambda: [recipes()[k]["ratio_long"] for k in (WINDOW_BLOCKS, "window + sinks + landmark m=64, blocks")],
    ),
    (
        "README.md",
        "keeps N % of its perplexity, and its recall, on texts of up to 450 tokens by a recipe whose cache is N of",
        lambda: [100 / recipes()[RECIPE]["ratio_long"], recipes()[RECIPE]["memory"]],
    ),
    ("README.md", "at 4,000 tokens takes N, or", lambda: [experiment("smollm_target")["4000"]["row"]["memory"]]),
    (
        "README.md",
        "the perplexity of a book is N times the original's from token 4,000 on",
        lambda: [long_ratio("window 128 + landmark m=64", "4000-6500")],
    ),
    (
        "index.md",
        "| N % of the perplexity at 450 tokens; less on longer texts | N of the cache at 4,000 tokens |",
        lambda: [100 / recipes()[RECIPE]["ratio_long"], recipes()[RECIPE]["memory"]],
    ),
    (
        "faq.md",
        "heads exact keeps N of the cache at 4,000 tokens. It loses N % of the perplexity on texts of 450 tokens",
        lambda: [recipes()[RECIPE]["memory"], 100 * (recipes()[RECIPE]["ratio_long"] - 1)],
    ),
    (
        "which-map.md",
        "It loses N % of the perplexity at 450 tokens",
        lambda: [100 * (recipes()[RECIPE]["ratio_long"] - 1)],
    ),
    (
        "landmark.md",
        "is N at 450 tokens with window and sinks alone and N with m = 64 beside them",
        lambda: [recipes()[k]["ratio_long"] for k in ("window + sinks", "window + sinks + landmark m=64")],
    ),
    (
        "README.md",
        "its transcripts word for word (N words",
        lambda: [x["words"] for x in [experiment("speech_encoder")[FITTED]] if not x["word_error_rate"]],
    ),
    ("howto-seq2seq.md", "| window 32 and a sink | N | N |", lambda: speech("window 32, sink")),
    ("howto-seq2seq.md", "| and `calibrated`, m = 64 | N | N |", lambda: speech("window 32, sink, calibrated m=64")),
    ("howto-seq2seq.md", "| and `landmark`, m = 16 | N | N |", lambda: speech("window 32, sink, landmark m=16")),
    (
        "howto-seq2seq.md",
        "| and `landmark`, m = 64 | **N** | **N** |",
        lambda: speech(FITTED),
    ),
    ("howto-seq2seq.md", "| `calibrated` alone, m = 64 | N | N |", lambda: speech("calibrated m=64 alone")),
    ("howto-seq2seq.md", "| `keep=0.98` | N | N |", lambda: speech("keep 0.98")),
    ("howto-seq2seq.md", "verifies N on pieces held back", lambda: [experiment("speech_encoder")["keep 0.98"]["kept"]]),
    ("decoder-results.md", "| converted | N | N | N | N, N | N |", lambda: distilled("converted")),
    (
        "decoder-results.md",
        "| fitted to the original's outputs | N | N | N | N, N | N |",
        lambda: distilled("distilled"),
    ),
    ("decoder-results.md", "| trained by its own loss | N | N | N | N, N | N |", lambda: distilled("trained")),
    (
        "decoder-results.md",
        "| `keep=0.99, memory=0.15`, trained by the same call | N | N | N | N, N | N |",
        lambda: distilled("target"),
    ),
    (
        "decoder-results.md",
        "trained by the same call | N | N | N | N | N | N | N | N | 0.14 |",
        lambda: [
            *experiment("smollm_distilled")["target"]["book"]["perplexity"].values(),
            *experiment("smollm_distilled")["target"]["book"]["recall"].values(),
        ],
    ),
    (
        "howto-encoders.md",
        "converts N of 72 heads, some in every layer (N on texts held back, of 1,024 tokens), in 9 "
        "minutes on one core: the whole model takes N of the time at 2,048 tokens and N at 4,096.",
        tiled,
    ),
    (
        "howto-decoders.md",
        "**N of the memory** at 4,000 tokens, 8 of 90 groups exact, it keeps N untrained and **N trained**, of texts "
        "that it held back; on other authors' texts of 150 and 450 tokens the perplexity ratio is N and N, recall N "
        "(exact 1.284), and of theirs of 4,000 tokens N is kept",
        by_memory,
    ),
    (
        "decoder-results.md",
        "where recall is N against N (the original untrained: N)",
        lambda: [
            *(experiment("smollm_distilled")[stage]["4000"]["recall"] for stage in ("trained", "control")),
            experiment("smollm_distilled")["trained"]["4000"]["recall_original"],
        ],
    ),
    ("howto-decoders.md", "| 4,000 tokens | N | N | N | N | N, N |", lambda: target("4000")),
    (
        "decoder-results.md",
        "| reading 4,000 tokens | N tokens/s | N tokens/s (N) | N tokens/s (N) | N tokens/s (N) |",
        rates,
    ),
    ("decoder-results.md", "| the original, trained so | N | N | N | N, N | N |", lambda: distilled("control")),
    (
        "landmark.md",
        "| **`landmark`** | 8 / 16 / 32 / 64 / 128 | N / N / N / N / N |",
        lambda: frontier("minilm", "landmark", 8, 16, 32, 64, 128),
    ),
    (
        "landmark.md",
        "| **`landmark`, signed** | 8 / 16 / 32 / 64 / 128 | N / N / N / N / N |",
        lambda: frontier("minilm", "landmark, signed", 8, 16, 32, 64, 128),
    ),
    (
        "landmark.md",
        "| `calibrated` | 32 / 64 / 128 | N / N / N |",
        lambda: frontier("minilm", "calibrated", 32, 64, 128),
    ),
    ("landmark.md", "| FAVOR+ | 32 / 64 / 128 | N / N / N |", lambda: frontier("minilm", "FAVOR+", 32, 64, 128)),
    ("landmark.md", "| averaging the values | | N |", lambda: frontier("minilm", "uniform")),
    (
        "landmark.md",
        "| window 32, 1 sink, nothing else | | N |",
        lambda: frontier("minilm, window", "window alone"),
    ),
    (
        "landmark.md",
        "| **window 32, 1 sink, `landmark`** | 16 / 64 | N / N |",
        lambda: frontier("minilm, window", "landmark", 16, 64),
    ),
    (
        "landmark.md",
        "N with 16 landmark features, and no less with 64",
        lambda: frontier("smollm2, window", "landmark", 16),
    ),
    (
        "which-map.md",
        "positive features have an error of N where averaging the values has N",
        lambda: [experiment("minilm_heads")["positive"]["256"], experiment("minilm_heads")["uniform"]],
    ),
    (
        "which-map.md",
        "(`calibrated`: N), and",
        lambda: [experiment("minilm_heads")["calibrated"]["256"]],
    ),
    ("which-map.md", "(`landmark`: N) what random", lambda: frontier("minilm", "landmark", 32)),
    ("which-map.md", "| nothing | N | N | N | N | N |", lambda: beside_window("nothing")),
    ("which-map.md", "| `calibrated`, m = 128 | N | N | N | N | N |", lambda: beside_window("calibrated 128")),
    ("which-map.md", "| `landmark`, m = 64 | N | N | N | N | N |", lambda: beside_window("landmark 64")),
    ("which-map.md", "| `moments`, 1 group | N | N | N | N | N |", lambda: beside_window("moments 1")),
    ("which-map.md", "| `moments`, 4 groups | N | N | N | N | N |", lambda: beside_window("moments 4")),
    ("which-map.md", "| `moments`, 16 groups | N | N | N | N | N |", lambda: beside_window("moments 16")),
    (
        "projections.md",
        "| QR without its signs fixed | **N** ± N | **N** ± N | **N** ± N | **N** ± N |",
        lambda: [x for d in ("4", "8", "16", "32") for x in experiment("projection_bias")["QR, signs not fixed"][d]],
    ),
    (
        "projections.md",
        "estimate N where the truth is 1 at d = 8",
        lambda: [1 + experiment("projection_bias")["QR, signs not fixed"]["8"][0]],
    ),
    (
        "coming-from.md",
        "is biased: N where the truth is 1 at d = 8",
        lambda: [1 + experiment("projection_bias")["QR, signs not fixed"]["8"][0]],
    ),
    (
        "experiments-hybrid.md",
        "mean length of queries N, of classes N",
        lambda: list(experiment("softmax_metrics")["lengths"].values()),
    ),
    (
        "experiments-hybrid.md",
        "| uniform | N, N, N | +N | N |",
        lambda: [*sampled("uniform", "loss"), above("uniform"), mean(sampled("uniform", "divergence"))],
    ),
    (
        "experiments-hybrid.md",
        "| our tree | N, N, N | +N | N |",
        lambda: [*sampled("tree", "loss"), above("tree"), mean(sampled("tree", "divergence"))],
    ),
    (
        "experiments-hybrid.md",
        "| our tree; with 256 features | N; N |",
        lambda: [experiment("sampler_variance")["variance"][k][0] for k in ("tree", "tree, 256 features")],
    ),
    ("sampling.md", "cross entropy of exact training, uniform draws N", lambda: [above("uniform")]),
    (
        "sampling.md",
        "is N times as fast as a full softmax for each of 512 queries, and N times for queries one after another",
        single_draws,
    ),
    (
        "howto-encoders.md",
        "33 of 64 heads become kernels, the whole takes N of the time; kept N | N | N |",
        lambda: further("AntiBERTy"),
    ),
    (
        "howto-encoders.md",
        "become windows or kernels, the whole takes N of the time; kept N | N | N | | Sapiens",
        lambda: further("rxnfp"),
    ),
    (
        "several-machines.md",
        "was N to N times the predicted one",
        lambda: [f(r["measured"] / r["predicted"] for r in experiment("parallel_plan")["rows"]) for f in (min, max)],
    ),
    (
        "release-notes.md",
        "takes N times bare matrix products, a causal one N times",
        lambda: [
            claim("bidirectional forward at 16,384, of the floor"),
            claim("causal forward at 4,096, of the floor"),
        ],
    ),
    (
        "how-it-works.md",
        "takes N times the floor at 16,384 tokens",
        lambda: [claim("bidirectional forward at 16,384, of the floor")],
    ),
    (
        "training-cost.md",
        "takes N to N times as long as `positive` up to 4,096 tokens, N to N times from 8,192 on",
        lambda: [
            f(slower("reformer", "positive", *lengths))
            for lengths in ((128, 256, 512, 1024, 2048, 4096), (8192, 16384))
            for f in (min, max)
        ],
    ),
    (
        "training-cost.md",
        "a step with `positive` takes N times as long at 8,192 tokens, with a block window and `calibrated` N times",
        lambda: [*slower("positive", "identity", 8192), *slower("window+calibrated", "identity", 8192)],
    ),
    (
        "training-cost.md",
        "(N MB at 8,192 tokens, `positive` N)",
        lambda: [experiment("train_speed")["memory"][a]["8192"] for a in ("exact", "positive")],
    ),
    ("training.md", "the same probabilities to Ne-7 in all five folds", lambda: [1e7 * max(tis("probability"))]),
    (
        "training.md",
        "its logits, of up to N, differ by at most Ne-4, that is by Ne-6 of the largest",
        lambda: [
            max(tis("logit_size")),
            1e4 * max(tis("logit")),
            1e6 * max(a / b for a, b in zip(tis("logit"), tis("logit_size"), strict=True)),
        ],
    ),
    (
        "training-results.md",
        "| N bits per dimension (frequencies), N (difference to the pixel before) |",
        lambda: without("pixels", "frequencies", "difference"),
    ),
    ("training-results.md", "| `lm_bpe` | N bits per byte (", lambda: without("lm_bpe", "frequencies")),
    (
        "training-results.md",
        "| `protein_causal` | N %, perplexity N |",
        lambda: without("protein_causal", "accuracy", "perplexity"),
    ),
    (
        "training-results.md",
        "| `pretraining` | N % (the commonest piece), N % (copying what is shown) |",
        lambda: without("pretraining", "commonest", "copying"),
    ),
    (
        "training-results.md",
        "guessing the commonest letter elsewhere gives N %",
        lambda: without("protein", "copying"),
    ),
    (
        "training-results.md",
        "how alike the letters of two pages are tells N %",
        lambda: without("retrieval", "letters"),
    ),
]


def sampled(name: str, figure: str) -> list[float]:
    runs = experiment("sampled_softmax")["runs"]
    return [runs[f"{name}/{seed}"][figure] for seed in range(3)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def above(name: str) -> float:
    return mean(sampled(name, "loss")) - mean(sampled("exact", "loss"))


@pytest.mark.parametrize(
    ("name", "pattern", "stored"), STATEMENTS, ids=[f"{p}: {text[:30]}" for p, text, _ in STATEMENTS]
)
def test_a_statement_is_what_is_stored(name: str, pattern: str, stored: Callable[[], list[float]]) -> None:
    check(name, pattern, stored())


def test_a_wrong_number_would_be_seen() -> None:
    assert agrees("0.81", 0.8149)
    assert agrees("1,868", 1867.9)
    assert not agrees("0.81", 0.798)
    assert not agrees("684", 685.2)
    with pytest.raises(AssertionError, match="printed and stored"):
        check("landmark.md", "| averaging the values | | N |", [0.5])
    with pytest.raises(AssertionError, match="does not say"):
        check("landmark.md", "averaging the values gives N", [0.5])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("attention", "benchmarks.md"),
        ("windows", "benchmarks.md"),
        ("matvec", "kernel-speed.md"),
        ("estimators", "estimators.md"),
        ("sampling", "sampling.md"),
        ("feedforward", "feedforward.md"),
        ("sketches", "maps-polynomial-local.md"),
    ],
)
def test_the_tables_of_a_benchmark_are_its_stored_results(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = module("benchmarks", name, monkeypatch).tables(benchmark(name))
    _, _, rest = (DOCS / target).read_text(encoding="utf-8").partition(f"<!-- {name}:begin -->\n")
    assert rest.partition(f"\n<!-- {name}:end -->")[0] == text, f"run benchmarks/{name}.py with --page"


def test_the_gallery_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for runs of training, which go on: their sections say how many there are so far."""
    texts = module("experiments", "gallery", monkeypatch).pages()

    def sections(text: str) -> list[str]:
        return [part for part in text.split("\n## ")[1:] if not part.startswith("train_")]

    for name, text in texts.items():
        if name != "gallery.md":
            assert sections((DOCS / name).read_text(encoding="utf-8")) == sections(text), "run experiments/gallery.py"


def test_figures_of_the_demonstration_are_the_same_on_every_page() -> None:
    """The README, the how-tos and the page about landmarks quote one run of `bochner demo`."""
    texts = {name: page(name) for name in ("README.md", "howto-encoders.md", "howto-training.md")}
    for name, text in texts.items():
        for figure in ("0.9955", "0.9966", "73 seconds"):
            assert figure in text, f"{name} does not have {figure}"
    assert "0.0045 with the two exact" in page("landmark.md")  # 1 - 0.9955
    assert "0.0034 after distillation" in page("landmark.md")  # 1 - 0.9966
