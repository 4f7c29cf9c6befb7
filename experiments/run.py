"""The figures and tables of the papers: one declared experiment each, which states its claim and says whether it holds.

    python experiments/run.py                     every experiment without a result, or whose result is stale
    python experiments/run.py NAME ...            these; --set steps=100 changes an option, --list shows them
    python experiments/run.py --quick             small forms, under 15 minutes, in a folder of their own: `.quick`
    python experiments/run.py NAME --resume       goes on with the stored figures: measures only what is missing
    python experiments/run.py NAME --judge        says anew what the stored figures mean; --draw only draws them
    python experiments/run.py --status            verdicts, and which results are older than the functions they executed

A run that was stopped goes on where it was. The exit code is 0 if every experiment ran and no claim fails that the
stored result says is good, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _framework as framework
from _framework import GOOD, Experiment

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # before torch is imported: times of one thread can be compared
BAD, SKIPPED = 3, 77  # exit codes: the claim is not good; data or packages are not there


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="experiments/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("names", nargs="*", metavar="name", help="experiments, see --list; all unless given")
    made.add_argument("--quick", action="store_true", help="small forms, under 15 minutes; nothing stored is touched")
    made.add_argument("--resume", action="store_true", help="keep the stored figures and measure what is missing")
    made.add_argument("--again", action="store_true", help="also those whose result is up to date")
    made.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", dest="options")
    made.add_argument("--judge", action="store_true", help="judge and draw the stored figures; measure nothing")
    made.add_argument("--draw", action="store_true", help="draw the stored figures; measure nothing")
    made.add_argument("--status", action="store_true", help="verdicts and stale results")
    made.add_argument("--list", action="store_true", help="the experiments, their options and small forms")
    made.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # a process of its own, made by this one
    return made


def options_of(declared: Experiment, given: list[str], quick: bool) -> dict[str, Any]:
    """The options of a run: those given over those of the small form; unknown ones are refused."""
    known = {n: p.default for n, p in list(inspect.signature(declared.measure).parameters.items())[1:]}
    small = declared.quick if quick and isinstance(declared.quick, dict) else {}
    found = dict(small)
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            raise SystemExit(f"{declared.name} has no option {name!r}; it has {', '.join(known) or 'none'}")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[name] = value
    return found


def one(name: str, options: argparse.Namespace) -> int:
    """Run one experiment in this process."""
    try:
        declared = framework.load(name)
        if options.judge:
            said = framework.judge_again(declared)
        elif options.draw:
            framework.draw(declared)
            return 0
        else:
            chosen = options_of(declared, options.options, options.quick)
            said = framework.run(declared, chosen, resume=options.resume)
    except Exception as reason:
        if not isinstance(reason, ImportError) and type(reason).__name__ != "ArtefactUnavailable":
            raise
        print(f"skipped, {name}: {reason}")
        return SKIPPED
    return 0 if said.verdict in GOOD else BAD


def in_process(name: str, folder: Path | None, arguments: list[str]) -> tuple[int, float]:
    """The exit code of one experiment in a process of its own, and the processor time it took."""
    environment = {**os.environ, "BOCHNER_EXPERIMENTS_OUT": str(folder)} if folder else dict(os.environ)
    before = os.times()
    done = subprocess.run([sys.executable, __file__, name, "--here", *arguments], check=False, env=environment)
    after = os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return done.returncode, busy


def expected(name: str) -> bool:
    """Whether the stored result says that the claim is good."""
    try:
        return bool(framework.stored(name)["said"]["verdict"] in GOOD)
    except (OSError, KeyError):
        return True


def up_to_date(name: str) -> bool:
    """Whether there is a result, made by the code as it is."""
    try:
        return not framework.stale(name)
    except (OSError, KeyError):
        return False


def several(names: list[str], options: argparse.Namespace) -> int:
    """Run experiments one after the other, each in a process of its own."""
    folder = framework.ROOT / ".quick" if options.quick else None
    # What a process of its own is told: the flags as they came, without the names.
    flags = [f"--{x}" for x in ("quick", "resume", "judge", "draw") if getattr(options, x)]
    flags += [part for text in options.options for part in ("--set", text)]
    broken, bad, skipped = [], [], []
    for i, name in enumerate(names, 1):
        print(f"[{i}/{len(names)}] {name}", flush=True)
        began = time.monotonic()
        code, busy = in_process(name, folder, flags)
        print(f"[{i}/{len(names)}] {name}: {time.monotonic() - began:.0f} s, {busy:.0f} s of a processor", flush=True)
        if code == SKIPPED:
            skipped.append(name)
        elif code == BAD and expected(name):
            bad.append(name)
        elif code not in (0, BAD):
            broken.append(name)
    print(f"{len(names) - len(skipped) - len(broken)} experiments ran")
    for what, which in (
        ("skipped", skipped),
        ("fail, though the gallery says they do not", bad),
        ("broke down", broken),
    ):
        if which:
            print(f"{what}: {', '.join(which)}")
    return int(bool(broken or bad))


def status(names: list[str]) -> int:
    """Print the verdict of every result, and the functions that have changed since; 0 whatever they are."""
    old = 0
    for name in names:
        try:
            verdict, changed = framework.stored(name)["said"]["verdict"], framework.stale(name)
        except OSError:
            print(f"{name:24s} not run")
            continue
        old += bool(changed)
        told = f"stale: {', '.join(changed[:3])}" + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        print(f"{name:24s} {verdict:11s} {told if changed else ''}".rstrip())
    print(f"{old} of {len(names)} results are older than the functions they depend on")
    return 0


def listed(names: list[str]) -> int:
    for name in names:
        declared = framework.load(name)
        known = [f"{n}={p.default!r}" for n, p in list(inspect.signature(declared.measure).parameters.items())[1:]]
        small = "quick" if isinstance(declared.quick, dict) else f"no small form: {declared.quick}"
        print(
            f"{name}: {(declared.module.__doc__ or '').splitlines()[0]}\n    {small}; options: "
            f"{', '.join(known) or 'none'}"
        )
    return 0


def main(arguments: list[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    known = framework.names(framework.HERE)
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        made.error(f"unknown experiment {', '.join(unknown)}; there are {', '.join(known)}")
    if options.options and not options.names:
        made.error("--set needs the name of an experiment")
    chosen = options.names or known
    if options.list or options.status:
        return listed(chosen) if options.list else status(chosen)
    if options.here:
        return one(chosen[0], options)
    left_out = {}
    if options.quick:
        left_out = {n: q for n in chosen if isinstance(q := quick_of(n), str)}
        chosen = [n for n in chosen if n not in left_out]
    elif not (options.names or options.again or options.judge or options.draw):
        chosen = [n for n in chosen if not up_to_date(n)]
    code = several(chosen, options)
    for name, reason in left_out.items():
        print(f"left out, {name}: {reason}")
    return code


def quick_of(name: str) -> Any:
    """The options of the small form, or the reason why there is none; an experiment that cannot be loaded is tried."""
    try:
        return framework.load(name).quick
    except ImportError:
        return {}


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("stopped; call it again to go on", file=sys.stderr)
        raise SystemExit(130) from None
