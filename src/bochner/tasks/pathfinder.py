"""Pathfinder: are the two discs ends of one dashed curve, or of two? (Linsley et al. 2018, Tay et al. 2021)

Two long dashed curves and short distractors in one contrast, drawn so that dashes of one curve are nearer to each other
than to anything else: the answer is in the picture, and only in the connection.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bochner.tasks.base import SPLITS, Preset, Sequences, stored

SIDE = 32
DASHES, DISTRACTORS, DISTRACTOR_DASHES = 14, 5, 4
SEED_DISTANCE = 7.0  # between the first points of the two long curves
DASH, GAP = 1.6, 0.9  # length of a dash and of the gap after it, in pixels
CLEARANCE = 2.2  # between curves, and between parts of a curve that are not neighbours
TURN = 0.35  # standard deviation of the change of direction, radians
INK, DISC = 0.35, 1.1  # radii of the pen and of the discs
FINE = 4  # subpixels per pixel when drawing
LADDER = np.linspace(0.0, 1.0, 6)[:, None]  # where along a piece its distance to others is taken


class Picture(NamedTuple):
    """Dashes (k, 2, 2) as end points, the curve each belongs to (long ones 0 and 1), two discs (2, 2), the label."""

    dashes: np.ndarray
    curve: np.ndarray
    discs: np.ndarray
    same: bool


def picture(seed: int, index: int) -> Picture:
    """The picture number `index`; every second one has its discs on one curve."""
    rng = np.random.default_rng([seed, index])
    while True:
        curves = _curves(rng)
        if curves is not None:
            break
    same = index % 2 == 1
    first, second = curves[0], curves[1]
    ends = [first[0, 0], first[-1, 1], second[0, 0], second[-1, 1]]
    swap = int(rng.integers(2))
    discs = (
        [ends[2 * swap], ends[2 * swap + 1]] if same else [ends[int(rng.integers(2))], ends[2 + int(rng.integers(2))]]
    )
    return Picture(
        np.concatenate(curves), np.repeat(np.arange(len(curves)), [len(c) for c in curves]), np.array(discs), same
    )


def _curves(rng: np.random.Generator) -> list[np.ndarray] | None:
    """Two long curves and the distractors, or None if they do not fit."""
    curves: list[np.ndarray] = []
    taken = np.zeros((0, 2))
    for number in range(2 + DISTRACTORS):
        for _ in range(60):
            start = rng.uniform(2.0, SIDE - 2.0, 2)
            too_near = number == 1 and np.linalg.norm(start - curves[0][0, 0]) < SEED_DISTANCE
            if too_near or _distance(start[None], taken) < CLEARANCE:
                continue
            curve = _curve(rng, start, DASHES if number < 2 else DISTRACTOR_DASHES, taken)
            if curve is not None:
                break
        else:
            return None
        curves.append(curve)
        ends = np.concatenate([curve[:1, 0], curve[:, 1]])
        taken = np.concatenate([taken, *(a + LADDER * (b - a) for a, b in pairwise(ends))])
    return curves


def _curve(rng: np.random.Generator, start: np.ndarray, count: int, taken: np.ndarray) -> np.ndarray | None:
    """`count` dashes from `start`, clear of `taken` and of itself, or None."""
    angle = rng.uniform(0.0, 2 * math.pi)
    dashes: list[tuple[np.ndarray, np.ndarray]] = []
    near, last = taken, taken[:0]  # the dash before may be near: it joins one step later
    here = start
    for _ in range(count):
        for _ in range(6):
            turned = angle + rng.normal(0.0, TURN)
            step = np.array([math.cos(turned), math.sin(turned)])
            end = here + DASH * step
            if not (1.5 < end[0] < SIDE - 1.5 and 1.5 < end[1] < SIDE - 1.5):
                continue
            if _distance(here + DASH * LADDER * step, near) >= CLEARANCE:
                break
        else:
            return None
        dashes.append((here, end))
        near, last = np.concatenate([near, last]), here + (DASH + GAP) * LADDER * step
        angle, here = turned, here + (DASH + GAP) * step
    return np.array(dashes)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    if len(b) == 0:
        return math.inf
    apart = a[:, None] - b
    return math.sqrt(np.einsum("ijk,ijk->ij", apart, apart).min())


def draw(shown: Picture, fine: int = FINE) -> np.ndarray:
    """The picture on a canvas of `fine` x `fine` subpixels to the pixel, True where there is ink."""
    ink = np.zeros((SIDE * fine, SIDE * fine), bool)
    for a, b in shown.dashes:
        _stroke(ink, a, b, INK, fine)
    for disc in shown.discs:
        _stroke(ink, disc, disc, DISC, fine)
    return ink


def _stroke(ink: np.ndarray, a: np.ndarray, b: np.ndarray, radius: float, fine: int) -> None:
    """Blacken what is at most `radius` from the segment a b; columns are the first coordinate."""
    low = np.floor((np.minimum(a, b) - radius) * fine).astype(int).clip(0)
    high = np.ceil((np.maximum(a, b) + radius) * fine).astype(int)
    box = ink[low[1] : high[1], low[0] : high[0]]
    x = (np.arange(box.shape[1]) + low[0] + 0.5) / fine - a[0]
    y = (np.arange(box.shape[0])[:, None] + low[1] + 0.5) / fine - a[1]
    u, v = b - a
    t = ((x * u + y * v) / max(u * u + v * v, 1e-12)).clip(0.0, 1.0)
    box |= (x - t * u) ** 2 + (y - t * v) ** 2 <= radius**2


def image(shown: Picture) -> np.ndarray:
    """(32, 32) of uint8, the ink averaged over each pixel."""
    ink = draw(shown).reshape(SIDE, FINE, SIDE, FINE).mean((1, 3))
    return np.rint(255 * ink).astype(np.uint8)


def load(preset: Preset, split: str) -> Sequences:
    """Rows of pixels, label 1 where the discs are on one curve."""
    train, test = preset.train or 160_000, preset.test or 20_000
    i = SPLITS.index(split)
    count = (train, test, test)[i]

    def make() -> dict[str, np.ndarray]:
        return {"pixels": np.stack([image(picture(i, j)).ravel() for j in range(count)])}

    pixels = stored(f"pathfinder-1-{split}-{count}", make)["pixels"]
    return Sequences.of(list(pixels), np.arange(count) % 2, preset.length)
