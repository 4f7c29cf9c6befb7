"""Pathfinder: are the two discs ends of one dashed curve, or of two? (Linsley et al. 2018, Tay et al. 2021)

Two long dashed curves and short distractors in one contrast, drawn so that dashes of one curve are nearer to each other
than to anything else. Where the discs are tells nothing: they are always the ends of a curve that was drawn first, and
thrown away where two curves are to start from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bochner._checks import BochnerError
from bochner._progress import track
from bochner.tasks.base import SPLITS, Preset, Sequences, stored

DASH, GAP = 1.6, 0.9  # length of a dash and of the gap after it, in pixels
CLEARANCE = 2.2  # between curves, and between parts of a curve that are not neighbours
TURN = 0.35  # standard deviation of the change of direction, radians
INK, DISC = 0.35, 1.1  # radii of the pen and of the discs
AIR = 1.0  # between the rims of the discs: touching ones would look joined
FINE = 4  # subpixels per pixel when drawing
CELLS = 8  # cells per pixel of the grid that says what is taken
REACH = math.ceil(CLEARANCE * CELLS)
NEAR = np.hypot(*np.mgrid[-REACH : REACH + 1, -REACH : REACH + 1]) <= CLEARANCE * CELLS
LADDER = (0.25, 0.5, 0.75, 1.0)  # where along a piece it is looked up in the grid
TRIES, TURNS, PATIENCE = 60, 6, 200  # to grow a curve, to go on from a dash, to make a picture


class Style(NamedTuple):
    """What a picture has: `side` in pixels, `dashes` of the two long curves, `distractors` with `short` dashes each."""

    side: int = 32
    dashes: int = 14
    distractors: int = 5
    short: int = 4


class Picture(NamedTuple):
    """Dashes (k, 2, 2) as end points, the curve each belongs to (long ones 0 and 1), two discs (2, 2), the label."""

    dashes: np.ndarray
    curve: np.ndarray
    discs: np.ndarray
    same: bool


PAPER = Style()


def picture(seed: int, index: int, style: Style = PAPER) -> Picture:
    """The picture number `index`; every second one has its discs on one curve."""
    rng = np.random.default_rng([seed, index])
    same = index % 2 == 1
    for _ in range(PATIENCE):
        with suppress(NoRoom):
            first = Canvas(style.side).grow(rng, style.dashes)
            discs = first[[0, -1], [0, 1]]
            if math.dist(*discs) >= 2 * DISC + AIR:
                curves = _curves(rng, first, same, style)
                which = np.repeat(np.arange(len(curves)), [len(c) for c in curves])
                return Picture(np.concatenate(curves), which, discs, same)
    raise BochnerError(f"Pictures of pathfinder have no room for {style}; take a larger 'side' or fewer dashes.")


def _curves(rng: np.random.Generator, first: np.ndarray, same: bool, style: Style) -> list[np.ndarray]:
    """The two long curves and the distractors; the first long one joins the ends of `first`, or each has one of them.

    Not given up at once: ends that leave room for one label only would tell.
    """
    for _ in range(TRIES):
        with suppress(NoRoom):
            canvas = Canvas(style.side)
            if same:
                long = [canvas.add(first), canvas.grow(rng, style.dashes)]
            else:
                a, b = first[[0, -1], [0, 1]]
                other = Canvas(style.side)
                other.take(b, b)  # the other disc is no part of this curve
                long = [canvas.add(other.grow(rng, style.dashes, a)), canvas.grow(rng, style.dashes, b)]
            return [*long, *(canvas.grow(rng, style.short) for _ in range(style.distractors))]
    raise NoRoom


class NoRoom(Exception):
    """A curve did not fit."""


class Canvas:
    """Curves that keep clear of each other, on a grid of cells that are taken."""

    def __init__(self, side: int) -> None:
        self.side, self.taken = side, np.zeros((side * CELLS + 2 * REACH,) * 2, bool)

    def grow(self, rng: np.random.Generator, count: int, start: np.ndarray | None = None) -> np.ndarray:
        """A new curve of `count` dashes from `start` or from anywhere."""
        for _ in range(TRIES):
            here = rng.uniform(2.0, self.side - 2.0, 2) if start is None else start
            curve = None if self.is_taken(*here) else self._walk(rng, count, *here.tolist())
            if curve is not None:
                return self.add(curve)
        raise NoRoom

    def _walk(self, rng: np.random.Generator, count: int, x: float, y: float) -> np.ndarray | None:
        """Dashes that stay clear of what is taken and of each other, or None where they cannot go on."""
        own = Canvas(self.side)
        own.taken |= self.taken
        angle, bends = rng.uniform(0.0, 2 * math.pi), rng.normal(0.0, TURN, (count, TURNS)).tolist()
        dashes: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for k in range(count):
            for bend in bends[k]:
                u, v = DASH * math.cos(angle + bend), DASH * math.sin(angle + bend)
                inside = 1.5 < x + u < self.side - 1.5 and 1.5 < y + v < self.side - 1.5
                if inside and not any(own.is_taken(x + t * u, y + t * v) for t in LADDER):
                    break
            else:
                return None
            if dashes:  # the dash before may be near: it counts one step later
                own.take(dashes[-1][0], (x, y))
            dashes.append(((x, y), (x + u, y + v)))
            angle, x, y = angle + bend, x + u * (1 + GAP / DASH), y + v * (1 + GAP / DASH)
        return np.array(dashes)

    def add(self, curve: np.ndarray) -> np.ndarray:
        """Keep others clear of the curve, its gaps included."""
        for a, b in pairwise([curve[0, 0], *curve[:, 1]]):
            self.take(a, b)
        return curve

    def take(self, a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> None:
        """Mark what is nearer than the clearance to the segment a b."""
        (x, y), (u, v) = a, b
        for t in (0.0, *LADDER):
            i, j = int((y + t * (v - y)) * CELLS), int((x + t * (u - x)) * CELLS)
            self.taken[i : i + 2 * REACH + 1, j : j + 2 * REACH + 1] |= NEAR

    def is_taken(self, x: float, y: float) -> bool:
        return bool(self.taken[int(y * CELLS) + REACH, int(x * CELLS) + REACH])


def draw(shown: Picture, side: int = 32, fine: int = FINE) -> np.ndarray:
    """The picture on a canvas of `fine` x `fine` subpixels to the pixel, True where there is ink."""
    ink = np.zeros((side * fine, side * fine), bool)
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


def image(shown: Picture, side: int = 32) -> np.ndarray:
    """(side, side) of uint8, the ink averaged over each pixel."""
    ink = draw(shown, side).reshape(side, FINE, side, FINE).mean((1, 3))
    return np.rint(255 * ink).astype(np.uint8)


def load(preset: Preset, split: str) -> Sequences:
    """Rows of pixels, label 1 where the discs are on one curve.

    The preset's `data`: what a picture has, by the names of `Style`; `levels`: greys that are told apart, default all
    256.
    """
    said = dict(preset.data)
    levels = said.pop("levels", 256)
    style = Style(**said)
    train, test = preset.train or 160_000, preset.test or 20_000
    i = SPLITS.index(split)
    count = (train, test, test)[i]

    def make() -> dict[str, np.ndarray]:
        numbers = track(range(count), count, f"making pathfinder, {split}, once")
        return {"pixels": np.stack([image(picture(i, j, style), style.side).ravel() for j in numbers])}

    named = "-".join(map(str, style))
    pixels = stored(f"pathfinder-2-{named}-{split}-{count}", make)["pixels"] // (256 // levels)
    return Sequences.of(list(pixels), np.arange(count) % 2, preset.length)
