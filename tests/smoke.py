"""A smoke test of an installed package, run by `make release` outside the source: `python smoke.py VERSION`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import bochner
from bochner.report import HeadPictures, Report

assert "site-packages" in bochner.__file__ or "target" in bochner.__file__, (
    f"not the installed package: {bochner.__file__}"
)
assert bochner.__version__ == sys.argv[1], (bochner.__version__, sys.argv[1])

q, k, v = (torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(i)) * 0.3 for i in range(3))
phi = bochner.feature_map("positive", dim=16, num_features=256, seed=0)
out, exact = bochner.linear_attention(q, k, v, phi), bochner.exact_attention(q, k, v)
assert (out - exact).norm() < 0.2 * exact.norm()

K = bochner.KernelOperator(
    torch.randn(500, 4, generator=torch.Generator().manual_seed(0)), bandwidth=1.0, eps=0.1, seed=0
)
assert (K @ torch.ones(500).numpy()).shape == (500,)

weights = [torch.full((1, 2, 2), 0.5)]
page = Report("smoke").heads(HeadPictures(["a", "b"], [False, False], weights, weights, [[0.1]]))
with tempfile.TemporaryDirectory() as folder:
    text = page.save(Path(folder) / "r.html").read_text()
assert "section.viewer" in text  # style sheet and script were packaged
assert "--paper" in text

for arguments in (["--version"], ["plan", "features", "--json"], ["info", "--json"]):
    subprocess.run([sys.executable, "-m", "bochner", *arguments], check=True, stdout=subprocess.DEVNULL)
print(f"smoke test of bochner {bochner.__version__} passed")
