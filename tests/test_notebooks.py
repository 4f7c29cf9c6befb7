"""The notebooks of the examples run, and what they print is what they were stored with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import bochner

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_prints_what_was_stored(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    try:
        bochner.data.fetch("minilm", quiet=True)
        bochner.data.fetch("books", quiet=True)
    except bochner.data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [out for cell in cells for out in cell["outputs"]]
    assert any("image/png" in out.get("data", {}) for out in outputs), "stored without its pictures"
    assert not any(out["output_type"] == "error" for out in outputs)
    exec("\n".join("".join(cell["source"]) for cell in cells), {"__name__": "notebook"})
    stored = "".join("".join(out["text"]) for out in outputs if out["output_type"] == "stream")
    numbers = [[float(x) for x in re.findall(r"\d+\.\d+", text)] for text in (stored, capsys.readouterr().out)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.02)
