"""The claim that matters: on the heads of a real pretrained model, calibration makes random features worth using."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path

import pytest
import torch

from bochner import data

pytestmark = pytest.mark.model


def test_calibrated_features_do_what_many_more_plain_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "experiments"))
    from _models import NOTHING_EXACT, average, calibrated, layers_of, mean_error, of_books, through

    from bochner.demo import load_minilm

    try:
        model, *inputs = of_books(load_minilm, 110, 150, (24, 16))()
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    with torch.no_grad():
        seen, unseen = (layers_of(model, some) for some in inputs)

        def error(name: str, m: int) -> float:
            maps = [calibrated(name, m, s, NOTHING_EXACT, i) for i, s in enumerate(seen)]
            return mean_error(map(through, maps), unseen)

        uniform = mean_error(repeat(average()), unseen)
        plain = {m: error("positive", m) for m in (256, 1024)}
        fitted = {m: error("calibrated", m) for m in (64, 256)}
    assert fitted[64] < plain[1024]
    assert fitted[256] < 0.8 * plain[256]
    assert fitted[256] < 0.9 * fitted[64]
    assert plain[256] > 0.9 * uniform  # plain FAVOR+ is hardly better than averaging
