"""What benchmarks share: times, peak memory, the machine, the page of results."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bochner._timing import best_times

__all__ = ["best_times", "bfloat16_works", "machine", "peak_memory", "write_page"]

Call = Callable[[], Any]


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
