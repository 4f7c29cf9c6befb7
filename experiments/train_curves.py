"""How fast each attention learns to read: bits per byte of held-out books against steps.

Claim: the same steps bring at least one linear attention within 5 % of exact attention's bits per byte. Preset `small`
of the task `lm`, one seed; every attention sees the same batches in the same order. Beside them the limit that no
attention can be worse than, the frequencies of the bytes.

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
from _gallery import RESULTS, ROOT, figure, finish, save

from bochner import tasks
from bochner.tasks import checkpoints

NAME = "train_curves"
ATTENTIONS = ("exact", "window+calibrated", "window+positive", "fastfood_prf", "relu", "positive", "identity")
CLOSE = 1.05


def known() -> dict[str, Any]:
    """Stored runs by attention."""
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("runs", {}) if path.exists() else {}
    return found


def curve(attention: str, where: Path) -> dict[str, Any]:
    """Train, or take up a run that was stopped: validation bits against steps, and those of the test books."""
    result = tasks.train("lm", attention=attention, output=where / attention, resume=True, progress=False)
    seen = [x for x in checkpoints.lines(where / attention / "metrics.jsonl") if "eval_bits" in x]
    return {
        "steps": [x["step"] for x in seen],
        "bits": [x["eval_bits"] for x in seen],
        "test": result["metrics"]["bits"],
        "parameters": result["parameters"],
    }


def frequencies() -> float:
    """Bits per byte of the validation books by how often each byte occurs in the training books."""
    task = tasks.task("lm")
    preset = tasks.preset_of(task, "small")
    train, held = (task.load(preset, split).tokens for split in ("train", "validation"))
    share = (np.bincount(train, minlength=256) + 1) / (len(train) + 256)
    return float(-np.log(share[held]).mean() / math.log(2))


def draw(runs: dict[str, Any], base: float) -> None:
    fig, ax = figure(figsize=(6.8, 4.2))
    low = math.inf
    for bits, name in sorted((run["bits"][-1], name) for name, run in runs.items())[::-1]:
        (line,) = ax.plot(runs[name]["steps"], runs[name]["bits"], lw=2.4 if name == "exact" else 1.4)
        low = min(bits, low - 0.05)  # labels that do not touch
        ax.text(runs[name]["steps"][-1] + 10, low, f"{name}  {bits:.2f}", color=line.get_color(), va="center")
    ax.set(xlabel="steps", ylabel="bits per byte, validation books", title=f"frequencies of bytes alone: {base:.2f}")
    ax.set_xlim(0, 1.32 * max(max(run["steps"]) for run in runs.values()))
    ax.set_xticks(range(0, 801, 200))
    ax.set_ylim(bottom=low - 0.1)
    save(fig, NAME)


def conclude(runs: dict[str, Any]) -> int:
    base = frequencies()
    draw(runs, base)
    exact = runs["exact"]["test"]
    near = {a: runs[a]["test"] / exact for a in runs if a != "exact"}
    within = [a for a, r in near.items() if r <= CLOSE]
    told = ", ".join(f"{a} {runs[a]['test']:.2f}" for a in runs)
    missing = [a for a in ATTENTIONS if a not in runs]
    return finish(
        NAME,
        {"runs": runs, "frequencies": base},
        claim="At the same steps a linear attention reads books within 5 % of exact attention's bits per byte.",
        ours=f"bits per byte of the test books: {told}; within 5 %: {', '.join(within) or 'none'}.",
        verdict="not" if not within else "partly" if missing else "reproduced",
        why=f"not run: {', '.join(missing)}" if missing else "" if within else "none is within 5 % after 800 steps",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "curves", help="where runs are kept")
    parser.add_argument("--status", action="store_true", help="only show what is known")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = known()
    for attention in () if options.status else ATTENTIONS:
        if attention not in runs:
            runs[attention] = curve(attention, options.runs)
            print(f"{attention}: {runs[attention]['test']:.3f} bits per byte", flush=True)
            path = RESULTS / f"{NAME}.json"
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            path.write_text(json.dumps({**before, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    return conclude(runs)


if __name__ == "__main__":
    raise SystemExit(main())
