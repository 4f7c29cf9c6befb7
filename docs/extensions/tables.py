"""The tables of the pages, filled from stored results: `python docs/extensions/tables.py` writes them anew.

A page has `<!-- table: NAME -->` above a table and `<!-- end -->` below it. No table has more than six columns.
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
MARKED = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end -->", flags=re.DOTALL)


def experiment(name: str) -> Any:
    return json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def benchmark(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def quality(value: float) -> str:
    return f"{100 * value:.1f} %"


def times(value: float) -> str:
    return f"{value:.2f}x"


def short(value: float) -> str:
    """Three significant digits, or the whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# Converted models


def verified(report: Any) -> dict[str, float]:
    """What a search's report says of texts held back; in older results "kept" stands for "retained"."""
    found = report["verified"]
    told = {**found, **found.get("figures", {})}
    return {name.replace("kept", "retained"): value for name, value in told.items()}


NO_CACHE, UNTIMED = "no cache", "not timed"


def models() -> str:
    speech, further = (experiment("speech_encoder")["keep 0.98"], experiment("further_models"))
    target = experiment("smollm_target")
    rows = [
        [
            "Whisper tiny, encoder",
            "1,500",
            quality(speech["kept"]),
            NO_CACHE,
            times(speech["time"]),
            "`keep=0.98`",
        ]
    ]
    for name, what in (("512", "judged at 512 tokens"), ("4000", "at 4,000 tokens")):
        found = target[name]
        kept, memory = (quality(verified(found["report"])["retained"]), share(found["row"]["memory"]))
        rows.append(["SmolLM2-135M", f"{int(name):,}", kept, memory, UNTIMED, f"`keep=0.99`, {what}"])
    trained = experiment("smollm_distilled")["target"]
    kept, memory = (quality(trained["report"]["target"]["trained"]["4000"]["kept"]), share(trained["memory"]))
    rows.append(["SmolLM2-135M, adapters trained", "4,000", kept, memory, UNTIMED, "`keep=0.99, memory=0.15`"])
    for name, length in (("AntiBERTy", "512"), ("rxnfp", "512"), ("RXNMapper", "512"), ("Sapiens", "144")):
        row = further[name]
        took = row["whole"]["converted"]["seconds"] / row["whole"]["original"]["seconds"]
        done = bool(row["converted_layers"])
        figures = [quality(row["kept"]) if done else "100 %", NO_CACHE, times(took) if done else "1x"]
        rows.append([name, length, *figures, "`keep=0.98`" if done else "left as it was"])
    return table(["model", "tokens", "quality retained", "cache at 4,000", "time to read", "how"], rows)


def speech() -> str:
    names = {
        "window 32, sink": "window 32, one sink",
        "window 32, sink, calibrated m=64": "the same and `calibrated`, m = 64",
        "window 32, sink, landmark m=16": "the same and `landmark`, m = 16",
        "window 32, sink, landmark m=64": "the same and `landmark`, m = 64",
        "calibrated m=64 alone": "`calibrated` alone, m = 64",
        "keep 0.98": "`Target(keep=0.98)`",
    }
    found = experiment("speech_encoder")
    rows = [
        [label, f"{found[k]['cosine']:.3f}", share(found[k]["word_error_rate"]), times(found[k]["time"])]
        for k, label in names.items()
    ]
    return table(["encoder", "cosine of its frames", "words that differ", "time of the encoder"], rows)


def decoder_recipes() -> str:
    names = {
        "kernel only, positive m=128": "FAVOR+ alone, m = 128",
        "kernel only, calibrated m=128": "`calibrated` alone, m = 128",
        "window + sinks, blocks": "window 64, 4 sinks",
        "window + sinks + landmark m=64, blocks": "window 64, 4 sinks, `landmark` m = 64",
        "window + sinks, 10 % exact, blocks": "window 64, 4 sinks, 10 % of the heads exact",
        "window + sinks + landmark m=64, 10 % exact, blocks": "the same and `landmark`, m = 64",
        "window 128 + sinks, 10 % exact, blocks": "window 128, 4 sinks, 10 % of the heads exact",
    }
    found = {row["recipe"]: row for row in experiment("smollm_recipes")["rows"]}
    rows = [["original", "1", "1", f"{experiment('smollm_recipes')['exact'][2]:.2f}", "100 %"]]
    for key, label in names.items():
        row = found[key]
        figures = [short(row[k]) if row[k] > 10 else f"{row[k]:.3f}" for k in ("ratio", "ratio_long", "recall")]
        rows.append([label, *figures, share(row["memory"])])
    return table(["recipe", "ratio, 150 tokens", "ratio, 450 tokens", "recall", "cache at 4,000"], rows)


def decoder_texts() -> str:
    names = {
        "int8, groups of 32": "8 bits",
        "int4, groups of 32": "4 bits",
        "window 128, 4 sinks": "window 128",
        "selected keys, 12 % of float32": "`memory=0.12` of float32",
        "selected keys, 6 % of float32": "`memory=0.06` of float32",
    }
    found, rows = experiment("decoder_texts"), []
    for key, label in names.items():
        cells = []
        for kind in ("novel", "newspaper", "manual"):
            row, whole = found[kind][key], found[kind]["exact"]
            worst = max(row["recall"][back] / whole["recall"][back] for back in whole["recall"])
            ratio = row["perplexity"]["2000-4000"] / whole["perplexity"]["2000-4000"]
            cells.append(f"{ratio:.3f} and {worst:.2f}")
        held = 2 * found["novel"][key]["bytes"] / found["novel"]["exact"]["bytes"]
        rows.append([label, share(held), *cells])
    return table(["cache", "of bfloat16", "novel", "newspaper", "manual"], rows)


PEERS = {
    "int8, groups of 32": "8 bits",
    "int4, groups of 32": "4 bits",
    "window 860, 4 sinks": "window 860",
    "window 428, 4 sinks": "window 428",
    **{
        f"{press} {ratio}": f"{press}, {ratio}"
        for press in ("SnapKV", "Expected Attention")
        for ratio in (0.5, 0.76, 0.88)
    },
    **{f"KVzip {ratio}": f"KVzip, {ratio}" for ratio in (0.75, 0.88, 0.9)},
    "selected keys, 12 % of float32": "`memory=0.12` of float32",
    "selected keys, 6 % of float32": "`memory=0.06` of float32",
}


TEXTS = ("novel", "newspaper", "manual")


def beside(names: Iterable[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """Perplexity, and recall at the worst distance, over the original's: on each text, and their geometric means.

    Of the caches that were measured on every text.
    """
    found, made = experiment("decoder_peers"), {}
    for name in (name for name in names if all(name in found[kind] for kind in TEXTS)):
        ratios = {}
        for kind in TEXTS:
            row, whole = found[kind][name], found[kind]["exact"]
            worst = max(row["recall"][back] / whole["recall"][back] for back in whole["recall"])
            ratios[kind] = (row["perplexity"] / whole["perplexity"], worst)
        means = [statistics.geometric_mean(column) for column in zip(*ratios.values(), strict=True)]
        made[name] = {**ratios, "mean": (means[0], means[1])}
    return made


def decoder_peers() -> str:
    found, rows = experiment("decoder_peers")["novel"], []
    for name, kinds in beside(PEERS).items():
        cells = [f"{kinds[kind][0]:.3f} and {kinds[kind][1]:.2f}" for kind in TEXTS]
        rows.append([PEERS[name], share(found[name]["held"]), share(found[name]["tensors"]), *cells])
    return table(["cache", "to store", "in tensors", "novel", "newspaper", "manual"], rows)


def decoder_peers_short() -> str:
    """Means over the texts, of the caches that come near to ours in bytes."""
    names = ("int4, groups of 32", "window 428, 4 sinks", "SnapKV 0.76", "Expected Attention 0.76", "KVzip 0.75")
    names += ("KVzip 0.88", "selected keys, 12 % of float32", "selected keys, 6 % of float32")
    found, rows = experiment("decoder_peers")["novel"], []
    for name, kinds in beside(names).items():
        perplexity, recall = kinds["mean"]
        rows.append([PEERS[name], share(found[name]["held"]), f"{perplexity:.3f}", f"{recall:.2f}"])
    return table(["cache", "of bfloat16", "perplexity", "recall"], rows)


BOOK = {
    "exact": "original",
    "window 128": "window 128",
    "window 512": "window 512",
    "window 128, 30 of 90 groups exact": "window 128, 30 of 90 key heads exact",
    "window 128 + landmark m=64": "window 128, `landmark` fitted to 320 tokens",
    "keep 0.99, judged at 512 tokens": "`keep=0.99`, judged at 512 tokens",
    "keep 0.99 at 4,000 tokens": "`keep=0.99` at 4,000 tokens",
}


def needles() -> str:
    names = {
        "exact": "the whole cache",
        "int8, groups of 32": "8 bits",
        "int4, groups of 32": "4 bits",
        "selected keys, 12 % of float32": "`Target(memory=0.12)`",
        "selected keys, 6 % of float32": "`Target(memory=0.06)`",
    }
    found, rows = experiment("needles"), []
    for name, label in names.items():
        if found.get(name):
            cells = []
            for task in ("needle", "multikey", "multivalue"):
                scores = [x for key, row in found[name].items() if key.startswith(f"{task}/") for x in row]
                cells.append(f"{100 * statistics.mean(scores):.0f} %")
            rows.append([label, *cells])
    return table(["cache", "one needle", "one of four", "four values"], rows)


def book() -> dict[str, dict[str, Any]]:
    found = experiment("long_context")
    trained = experiment("smollm_distilled")["target"]
    rows = {label: found[key] for key, label in BOOK.items()}
    return {**rows, "`keep=0.99, memory=0.15`, adapters trained": {**trained["book"], "memory": trained["memory"]}}


def book_perplexity() -> str:
    places = ("0-500", "500-1000", "1000-2000", "2000-4000", "4000-6500")
    rows = [[label, *(short(row["perplexity"][p]) for p in places)] for label, row in book().items()]
    return table(["perplexity at tokens", *(p.replace("000", ",000").replace("6500", "6,500") for p in places)], rows)


def book_recall() -> str:
    rows = [
        [label, *(short(row["recall"][p]) for p in ("500", "2000", "6000")), share(row["memory"])]
        for label, row in book().items()
    ]
    return table(["recall of a passage", "500 back", "2,000 back", "6,000 back", "cache at 4,000"], rows)


def decoder_targets() -> str:
    found = experiment("smollm_target")
    rows = []
    for name in ("512", "1000", "4000"):
        kept, row = verified(found[name]["report"]), found[name]["row"]
        figures = [quality(kept["retained"]), f"{kept['perplexity_ratio']:.3f}", quality(kept["recall_retained"])]
        rows.append([f"{int(name):,} tokens", *figures, share(row["memory"])])
    return table(["judged at", "quality retained", "perplexity ratio", "recall retained", "cache at 4,000"], rows)


def decoder_trained() -> str:
    names = {
        "converted": "converted",
        "distilled": "fitted to the original's outputs",
        "trained": "trained by its own loss",
        "control": "the original, trained in the same way",
        "target": "`keep=0.99, memory=0.15`, trained",
    }
    found = experiment("smollm_distilled")
    rows = []
    for key, label in names.items():
        row = found[key]
        kept = [quality(row[n]["kept"]) for n in ("512", "4000")]
        memory = "100 %" if key == "control" else share(row["memory"])
        rows.append([label, *kept, f"{row['ratio_long']:.3f}", f"{row['recall']:.2f}", memory])
    heads = ["model", "quality at 512", "quality at 4,000", "ratio, 450 tokens", "recall", "cache at 4,000"]
    return table(heads, rows)


def decoder_rates() -> str:
    found = experiment("smollm_rates")
    names = list(found["prefill"])
    rows = []
    for key, label in (
        ("prefill", "reading 4,000 tokens"),
        ("decoding at 4000", "decoding after 4,000"),
        ("decoding at 8000", "decoding after 8,000"),
    ):
        first = found[key][names[0]]
        rows.append(
            [label, f"{first:.1f}", *(f"{found[key][n]:.1f} ({found[key][n] / first:.2f}x)" for n in names[1:])]
        )
    return table(["tokens per second", *names], rows)


def further() -> str:
    rows = []
    for name, row in experiment("further_models").items():
        took = row["whole"]["converted"]["seconds"] / row["whole"]["original"]["seconds"]
        done = [quality(row["kept"]), times(took)] if row["converted_layers"] else ["left as it was", "1x"]
        recipes = [quality(row[k]) for k in ("window 32, sink", "window 32, sink, landmark m=64")]
        rows.append([name, *done, *recipes])
    return table(["model", "`Target(keep=0.98)`", "time", "window 32, one sink", "and `landmark`, m = 64"], rows)


def certified() -> str:
    found, places = experiment("certified_heads"), {"all-MiniLM-L6": (512,), "SmolLM2": (512, 1024, 2048, 4096, 8192)}
    heads, rows = ["heads", "tokens", "pairs visited", "keys needed", "time"], []
    for name, lengths in places.items():
        for n in lengths:
            row = found[name][f"{n}/0.01"]
            rows.append([name, f"{n:,}", share(row["visited"]), share(row["needed"]), f"{row['time']:.1f}x"])
    return table(heads, rows)


def window_kinds() -> str:
    found = {row["recipe"]: row["ratio_long"] for row in experiment("smollm_recipes")["rows"]}
    names = {
        "window + sinks": "window and sinks",
        "window + sinks + landmark m=64": "and `landmark`, m = 64",
        "window + sinks, 10 % exact": "and 10 % of the heads exact",
        "window + sinks + landmark m=64, 10 % exact": "and both",
    }
    rows = [[label, f"{found[name]:.3f}", f"{found[f'{name}, blocks']:.3f}"] for name, label in names.items()]
    return table(["heads", "sliding window", "blocks"], rows)


# Maps


def moments() -> str:
    names = {
        "nothing": "nothing",
        "calibrated 128": "`calibrated`, m = 128",
        "landmark 64": "`landmark`, m = 64",
        "moments 1": "`moments`, 1 group",
        "moments 4": "`moments`, 4 groups",
        "moments 16": "`moments`, 16 groups",
    }
    encoder, decoder = (experiment("moments_frontier")[f"{model}, window"] for model in ("minilm", "smollm2"))
    out, rows = "out of domain", []
    for key, label in names.items():
        took = [times(case["seconds"][key] / case["seconds"]["exact"]) for case in (encoder, decoder)]
        errors = [f"{x:.2f}" for x in (encoder["in domain"][key], encoder[out][key], decoder[out][key])]
        rows.append([label, errors[0], errors[1], took[0], errors[2], took[1]])
    heads = ["kernel", "MiniLM, books", "MiniLM, Python", "time", "SmolLM2, Python", "time"]
    return table(heads, rows)


def fits() -> str:
    found = experiment("fits_that_travel")
    several = "books, newspaper, manual"
    names = {
        ("books", "landmark 64"): "`landmark`, m = 64, fitted to books",
        (several, "landmark 64"): "`landmark`, m = 64, fitted to three kinds",
        ("books", "calibrated 128"): "`calibrated`, m = 128, fitted to books",
        (several, "calibrated 128"): "`calibrated`, m = 128, fitted to three kinds",
        ("nothing", "moments"): "`moments`, 1 group, not fitted",
        ("nothing", "moments of 4 groups"): "`moments`, 4 groups, not fitted",
        ("nothing", "no kernel"): "no kernel",
    }
    kinds = list(found["nothing"]["no kernel"])
    rows = [[label, *(f"{found[a][b][k]['lost']:.3f}" for k in kinds)] for (a, b), label in names.items()]
    return table(["kernel", *(kind.partition(",")[0] for kind in kinds)], rows)


def frontier() -> str:
    case, near = (experiment("landmark_frontier")[name] for name in ("minilm", "minilm, window"))
    sizes = ("16", "32", "64", "128")
    names = {
        "FAVOR+": "FAVOR+",
        "calibrated": "`calibrated`",
        "landmark": "`landmark`",
        "best of rank m": "best of rank m",
    }
    rows = [["averaging the values", *[f"{case['uniform']['all']:.2f}"] * 4]]
    rows += [
        [label, *(f"{case[key][m]:.2f}" if m in case[key] else "not run" for m in sizes)]
        for key, label in names.items()
    ]
    rows.append(["window 32, one sink", *[f"{near['window alone']['all']:.2f}"] * 4])
    found = near["landmark"]
    rows.append(["window 32, one sink, `landmark`", *(f"{found[m]:.2f}" if m in found else "not run" for m in sizes)])
    return table(["features", *(f"m = {m}" for m in sizes)], rows)


def projections() -> str:
    found = experiment("projection_bias")
    names = ("orthogonal", "hadamard", "givens", "QR, signs not fixed")
    dims = ("4", "8", "16", "32")
    rows = [
        [name if "QR" in name else f"`{name}`", *(f"{found[name][d][0]:+.3f} ± {found[name][d][1]:.3f}" for d in dims)]
        for name in names
    ]
    return table(["relative bias", *(f"d = {d}" for d in dims)], rows)


# Attention and training


def attention(is_causal: bool) -> str:
    found = benchmark("attention")
    rows = []
    for case in found["times"]:
        this = (case["dtype"], case["is_causal"], case["passes"]) == ("float32", is_causal, "forward")
        if this and case["length"] in (256, 1024, 4096, 16_384, 65_536):
            took = case["seconds"]
            cells = [
                f"{1000 * took[n]:,.1f}" if n in took else "not run" for n in ("bochner", "exact", "performer", "floor")
            ]
            rows.append([f"{case['length']:,}", *cells])
    return table(["tokens", "Bochner", "exact", "performer-pytorch", "bare products"], rows)


def crossover() -> str:
    found = benchmark("attention")["crossover"]
    sizes = sorted({c["num_features"] for c in found})
    rows = []
    for is_causal, label in ((False, "both ways"), (True, "causal")):
        cells = {c["num_features"]: c["length"] for c in found if c["is_causal"] == is_causal}
        rows.append([label, *(f"{cells[m]:,}" if cells[m] else "over 8,192" for m in sizes)])
    return table(["crossover length", *(f"m = {m}" for m in sizes)], rows)


def windows() -> str:
    found = benchmark("windows")["windows"]
    names = {"encoder, landmark 64": "encoder, `landmark` m = 64", "encoder, landmark 16": "encoder, `landmark` m = 16"}
    names["decoder"] = "decoder, `positive` m = 128"
    rows = []
    for shape, label in names.items():
        for case in found:
            if case["shape"] == shape and case["length"] in (512, 1024, 4096):
                cells = [f"{1000 * case['seconds'][n]:.1f}" for n in ("kernel", "block", "sliding", "exact")]
                rows.append([label, f"{case['length']:,}", *cells])
    return table(["shape", "tokens", "kernel", "block window", "sliding window", "exact"], rows)


def train_table() -> Any:
    """The module that trains and gates: it says which tasks need attention."""
    folder = str(ROOT / "experiments")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("train_table")


def needed() -> str:
    """Which tasks need attention: exact attention against none at all and against the best trivial answer."""
    found, module = experiment("train_table"), train_table()
    spread = importlib.import_module("_training").spread
    rows = []
    for task, kind in module.COLUMNS.items():
        digits = 2 if kind == "bits" else 1
        exact, none = (spread(module.seeds_of(found, task, a), digits) for a in ("exact", "identity"))
        best = module.trivial(task)
        shown = "no such answer" if best is None else f"{best:.{digits}f}"
        if exact and none:
            rows.append([task, exact, none, shown, module.say_gate(found, task)])
    return table(["task", "`exact`", "`identity`", "without learning", "verdict"], rows)


def training() -> str:
    found, module = experiment("train_table"), train_table()
    return str(module.table(found))


def recall() -> str:
    """Accuracy on the recall task by features, the best at 8 features first; the gallery has the signed maps."""
    found = experiment("recall")
    sizes = [m for m in ("4", "8", "16") if f"positive/{m}/16" in found["runs"]]
    rows: dict[str, list[str]] = {}
    for key, run in found["runs"].items():
        name, m, pairs = key.rsplit("/", 2)
        seen = run.get("accuracy")
        if pairs == "16" and seen:
            spread = f" ± {100 * statistics.stdev(seen):.1f}" if len(seen) > 1 else ""
            cells = rows.setdefault(name, [""] * len(sizes))
            for i, size in enumerate(sizes):
                if m in (size, "0"):
                    cells[i] = f"{100 * statistics.mean(seen):.1f}{spread}"
    signed = ("gmm_rks", "fastfood_rks", "generative_rks", "sum_poly")
    whole = {name: cells for name, cells in rows.items() if all(cells) and name not in signed}
    order = sorted(whole, key=lambda n: -float(whole[n][sizes.index("8")].split()[0]))
    lines = [[f"`{n.split(',')[0]}`" + "".join(f",{p}" for p in n.split(",")[1:]), *whole[n]] for n in order]
    lines.append(["prediction by rank", *(f"{100 * found['rank'][m]:.1f}" for m in sizes)])
    return table(["attention", *(f"m = {m}" for m in sizes)], lines)


def trained_recall() -> str:
    train_table()  # its folder can be imported from
    return str(importlib.import_module("train_recall").table(experiment("train_recall")))


def six_tasks() -> str:
    train_table()
    return str(importlib.import_module("train_beside").table(experiment("train_beside")))


def training_papers() -> str:
    rows = []
    for kind, lengths in experiment("train_speed")["papers"].items():
        for length, row in lengths.items():
            gains = [times(row["exact"] / row[name]) for name in ("positive", "relu", "gmm_prf", "identity")]
            rows.append([kind, f"{int(length):,}", *gains])
    return table(["size", "tokens", "`positive`", "`relu`", "`gmm_prf`", "values alone"], rows)


def transfer() -> str:
    names = {
        "exact": "`exact`",
        "positive": "`positive`, m = 64",
        "positive, m = 256": "`positive`, m = 256",
        "window+positive": "`window+positive`",
        "trig": "`trig`",
    }
    runs = experiment("train_transfer")["runs"]
    rows = [
        [label, *(f"{runs[key][when]['bits']:.2f}" for when in ("before", "after"))] for key, label in names.items()
    ]
    return table(["attention", "at once", "after 200 steps"], rows)


def feedforward() -> str:
    found, rows = benchmark("feedforward")["blocks"], []
    for features in (0, 256, 1024):
        for method in ("chebyshev", "least_squares"):
            cases = [c for c in found if (c["features"], c["method"]) == (features, method)]
            errors = [f"{c['error']:.2f}" for c in sorted(cases, key=lambda c: c["layer"])]
            speed = statistics.median(c["speed"] for c in cases)
            rows.append([f"{features:,}", method.replace("_", " "), *errors, f"{speed:.1f}x"])
    return table(["features", "method", "layer 0", "layer 3", "layer 5", "speed"], rows)


# Kernels, estimators, sampling

WORDS = {
    "patches": "image patches", "casp": "proteins", "california": "houses", "colours": "pixels", "covers": "forests",
    "rims": "rims of patches", "words": "word vectors", "normal": "normal points", "mixture": "clusters",
    "plane": "points in a plane",
}  # fmt: skip
UNMEASURED = "Not measured with this version yet: run `make bench`."


def kernel_rows(parts: dict[str, Any], names: Iterable[str]) -> list[list[str]]:
    rows = []
    for row in (row for name in names for row in parts.get(name, [])):
        label = f"{WORDS.get(row['data'], row['data'])}, d = {row['d']}"
        took = [f"{row[k]:.2f}" for k in ("exact_s", "auto_s")]
        change = (
            "two sets"
            if row["change"] is None
            else f"{row['change']:,.0f}"
            if row["change"] > 99
            else f"{row['change']:.2g}"
        )
        rows.append([label, row["bandwidth"], change, *took, row["method"]])
    return rows


def kernel_products(names: Iterable[str], other_methods: bool = False) -> str:
    parts = benchmark("matvec")["parts"]
    if not all(isinstance(part, list) for part in parts.values()):
        return UNMEASURED
    rows = kernel_rows(parts, names)
    if other_methods:
        rows = [row for row in rows if row[-1] != "exact"]
    return table(["points", "bandwidth", "change of x", "exact (s)", "auto (s)", "method"], rows)


def many_points() -> str:
    parts, rows = benchmark("matvec")["parts"], []
    for row in (row for name in ("million", "words400k") for row in parts.get(name, [])):
        took = [f"{row[k]:,.0f}" for k in ("exact_s", "build_s", "product_s")]
        rows.append([f"{row['n']:,}, d = {row['d']}", f"{row['change']:.2g}", *took, row["method"]])
    return table(["points", "change of x", "exact (s)", "build (s)", "product (s)", "method"], rows)


def keops() -> str:
    rows = []
    for row in benchmark("matvec")["parts"].get("keops", []):
        took = [f"{row['seconds'][k]:.2f}" for k in ("KeOps", "ours, all pairs", "ours")]
        rows.append([f"{WORDS[row['data']]}, d = {row['d']}", *took])
    return table(["points", "KeOps (s)", "ours, all pairs (s)", "ours, each pair once (s)"], rows)


def processes() -> str:
    rows = []
    for row in (row for row in benchmark("estimators")["process"] if row["kernel"] == "matern32"):
        figures = [f"{row['fit']:.0f} s", f"{row['r2']:.2f}", f"{row['nll']:.2f}", f"{row['coverage']:.1%}"]
        rows.append([row["data"], row["model"], *figures])
    return table(["table", "model", "fit", "R2", "NLL", "coverage of 95 %"], rows)


def random_features() -> str:
    found, rows = benchmark("estimators"), []
    for case in found["features"]:
        took = found["times"][case["data"]][str(case["n_components"])]
        error = [f"{case['kernel_error'][k]:.3f}" for k in ("ours", "scikit-learn")]
        ratio = took["ours"] / took["scikit-learn"]
        rows.append([case["data"], f"{case['rows']:,}", str(case["n_components"]), *error, times(ratio)])
    return table(["data", "rows", "components", "kernel error", "`RBFSampler`", "time, of theirs"], rows)


def large_tables() -> str:
    rows = []
    for case in (case for case in benchmark("estimators")["tables"] if case["rows"] != 200_000):
        figures = [f"{case['seconds']:.1f} s", f"{case['memory_gb']:.1f} GB", f"{case['score']:.3f}"]
        rows.append([case["data"], f"`{case['model']}`", *figures])
    return table(["table, rows", "model", "fit", "memory", "score"], rows)


def sampling() -> str:
    rows = []
    for case in benchmark("sampling")["speed"]:
        took = case["microseconds"]
        cells = [f"{took[k]:,.0f}" for k in ("softmax", "draw", "40 draws")]
        rows.append([f"{case['classes']:,}", *cells, f"{took['softmax'] / took['draw']:.0f}x"])
    return table(["classes", "full softmax", "one draw", "40 draws", "a draw is faster by"], rows)


def samplers() -> str:
    runs, variance = (experiment("sampled_softmax")["runs"], experiment("sampler_variance")["variance"])
    exact = statistics.mean(runs[f"exact/{s}"]["loss"] for s in range(3))
    names = {"tree": "our tree", "log-uniform": "log-uniform", "uniform": "uniform"}
    rows = []
    for key, label in names.items():
        loss = statistics.mean(runs[f"{key}/{s}"]["loss"] for s in range(3)) - exact
        divergence = statistics.mean(runs[f"{key}/{s}"]["divergence"] for s in range(3))
        rows.append([label, f"{loss:+.2f}", f"{divergence:.2f}", short(variance[key][0])])
    return table(["draws", "loss above exact training", "divergence from it", "variance of one draw"], rows)


def aims() -> str:
    rows = [
        [row["aim"], f"`examples/{row['script']}`", f"{row['first']:.0f} s", f"{row['seconds']:.0f} s"]
        for row in benchmark("aims")["rows"]
    ]
    return table(["aim", "script", "first sign", "end"], rows)


# The first screen


def you_get() -> str:
    """What the README and the home page begin with."""
    caches, speech = experiment("decoder_texts"), experiment("speech_encoder")["window 32, sink, landmark m=64"]
    kinds, chosen = ("novel", "newspaper", "manual"), "selected keys, 12 % of float32"
    pairs = [(caches[kind][chosen], caches[kind]["exact"]) for kind in kinds]
    worst = max(row["perplexity"]["2000-4000"] / whole["perplexity"]["2000-4000"] for row, whole in pairs)
    memory = share(2 * pairs[0][0]["bytes"] / pairs[0][1]["bytes"])
    assert speech["word_error_rate"] == 0
    wanted = ("patches 1,000,000", "KernelRidge(centers=2000)")
    fit = next(row for row in benchmark("estimators")["tables"] if (row["data"], row["model"]) == wanted)
    step = experiment("train_speed")["papers"]["small"]["8192"]
    faster = step["exact"] / step["positive"]
    rows = [
        [
            "a decoder whose cache is too large",
            f"{memory} of its bfloat16 cache, at most {worst:.3f}x the perplexity, nothing trained",
            "SmolLM2-135M, three texts of 4,000 tokens",
        ],
        [
            "a long encoder",
            f"{times(speech['time'])} the time, every word the same",
            "Whisper tiny's encoder, 1,500 frames",
        ],
        [
            "a large table or kernel matrix",
            f"{fit['rows']:,} rows fitted in {fit['seconds']:.0f} s and {fit['memory_gb']:.1f} GB",
            f"image patches, {fit['centers']:,} centres, R2 {fit['score']:.2f}",
        ],
        ["a model to train", f"a step {faster:.0f}x faster", "6 layers of width 64, 8,192 tokens"],
    ]
    return table(["you have", "you get", "measured on, one core"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "you-get": you_get,
    "aims": aims,
    "kernels": lambda: kernel_products((k for k in WORDS if k != "plane"), other_methods=True),
    "kernel-shapes": lambda: kernel_products(("plane", "many"), other_methods=True),
    "many-points": many_points,
    "keops": keops,
    "processes": processes,
    "random-features": random_features,
    "large-tables": large_tables,
    "models": models,
    "speech": speech,
    "decoder-texts": decoder_texts,
    "decoder-peers": decoder_peers,
    "decoder-peers-short": decoder_peers_short,
    "needles": needles,
    "decoder-recipes": decoder_recipes,
    "decoder-targets": decoder_targets,
    "decoder-trained": decoder_trained,
    "decoder-rates": decoder_rates,
    "book-perplexity": book_perplexity,
    "book-recall": book_recall,
    "further": further,
    "certified": certified,
    "window-kinds": window_kinds,
    "fits": fits,
    "moments": moments,
    "frontier": frontier,
    "projections": projections,
    "attention": lambda: attention(False),
    "attention-causal": lambda: attention(True),
    "crossover": crossover,
    "windows": windows,
    "training": training,
    "training-needed": needed,
    "recall": recall,
    "training-recall": trained_recall,
    "training-beside": six_tasks,
    "training-papers": training_papers,
    "transfer": transfer,
    "feedforward": feedforward,
    "sampling": sampling,
    "samplers": samplers,
}


def filled(text: str) -> str:
    """A page with its tables as the results have them."""
    return MARKED.sub(lambda m: f"<!-- table: {m['name']} -->\n{TABLES[m['name']]()}\n<!-- end -->", text)


def main() -> None:
    for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        old = path.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
