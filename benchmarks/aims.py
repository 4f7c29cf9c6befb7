"""How long a new user waits: four examples in processes of their own, seconds to the first sign and to the end.

python benchmarks/aims.py [--quick] [--output FILE.json]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _timing import arguments, machine, show, write

from bochner import data

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def aims(quick: bool) -> dict[str, list[str]]:
    """By aim, the script and its arguments."""
    return {
        "speed up an encoder": ["speed_up_an_encoder.py", *(["200"] if quick else [])],
        "shrink a cache": ["shrink_a_cache.py", *([] if quick else [str(data.fetch("smollm2"))])],
        "fit 200,000 rows": ["many_rows.py", *(["2000"] if quick else [])],
        "train a Performer": ["performer.py", *(["20"] if quick else [])],
    }


def run(script: str, *rest: str) -> dict[str, Any]:
    """Seconds until something was said and until the end, and the last line."""
    began = time.perf_counter()
    command = [sys.executable, "-u", str(EXAMPLES / script), *rest]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=alone) as process:
        assert process.stdout is not None
        first, last = 0.0, ""
        for line in process.stdout:
            text = line.decode(errors="replace").strip()
            if text:
                first, last = first or time.perf_counter() - began, text
    if process.returncode:
        raise SystemExit(f"{script} ended with code {process.returncode}: {last}")
    return {"first": first, "seconds": time.perf_counter() - began, "last": last}


def main() -> None:
    options = arguments(__doc__, "small sizes", page=False).parse_args()
    rows = []
    for aim, command in aims(options.quick).items():
        rows.append({"aim": aim, "script": command[0], **run(*command)})
        show(rows[-1:])
    write({"machine": machine(1), "rows": rows}, options)


if __name__ == "__main__":
    main()
