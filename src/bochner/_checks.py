"""Validation at the public entry: one exception class, one sentence per mistake."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable, Mapping
from importlib import import_module
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class BochnerError(ValueError):
    """The one error of this library: names the argument, the value and the remedy."""


class ArgumentError(BochnerError):
    """The value of an argument is none that it can have; on the command line, wrong usage."""


class MissingExtraError(BochnerError, ImportError):
    """A package that is not installed is needed for this; the message says what to install."""


class BochnerWarning(UserWarning):
    """Something was computed, but not as well as the caller may think."""


def is_int(value: Any) -> bool:
    """Whether a value counts something: an int of Python, numpy or torch's tracing, but no bool."""
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def positive_int(value: Any, name: str, owner: str) -> int:
    if not is_int(value) or value <= 0:
        raise ArgumentError(f"The {name!r} of {owner} must be a positive int, got {value!r}.")
    return int(value)


def positive_float(value: Any, name: str, owner: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ArgumentError(f"The {name!r} of {owner} must be a positive finite number, got {value!r}.")
    return float(value)


def positive_numbers(value: Any, name: str, owner: str, count: int | None = None) -> float | np.ndarray:
    """One positive number, or a float64 array of one for each column, `count` of them where that is known."""
    got = repr(value)
    with contextlib.suppress(ValueError):  # rows of unequal length
        table = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        fits = table.ndim == 0 or (table.ndim == 1 and table.size and count in (None, table.size))
        if fits and table.dtype.kind in "fiu" and ((table > 0) & np.isfinite(table)).all():
            return table.astype(np.float64) if table.ndim else float(table)
        got = repr(table.tolist()) if table.ndim < 2 else f"an array of shape {table.shape}"
    many = "one for each column" if count is None else f"{count}, one for each column"
    raise ArgumentError(f"The {name!r} of {owner} must be one positive number, or {many}, got {got}.")


def non_negative(value: Any, name: str, owner: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ArgumentError(f"The {name!r} of {owner} must be a number >= 0, got {value!r}; give a finite one.")
    return float(value)


def flag(value: Any, name: str, owner: str) -> bool:
    """A yes or no: a bool of Python, numpy or torch's tracing."""
    if not isinstance(value, (bool, np.bool_, torch.SymBool)):
        raise ArgumentError(f"The {name!r} of {owner} must be True or False, got {value!r}.")
    return bool(value)


def one_of(value: Any, name: str, owner: str, valid: Iterable[Any]) -> Any:
    valid = list(valid)
    if value not in valid:
        raise ArgumentError(f"The {name!r} of {owner} must be one of {valid}, got {value!r}.")
    return value


def lookup(registry: Mapping[str, T], name: Any, what: str) -> T:
    """The entry of a registry; an unknown name is told the likeliest ones, or all if none is like it."""
    if isinstance(name, str) and name in registry:
        return registry[name]
    like = difflib.get_close_matches(name, registry) if isinstance(name, str) else []
    help = f"did you mean {' or '.join(map(repr, like))}?" if like else f"the valid names are {sorted(registry)}."
    raise ArgumentError(f"Unknown {what} {name!r}; {help}")


def floating(x: Any, name: str, owner: str) -> Tensor:
    """A floating-point tensor, or a sentence saying what came instead."""
    if not isinstance(x, Tensor):
        raise BochnerError(f"The {name!r} of {owner} must be a torch.Tensor, got {type(x).__name__}.")
    if not x.is_floating_point():
        raise BochnerError(
            f"The {name!r} of {owner} must be a floating-point tensor, got {x.dtype}; call .float() on it."
        )
    if x.dtype not in DTYPES:
        raise BochnerError(
            f"The {name!r} of {owner} must be float16, bfloat16, float32 or float64, got {x.dtype}; call .bfloat16() "
            "on it."
        )
    return x


def finite(x: Tensor, name: str, owner: str) -> Tensor:
    """Refuse NaN and infinity, saying where the first one is. Skipped while tracing or compiling."""
    if torch.compiler.is_compiling() or x.is_meta:
        return x
    # A sum is one pass without a temporary; only a bad or overflowing tensor pays for the full search.
    if not math.isfinite(float(x.detach().sum(dtype=accumulation_dtype(x.dtype)))):
        bad = ~torch.isfinite(x.detach())
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            raise BochnerError(
                f"The {name!r} of {owner} must be finite, got {x[where].item()} at index {where} "
                f"({int(bad.sum())} of {x.numel()} entries are not finite)."
            )
    return x


def extra(package: str, name: str, what: str) -> Any:
    """The module `package`, which comes with the extra `name` and which `what` needs; else `MissingExtraError`.

    >>> extra("math", "hf", "bochner.hf").sqrt(4.0)
    2.0
    """
    root = package.split(".")[0]
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != root:
            raise
        raise MissingExtraError(f"{what} needs {root}; install it with: pip install 'bochner[{name}]'.") from error


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64, everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_generator(seed: int | None, generator: torch.Generator | None = None) -> torch.Generator:
    """A CPU generator of its own; the global random state is never touched."""
    if generator is not None:
        if seed is not None:
            raise BochnerError("Give 'seed' or 'generator', not both.")
        return generator
    g = torch.Generator(device="cpu")
    if seed is None:
        g.seed()
    elif not is_int(seed) or seed < 0:
        raise BochnerError(f"The 'seed' must be a non-negative int or None, got {seed!r}.")
    else:
        g.manual_seed(int(seed))
    return g


def spawn_seed(seed: int, *key: int) -> int:
    """An independent seed for one of many parts (a layer, a step, a head), from the user's seed and the part's numbers.

    The one rule of the library: sums such as `seed + 1000 * layer` collide, a `numpy.random.SeedSequence` does not.

    >>> spawn_seed(0, 1) == spawn_seed(0, 1), spawn_seed(0, 1) == spawn_seed(1, 0)
    (True, False)
    """
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return int(state[0]) >> 1
