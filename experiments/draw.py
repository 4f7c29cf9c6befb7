"""The pictures of the experiments from their stored results, where they can be drawn so; computes nothing.

python experiments/draw.py [name ...]      (all unless given; a result that is missing is left out)
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from _gallery import COLOURS, RESULTS, figure, name_points, note_drawn, save

GREY = "0.55"
SIZES = (64, 128, 256, 512)
FLOOR = 30  # of the axis of ListOps, %


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def by_name(found: dict[str, Any], figure_of: str) -> dict[str, list[float]]:
    """The figure of each kind of run over its seeds; the keys of a result are `kind/seed`."""
    kinds: dict[str, list[float]] = {}
    for key, run in found.items():
        if figure_of in run:
            kinds.setdefault(key.rpartition("/")[0], []).append(run[figure_of])
    return kinds


def dots(ax: Any, rows: dict[str, list[float]], *, ordered: bool = True, scale: float = 1.0) -> None:
    """One line a name: a small dot for each seed, a bar through their mean; the largest mean on top."""
    names = sorted(rows, key=lambda n: statistics.mean(rows[n])) if ordered else list(rows)[::-1]
    for y, name in enumerate(names):
        values = [scale * x for x in rows[name]]
        ax.plot(values, [y] * len(values), "o", color=COLOURS[0], markersize=4, alpha=0.7)
        ax.plot(statistics.mean(values), y, "|", color="black", markersize=11)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)


def softmax_metrics() -> None:
    """Figure 3 of 001: distance to the true distribution against the number of features."""
    found = stored("softmax_metrics")["metrics"]
    fig, axes = figure(3, figsize=(12, 3.8))
    names = [k.partition("/")[2] for k in found if k.startswith("64/")]
    titles = {"wasserstein": "1d-Wasserstein", "ks": "Kolmogorov-Smirnov", "negative": "share of negative estimates"}
    for ax, (metric, title) in zip(axes, titles.items(), strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            rows = [found[f"{m}/{name}"] for m in SIZES]
            spread = [r["deviation"][metric] for r in rows]
            style = {"marker": "o", "markersize": 4, "capsize": 2, "color": colour}
            ax.errorbar(SIZES, [r["mean"][metric] for r in rows], spread, label=name, **style)
        ax.set_xscale("log", base=2)
        ax.set_xticks(SIZES, [str(m) for m in SIZES])
        ax.minorticks_off()
        ax.set(title=title, xlabel="features")
        ax.set_ylim(bottom=0)
    axes[0].legend(fontsize=8, loc="center left", bbox_to_anchor=(0, 0.55))
    save(fig, "softmax_metrics")


def sampled_softmax() -> None:
    """Figure 10 of 001: held-out loss while training, the mean over seeds, and where each sampler ends."""
    runs = stored("sampled_softmax")["runs"]
    fig, (left, right) = figure(2, figsize=(11, 4))
    curves: dict[str, list[list[float]]] = {}
    for key, run in runs.items():
        curves.setdefault(key.rpartition("/")[0], []).append(run["curve"])
    ours = {"exact": COLOURS[6], "tree": COLOURS[2], "uniform": COLOURS[1]}
    paper = {name: colour for name, colour in zip(curves, (GREY,) * len(curves), strict=True) if "paper" in name}
    for name, colour in {**paper, **ours}.items():
        mean = [statistics.mean(x) for x in zip(*curves[name], strict=True)]
        left.plot(range(100, 100 * len(mean) + 1, 100), mean, "o-", markersize=3, color=colour)
        if name in ours:
            place = {"xytext": (6, 4 if name == "tree" else -6), "textcoords": "offset points"}
            left.annotate(name, (100 * len(mean), mean[-1]), color=colour, **place)
    low = min(statistics.mean(c[-1] for c in curves[n]) for n in paper)
    left.annotate("samplers of the paper", (500, low), xytext=(-60, -16), textcoords="offset points", color=GREY)
    left.set(xlabel="steps", ylabel="held-out cross entropy", xlim=(80, 590), title="while training")
    losses = by_name(runs, "loss")
    gaps = {n: [run - end for run, end in zip(x, losses["exact"], strict=False)] for n, x in losses.items()}
    dots(right, {n: x for n, x in gaps.items() if n != "exact"})
    right.set_xscale("symlog", linthresh=0.1)
    right.set_xticks([-0.1, 0, 0.1, 1, 4], ["-0.1", "0", "0.1", "1", "4"])
    right.set_xlim(-0.15, 6)
    right.set(xlabel="above exact training with the same seed", title="at the end")
    save(fig, "sampled_softmax")


def sampler_variance() -> None:
    found = {name: row[:1] for name, row in stored("sampler_variance")["variance"].items()}
    fig, ax = figure(figsize=(7, 3.4))
    dots(ax, found)
    ax.set_xscale("log")
    ax.set(xlabel="relative variance of the partition function from one draw")
    save(fig, "sampler_variance")


def train_kernels() -> None:
    """Figures 15 to 18 of 003: test accuracy of every kernel, both seeds."""
    found = stored("train_kernels")
    accuracy = by_name(found, "accuracy")
    panels = {
        "figure 15: estimates of softmax": ("exact", "positive", "positive, no redraw", "regularized", "trig", "relu"),
        "figures 16, 17: functions of a generalised kernel": (
            *("relu", "sigmoid", "exp", "abs", "gelu", "cos", "tanh"),
            "identity_kernel",
        ),
        "figures 17, 18: Linear Transformer": (
            *("exact", "relu", "linear_elu", "relu, no normaliser", "linear_elu, no normaliser"),
            *("exact, causal", "relu, causal", "linear_elu, causal"),
            *("relu, causal, no normaliser", "linear_elu, causal, no normaliser"),
        ),
    }
    fig, axes = figure(3, figsize=(13, 3.6), sharex=True)
    baseline = 100 * next(iter(found.values()))["baseline"]
    for ax, (title, names) in zip(axes, panels.items(), strict=True):
        dots(ax, {n: accuracy[n] for n in names if n in accuracy}, ordered=False, scale=100)
        ax.axvline(baseline, color=GREY, linestyle="--", linewidth=1)
        ax.margins(y=0.12)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("accuracy on unseen proteins, %")
    axes[0].text(baseline + 0.1, 5.35, "dashed: the most frequent letter", fontsize=7, color="0.4")
    save(fig, "train_kernels")


def train_table() -> None:
    """Figure 19 and table 2 of 003, table 2 of 004: accuracy by task and attention, every seed."""
    found = stored("train_table")
    rows: dict[str, dict[str, list[float]]] = {}
    for key, values in by_name(found, "accuracy").items():
        task, _, attention = key.partition("/")
        rows.setdefault(task, {})[attention] = values
    tasks = [t for t in ("listops", "text", "image", "pathfinder", "retrieval", "protein", "lm") if t in rows]
    heights = [max(len(rows[t]) for t in tasks[i : i + 3]) for i in range(0, len(tasks), 3)]
    size = (13, 0.22 * sum(heights) + 1.3 * len(heights))
    fig, axes = figure(3, len(heights), figsize=size, squeeze=False, gridspec_kw={"height_ratios": heights})
    for ax in axes.flat[len(tasks) :]:
        ax.set_axis_off()
    for ax, task in zip(axes.flat, tasks, strict=False):
        dots(ax, rows[task], scale=100)
        low, high = ax.get_xlim()
        middle = 100 * statistics.median(x for values in rows[task].values() for x in values)
        if high - low < 2:  # less than the seeds differ by elsewhere: no difference is to be read from it
            ax.set_xlim(middle - 1, middle + 1)
        ax.margins(y=0.1)
        ax.set_title(f"{task}: accuracy, %" if task != "lm" else "lm: accuracy of the next byte, %", fontsize=10)
    save(fig, "train_table")


def listops_memory() -> None:
    """Figure 6 of 004: memory of a training step against accuracy on ListOps."""
    accuracy = by_name(stored("train_table"), "accuracy")
    memory = stored("train_speed")["memory"]
    fig, ax = figure(figsize=(7, 4.2))
    points: dict[str, tuple[float, float]] = {}
    peers = ("performer_pytorch", "linformer", "nystromformer", "big_bird", "longformer", "reformer", "fnet")
    for name, held in memory.items():
        if f"listops/{name}" in accuracy and "2048" in held:
            x, y = held["2048"], 100 * statistics.mean(accuracy[f"listops/{name}"])
            low = y < FLOOR  # far below the others: at the edge, with its figure
            marker = "v" if low else "s" if name in peers else "o"
            ax.plot(x, max(y, FLOOR), marker, color=COLOURS[name in peers], clip_on=False)
            points[f"{name} {y:.1f} %" if low else name] = (x, max(y, FLOOR))
    ax.set(ylim=(FLOOR, 34), xlim=(10, 1.1 * max(x for x, _ in points.values())))
    ax.set(xlabel="memory of a training step at 2,048 tokens, MB", ylabel="accuracy on ListOps, %")
    ax.set_title("round: this library; square: peers", fontsize=9)
    name_points(ax, points)
    save(fig, "listops_memory")


def smollm_recipes() -> None:
    """Perplexity and recall of a converted decoder by recipe, and the memory each takes."""
    rows = stored("smollm_recipes")["rows"][::-1]
    fig, axes = figure(3, figsize=(14, 1 + 0.25 * len(rows)), sharey=True)
    kinds = {"ratio_long": "perplexity ratio, 450 tokens", "recall": "perplexity of a repeated passage"}
    for ax, (key, title) in zip(axes, {**kinds, "memory": "share of the key-value memory"}.items(), strict=True):
        colours = [COLOURS[0] if r["exact_heads"] else COLOURS[4] if "window" in r["recipe"] else GREY for r in rows]
        ax.barh(range(len(rows)), [r[key] for r in rows], color=colours)
        for y, row in enumerate(rows):
            shown = f"{row[key]:,.0f}" if row[key] > 20 else f"{row[key]:.2f}" if key != "memory" else f"{row[key]:.3f}"
            ax.annotate(shown, (row[key], y), xytext=(3, -3), textcoords="offset points", fontsize=7)
        ax.set_title(title, fontsize=10)
        if key != "memory":
            ax.set_xscale("log")
            ax.set_xlim(0.9, 4 * max(r[key] for r in rows))
            ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.margins(x=0.15)
    axes[0].set_yticks(range(len(rows)), [r["recipe"] for r in rows], fontsize=7)
    save(fig, "smollm_recipes")


def smollm_target() -> None:
    """What the search for a target tried: kept against memory."""
    found = stored("smollm_target")
    fig, ax = figure(figsize=(6.4, 4))
    for n, colour in (("1000", COLOURS[0]), ("4000", COLOURS[1])):
        if n not in found:
            continue
        report = found[n]["report"]
        tried = [(c["memory"], 1 - c["kept"]) for c in report["candidates"]]
        ax.plot(*zip(*tried, strict=True), "o", color=colour, alpha=0.6, label=f"tried on texts of {int(n):,} tokens")
        label = f"chosen; {found[n]['row']['memory']:.2f} of the memory at 4,000"
        ax.plot(*tried[report["chosen"]], "*", markersize=14, color=colour, label=label)
    ax.axhline(0.01, color=GREY, linestyle="--", linewidth=1)
    ax.set_yscale("log")
    ax.set_yticks([0.01, 0.02, 0.05, 0.1, 0.5, 0.9], ["1 %", "2 %", "5 %", "10 %", "50 %", "90 %"])
    ax.minorticks_off()
    ax.set(xlabel="share of the key-value memory at the length of the texts", xlim=(0, 1))
    ax.set_ylabel("lost of perplexity and recall")
    ax.legend(fontsize=8, loc="upper right")
    save(fig, "smollm_target")


def smollm_rates() -> None:
    found = {k: v for k, v in stored("smollm_rates").items() if k != "threads"}
    names = list(next(iter(found.values())))
    fig, ax = figure(figsize=(7, 3.4))
    for i, name in enumerate(names):
        ratios = [row[name] / row["original"] for row in found.values()]
        bars = ax.bar([x + 0.27 * (i - 1) for x in range(len(found))], ratios, 0.25, label=name, color=COLOURS[i])
        ax.bar_label(bars, [f"{row[name]:.0f}" for row in found.values()], fontsize=8)
    ax.set_xticks(range(len(found)), list(found))
    ax.set(ylabel="rate over that of the original", title="above the bars: tokens a second, one thread")
    ax.set_ylim(0, 1.9)
    ax.legend(fontsize=8, loc="upper left", ncols=3)
    save(fig, "smollm_rates")


def long_context() -> None:
    """Perplexity over a whole book by position, and recall by distance, relative to exact attention."""
    found = stored("long_context")
    stages = stored("smollm_distilled")
    found["window 256, 8 of 90 groups exact"] = stages["converted"]["book"]
    found["window 256, 8 of 90 groups exact, trained"] = stages["trained"]["book"]
    found["keep=0.99, memory=0.15, trained"] = stages["target"]["book"]
    fig, (left, right) = figure(2, figsize=(11, 3.8))
    exact = found["exact"]
    for i, (name, row) in enumerate(found.items()):
        colours = (*COLOURS[6:], *COLOURS[:6])
        style = {"color": colours[i % len(colours)], "linestyle": "-" if i < len(colours) else "--"}
        places = list(row["perplexity"])
        ratios = [row["perplexity"][p] / exact["perplexity"][p] for p in places]
        left.plot(range(len(places)), ratios, marker="o", markersize=3, label=name, **style)
        left.set_xticks(range(len(places)), places, fontsize=8)
        far = list(row["recall"])
        right.plot(range(len(far)), list(row["recall"].values()), marker="o", markersize=3, **style)
        right.set_xticks(range(len(far)), [f"{int(n):,}" for n in far])
    left.set_yscale("log")
    left.set_yticks([1, 1.5, 2, 5, 10, 50], ["1", "1.5", "2", "5", "10", "50"])
    left.minorticks_off()
    left.set(xlabel="positions in the book", ylabel="perplexity over that of exact attention")
    right.set_yscale("log")
    right.set_yticks([2, 5, 10, 50, 1000], ["2", "5", "10", "50", "1,000"])
    right.minorticks_off()
    right.set(xlabel="tokens between a passage and its repetition", ylabel="perplexity of the repetition")
    left.legend(fontsize=6, handlelength=3.5)
    save(fig, "long_context")


def window_kinds() -> None:
    found = stored("window_kinds")
    fig, axes = figure(2, figsize=(11, 3.2))
    panels = (("cosine", "all-MiniLM-L6: cosine to the original"), ("perplexity_ratio", "SmolLM2: perplexity ratio"))
    for ax, (key, title) in zip(axes, panels, strict=True):
        besides = list(dict.fromkeys(r["beside"] for r in found if key in r))[::-1]
        for kind, colour, marker in (("sliding", COLOURS[1], "o"), ("block", COLOURS[0], "s")):
            rows = [r for r in found if key in r and r["kind"] == kind]
            places = [besides.index(r["beside"]) for r in rows]
            ax.plot([r[key] for r in rows], places, marker, color=colour, label=f"{kind} window")
        ax.set_yticks(range(len(besides)), besides, fontsize=8)
        ax.set_ylim(-0.5, len(besides) - 0.5)
        ax.set_title(title, fontsize=10)
        ax.grid(axis="x", color="0.9")
    axes[0].legend(fontsize=8)
    save(fig, "window_kinds")


def landmark_ablations() -> None:
    found = {k: v for k, v in stored("landmark_ablations").items() if "other authors" in v}
    names = list(found)[::-1]
    fig, ax = figure(figsize=(8, 0.2 * len(names) + 1.2))
    for where, colour, marker in (("other authors", COLOURS[0], "o"), ("modern", COLOURS[1], "s")):
        places = [i for i, n in enumerate(names) if where in found[n]]
        ax.plot([found[names[i]][where] for i in places], places, marker, markersize=4, color=colour, label=where)
    ax.axvline(found["as it is"]["other authors"], color=GREY, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.margins(y=0.02)
    ax.grid(axis="y", color="0.94")
    ax.set_xlabel("error of the attention output on held-out texts")
    ax.legend(fontsize=8, loc="lower right")
    save(fig, "landmark_ablations")


def frontier() -> None:
    """The picture of the README and of the home page: the error on real heads by map and size, in large type."""
    found = stored("landmark_frontier")
    fig, axes = figure(2, figsize=(9, 4.4))
    names = {"FAVOR+": COLOURS[1], "calibrated": COLOURS[4], "landmark": COLOURS[0]}
    panels = {"minilm": "a kernel alone, sentence encoder", "smollm2, window": "beside a window, decoder"}
    for ax, (case, title) in zip(axes, panels.items(), strict=True):
        rows = found[case]
        for name, colour in names.items():
            sizes = sorted(int(m) for m in rows[name])
            errors = [rows[name][str(m)] for m in sizes]
            ax.plot(sizes, errors, "o-", color=colour, linewidth=2.5, markersize=7)
        floor = "window alone" if "window alone" in rows else "uniform"
        ax.axhline(rows[floor]["all"], color=GREY, linestyle="--", linewidth=1.5)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes := sorted(int(m) for m in rows["FAVOR+"]), [str(m) for m in sizes], fontsize=14)
        ax.tick_params(axis="y", labelsize=14)
        ax.set_ylim(0, 1.2 if case == "minilm" else 0.4)
        ax.set_title(title, fontsize=15)
        ax.set_xlabel("features per head", fontsize=15)
    axes[0].set_ylabel("error of attention", fontsize=15)
    labels = (
        (0, 14, 1.09, "FAVOR+", COLOURS[1]),
        (0, 70, 0.74, "calibrated", COLOURS[4]),
        (0, 32, 0.26, "landmark", COLOURS[0]),
        (0, 8, 0.76, "averaging", "0.4"),
        (1, 16, 0.315, "calibrated", COLOURS[4]),
        (1, 16, 0.245, "FAVOR+ or no kernel", COLOURS[1]),
        (1, 16, 0.14, "landmark", COLOURS[0]),
    )
    for place, x, y, text, colour in labels:
        axes[place].text(x, y, text, color=colour, fontsize=15, weight="bold")
    save(fig, "frontier")


def projection_bias() -> None:
    """The bias of positive features on every projection, 2 standard errors, against d."""
    found = stored("projection_bias")
    fig, ax = figure(figsize=(7.5, 3.8))
    styles = {"iid": (COLOURS[0], "s"), "orthogonal": (COLOURS[2], "D")}
    for i, (name, row) in enumerate(found.items()):
        wrong = "not fixed" in name
        colour, marker = (COLOURS[1], "o") if wrong else styles.get(name, (GREY, "o"))
        label = name if wrong or name in styles else "the six others" if name == "hadamard" else None
        x = [place + 0.07 * (i - (len(found) - 1) / 2) for place in range(len(row))]
        bias, error = zip(*row.values(), strict=True)
        style = {"markersize": 4, "capsize": 2, "linestyle": "-" if wrong else "", "linewidth": 1, "label": label}
        ax.errorbar(x, bias, [2 * e for e in error], marker=marker, color=colour, **style)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(row)), list(row))
    ax.set(xlabel="d", ylabel="relative bias")
    ax.legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.62))
    save(fig, "projection_bias")


def numbered(found: Any) -> Any:
    """Keys that JSON has made strings of are numbers again."""
    if isinstance(found, dict):
        return {_number(k): numbered(v) for k, v in found.items()}
    return found


def _number(key: str) -> Any:
    return int(key) if key.isdigit() else float(key) if key.replace(".", "", 1).isdigit() else key


def by_script(name: str) -> None:
    """The pictures that scripts draw when they are run, from what they have stored."""
    module, found = importlib.import_module(name), stored(name)
    draw: Callable[..., None] = module.draw
    if name == "attention_output_error":
        whole = {
            k: {n: {int(m): x for m, x in row.items()} for n, row in t.items()} for k, t in found["errors"].items()
        }
        draw(whole)
    elif name == "attention_policies":
        draw(found["runs"], list(found["table"]), found["seeds"])
    elif name == "parallel_plan":
        draw(found["rows"])
    elif name == "polynomial_timings":
        draw({k: {n: numbered(t) for n, t in rows.items()} for k, rows in found["seconds"].items()})
    elif name == "quasi_random_table":
        draw(found["mse"])
    elif name == "train_curves":
        draw(found["runs"], found["frequencies"])
    elif name == "train_transfer":
        draw(found["parent"], found["runs"])
    elif name == "turing_machine":
        draw(numbered(found["kernel"]), {int(m): x for m, x in found["features"].items()}, found["total"])


BY_SCRIPT = (
    "attention_output_error",
    "attention_policies",
    "parallel_plan",
    "polynomial_timings",
    "quasi_random_table",
    "train_curves",
    "train_transfer",
    "turing_machine",
)
# Every picture with the results it is drawn from.
PICTURES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "frontier": (frontier, ("landmark_frontier",)),
    "landmark_ablations": (landmark_ablations, ("landmark_ablations",)),
    "listops_memory": (listops_memory, ("train_table", "train_speed")),
    "long_context": (long_context, ("long_context", "smollm_distilled")),
    "projection_bias": (projection_bias, ("projection_bias",)),
    "sampled_softmax": (sampled_softmax, ("sampled_softmax",)),
    "sampler_variance": (sampler_variance, ("sampler_variance",)),
    "smollm_rates": (smollm_rates, ("smollm_rates",)),
    "smollm_recipes": (smollm_recipes, ("smollm_recipes",)),
    "smollm_target": (smollm_target, ("smollm_target",)),
    "softmax_metrics": (softmax_metrics, ("softmax_metrics",)),
    "train_kernels": (train_kernels, ("train_kernels",)),
    "train_table": (train_table, ("train_table",)),
    "window_kinds": (window_kinds, ("window_kinds",)),
    **{name: (partial(by_script, name), (name,)) for name in BY_SCRIPT},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(PICTURES))
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(PICTURES))
    if unknown:
        parser.error(f"unknown picture {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    for name in options.names or PICTURES:
        draw, results = PICTURES[name]
        missing = [r for r in results if not (RESULTS / f"{r}.json").exists()]
        if missing:
            print(f"{name}: left out, {', '.join(missing)} was not run yet", file=sys.stderr)
            continue
        draw()
        note_drawn(name, results)
        print(f"wrote {name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
