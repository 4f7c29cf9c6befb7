"""What the site adds to its pages: tables as files, the interactive chart, pictures that exist."""

import csv
import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = SimpleNamespace(url="results-models/")


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "extensions" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_marked_table_can_be_downloaded(tmp_path: Path) -> None:
    module = hook("downloads")
    text = "<!-- table: sizes -->\n| a, b | c |\n|---|---|\n| `x` | **1,000** |\n<!-- end -->\n"
    assert '<a class="csv" href="../tables/sizes.csv" download>' in module.on_page_markdown(text, PAGE)
    module.on_post_build({"site_dir": tmp_path})
    written = (tmp_path / "tables" / "sizes.csv").read_text(encoding="utf-8")
    assert list(csv.reader(io.StringIO(written))) == [["a, b", "c"], ["x", "1,000"]]


def test_the_chart_has_the_stored_figures() -> None:
    module = hook("frontier")
    page = module.on_page_markdown(f"text\n\n{module.MARK}\n", PAGE)
    charts = json.loads(re.search(r'json">(.*?)</script>', page)[1])  # type: ignore[index]
    stored = module.figures("decoder_texts")["novel"]
    names = {point[0]: point for point in charts[0]["points"]}
    assert set(names) == set(stored)
    assert names["exact"][1:] == [200.0, 1.0]
    assert all(x > 0 for chart in charts for _, x, _ in chart["points"])
    assert (DOCS / "frontier.js").exists()
    assert module.MARK in (DOCS / "results-models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("*.md")))
def test_every_picture_and_frame_of_a_page_exists(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for name in re.findall(r'(?:!\[[^\]]*\]\(|src=")(images/[^)"]+)', text):
        assert (DOCS / name).exists(), name
