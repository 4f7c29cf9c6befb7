"""Versions, machine and cache: what reports and bug reports state."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from bochner import data
from bochner._version import __version__

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
    """Versions, the machine and the cache."""
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
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": versions,
        "cache": str(cache),
        "cached": [n for n, a in data.ARTEFACTS.items() if (cache / f"{n}-{a.version}-{a.sha256[:12]}").exists()],
    }
