"""What a release needs: one place for the version, a history of benchmarks that can be compared, forms for issues."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import bochner

ROOT = Path(__file__).parent.parent


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("history", ROOT / "benchmarks" / "history.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HISTORY", tmp_path)
    return module


def test_the_version_stands_in_one_place(history: ModuleType) -> None:
    assert history.version() == bochner.__version__
    places = [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts and "build" not in p.parts]
    assert [p.name for p in places if re.search(r'^__version__ = "', p.read_text(), flags=re.MULTILINE)] == [
        "_version.py"
    ]
    released = bochner.__version__.partition(".dev")[0]
    assert f"## {released}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"The version is {released}" in (ROOT / "docs" / "install.md").read_text()


def test_two_versions_are_compared(history: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"matvec": {"parts": [{"product_s": 2.0, "name": "x"}, {"product_s": 1.0, "name": "y"}], "error": 0.1}}
    (history.HISTORY / "1.json").write_text(json.dumps({"results": results}))
    results["matvec"]["parts"][0]["product_s"] = 1.0
    results["matvec"]["parts"].insert(0, {"product_s": 7.0, "name": "w"})  # a new row moves no other
    (history.HISTORY / "2.json").write_text(json.dumps({"results": results}))
    assert history.main(["compare", "1", "2"]) == 0
    said = capsys.readouterr().out
    assert "0.50" in said
    assert "matvec/parts/x/product_s" in said
    assert "1 figures changed" in said
    assert "1 are new" in said
    assert history.main(["compare", "1", "2", "--least", "3"]) == 0
    assert "0 figures changed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no results of version '9'; there are 1, 2"):
        history.main(["compare", "1", "9"])


def test_the_present_results_can_be_kept(history: ModuleType) -> None:
    history.main(["keep"])
    kept = json.loads((history.HISTORY / f"{bochner.__version__}.json").read_text())
    assert "matvec" in kept["results"]
    names = dict(history.leaves(kept["results"]))
    assert len(names) > 100
    # Rows of the tables have names, all different ones.
    assert "windows/windows/encoder, length=256/seconds/block" in names
    assert len(names) == sum(1 for _ in history.leaves(kept["results"]))


def test_the_forms_for_issues_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for form in forms:
        content = yaml.safe_load(form.read_text())
        if form.name != "config.yml":
            assert {"name", "description", "body"} <= set(content)
