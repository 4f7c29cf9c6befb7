"""Shared set-up: the helpers beside the tests can be imported, and one thread per worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before numpy and torch are imported, and for every process that a test starts: workers share the cores.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from bochner import data  # noqa: E402
from bochner.maps import FEATURE_MAPS  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
collect_ignore = ["smoke.py"]  # run by `make release`, outside the source


@pytest.fixture(autouse=True)
def one_seed() -> None:
    """What draws from the global generator draws the same whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def a_registry_that_does_not_answer_is_asked_once() -> Iterator[None]:
    """A download ends well before a test's time does, and what could not be had is not asked for again."""
    unavailable: dict[tuple[str, Path], data.ArtefactUnavailable] = {}
    plain = data._download

    def download(name: str, artefact: data.Artefact, into: Path, quiet: bool) -> Path:
        key = name, data.cache_dir()
        if key in unavailable:
            raise unavailable[key]
        try:
            return plain(name, artefact, into, quiet)
        except data.ArtefactUnavailable as reason:
            unavailable[key] = reason
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SECONDS", 200)
        patch.setattr(data, "_download", download)
        yield


@pytest.fixture
def own_maps() -> Iterator[None]:
    """Maps that a test registers are forgotten after it."""
    before = dict(FEATURE_MAPS)
    yield
    FEATURE_MAPS.clear()
    FEATURE_MAPS.update(before)
