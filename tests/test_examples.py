"""Every example is a complete script of under 60 lines, runs at a small size, and shows what it promises."""

from __future__ import annotations

import importlib
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bochner

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A script of the folder as a module, run in a directory of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)

    def load(name: str) -> ModuleType:
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return load


@contextmanager
def a_new_user_waits_at_most(seconds: float) -> Iterator[None]:
    """Processor time of this process, so that a busy machine changes nothing; about four times what it takes."""
    began = time.process_time()
    yield
    took = time.process_time() - began
    assert took < seconds, f"{took:.1f} s of processor time"


def needs_data() -> None:
    try:
        bochner.data.fetch("minilm", quiet=True)
        bochner.data.fetch("books", quiet=True)
    except bochner.data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_an_example_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (39 if path.stem in ("own_fate", "own_map") else 60)
    assert text.startswith('"""')
    assert "__main__" in text
    assert f"test_{path.stem}" in Path(__file__).read_text(encoding="utf-8") or path.stem == "own_map"


@pytest.mark.model
def test_shrink_a_cache(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    needs_data()
    with a_new_user_waits_at_most(60):
        assert example("shrink_a_cache").main() < 0.15
    assert "4,000 tokens" in capsys.readouterr().out


def test_speed_up_an_encoder(example: Any) -> None:
    pytest.importorskip("transformers")
    with a_new_user_waits_at_most(10):
        assert example("speed_up_an_encoder").main(200) < 0.1


@pytest.mark.model
def test_sentence_encoder(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentence_transformers")
    needs_data()
    assert example("sentence_encoder").main() > 0.97
    assert "the same: True" in capsys.readouterr().out


def test_performer(example: Any) -> None:
    with a_new_user_waits_at_most(10):
        losses = example("performer").main(30)
    assert losses[-1] < losses[0]


def test_fine_tune(example: Any) -> None:
    pytest.importorskip("accelerate")
    assert example("fine_tune").main(40) > 0.75


def test_many_rows(example: Any) -> None:
    pytest.importorskip("sklearn")
    with a_new_user_waits_at_most(15):
        assert example("many_rows").main(8000, 300) > 0.85


def test_certified_product(example: Any) -> None:
    assert example("certified_product").main(3000) < 1e-3


def test_certified_attention(example: Any) -> None:
    assert example("certified_attention").main(1024) < 0.9


def test_two_processes(example: Any) -> None:
    assert example("two_processes").main() < 1e-4


def test_own_fate(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from bochner.hf.fates import FATES

    before = dict(FATES)
    try:
        runpy.run_path(str(EXAMPLES / "own_fate.py"), run_name="__main__")
    finally:
        FATES.clear()
        FATES.update(before)
    assert "WU" in capsys.readouterr().out


def test_own_task(example: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    assert example("own_task").main(steps=120) > 0.55
    shown = capfd.readouterr().err
    assert "about" in shown
    assert "for 120 steps" in shown
