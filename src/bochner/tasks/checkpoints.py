"""A run's directory: its configuration, its metrics line by line, and checkpoints that survive being killed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from bochner._checks import BochnerError

COMPLETE = "complete"  # the hashes of the files, written last: a checkpoint without it was interrupted


def write(path: Path, text: str) -> None:
    """All of it or nothing."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(text, encoding="utf-8")
    tmp.replace(path)


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, indent=1) + "\n")


def prepare(output: Path, configuration: dict[str, Any], *, resume: bool) -> None:
    """Claim a directory for a run, or take up the run that is there if it is the same one.

    A run that never got as far as a measurement or a checkpoint is no run.
    """
    path = output / "run.json"
    begun = any(found for name in ("result.json", "metrics.jsonl", "checkpoint-*") for found in output.glob(name))
    if path.exists() and begun:
        there = json.loads(path.read_text(encoding="utf-8"))
        differ = sorted(k for k in {*there, *configuration} if there.get(k) != configuration.get(k))
        if differ:
            said = ", ".join(f"{k} {there.get(k)!r} there and {configuration.get(k)!r} here" for k in differ)
            raise BochnerError(f"The run in {str(output)!r} is another one: {said}; choose another output.")
        if not resume:
            raise BochnerError(f"There is a run in {str(output)!r} already; resume it, or choose another output.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_json(path, configuration)
    except OSError as error:
        raise BochnerError(
            f"The directory {str(output)!r} of the run cannot be written to: {error.strerror}; choose another output."
        ) from error


NO_ROOM = tuple(code for name in ("ENOSPC", "EDQUOT", "EFBIG") if (code := getattr(errno, name, None)) is not None)


@contextmanager
def room_named(output: Path) -> Iterator[None]:
    """Say so if a run stops because the disk is full.

    Each library says it in its own way: Python by a number, safetensors by the system's words in an error of its own,
    torch by the line of its source at which a write went wrong.
    """
    try:
        yield
    except BochnerError:
        raise
    except Exception as error:
        said = str(error)
        named = getattr(error, "errno", None) in NO_ROOM or any(os.strerror(code) in said for code in NO_ROOM)
        if not named and "inline_container" not in said:
            raise
        left = shutil.disk_usage(output).free / 1e6
        raise BochnerError(
            f"The run in {str(output)!r} could not be written: its disk has {left:.1f} MB left; free some space, then "
            "resume it."
        ) from error


def last_checkpoint(output: Path, *, tidy: bool = True) -> Path | None:
    """The newest complete checkpoint; with `tidy` those that were interrupted or damaged are removed."""
    found: list[tuple[int, Path]] = []
    for path in output.glob("checkpoint-*"):
        if is_complete(path):
            found.append((int(path.name.removeprefix("checkpoint-")), path))
        elif tidy:
            shutil.rmtree(path)
    return max(found)[1] if found else None


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end and has the bytes that were written."""
    try:
        said = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(said == hashes(checkpoint))


def hashes(checkpoint: Path) -> dict[str, str]:
    """The sha256 of every file of a checkpoint but the mark, and but the random states of other processes."""
    files = sorted(p for p in checkpoint.iterdir() if p.name != COMPLETE and not p.name.startswith("rng_state_"))
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


class Journal(TrainerCallback):
    """Writes the metrics so far, which Trainer keeps in its checkpoints, as JSON lines; marks complete checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            rows = [x for x in state.log_history if "train_runtime" not in x]
            write(self.path, "".join(json.dumps(dict(sorted(x.items()))) + "\n" for x in map(timeless, rows)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(checkpoint / COMPLETE, hashes(checkpoint))


def timeless(logged: dict[str, Any]) -> dict[str, Any]:
    """What was measured, without how long it took."""
    return {k: v for k, v in logged.items() if not k.endswith(("_runtime", "_per_second")) and k != "epoch"}


def lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
