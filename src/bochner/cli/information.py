"""`bochner info` and `bochner fetch`: what is here, and what can be had."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated, Any

import typer

from bochner._version import __version__
from bochner.cli.common import Json, print_json, show

PACKAGES = {
    "torch": "core",
    "numpy": "core",
    "scipy": "core",
    "transformers": "hf",
    "scikit-learn": "sklearn",
    "dask": "dask",
    "typer": "cli",
    "tokenizers": "train",
    "matplotlib": "report",
    "performer-pytorch": "bench",
    "mkdocs-material": "docs",
    "pytest": "test",
}


def facts() -> dict[str, Any]:
    """Versions, the machine and the cache, as reports and bug reports need them."""
    import os

    import torch

    from bochner import data

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cache = data.cache_dir()
    return {
        "bochner": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": versions,
        "cache": str(cache),
        "cached": [n for n, a in data.ARTEFACTS.items() if (cache / f"{n}-{a.version}-{a.sha256[:12]}").exists()],
    }


def info(as_json: Json = False) -> None:
    """Versions, machine, extras and cache: what a bug report needs.

    Example: `bochner info --json`
    """
    found = facts()
    if as_json:
        print_json(found)
        return
    packages = found.pop("packages")
    found["cached"] = ", ".join(found["cached"]) or "nothing"
    for name, value in found.items():
        print(f"{name:12s} {value if value is not None else 'none'}")
    for name, version in packages.items():
        what = version or f"not installed: pip install 'bochner[{PACKAGES[name]}]'"
        print(f"  {name:18s} {what}")


def fetch(
    name: Annotated[str, typer.Argument(help="an artefact; without one, list them")] = "", as_json: Json = False
) -> None:
    """Fetch a pinned model or data set into the cache, and print its path.

    Example: `bochner fetch minilm`
    """
    from bochner import data

    if name:
        path = data.fetch(name)
        print_json({"name": name, "path": str(path)}) if as_json else print(path)
        return
    if as_json:
        print_json({n: a._asdict() for n, a in data.ARTEFACTS.items()})
        return
    rows = [[n, a.tool, f"{a.package} {a.version}", str(a.megabytes), a.what] for n, a in data.ARTEFACTS.items()]
    show(["name", "from", "package", "MB", "what"], rows)
