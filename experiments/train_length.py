"""Accuracy against length: film reviews cut off after 256 to 2,048 bytes; the third axis of figures 1 and 3 of 004.

Claim: learned kernels keep the accuracy of softmax attention, at every length, for less time and memory (these are
measured by train_speed.py). Preset `small` of the task `text` with another `length` and nothing else changed: one layer
of width 32, 600 steps of 16 reviews, one seed. Runs with 1,024 bytes are those of results/train_table.json. Beside
them what the counts of bytes alone tell, by a logistic regression on the same bytes: more of a review tells more.

"Level" is within two standard errors of a difference between two shares of the 5,000 test reviews.

One run at a time, each resumable: stop the script whenever you like and call it again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_table
from _gallery import RESULTS, ROOT, figure, finish, save

from bochner import tasks

NAME = "train_length"
LENGTHS = (256, 512, 1024, 2048)
LEARNED = ("fastfood_prf",)
ATTENTIONS = ("exact", "positive", *LEARNED, "window+calibrated", "fnet", "identity")
LAST = ("exact/2048",)  # takes longer than all others together
Cells = dict[str, float]  # "attention/length": accuracy


def wanted() -> list[str]:
    """Every cell, short sequences first."""
    cells = [f"{a}/{n}" for n in LENGTHS for a in ATTENTIONS]
    return sorted(cells, key=LAST.__contains__)


def known() -> dict[str, Any]:
    """Stored accuracies, with those of the table at its own length, and those of the counts of bytes."""
    path = RESULTS / f"{NAME}.json"
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    accuracy = dict(stored.get("accuracy", {}))
    length = tasks.task("text").presets["small"].length
    for key, run in train_table.known().items():
        task, attention, seed = key.split("/")
        if task == "text" and seed == "0" and attention in ATTENTIONS and length in LENGTHS:
            accuracy[f"{attention}/{length}"] = run["accuracy"]
    return {"accuracy": accuracy, "counts": stored.get("counts", {})}


def counts_alone(length: int) -> float:
    """Test accuracy of a logistic regression on how often each byte occurs in the first `length - 1` bytes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    preset = tasks.preset_of(tasks.task("text"), "small", length=length)
    rows = {}
    for split in ("train", "test"):
        found = tasks.task("text").load(preset, split)
        shares = [np.bincount(found.raw(i)[: length - 1], minlength=256) / length for i in range(len(found))]
        rows[split] = np.stack(shares), found.labels
    scale = StandardScaler().fit(rows["train"][0])
    model = LogisticRegression(max_iter=1000).fit(scale.transform(rows["train"][0]), rows["train"][1])
    return float(model.score(scale.transform(rows["test"][0]), rows["test"][1]))


def noise(share: float, count: int) -> float:
    """Standard error of the difference of two shares near this one."""
    return math.sqrt(2 * share * (1 - share) / count)


def behind(accuracy: Cells, count: int) -> dict[str, float]:
    """By how much the best learned kernel is behind exact attention, where that is more than two standard errors."""
    out = {}
    for n in LENGTHS:
        learned = [accuracy[f"{a}/{n}"] for a in LEARNED if f"{a}/{n}" in accuracy]
        exact = accuracy.get(f"exact/{n}")
        if exact is not None and learned and exact - max(learned) > 2 * noise(exact, count):
            out[str(n)] = exact - max(learned)
    return out


def picture(found: dict[str, Any]) -> None:
    fig, ax = figure(figsize=(6.4, 3.8))
    for name in ATTENTIONS:
        seen = [(n, 100 * found["accuracy"][f"{name}/{n}"]) for n in LENGTHS if f"{name}/{n}" in found["accuracy"]]
        ax.plot(*zip(*seen, strict=True), marker="o", lw=2.4 if name == "exact" else 1.4, label=name)
    alone = {int(n): 100 * x for n, x in found["counts"].items()}
    ax.plot(list(alone), list(alone.values()), "--", color="0.5", label="counts of bytes")
    ax.set_xscale("log", base=2)
    ax.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    ax.set(xlabel="bytes of a review", ylabel="accuracy (%)")
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(fig, NAME)


def conclude(found: dict[str, Any]) -> int:
    accuracy = found["accuracy"]
    picture(found)
    lost = behind(accuracy, tasks.task("text").presets["small"].test or 1)
    shown = {a: [accuracy.get(f"{a}/{n}") for n in LENGTHS] for a in ATTENTIONS}
    told = ", ".join(f"{a} {' '.join('-' if x is None else f'{100 * x:.1f}' for x in row)}" for a, row in shown.items())
    missing = [c for c in wanted() if c not in accuracy]
    why = "one task, one small layer and one seed, where no attention at all does as well"
    return finish(
        NAME,
        found,
        claim="Learned kernels keep the accuracy of softmax attention, for less time and memory.",
        ours=f"accuracy in percent at {', '.join(map(str, LENGTHS))} bytes of text: {told}; learned behind exact by "
        f"more than two standard errors at: {', '.join(lost) or 'no length'}.",
        verdict="not" if lost else "partly",
        why=why + (f"; not run: {', '.join(missing)}" if missing else ""),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "length", help="where runs are kept")
    parser.add_argument("--only", nargs="+", default=[""], help="cells that contain one of these, as in positive/512")
    parser.add_argument("--status", action="store_true", help="only show what is known")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = known()
    for cell in () if options.status else wanted():
        if cell in found["accuracy"] or not any(part in cell for part in options.only):
            continue
        attention, length = cell.split("/")
        where = options.runs / cell
        result = tasks.train("text", attention=attention, length=int(length), output=where, resume=True, progress=False)
        found["accuracy"][cell] = result["metrics"]["accuracy"]
        print(f"{cell}: {found['accuracy'][cell]:.4f}", flush=True)
        keep(found)
    for n in () if options.status else LENGTHS:
        if str(n) not in found["counts"]:
            found["counts"][str(n)] = counts_alone(n)
            keep(found)
    return conclude(found)


def keep(found: dict[str, Any]) -> None:
    """Store the runs; what is said of them stays until all were made."""
    path = RESULTS / f"{NAME}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**before, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
