"""The figures and tables of the papers: one script each, which states its claim and says whether it holds.

Without names every script runs that has not run since it was last changed: stop it whenever you like and call it
again. A full run writes `experiments/results`, from which `experiments/gallery.py` makes the gallery. `--quick` takes
the scripts that have a small form, in a copy of this folder under `.quick`: no stored result is touched.

The exit code is 0 if every script ran and every verdict is the one the gallery states, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Small forms of the scripts that have no --quick of their own.
QUICK = {
    "clustered_table": ["--repetitions", "3"],
    "landmark_frontier": ["--cases", "minilm", "--layers", "1", "--sizes", "32", "256"],
    "hybrid_angles": ["--estimates", "300"],
    "hybrid_surface": [],
    "moments_frontier": ["--cases", "minilm, window", "--layers", "1", "--texts", "2"],
    "projection_bias": [],
    "quasi_random_table": ["--draws", "5"],
    "sampled_softmax": ["--steps", "100", "--seeds", "1"],
    "sampler_variance": ["--steps", "100"],
    "softmax_metrics": ["--steps", "100", "--runs", "2"],
}
# Why a script has no small form.
LEFT_OUT = {
    "further_models": "searches a target for each of four models",
    "landmark_ablations": "fits maps to hundreds of texts, for each of its parts anew",
    "long_context": "reads a book with a decoder of 135 million parameters, several times",
    "minilm_target": "two searches, and what they find depends on the time they are given",
    "protein_attention": "looks at a model that is trained first",
    "smollm_rates": "times a decoder of 135 million parameters behind 8,000 tokens",
    "smollm_recipes": "converts a decoder of 135 million parameters by 21 recipes",
    "smollm_target": "searches a target for a decoder of 135 million parameters",
    "smollm_distilled": "distills a decoder of 135 million parameters",
    "speech_encoder": "fits maps to 1,500 frames of thirteen pieces, four times",
    "train_curves": "trains models",
    "train_fastfood": "trains models",
    "train_kernels": "trains models",
    "train_length": "trains models",
    "train_speed": "its claim is about lengths that take minutes, on an idle machine",
    "train_table": "trains models",
    "train_tis": "runs five models of eight layers over whole transcripts, twice",
    "train_transfer": "trains models",
}
# Claims that do not hold as they are stated, of scripts whose result does not say so itself; the gallery says why.
NOT_REPRODUCED = {
    "attention_sparsity",
    "sampled_softmax",
    "sampler_variance",
    "softmax_metrics",
    "train_table",
}
TOOLS = {"run", "gallery", "pictures", "draw"}  # scripts of this folder that are no experiments


def names() -> list[str]:
    return sorted(p.stem for p in HERE.glob("[!_]*.py") if p.stem not in TOOLS)


def quick_arguments(name: str) -> list[str] | None:
    """The arguments of the small form of a script, or None if it has none."""
    if name in QUICK:
        return QUICK[name]
    return ["--quick"] if '"--quick"' in (HERE / f"{name}.py").read_text(encoding="utf-8") else None


def expected_to_hold(name: str) -> bool:
    """Whether the stored result says that the claim holds; without one, whether it is not known to fail."""
    try:
        said = json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))["gallery"]
    except (OSError, ValueError, KeyError, TypeError):
        return name not in NOT_REPRODUCED
    return bool(said["verdict"] == "reproduced")


def stamp(name: str) -> str:
    """Changes with the script and with what all scripts share."""
    shared = sorted(HERE.glob("_*.py"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in [HERE / f"{name}.py", *shared])).hexdigest()[:16]


class Log:
    """Which scripts ran to their end, in a file beside the results; survives being stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries: dict[str, dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.entries = {}

    def done(self, name: str) -> bool:
        return self.entries.get(name, {}).get("stamp") == stamp(name)

    def add(self, name: str, holds: bool, seconds: float) -> None:
        self.entries[name] = {"stamp": stamp(name), "holds": holds, "seconds": round(seconds, 1)}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.entries, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)


def copy_for_quick() -> Path:
    """The folder of a quick run: the scripts, and room for the pictures some of them draw."""
    root = HERE.parent / ".quick"
    folder = root / "experiments"
    (folder / "results").mkdir(parents=True, exist_ok=True)
    (root / "docs" / "images" / "gallery").mkdir(parents=True, exist_ok=True)
    for script in HERE.glob("*.py"):
        shutil.copy(script, folder)
    return folder


def run(folder: Path, name: str, arguments: list[str]) -> bool | None:
    """Whether the claim of one script holds; None if it broke down before it wrote its result."""
    result = folder / "results" / f"{name}.json"
    before = result.stat().st_mtime_ns if result.exists() else 0
    code = subprocess.run([sys.executable, str(folder / f"{name}.py"), *arguments], check=False).returncode
    if code not in (0, 1) or not result.exists() or (code and result.stat().st_mtime_ns == before):
        return None
    return code == 0


def processor_seconds() -> float:
    """What all scripts have used so far; on a busy machine less than the time that has passed."""
    times = os.times()
    return times.children_user + times.children_system


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="experiments/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help="experiments, see --list; all unless given")
    parser.add_argument("--quick", action="store_true", help="small forms, under 15 minutes, nothing stored is touched")
    parser.add_argument("--again", action="store_true", help="also those that have run already")
    parser.add_argument("--list", action="store_true", help="list the experiments and leave")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"unknown experiment {', '.join(unknown)}; there are {', '.join(names())}")
    if options.list:
        for name in names():
            first = (HERE / f"{name}.py").read_text(encoding="utf-8").splitlines()[0].strip('"')
            print(f"{name:22s} {'quick' if quick_arguments(name) is not None else '     '}  {first}")
        return 0
    chosen = options.names or names()
    left_out = [name for name in chosen if options.quick and quick_arguments(name) is None]
    chosen = [name for name in chosen if name not in left_out]
    folder = copy_for_quick() if options.quick else HERE
    log = Log(folder / "results" / ".done.json")
    todo = [n for n in chosen if options.names or options.again or not log.done(n)]
    broken = []
    for i, name in enumerate(todo, 1):
        print(f"[{i}/{len(todo)}] {name}", flush=True)
        start, busy = time.perf_counter(), processor_seconds()
        holds = run(folder, name, (quick_arguments(name) or []) if options.quick else [])
        seconds, busy = time.perf_counter() - start, processor_seconds() - busy
        print(f"[{i}/{len(todo)}] {name}: {seconds:.0f} s, {busy:.0f} s of a processor", flush=True)
        if holds is None:
            broken.append(name)
        else:
            log.add(name, holds, seconds)
    code = report(chosen, log, broken, len(chosen) - len(todo))
    for name in left_out:
        print(f"left out, {name}: {LEFT_OUT.get(name, 'no small form')}")
    return code


def report(chosen: list[str], log: Log, broken: list[str], skipped: int) -> int:
    ran = [n for n in chosen if log.done(n) and n not in broken]
    fails = [n for n in ran if not log.entries[n]["holds"]]
    surprising = [n for n in fails if expected_to_hold(n)]
    print(f"{len(ran)} experiments ran, {skipped} of them before; the claims of {len(ran) - len(fails)} hold")
    if fails:
        print(f"not as the papers state: {', '.join(fails)}")
    if surprising:
        print(f"of these the gallery says that they hold: {', '.join(surprising)}")
    if broken:
        print(f"broke down: {', '.join(broken)}")
    return int(bool(broken or surprising))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("stopped; call it again to go on", file=sys.stderr)
        raise SystemExit(130) from None
