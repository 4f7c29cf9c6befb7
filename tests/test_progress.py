"""What long work says goes through the logger "bochner", which a user can silence or send elsewhere."""

import logging

import pytest

from bochner._progress import logger, speaker, track


def test_messages_go_to_the_error_stream_and_can_be_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    speaker(True)("reading 50 % of it")
    assert capsys.readouterr().err == "bochner: reading 50 % of it\n"
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        speaker(True)("not heard")
        assert list(track([1, 2], 2, "not seen")) == [1, 2]
    finally:
        logger.setLevel(level)
    speaker(False)("not said")
    assert capsys.readouterr().err == ""


def test_another_handler_hears_every_message() -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        speaker(True)("searching")
    finally:
        logger.removeHandler(handler)
    assert heard == ["searching"]


def test_a_search_names_every_text_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text takes seconds: silence ends with each of them."""
    pytest.importorskip("transformers")
    from types import SimpleNamespace
    from typing import Any

    from bochner.hf.search import verify

    said: list[str] = []
    verifier = verify.Verifier.__new__(verify.Verifier)
    verifier.say = said.append
    monkeypatch.setattr(verify, "read", lambda model, ids: (model, ids))
    texts: Any = [SimpleNamespace(ids=i) for i in range(3)]
    assert verifier._answers("model", texts) == [("model", 0), ("model", 1), ("model", 2)]
    assert said == ["reading text 2 of 3", "reading text 3 of 3"]
