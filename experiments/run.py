"""The figures and tables of the papers: one declared experiment each, which states its claim and says whether it holds.

    python experiments/run.py                     every experiment without a result, or whose result is stale
    python experiments/run.py NAME ...            these; --set steps=100 changes an option, --list shows them
    python experiments/run.py --quick             small forms, under 15 minutes; their results are in `.quick`
    python experiments/run.py NAME --resume       goes on with the stored figures: measures only what is missing
    python experiments/run.py NAME --judge        says anew what the stored figures mean; --draw only draws them
    python experiments/run.py --status            verdicts, and which results are older than the functions they executed

A run that was stopped goes on where it was; `--again` also runs what is up to date. The exit code is 0 if every
experiment ran and no claim fails that the stored result says is good, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # before torch is imported: times of one thread can be compared
if "--quick" in sys.argv[1:]:
    os.environ["BOCHNER_EXPERIMENTS_OUT"] = str(Path(__file__).resolve().parent.parent / ".quick")

import _framework as framework  # noqa: E402
from _framework import GOOD, Experiment  # noqa: E402

BAD, SKIPPED = 3, 77  # exit codes: the claim is not good; data or packages are not there
RAN, WORSE, BROKEN = "ran", "fail, though the gallery says they do not", "broke down"


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


def expected(name: str) -> bool:
    """Whether the stored result says that the claim is good."""
    path = framework.HERE / "results" / f"{name}.json"
    return not path.exists() or json.loads(path.read_text(encoding="utf-8"))["said"]["verdict"] in GOOD


def up_to_date(name: str, quick: bool) -> bool:
    """Whether there is a result, made by the code as it is; in its small form if that is asked for."""
    if not framework.path_of(name).exists() or framework.stale(name):
        return False
    small = json.loads(json.dumps(quick_of(name)))
    return not quick or bool(framework.stored(name)["made"]["options"] == small)


def several(names: list[str], options: argparse.Namespace) -> int:
    """Run experiments one after the other, each in a process of its own, and print a table of them."""
    # What a process of its own is told: the flags as they came, without the names.
    flags = [f"--{x}" for x in ("quick", "resume", "judge", "draw") if getattr(options, x)]
    flags += [part for text in options.options for part in ("--set", text)]
    rows = []
    for i, name in enumerate(names, 1):
        print(f"[{i}/{len(names)}] {name}", flush=True)
        began, before = time.monotonic(), os.times()
        code = subprocess.run([sys.executable, __file__, name, "--here", *flags], check=False).returncode
        seconds, after = time.monotonic() - began, os.times()
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"[{i}/{len(names)}] {name}: {seconds:.0f} s, {busy:.0f} s of a processor", flush=True)
        outcome = {0: RAN, BAD: WORSE if expected(name) else RAN, SKIPPED: "skipped"}.get(code, BROKEN)
        rows.append((name, outcome, seconds, busy))
    total = (f"{len(rows)} experiments", "", sum(r[2] for r in rows), sum(r[3] for r in rows))
    print(f"\n{'experiment':24s} {'s':>5s} {'s of a processor':>17s}")
    for name, outcome, seconds, busy in (*rows, total):
        print(f"{name:24s} {seconds:5.0f} {busy:17.0f}  {outcome}".rstrip())
    found = {outcome: [r[0] for r in rows if r[1] == outcome] for outcome in ("skipped", WORSE, BROKEN)}
    for outcome, which in found.items():
        if which:
            print(f"{outcome}: {', '.join(which)}")
    return int(bool(found[WORSE] or found[BROKEN]))


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
    left_out = {n: q for n in chosen if isinstance(q := quick_of(n), str)} if options.quick else {}
    chosen = [n for n in chosen if n not in left_out]
    fresh = []
    if not (options.names or options.again or options.judge or options.draw):
        fresh = [n for n in chosen if up_to_date(n, options.quick)]
    code = several([n for n in chosen if n not in fresh], options)
    if fresh:
        print(f"up to date: {', '.join(fresh)}")
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
