"""Public names that are imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from bochner._checks import MissingExtraError


def lazy(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package; `places`: name to `module` or `module:member`."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, member = places[name].partition(":")
        try:
            found = import_module(module)
        except ModuleNotFoundError as missing:
            if missing.name and missing.name.startswith("bochner"):
                raise
            raise MissingExtraError(
                f"{package}.{name} needs the package {missing.name!r}; install the extra it belongs to, for example: "
                "pip install 'bochner[hf,sklearn,cli,report]'"
            ) from missing
        value = getattr(found, member) if member else found
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names
