"""The package as a whole: imports flow one way, extras stay out, the README's code runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bochner

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bochner"

# A module may import from its own row and the rows above it.
LAYERS = [
    ["_checks", "_progress", "_scratch"],
    ["projections", "moments", "data", "theory"],
    ["maps"],
    ["attention", "feedforward"],
    ["nn", "matvec"],
    ["hf", "distill", "estimators", "sampling", "tasks"],
    ["advisor", "report", "demo"],
    ["cli"],
]
RANK = {name: i for i, row in enumerate(LAYERS) for name in row}
OPTIONAL = {"transformers", "safetensors", "accelerate", "sklearn", "dask", "distributed", "typer", "rich", "plotly"}
OPTIONAL |= {"matplotlib", "peft", "faiss", "pykeops", "gguf", "sentence_transformers", "zarr"}


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports; lazily inside functions too unless `top_level_only`."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{a.name}" for a in node.names} if node.module == "bochner" else {node.module}
    return names


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_imports_flow_one_way():
    for path in SOURCE.rglob("*.py"):
        here = room(path)
        if here in ("__init__", "__main__"):
            continue
        assert here in RANK, f"{here} is not in the picture of the architecture; add it to LAYERS"
        for name in imported(path, top_level_only=True):
            parts = name.split(".")
            if parts[0] == "bochner" and len(parts) > 1 and parts[1] in RANK and parts[1] != here:
                assert RANK[parts[1]] <= RANK[here], f"{path.name} imports {name}, which lies above it"


def test_importing_the_package_imports_no_extra():
    code = f"import sys, bochner; print(sorted({OPTIONAL!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_public_name_exists_and_is_documented():
    for name in bochner.__all__:
        thing = getattr(bochner, name)
        assert (thing.__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = bochner.nonsense


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.model
def test_the_code_of_the_readme_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    try:
        bochner.data.fetch("minilm", quiet=True)
    except bochner.data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    codes = snippets(ROOT / "README.md")
    assert len(codes) >= 3
    monkeypatch.chdir(tmp_path)
    for code in codes:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text()))
    assert named <= targets
    assert {"demo", "test"} <= named


def test_nothing_speaks_of_a_machine_or_a_registry_host():
    pattern = re.compile(r"(pypi\.org|npmjs\.|deb\.debian|/home/|/root/|/work/|/tmp/team)")
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "Makefile"]:
        assert not pattern.search(path.read_text()), path
