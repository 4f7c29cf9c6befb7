"""The documentation site in a real browser, wide and narrow: nothing wider than the screen, no picture missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, answered, served

ROOT = Path(__file__).parent.parent
# Opens every page in a frame as wide as a screen, one after another, and notes what a reader would complain about.
PROBE = """<!doctype html><html><body><script>
const pages = PAGES, width = WIDTH, found = {};
const look = (frame) => {
  const page = frame.contentDocument, root = page.documentElement;
  const clipped = (e) => { for (let p = e.parentElement; p; p = p.parentElement)
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return true; return false; };
  const over = [...page.querySelectorAll("article *")].filter((e) => e.getBoundingClientRect().right > width + 1
    && !clipped(e)).map((e) => e.tagName + ": " + e.textContent.trim().slice(0, 60));
  const pictures = [...page.images];
  return { title: page.title, width: root.scrollWidth, over: over.slice(0, 3), pictures: pictures.length,
    missing: pictures.filter((p) => !p.naturalWidth).map((p) => p.src), words: page.body.innerText.length,
    formulas: page.querySelectorAll("math").length, cards: page.querySelectorAll(".cards a").length };
};
(async () => {
  for (const name of pages) {
    const frame = document.createElement("iframe");
    frame.style = `width:${width}px;height:900px;border:0`;
    frame.src = name;
    const loaded = new Promise((done) => { frame.onload = done; });
    document.body.append(frame);
    await loaded;
    for (const p of frame.contentDocument.images) { p.loading = "eager"; await p.decode().catch(() => 0); }
    found[name] = look(frame);
    frame.remove();
  }
  await fetch("/", { method: "POST", body: JSON.stringify(found) });
})();
</script></body></html>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    pytest.importorskip("mkdocs")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*build, "-d", str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def probe(folder: Path, profile: Path, pages: list[str], width: int) -> tuple[dict[str, dict], str]:
    """What was found on each page at a width, and the console."""
    text = PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width))
    (folder / f"probe-{width}.html").write_text(text, encoding="utf-8")
    with served(folder) as (address, received):
        found, console = answered(f"{address}/probe-{width}.html", received, profile, width + 40)
    return json.loads(found), console


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [1280, 480])
def test_pages_fit_the_screen_and_show_their_pictures(site: Path, tmp_path: Path, width: int) -> None:
    pages = ["./", *sorted(f"{p.parent.name}/" for p in site.glob("*/index.html"))]
    assert len(pages) == len(list((ROOT / "docs").glob("*.md")))
    found, console = probe(site, tmp_path, pages, width)
    assert set(found) == set(pages)
    assert {n: f["missing"] for n, f in found.items() if f["missing"]} == {}
    wide = {n: (f["width"], f["over"]) for n, f in found.items() if f["width"] > width or f["over"]}
    assert wide == {}
    assert found["gallery-003/"]["pictures"] > 12
    assert all(f["words"] > 300 for f in found.values())
    assert found["theory/"]["formulas"] >= 8
    assert found["./"]["cards"] == 4
    assert console == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_probe_sees_planted_faults(tmp_path: Path) -> None:
    """A line that is too wide, a picture that is not there, and an error of a script."""
    (tmp_path / "bad").mkdir()
    text = '<html><body><article><p style="width:900px">wide</p><img src="none.png"></article><script>absent()</script>'
    (tmp_path / "bad" / "index.html").write_text(text + "</body></html>", encoding="utf-8")
    found, console = probe(tmp_path, tmp_path, ["bad/"], 480)
    assert found["bad/"]["width"] > 480
    assert found["bad/"]["over"] == ["P: wide"]
    assert len(found["bad/"]["missing"]) == 1
    assert "absent is not defined" in console


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_search_finds_a_page(site: Path, tmp_path: Path) -> None:
    page = (site / "start" / "index.html").read_text(encoding="utf-8")
    script = """<script>addEventListener("load", () => {
      const box = document.querySelector("input.md-search__input");
      document.querySelector("#__search").click();
      setTimeout(() => { box.focus(); box.value = "landmark"; }, 500);
      setTimeout(() => box.dispatchEvent(new Event("input", { bubbles: true })), 600);
      setInterval(() => {
        const hits = [...document.querySelectorAll("a.md-search-result__link")].map((a) => a.pathname);
        if (hits.length) fetch("/", { method: "POST", body: JSON.stringify(hits) });
      }, 300);
    });</script></body>"""
    (site / "start" / "searched.html").write_text(page.replace("</body>", script), encoding="utf-8")
    with served(site) as (address, received):
        hits, console = answered(f"{address}/start/searched.html", received, tmp_path)
    assert "/which-map/" in json.loads(hits)
    assert console == ""
