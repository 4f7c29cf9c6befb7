"""What a Fastfood kernel has to learn: nothing, S, or S, G and B; table 7 of paper 004, in small.

Claim: FastFood-SGB, where all three diagonals are learned, is the best variant or close to it, except on WNLI and CoLA.
GLUE after pre-training is out of reach here; the variants are compared on tasks of `bochner train` with preset `small`,
sentences of film critics among them, which are the source of SST-2. "Close" is within the spread: the larger standard
deviation of the two over seeds. Where no variant differs from another by more than that the claim holds whatever the
order is: that is reproduced in part only.

One run at a time, each resumable: stop the script whenever you like and call it again. Runs with SGB that
results/train_table.json has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import train_table
from _gallery import RESULTS, ROOT, figure, finish, save

from bochner import tasks

NAME = "train_fastfood"
VARIANTS = {"FastFood": None, "FastFood-S": "S", "FastFood-SGB": "SGB"}
TASKS = ("listops", "image", "text", "sentiment", "nli")
SEEDS = 3


def known() -> dict[str, dict[str, Any]]:
    """Stored runs by `task/variant/seed`, of the presets as they are now; those of the table included."""
    path = RESULTS / f"{NAME}.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("runs", {}) if path.exists() else {}
    presets = {k: tasks.task(k.split("/")[0]).presets["small"] for k in found}
    found = {k: v for k, v in found.items() if all(v[x] == getattr(presets[k], x) for x in train_table.SAME)}
    for key, run in train_table.known().items():
        task, attention, seed = key.split("/")
        if attention == "fastfood_prf" and task in TASKS:
            found[f"{task}/FastFood-SGB/{seed}"] = {k: run[k] for k in ("accuracy", *train_table.SAME)}
    return found


def scores(found: dict[str, dict[str, Any]], task: str) -> dict[str, list[float]]:
    """Accuracy in percent of every variant that was run, one for each seed."""
    keys = {v: [k for s in range(SEEDS) if (k := f"{task}/{v}/{s}") in found] for v in VARIANTS}
    return {v: [100 * found[k]["accuracy"] for k in ks] for v, ks in keys.items() if ks}


def close(seen: dict[str, list[float]]) -> tuple[float, float]:
    """How far SGB is behind the best variant, and the spread of the two over seeds."""
    best = max(seen, key=lambda v: statistics.mean(seen[v]))
    behind = statistics.mean(seen[best]) - statistics.mean(seen["FastFood-SGB"])
    return behind, max(statistics.stdev(seen[v]) for v in (best, "FastFood-SGB"))


def differ(seen: dict[str, list[float]]) -> bool:
    """Whether the best and the worst variant are further apart than the spread of either."""
    order = sorted(seen.values(), key=statistics.mean)
    return statistics.mean(order[-1]) - statistics.mean(order[0]) > max(map(statistics.stdev, (order[0], order[-1])))


def judge(whole: dict[str, dict[str, list[float]]]) -> tuple[str, str]:
    """The verdict on tasks run with all seeds, and why it is no better."""
    against = [t for t, (behind, spread) in ((t, close(s)) for t, s in whole.items()) if behind > spread]
    missing = [t for t in TASKS if t not in whole]
    told = [f"behind by more than the spread on {', '.join(against)}"] if against else []
    if not any(map(differ, whole.values())):
        told.append("no variant differs from another by more than the spread, so that any would be close to the best")
    told += [f"not all seeds run on {', '.join(missing)}"] if missing else []
    verdict = "not" if not whole or len(against) > len(whole) / 2 else "partly" if told else "reproduced"
    return verdict, "; ".join(told)


def conclude(found: dict[str, dict[str, Any]]) -> int:
    """Store what the runs say."""
    whole = {t: s for t in TASKS if len(s := scores(found, t)) == len(VARIANTS) and min(map(len, s.values())) == SEEDS}
    shown = []
    for task, seen in whole.items():
        cells = ", ".join(f"{v} {statistics.mean(x):.1f} ± {statistics.stdev(x):.1f}" for v, x in seen.items())
        shown.append(f"{task}: {cells}")
    once = {t: s for t in TASKS if t not in whole and (s := scores(found, t))}
    for task, seen in once.items():
        cells = ", ".join(f"{v} {statistics.mean(x):.1f}" for v, x in seen.items())
        shown.append(f"{task} ({min(map(len, seen.values()))} of {SEEDS} seeds): {cells}")
    draw(whole)
    verdict, why = judge(whole)
    apart = [t for t, s in whole.items() if differ(s)]
    shown.append(f"variants differ by more than the spread on {', '.join(apart) or 'no task'}")
    return finish(
        NAME,
        {"runs": found, "summary": {t: {"behind": close(s)[0], "spread": close(s)[1]} for t, s in whole.items()}},
        claim="FastFood-SGB (all diagonals learned) is the best variant or close to it, except on WNLI and CoLA.",
        ours="accuracy in percent over three seeds; " + "; ".join(shown) + ".",
        verdict=verdict,
        why=why,
    )


def draw(whole: dict[str, dict[str, list[float]]]) -> None:
    fig, axes = figure(max(1, len(whole)), figsize=(2.1 * max(1, len(whole)) + 0.5, 3.0), squeeze=False)
    for ax, (task, seen) in zip(axes[0], whole.items(), strict=False):
        for i, values in enumerate(seen.values()):
            ax.plot([i] * len(values), values, "o", alpha=0.6)
            ax.plot([i - 0.25, i + 0.25], [statistics.mean(values)] * 2, color="black")
        ax.set_xticks(range(len(seen)), ["none", "S", "SGB"][: len(seen)])
        ax.set_title(task)
    axes[0][0].set_ylabel("accuracy (%)")
    fig.supxlabel("learned diagonals of Fastfood")
    save(fig, NAME)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "fastfood", help="where runs are kept")
    parser.add_argument("--only", nargs="+", default=TASKS, choices=TASKS, help="these tasks")
    parser.add_argument("--status", action="store_true", help="only show what is known")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = known()
    for task in [] if options.status else options.only:
        for seed in range(SEEDS):
            for variant, learnable in VARIANTS.items():
                key = f"{task}/{variant}/{seed}"
                if key in found:
                    continue
                result = tasks.train(
                    task,
                    attention="fastfood_prf",
                    options={"learnable": learnable},
                    seed=seed,
                    output=options.runs / key,
                    resume=True,
                    progress=False,
                )
                found[key] = {"accuracy": result["metrics"]["accuracy"]}
                found[key] |= {k: result[k] for k in (*train_table.SAME, "parameters", "seconds")}
                print(f"{key}: {found[key]}", flush=True)
                keep(found)
    return conclude(found)


def keep(found: dict[str, dict[str, Any]]) -> None:
    """Store the runs; what is said of them stays until all were made."""
    path = RESULTS / f"{NAME}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**before, "runs": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
