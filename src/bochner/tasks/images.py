"""Tasks made of CIFAR-10: classify grey pixels, continue colour pixels."""

from __future__ import annotations

import json

import numpy as np

from bochner import data
from bochner._checks import BochnerError
from bochner.tasks.base import Blocks, Preset, Sequences, shuffled, stored

SIDE = 32
VALIDATION = 5_000


def cifar(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (n, 32, 32, 3) of uint8 and their classes; the last 5,000 to train on are for validation."""
    which = "test" if split == "test" else "train"

    def make() -> dict[str, np.ndarray]:
        from PIL import Image

        folder = data.fetch("cifar10")
        files = ["test_batch.png"] if which == "test" else [f"data_batch_{i}.png" for i in range(1, 6)]
        rows = []
        for file in files:
            with Image.open(folder / file) as opened:
                rows.append(np.asarray(opened.convert("RGB")).reshape(-1, SIDE, SIDE, 3))
        labels = json.loads((folder / f"{which}_lables.json").read_text())
        return {"pictures": np.concatenate(rows), "labels": np.array(labels, np.int64)}

    arrays = stored(f"cifar-1-{which}", make)
    pictures, labels = arrays["pictures"], arrays["labels"]
    if which == "test":
        return pictures, labels
    rows = slice(-VALIDATION, None) if split == "validation" else slice(None, -VALIDATION)
    return pictures[rows], labels[rows]


def shrink(pictures: np.ndarray, side: int) -> np.ndarray:
    """Pictures (n, 32, 32, ...) averaged down to `side` pixels square."""
    if SIDE % side:
        raise BochnerError(f"The 'side' of a picture must divide {SIDE}, got {side}.")
    by = SIDE // side
    shape = (len(pictures), side, by, side, by, *pictures.shape[3:])
    return np.rint(pictures.reshape(shape).mean((2, 4), dtype=np.float32)).astype(np.uint8)


def _some(preset: Preset, split: str, count: int) -> np.ndarray:
    limit = preset.train if split == "train" else preset.test
    return shuffled(count, 0)[:limit] if limit else np.arange(count)


def grey(preset: Preset, split: str) -> Sequences:
    """Rows of grey pixels, 0.2989 R + 0.587 G + 0.114 B, and the class of the picture.

    The preset's `side`: pictures are averaged down to it. `levels`: greys that are told apart, default all 256.
    """
    pictures, labels = cifar(split)
    chosen = _some(preset, split, len(labels))
    light = np.rint(pictures[chosen] @ np.array([0.2989, 0.587, 0.114], np.float32)).astype(np.uint8)
    light = shrink(light, preset.data["side"]) // (256 // preset.data.get("levels", 256))
    flat = light.reshape(len(chosen), -1)
    return Sequences.of(list(flat), labels[chosen], preset.length)


def colour(preset: Preset, split: str) -> Blocks:
    """Pictures as sequences R, G, B of one pixel after the other, to be continued."""
    pictures, labels = cifar(split)
    chosen = _some(preset, split, len(labels))
    return Blocks(shrink(pictures[chosen], preset.data["side"]).ravel(), preset.length)
