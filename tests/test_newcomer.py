"""A newcomer's path: clone, demonstration, its report in a browser, a model of one's own converted and loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_clone_demo_report_and_a_model_of_ones_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from browser import shown
    from hf_models import TEXT, build

    from bochner import data

    try:
        data.fetch("minilm")
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("there is no checkout to clone")
    # 1. Clone, and what `make demo` calls, with the packages that are installed already.
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    assert "bochner demo" in (clone / "Makefile").read_text()
    environment = {**os.environ, "PYTHONPATH": str(clone / "src")}
    bochner = [sys.executable, "-m", "bochner"]
    demo = [*bochner, "demo", "--quick", "--out", "report.html", "--json"]
    done = subprocess.run(demo, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    best = max(float(row["cosine"]) for row in json.loads(done.stdout)["table"])
    assert best > 0.95
    # 2. The report in a browser: the verdict first, charts there, nothing said on the console.
    dom, console = shown((clone / "report.html").read_text(), tmp_path)
    assert console == ""
    assert re.search(r'class="verdict[^"]*">\d+ of 72 heads', dom)
    assert dom.count("<svg") >= 3
    assert dom.count('class="asked"') == 2
    # 3. A model of one's own: advised on, converted, loaded again.
    own = tmp_path / "own"
    own.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(56))]
    (own / "vocab.txt").write_text("\n".join(words))
    build("bert", TEXT).save_pretrained(own)
    transformers.BertTokenizer(str(own / "vocab.txt")).save_pretrained(own)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(f"w{(7 * i + j * j) % 50}" for j in range(40)) for i in range(24)))
    convert = [*bochner, "convert", str(own), str(tmp_path / "out"), "--text", str(text), "--window", "8"]
    done = subprocess.run(convert, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    load = "import bochner, transformers; bochner.hf.register(); m = transformers.AutoModel.from_pretrained('out'); "
    load += "print(bochner.hf.plan_of(m).num_heads)"
    done = subprocess.run([sys.executable, "-c", load], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "8", done.stderr[-2000:]
