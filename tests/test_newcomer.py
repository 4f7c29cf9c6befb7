"""A newcomer's path: clone, `make demo`, its report in a browser, a model of one's own advised on and converted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTALL = "BOCHNER_NEWCOMER_INSTALL"  # set: `make` installs everything from the registry, as a newcomer's does


def borrow_packages(clone: Path) -> None:
    """The environment that `make` would set up, with the packages of this one instead of downloaded ones."""
    venv.create(clone / ".venv", with_pip=False, symlinks=True)
    (site,) = (clone / ".venv" / "lib").glob("python3*/site-packages")
    (site / "borrowed.pth").write_text(f"{clone / 'src'}\n{sysconfig.get_path('purelib')}\n")
    command = clone / ".venv" / "bin" / "bochner"
    command.write_text(f"#!{clone / '.venv' / 'bin' / 'python'}\nfrom bochner.__main__ import main\n\nmain()\n")
    command.chmod(0o755)
    (clone / ".venv" / ".installed").touch()


def call(command: list[str], folder: Path) -> str:
    """The standard output of a command as a newcomer would call it: no path of this checkout, one thread."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_clone_demo_report_and_a_model_of_ones_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from browser import shown

    from bochner import data

    try:
        weights, texts = data.fetch("minilm"), data.paragraphs("heldout", 40, source="books")
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    if any(shutil.which(tool) is None for tool in ("git", "make")) or not (ROOT / ".git").exists():
        pytest.skip("git, make and a checkout to clone are needed")
    # 1. Clone and `make demo`.
    clone = tmp_path / "clone"
    call(["git", "clone", "-q", str(ROOT), str(clone)], tmp_path)
    if not os.environ.get(INSTALL):
        borrow_packages(clone)
    said = call(["make", "demo", f"PYTHON={sys.executable}"], clone)
    where = call([str(clone / ".venv/bin/python"), "-c", "import bochner; print(bochner.__file__)"], tmp_path)
    assert where.startswith(str(clone)), "not the clone was tried"
    row = re.search(r"converted\W+([\d.]+)\W+([\d.]+)", said)  # megabytes, percent of the quality
    assert row is not None
    assert float(row[1]) < 10
    assert float(row[2]) > 98
    # 2. The report in a browser: the verdict first, charts there, nothing said on the console.
    report = (clone / "bochner-demo.html").read_text(encoding="utf-8")
    for width in (1280, 480):
        dom, console = shown(report, tmp_path, width)
        assert console == ""
        assert re.search(r'class="verdict[^"]*">The cache of a real language model', dom)
        assert dom.count("<svg") == 1
        assert dom.count('class="asked"') == 2
    # 3. A model of one's own, as transformers saves it, and text of one's own.
    own = tmp_path / "own"
    transformers.AutoModel.from_pretrained(weights).save_pretrained(own)
    transformers.AutoTokenizer.from_pretrained(weights).save_pretrained(own)
    (tmp_path / "sample.txt").write_text("\n\n".join(texts[:32]), encoding="utf-8")
    command = str(clone / ".venv" / "bin" / "bochner")
    common = ["--text", "sample.txt", "--keep", "0.95", "--length", "512", "--report"]
    advice = json.loads(call([command, "search", "own", *common, "advice.html", "--json"], tmp_path))
    assert advice["goal"]["length"] == 512
    told = json.loads(call([command, "convert", "own", "out", *common, "report.html", "--json"], tmp_path))
    assert told["target"]["met"]
    for name in ("advice.html", "report.html"):
        dom, console = shown((tmp_path / name).read_text(encoding="utf-8"), tmp_path)
        assert console == ""
        assert 'class="verdict' in dom
    # 4. Loaded by transformers, it is close to what it was on text that it never saw.
    load = f"""
import bochner, torch, transformers
bochner.hf.register()
tokenizer = transformers.AutoTokenizer.from_pretrained("own")
batch = tokenizer({" ".join(texts[32:40])!r}, return_tensors="pt", truncation=True, max_length=512)
models = [transformers.AutoModel.from_pretrained(name).eval() for name in ("own", "out")]
with torch.no_grad():
    one, other = (m(**batch).last_hidden_state.mean(1) for m in models)
print(float(torch.nn.functional.cosine_similarity(one, other)))
"""
    assert float(call([str(clone / ".venv/bin/python"), "-c", load], tmp_path)) > 0.95
