"""Every benchmark of this folder, one after another: `python benchmarks/run.py [--quick] [name ...]`.

A full run writes `benchmarks/results/<name>.json`, and then the tables of the documentation; a quick one only prints.
Each benchmark is a process of its own, so that none inherits another's memory or threads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"


def names() -> list[str]:
    return sorted(
        p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_") and p.stem not in ("run", "history", "sources")
    )


def command(name: str, quick: bool) -> list[str]:
    line = [sys.executable, str(HERE / f"{name}.py")]
    if quick:
        return [*line, "--quick"]
    line += ["--output", str(HERE / "results" / f"{name}.json")]
    if name == "attention":
        line += ["--plot", str(DOCS / "images" / "attention.png")]
    return line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names())}; all unless given")
    parser.add_argument("--quick", action="store_true", help="small sizes; prints, writes nothing")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(names())
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)}; there are {names()}")
    chosen = options.names or names()
    (HERE / "results").mkdir(exist_ok=True)
    failed = []
    for i, name in enumerate(chosen, start=1):
        print(f"[{i}/{len(chosen)}] {name}", flush=True)
        began = time.perf_counter()
        code = subprocess.run(command(name, options.quick), check=False).returncode
        print(
            f"[{i}/{len(chosen)}] {name}: {'done' if code == 0 else f'failed ({code})'} "
            f"in {time.perf_counter() - began:.0f} s\n",
            flush=True,
        )
        if code:
            failed.append(name)
    if not options.quick:
        subprocess.run([sys.executable, str(DOCS / "extensions" / "tables.py")], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
