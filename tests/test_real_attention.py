"""The claim that matters: on the heads of a real pretrained model, calibration makes random features worth using."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from bochner import data

pytestmark = pytest.mark.model


def load_experiment():
    path = Path(__file__).parent.parent / "experiments" / "minilm_heads.py"
    spec = importlib.util.spec_from_file_location("minilm_heads", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calibrated_features_do_what_many_more_plain_ones_do():
    pytest.importorskip("transformers")
    try:
        data.fetch("minilm", quiet=True)
        data.paragraphs("heldout", 1)
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    experiment = load_experiment()
    with torch.no_grad():
        sets = experiment.capture("calibration", 24), experiment.capture("heldout", 16)
        uniform = experiment.mean_error(*sets, "uniform", 0)
        plain = {m: experiment.mean_error(*sets, "positive", m) for m in (256, 1024)}
        calibrated = {m: experiment.mean_error(*sets, "calibrated", m) for m in (64, 256)}
    assert calibrated[64] < plain[1024]
    assert calibrated[256] < 0.8 * plain[256]
    assert calibrated[256] < 0.9 * calibrated[64]
    assert plain[256] > 0.9 * uniform  # plain FAVOR+ is hardly better than averaging
