"""Run every experiment: one script per figure or table, each stating its claim and whether it holds."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def main(names: list[str]) -> int:
    here = Path(__file__).parent
    found = (p for p in sorted(here.glob("[!_]*.py")) if p.name != "run.py")
    scripts = [p for p in found if not names or p.stem in names]
    failed = []
    for i, script in enumerate(scripts, 1):
        print(f"[{i}/{len(scripts)}] {script.stem}", flush=True)
        start = time.perf_counter()
        if subprocess.run([sys.executable, str(script)], check=False).returncode:
            failed.append(script.stem)
        print(f"[{i}/{len(scripts)}] {script.stem}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{len(scripts) - len(failed)} claims hold" + (f", these do not: {', '.join(failed)}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
