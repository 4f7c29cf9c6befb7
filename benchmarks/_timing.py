"""What benchmarks share: arguments, times, peak memory, the machine, results and their page."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bochner._timing import best_times as best_times  # for all benchmarks

Call = Callable[[], Any]


def arguments(
    doc: str | None, quick: str, *, parts: tuple[str, ...] = (), page: bool = True
) -> argparse.ArgumentParser:
    """The arguments that benchmarks have in common; `quick` says what is left out, `parts` what can be chosen."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=None, help="write the numbers as JSON; parts in it are kept")
    if page:
        parser.add_argument("--page", type=Path, default=None, help="replace the tables between the page's markers")
    if parts:
        parser.add_argument("--part", nargs="*", choices=parts, default=list(parts), help="only these")
    return parser


def kept(output: Path | None) -> dict[str, Any]:
    """What was measured before and is kept."""
    return json.loads(output.read_text()) if output is not None and output.exists() else {}


def write(results: dict[str, Any], options: argparse.Namespace, name: str = "", text: str = "") -> None:
    """Results as JSON, and as the tables of a page, where the arguments ask for it."""
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    if getattr(options, "page", None) is not None:
        write_page(options.page, name, text)


def show(rows: list[dict[str, Any]], title: str = "") -> None:
    """Rows as a table on the screen."""
    keys = [k for k in rows[0] if not isinstance(rows[0][k], list)]
    cells = [[f"{row[k]:.3g}" if isinstance(row[k], float) else str(row[k]) for k in keys] for row in rows]
    print((f"\n{title}\n" if title else "") + table(keys, cells))


def peak_memory(call: Call) -> int:
    """Bytes that a call holds at most beyond what was held before, by torch's own record of CPU allocations.

    What the call returns is counted while it runs.
    """
    call()
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def bfloat16_works() -> bool:
    """Whether this machine multiplies bfloat16 matrices: some virtual ones announce AMX and then die of it."""
    probe = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode == 0


def machine(threads: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table for a page."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def write_page(path: Path, name: str, text: str) -> None:
    """Replace what stands between the two markers of a page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = path.read_text().split(begin, 1)
    after = rest.split(end, 1)[1]
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
