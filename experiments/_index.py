"""Every figure and table of the five papers: which script reproduces it, or why none does.

An item with a script takes claim, finding and verdict from the script's stored JSON: from its `gallery` entry, or for
scripts that write none through a function here that reads their figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Said(NamedTuple):
    """What the gallery says of one script."""

    claim: str
    ours: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Item:
    """One figure, table or statement of a paper: a script, or the reason for which there is none."""

    label: str
    title: str
    script: str = ""
    reason: str = ""
    page: str = ""  # of the documentation, that says more
    needs: str = ""  # part of the key of a run without which the script has nothing to say about this item
    limits: str = ""  # what of the item its script leaves out: what holds there is then reproduced in part
    verdict: str = ""  # of an item without a script, whose `reason` then says what was found


@dataclass(frozen=True)
class Paper:
    key: str
    title: str
    items: tuple[Item, ...] = field(default_factory=tuple)


DRAWING = "a drawing of the method; the library's own is on the page about how it works"
LARGE = "needs accelerators: {} on 2 cores would take months"
NO_MODEL = "the model or the data is not in a package registry: {}"
PARAMETERS = "a list of settings, not a result; ours are the presets of `bochner train`"

PAPERS = (
    Paper(
        "000",
        "Data Mining Problems (Lucyszyn, 2025)",
        (
            Item("Section 1.3", "time of exact and sketched polynomial attention", "polynomial_timings"),
            Item(
                "Results 1-7, eq. 7-24",
                "variance of sum decomposition and TensorSketch",
                reason="the estimators are unbiased as stated; eq. 7 lacks a square and the bound of eq. 21 is false, "
                "tests have both",
                page="errata.md",
                verdict="partly",
            ),
            Item(
                "Section 2",
                "linearised feed-forward layers",
                reason="the layers are implemented and their mean and variance tested; on a trained transformer they do "
                "not pay",
                page="results-attention.md",
                verdict="partly",
            ),
            Item(
                "Section 3",
                "smoothed local masks",
                reason="the masks are unbiased with a corrected normaliser; they need thousands of features",
                page="which-map.md",
                verdict="partly",
            ),
        ),
    ),
    Paper(
        "001",
        "Hybrid Random Features (Choromanski et al., 2022)",
        (
            Item("Figure 1", "error of three estimators by length and angle", "hybrid_surface"),
            Item("Figure 2", "pointwise estimates by angle, lengths 1 and 1.5", "hybrid_angles"),
            Item("Table 1", "estimators on the wine and Boston tables", "quasi_random_table"),
            Item("Figure 3", "softmax of a language model, Penn Treebank", "softmax_metrics"),
            Item(
                "Table 2",
                "word error rate of a Conformer-Transducer",
                reason=NO_MODEL.format("LibriSpeech and the model"),
            ),
            Item(
                "Figure 4, left",
                "policies with implicit attention",
                "attention_policies",
                limits="a small world of MiniGrid instead of locomotion",
            ),
            Item(
                "Figure 4, right",
                "robotic-arm manipulation",
                reason=NO_MODEL.format("the simulator and its demonstrations"),
            ),
            Item("Figure 5", "pointwise estimates by angle, lengths 1, 1.25 and 1.5", "hybrid_angles"),
            Item("Figure 6", "clustered data", "clustered_table"),
            Item("Table 3", "clustered data, smallest and largest errors", "clustered_table"),
            Item("Table 4", "softmax of a language model, ten runs", "softmax_metrics"),
            Item("Figure 7", "lengths of keys and queries, Penn Treebank", "softmax_lengths"),
            Item(
                "Figure 8",
                "softmax of a language model, WikiText-2",
                reason=NO_MODEL.format("WikiText-2; the Brown corpus is figure 3"),
            ),
            Item(
                "Table 5",
                "softmax of a language model, WikiText-2",
                reason=NO_MODEL.format("WikiText-2; the Brown corpus is table 4"),
            ),
            Item("Figure 9", "lengths of keys and queries, WikiText-2", reason=NO_MODEL.format("WikiText-2")),
            Item("Figure 10", "training with a sampled softmax", "sampled_softmax", page="sampling.md"),
            Item("Figure 11", "camera image of the manipulation task", reason="an illustration of the task"),
            Item("Beyond the paper", "what a draw of each sampler is worth", "sampler_variance", page="sampling.md"),
        ),
    ),
    Paper(
        "002",
        "Improved algorithms for kernel matrix-vector multiplication under sparsity assumptions (2025)",
        (
            Item("Algorithms 1-3", "run time against n, and the error", "kernel_product_time", page="results-kernels.md"),
            Item("Figure 1", "largest ratios, BERT", "sparsity_prefixes"),
            Item("Figure 2", "ratios of neighbouring entries", "attention_sparsity"),
            Item(
                "Figure 3",
                "largest ratios, RoBERTa and GPT",
                "sparsity_prefixes",
                limits="neither model is in a package registry; a small RoBERTa of antibodies and SmolLM2 instead",
            ),
            Item("Figure 4", "the ratio against the length", "sparsity_prefixes"),
        ),
    ),
    Paper(
        "003",
        "Rethinking Attention with Performers (Choromanski et al., 2021)",
        (
            Item("Figure 1", "order of the products", reason=DRAWING, page="how-it-works.md"),
            Item("Figure 2", "positive against trigonometric features", "positive_variance"),
            Item(
                "Figure 3",
                "time of forward and backward passes",
                "train_speed",
                page="results-attention.md",
                limits="one layer, up to 16,384 tokens",
            ),
            Item("Figure 4", "error of the attention output against m", "attention_output_error"),
            Item(
                "Figure 5",
                "weights of a Transformer in a Performer, then fine-tuned",
                "train_transfer",
                page="results-attention.md",
            ),
            Item(
                "Figure 5, a large model",
                "a decoder converted without fine-tuning",
                "smollm_recipes",
                page="results-models.md",
            ),
            Item("Figure 6", "36-layer protein models", reason=LARGE.format("36 layers"), page="results-attention.md"),
            Item(
                "Figure 7", "ImageNet64 and proteins of 8,192 tokens", reason=LARGE.format("12,288 pixels, 12 layers")
            ),
            Item("Figure 8", "the prefix sum", reason=DRAWING, page="how-it-works.md"),
            Item("Table 1", "statistics of the proteins", "protein_statistics", limits="Swiss-Prot for TrEMBL"),
            Item("Figure 9", "distribution of the amino acids", "protein_statistics", limits="Swiss-Prot for TrEMBL"),
            Item(
                "Table 2",
                "protein models: accuracy and perplexity",
                "train_table",
                page="results-attention.md",
                needs="protein/",
            ),
            Item("Figure 10", "attention of a protein model", "protein_attention", page="results-attention.md"),
            Item("Figure 11", "two heads of it", "protein_attention", page="results-attention.md"),
            Item("Figure 12", "its first 25 tokens", "protein_attention", page="results-attention.md"),
            Item(
                "Figure 13",
                "similarity of amino acids by its attention",
                "protein_attention",
                page="results-attention.md",
            ),
            Item("Figure 14", "error through the layers", "error_propagation"),
            Item(
                "Figure 15",
                "redrawing, ReLU, instability of trig",
                "train_kernels",
                page="results-attention.md",
            ),
            Item("Figure 16", "generalised kernels on proteins", "train_kernels", page="results-attention.md"),
            Item(
                "Figure 17",
                "generalised kernels, with and without normaliser",
                "train_kernels",
                page="results-attention.md",
            ),
            Item("Figure 18", "gradients of the Linear Transformer", "train_kernels", page="results-attention.md"),
            Item("Figure 19", "Long Range Arena", "train_table", page="results-attention.md", needs="text/"),
            Item(
                "Figure 20",
                "time against layers and length",
                "train_speed",
                page="results-attention.md",
                limits="length only, with one layer",
            ),
            Item(
                "Theorem 2, Algorithm 1",
                "orthogonal features; the bias of QR",
                "projection_bias",
                page="which-map.md",
            ),
            Item(
                "A published Performer",
                "a trained model with our attention inside",
                "train_tis",
                page="train-a-performer.md",
            ),
            Item("Beyond the paper", "its features on the heads of a real model", "minilm_heads"),
            Item("Beyond the paper", "learning curves on books", "train_curves", page="results-attention.md"),
            Item("Beyond the paper", "block windows against sliding ones", "window_kinds", page="how-it-works.md"),
            Item("Beyond the paper", "a decoder converted to a target", "smollm_target", page="results-models.md"),
            Item("Beyond the paper", "rates of a converted decoder", "smollm_rates", page="results-models.md"),
            Item("Beyond the paper", "a decoder over a whole book", "long_context", page="results-models.md"),
            Item(
                "Beyond the paper",
                "cost of a split sequence, predicted and measured",
                "parallel_plan",
                page="several-machines.md",
            ),
            Item("Beyond the paper", "features fitted to the heads", "landmark_frontier", page="which-map.md"),
            Item("Beyond the paper", "moments, fitted to nothing", "moments_frontier", page="which-map.md"),
            Item("Beyond the paper", "an encoder converted to a target", "minilm_target", page="speed-up-an-encoder.md"),
            Item("Beyond the paper", "four models converted at first try", "further_models", page="speed-up-an-encoder.md"),
            Item("Beyond the paper", "a speech encoder made linear", "speech_encoder", page="encoder-decoders.md"),
            Item("Beyond the paper", "a small decoder, distilled", "smollm_distilled", page="results-models.md"),
            Item("Beyond the paper", "what each part of the fit is worth", "landmark_ablations", page="which-map.md"),
        ),
    ),
    Paper(
        "004",
        "On Learning the Transformer Kernel (Chowdhury et al., 2022)",
        (
            Item("Theorem 1", "a Turing machine in attention", "turing_machine"),
            Item(
                "Figure 1",
                "memory, accuracy and speed of efficient transformers",
                "train_speed",
                page="results-attention.md",
                limits="memory and speed; accuracy is in train_length and train_table",
            ),
            Item("Figure 2", "generative features", reason=DRAWING, page="which-map.md"),
            Item("Table 1", "complexity of the kernels", "train_speed"),
            Item("Table 2", "Long Range Arena", "train_table", page="results-attention.md", needs="text/"),
            Item(
                "Figure 3, memory and speed",
                "the learned kernels",
                "train_speed",
                page="results-attention.md",
                limits="one layer, one task",
            ),
            Item("Figure 3, accuracy", "the learned kernels against length", "train_length", page="results-attention.md"),
            Item(
                "Figure 4",
                "memory against length",
                "train_speed",
                page="results-attention.md",
                limits="linear as claimed, and so is torch's fused exact attention",
            ),
            Item(
                "Table 3",
                "GLUE after pre-training on WikiText-103",
                reason=LARGE.format("pre-training on 103 million words"),
            ),
            Item("Table 4", "settings of the Long Range Arena", reason=PARAMETERS),
            Item("Table 5", "numbers of random samples", reason=PARAMETERS),
            Item(
                "Figure 5",
                "memory across data sets",
                "train_speed",
                page="results-attention.md",
                limits="one task at eight lengths",
            ),
            Item("Table 6", "settings of GLUE", reason=PARAMETERS),
            Item(
                "Figure 6",
                "memory and accuracy on ListOps",
                "train_table",
                page="results-attention.md",
                needs="listops/",
            ),
            Item(
                "Table 7",
                "Fastfood variants",
                "train_fastfood",
                page="results-attention.md",
                limits="our tasks instead of GLUE, where no variant differs from another",
            ),
        ),
    ),
)


def _projection_bias(r: Any) -> Said:
    unsigned, fixed = r["QR, signs not fixed"]["8"][0], r["orthogonal"]["8"]
    return Said(
        "Orthogonal features are unbiased.",
        f"with the signs of QR fixed the relative bias at d = 8 is {fixed[0]:+.4f} +- {fixed[1]:.4f}; without, "
        f"{unsigned:+.3f}.",
        "reproduced",
    )


def _minilm_heads(r: Any) -> Said:
    return Said(
        "Positive orthogonal features approximate softmax attention well enough to replace it.",
        f"on 72 real heads, error of the output: 256 positive features {r['positive']['256']:.2f}, averaging the "
        f"values "
        f"{r['uniform']:.2f}, 256 calibrated features {r['calibrated']['256']:.2f}.",
        "not",
        "real queries and keys are long and off-centre: untrained plain features hardly beat the mean of the values",
    )


def _landmark_frontier(r: Any) -> Said:
    rows = r["minilm"]
    return Said(
        "Ours: 32 landmark features are closer than 256 calibrated ones.",
        f"landmark m = 32 {rows['landmark']['32']:.2f}, calibrated m = 256 {rows['calibrated']['256']:.2f}.",
        "reproduced" if rows["landmark"]["32"] < rows["calibrated"]["256"] else "not",
        "" if rows["landmark"]["32"] < rows["calibrated"]["256"] else "the order is reversed",
    )


def _moments_frontier(r: Any) -> Said:
    rows, seconds = (r["minilm, window"][key] for key in ("out of domain", "seconds"))
    moments, known, landmarks = (rows[name] for name in ("moments 4", "calibrated 128", "landmark 64"))
    holds = moments < known and moments <= 1.1 * landmarks
    return Said(
        "Ours: in an encoder, beside a window and out of domain, moments of 4 groups, fitted to nothing, are closer than "
        "128 calibrated features, and closer than 64 landmark features or within 10 % of them.",
        f"error {moments:.3f}, calibrated {known:.3f}, landmark {landmarks:.3f}; time at 2,048 tokens over exact "
        f"attention {seconds['moments 4'] / seconds['exact']:.2f}, one group "
        f"{seconds['moments 1'] / seconds['exact']:.2f} (error {rows['moments 1']:.3f}).",
        "reproduced" if holds else "not",
        "" if holds else "features that are fitted are closer",
    )


def _landmark_ablations(r: Any) -> Said:
    base, random = (r[k]["other authors"] for k in ("as it is", "landmarks: random rows"))
    return Said(
        "Ours: landmarks must lie at the data.",
        f"error {base:.2f} as it is, {random:.2f} with random rows.",
        "reproduced",
    )


def _attention_sparsity(r: Any) -> Said:
    said = "; ".join(
        f"{n}: median ratio of the n-th to the next entry {v['median_next']:.3f}, to the 2n-th {v['median_double']:.1f}"
        for n, v in r.items()
    )
    return Said(
        "The n-th largest entry of a kernel matrix is about as large as the next (ratio about 1), and at most "
        "about 20 times "
        "the 2n-th.",
        said + ".",
        "reproduced" if all(v["median_next"] < 1.1 and v["median_double"] < 20 for v in r.values()) else "partly",
        ""
        if all(v["median_next"] < 1.1 and v["median_double"] < 20 for v in r.values())
        else "one model has larger steps",
    )


def _softmax_metrics(r: Any) -> Said:
    wins = "; ".join(f"{k} {v}" for k, v in r["verdict"].items())
    closer = [v for k, v in r["verdict"].items() if "below" in k]
    whole = all(v.startswith("at 4") for v in r["verdict"].values())
    return Said(
        "Hybrids are closer to the softmax of a language model than positive and trigonometric features of equal "
        "FLOPs.",
        f"{wins}; mean lengths: queries {r['lengths']['queries']:.1f}, classes {r['lengths']['classes']:.1f}.",
        "reproduced" if whole else "not" if all(v.startswith("at 0") for v in closer) else "partly",
        "" if whole else "the vectors of our model are long: there positive features win, and fitted ones by far",
    )


def _sampled_softmax(r: Any) -> Said:
    runs: dict[str, list[float]] = {}
    for key, run in r["runs"].items():
        runs.setdefault(key.split("/")[0], []).append(run["loss"])
    means = {k: sum(v) / len(v) for k, v in runs.items()}
    paper = [v for k, v in means.items() if k.endswith("as the paper")]
    below, close = max(paper) < means["uniform"], max(paper) < means["exact"] + 0.1
    ours = f"our tree ends {means['tree'] - means['exact']:.2f} above exact training"
    best = f"the best sampler on vectors of length 1, as in the paper, {min(paper) - means['exact']:.2f}"
    return Said(
        "Training with sampled classes comes close to exact training, features below uniform sampling.",
        "held-out cross entropy: " + ", ".join(f"{k} {v:.2f}" for k, v in means.items()) + ".",
        "reproduced" if below and close else "partly" if below or close else "not",
        "" if below and close else f"{ours}, {best}",
    )


def _sampler_variance(r: Any) -> Said:
    v = {k: row[0] for k, row in r["variance"].items()}
    failed = [part for part, held in r["verdict"].items() if held != "holds"]
    return Said(
        "Ours: the partition function from draws of the calibrated tree has a variance 100 times below that of uniform "
        "and log-uniform draws, and 10 times below the paper's samplers.",
        "relative variance of the partition function from one draw: "
        + ", ".join(f"{k} {x:.3g}" for k, x in v.items())
        + ".",
        "reproduced" if not failed else "partly" if len(failed) < len(r["verdict"]) else "not",
        "; ".join(f"not {part}" for part in failed),
    )


def _smollm_recipes(r: Any) -> Said:
    rows = {row["recipe"]: row for row in r["rows"]}
    plain = rows["kernel only, positive m=128"]
    best = min((x for x in r["rows"] if x["recall"] < 2), key=lambda x: x["memory"], default=plain)
    return Said(
        "A pretrained Transformer's weights are usable in a Performer after a little fine-tuning.",
        f"without training, FAVOR+ alone multiplies the perplexity of SmolLM2-135M by {plain['ratio']:.0f}; "
        f"{best['recipe']} by "
        f"{best['ratio']:.2f}, with recall {best['recall']:.2f}.",
        "partly",
        "another model and no fine-tuning of its weights: an exact window and a tenth of the heads take its place",
    )


LINEAR_GROWTH, NEAR_LIMIT = 1.1, 1.25  # the largest exponent that counts as linear, and times "close" to the limit
NOT_LINEAR = ("exact", "identity", "performer_pytorch", "linformer", "nystromformer", "longformer")
NOT_LINEAR += ("big_bird", "reformer", "fnet")  # peers are measured, not claimed


def _growth(figures: dict[str, float]) -> float:
    """The exponent with which figures by length grow from 1,024 tokens on."""
    points = [(math.log(int(n)), math.log(x)) for n, x in figures.items() if int(n) >= 1024]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _train_speed(r: Any) -> Said:
    times, memory = r["time"], r["memory"]
    n = str(max(int(x) for x in times["exact"]))
    shown = ("exact", "identity", "positive", "relu", "gmm_prf", "fastfood_prf", "window+calibrated")
    names = [k for k in shown if n in times.get(k, {})]
    linear = [k for k in times if k not in NOT_LINEAR]
    steepest = max(_growth(table[k]) for table in (times, memory) for k in linear)
    slower = {k: times[k][n] / times["identity"][n] for k in linear}
    larger = {k: memory[k][n] / memory["identity"][n] for k in linear}
    (first, least), (last, most) = (f(slower.items(), key=lambda x: x[1]) for f in (min, max))
    missed = []
    if steepest > LINEAR_GROWTH:
        missed.append(f"the steepest grows with an exponent of {steepest:.2f}")
    if most > NEAR_LIMIT:
        missed.append(f"a step takes {least:.1f} ({first}) to {most:.1f} times ({last}) as long as with values alone")
    if max(larger.values()) > NEAR_LIMIT:
        missed.append(f"memory is up to {max(larger.values()):.1f} times as much")
    if memory["exact"][n] < 1.5 * memory["positive"][n]:
        missed.append("exact attention, which torch computes without its matrix, needs hardly more memory")
    return Said(
        "Time and memory of a training step are linear in the length, and close to those of attention that only "
        "returns the values.",
        f"a training step at {int(n):,} tokens: "
        + ", ".join(f"{k} {1e3 * times[k][n]:.0f} ms" for k in names)
        + "; peak memory: "
        + ", ".join(f"{k} {memory[k][n]:.0f} MB" for k in names if n in memory.get(k, {}))
        + f"; largest exponent from 1,024 tokens on {steepest:.2f}.",
        "not" if steepest > LINEAR_GROWTH else "partly" if missed else "reproduced",
        "; ".join(missed),
    )


def _train_kernels(r: Any) -> Said:
    runs: dict[str, list[float]] = {}
    for key, run in r.items():
        runs.setdefault(key.rsplit("/", 1)[0], []).append(run.get("accuracy", 0.0))
    shown = ", ".join(f"{k} {100 * sum(v) / len(v):.1f}" for k, v in sorted(runs.items(), key=lambda x: -max(x[1])))
    stopped = sorted(k for k, run in r.items() if "stopped" in run)
    bare = sum("no normaliser" in key for key in r)
    return Said(
        "Redrawn positive features train as well as ReLU ones, trigonometric ones badly; some kernels and the Linear "
        "Transformer explode.",
        f"accuracy in percent after 150 steps on proteins, runs made so far: {shown}; stopped: "
        + (", ".join(stopped) or "none")
        + ".",
        "partly",
        "two small layers and 150 steps instead of 36 layers; "
        + (f"{len(stopped)} runs stopped" if stopped else "none explodes")
        + (f", nor do the {bare} without the normaliser, which do not learn" if bare and not stopped else ""),
    )


def _smollm_target(r: Any) -> Said:
    found = {n: r[n]["report"] for n in ("1000", "4000") if n in r}
    told = "; ".join(
        f"kept {report['verified']['kept']:.3f} on held-back texts of {n} tokens, with {r[n]['row']['memory']:.2f} of the "
        "memory at 4,000"
        for n, report in found.items()
    )
    met = all(report["met"] for report in found.values())
    small = any(r[n]["row"]["memory"] <= 0.15 for n in found)
    return Said(
        "Ours: a search keeps 0.99 of perplexity and recall of SmolLM2 with at most 0.15 of the key-value memory.",
        f"{told}.",
        "reproduced" if met and small else "partly" if met else "not",
        "" if met and small else "the target is kept, with more memory than claimed",
    )


def _smollm_rates(r: Any) -> Said:
    name = "window 128, 10 of 90 groups exact"
    ratios = {where: row[name] / row["original"] for where, row in r.items() if where != "threads"}
    faster = ratios["prefill"] > 1.2 and ratios["decoding at 8000"] > 1.2
    return Said(
        "Ours: SmolLM2 with a window of 128 and 10 of 90 key-value groups exact reads 4,000 tokens and decodes behind 8,000 faster.",
        "tokens per second over those of the original: " + ", ".join(f"{n} {x:.2f}" for n, x in ratios.items()) + ".",
        "reproduced" if faster else "not",
        "" if faster else "not faster by a fifth",
    )


def _long_context(r: Any) -> Said:
    exact, window = r["exact"], r["window 128"]
    *_, last = exact["perplexity"]
    ratios = {n: row["perplexity"][last] / exact["perplexity"][last] for n, row in r.items() if n != "exact"}
    told = ", ".join(f"{n}: {x:.3f}" for n, x in ratios.items())
    grows = ratios["window 128"] > 1.05 and window["recall"]["2000"] > 3 * exact["recall"]["2000"]
    return Said(
        "Ours: what windows lose is far away; whole books show it, short texts do not.",
        f"perplexity ratio of SmolLM2 at positions {last} of a book, {told}.",
        "reproduced" if grows else "not",
        "" if grows else "the window alone loses less than 5 %",
    )


def _window_kinds(r: Any) -> Said:
    pairs: dict[tuple[str, str], dict[str, float]] = {}
    for row in r:
        if "cosine" in row:
            pairs.setdefault((row["model"], row["beside"]), {})[row["kind"]] = row["cosine"]
    whole = {k: v for k, v in pairs.items() if len(v) == 2}
    wins = sum(v["block"] >= v["sliding"] for v in whole.values())
    return Said(
        "Ours: block windows keep at least as much as sliding ones of the same length.",
        f"cosine of MiniLM's embeddings higher with blocks in {wins} of {len(whole)} cases.",
        "reproduced" if wins == len(whole) else "partly",
        "" if wins == len(whole) else "not beside every map",
    )


def _train_table(r: Any) -> Said:
    seeds: dict[tuple[str, str], list[float]] = {}
    for key, run in r.items():
        task, attention, _ = key.split("/")
        if "accuracy" in run and task != "lm":
            seeds.setdefault((task, attention), []).append(run["accuracy"])
    cells: dict[str, dict[str, float]] = {}
    for (task, attention), scores in seeds.items():
        cells.setdefault(task, {})[attention] = statistics.mean(scores)
    shown = "; ".join(
        f"{task}: " + ", ".join(f"{a} {s:.3f}" for a, s in sorted(row.items(), key=lambda x: -x[1])[:5])
        for task, row in cells.items()
    )
    return Said(
        "Learned kernels are on par with softmax attention and better on some tasks.",
        f"small presets, what was trained so far ({len(r)} runs): {shown}.",
        "partly",
        "small models and few steps; cells that were not trained are not guessed",
    )


def _train_tis(r: Any) -> Said:
    worst, logit = (max(v[k] for v in r.values()) for k in ("probability", "logit"))
    share = max(v["logit"] / v["logit_size"] for v in r.values())
    return Said(
        "A trained Performer keeps its outputs with our attention inside.",
        f"largest difference over {len(r)} published models: of a probability {worst:.1e}, of a logit {logit:.1e} "
        f"({share:.0e} of the largest one).",
        "reproduced" if max(worst, share) < 1e-4 else "not",
        "" if max(worst, share) < 1e-4 else "an output differs",
    )


def _minilm_target(r: Any) -> Said:
    short = [t["converted"] / max(t["original"], t["the same"]) for t in r["its own"]["seconds"].values()]
    times = {n: t["converted"] / t["original"] for n, t in r["tiled"]["seconds"].items()}
    met = r["tiled"]["report"]["met"]  # at 512 tokens the original may be all there is
    longest = max(times, key=int)
    good = met and max(short) < 1.01 and times[longest] < 1
    kept = r["tiled"]["report"]["verified"]
    return Said(
        "Ours: all-MiniLM-L6 converted to keep 98 % is never slower at its own 512 tokens, and faster with its positions "
        "tiled to 4,096.",
        f"time over the original's, whole model: at most {max(short):.3f} up to 512 tokens; tiled, "
        + ", ".join(f"{int(n):,} tokens {x:.2f}" for n, x in times.items())
        + f"; kept {kept['kept']:.3f} at {kept['length']:,} tokens.",
        "reproduced" if good else "partly" if met else "not",
        "" if good else "slower at a length, or the target is missed",
    )


def _further_models(r: Any) -> Said:
    told = "; ".join(
        f"{n}: kept {row['kept']:.3f} with {row['converted_layers']} of {row['layers']} layers converted"
        for n, row in r.items()
    )
    converted = [n for n, row in r.items() if row["converted_layers"]]
    kept = all(row["kept"] >= 0.98 for row in r.values())
    missed = [n for n, row in r.items() if not row["met"]]
    alone = (
        f"left alone, since nothing faster keeps it: {', '.join(missed)}" if missed else "met by leaving models alone"
    )
    return Said(
        "Ours: `convert(model, keep=0.98)` keeps what it says on models that had no part in development.",
        told + ".",
        "reproduced" if kept and converted and not missed else "partly" if kept else "not",
        "" if kept and converted and not missed else alone if kept else "a target is missed",
    )


def _speech_encoder(r: Any) -> Said:
    window, kernel, target = r["window 32, sink"], r["window 32, sink, landmark m=64"], r["keep 0.98"]
    good = kernel["word_error_rate"] < window["word_error_rate"] / 4 and target["met"]
    rates = {"window alone": window, "and landmark m = 64": kernel, "`keep=0.98`": target}
    return Said(
        "Ours: with a kernel beside a window the encoder of a speech model is linear, and its transcripts stay.",
        "word error rate to the original's transcript, Whisper tiny: "
        + ", ".join(f"{n} {row['word_error_rate']:.3f}" for n, row in rates.items())
        + f"; the target keeps {target['kept']:.3f} on pieces held back.",
        "reproduced" if good else "partly" if target["met"] else "not",
        "" if good else "the kernel does not pay, or the target is missed",
    )


def _smollm_distilled(r: Any) -> Said:
    before, now, called = r["converted"], r["trained"], r["target"]
    small = max(now["ratio"], now["ratio_long"]) <= 1.01 and now["recall"] <= 1.35
    good = small and min(now["512"]["kept"], now["4000"]["kept"]) >= 0.99 and called["report"]["target"]["met"]
    stages = ", ".join(
        f"{name} {row['512']['kept']:.3f} and {row['4000']['kept']:.2f}"
        for name, row in r.items()
        if name not in ("exact", "converted")
    )
    return Said(
        "Ours: with 0.15 of the memory a decoder keeps 0.99 of perplexity and recall at 512 and at 4,000 tokens, once "
        "adapters are trained for ten minutes.",
        f"{now['memory']:.3f} of the memory at 4,000 tokens; kept at 512 and at 4,000 tokens "
        f"{before['512']['kept']:.3f} and {before['4000']['kept']:.2f} before, {stages}; other authors, trained: ratios "
        f"{now['ratio']:.3f} and {now['ratio_long']:.3f}, recall {now['recall']:.3f} (exact {r['exact'][2]:.3f}). By one "
        f"call, `keep=0.99, memory=0.15`: {called['memory']:.3f} of the memory, "
        f"{called['report']['target']['trained']['4000']['kept']:.3f} on texts that it held back.",
        "reproduced" if good else "partly" if small else "not",
        "" if good else "less than 0.99 is kept" if small else "perplexity or recall is lost",
    )


# Scripts whose JSON has no entry for the gallery.
READERS: dict[str, Callable[[Any], Said]] = {
    "attention_sparsity": _attention_sparsity,
    "further_models": _further_models,
    "landmark_ablations": _landmark_ablations,
    "landmark_frontier": _landmark_frontier,
    "minilm_heads": _minilm_heads,
    "minilm_target": _minilm_target,
    "moments_frontier": _moments_frontier,
    "projection_bias": _projection_bias,
    "sampled_softmax": _sampled_softmax,
    "sampler_variance": _sampler_variance,
    "smollm_recipes": _smollm_recipes,
    "softmax_metrics": _softmax_metrics,
    "speech_encoder": _speech_encoder,
    "train_kernels": _train_kernels,
    "long_context": _long_context,
    "smollm_distilled": _smollm_distilled,
    "smollm_rates": _smollm_rates,
    "smollm_target": _smollm_target,
    "train_speed": _train_speed,
    "train_table": _train_table,
    "train_tis": _train_tis,
    "window_kinds": _window_kinds,
}
# Pictures of scripts that have others, or more, than `images/gallery/NAME.png`.
PICTURES = {
    "attention_sparsity": ("images/sparsity_minilm.png", "images/sparsity_smollm2.png"),
    "landmark_frontier": ("images/landmark_frontier.png",),
    "minilm_heads": ("images/minilm_heads.png",),
    "moments_frontier": ("images/moments_frontier.png",),
    "protein_attention": (
        "images/gallery/protein_heads.png",
        "images/gallery/protein_two_heads.png",
        "images/gallery/protein_attention.png",
    ),
    "train_speed": ("images/train_speed.png", "images/train_memory.png"),
    "train_table": ("images/gallery/train_table.png", "images/gallery/listops_memory.png"),
}
# Items whose result is a few figures, which a picture would not show better.
NO_PICTURE = {
    "further_models": "four lines of text",
    "minilm_target": "seven ratios",
    "smollm_distilled": "two rows of figures",
    "speech_encoder": "six rates of few words",
    "train_tis": "five differences of about 1e-7 in probabilities and 1e-4 in logits of up to 96",
}
