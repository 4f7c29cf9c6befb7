"""The package as a whole: imports flow one way and extras stay out."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import architecture
import pytest

import bochner

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bochner"

# A module may import from its own row and the rows above it.
LAYERS = [
    ["_checks", "_lazy", "_products", "_progress", "_timing", "_version"],
    ["projections", "moments", "data", "theory"],
    ["maps"],
    ["attention"],
    ["nn", "matvec", "migrate", "certified"],
    ["hf", "estimators", "sampling", "tasks", "papers"],
    ["report", "demo"],
    ["cli"],
    ["__main__"],
]
RANK = {name: i for i, row in enumerate(LAYERS) for name in row}
OPTIONAL = {"transformers", "safetensors", "accelerate", "sklearn", "dask", "distributed", "typer", "rich", "plotly"}
OPTIONAL |= {"matplotlib", "peft", "faiss", "pykeops", "gguf", "sentence_transformers", "zarr"}


def test_imports_flow_one_way():
    for found in architecture.imports():
        here, there = architecture.room(found.importer), architecture.room(found.module)
        if not here:
            continue
        where = f"{found.importer}, line {found.line},"
        assert here in RANK, f"{here} is not in the picture of the architecture; add it to LAYERS"
        assert there, f"{where} imports the package itself; import from the module that has the name"
        assert there in RANK, f"{there} is not in the picture of the architecture; add it to LAYERS"
        assert RANK[there] <= RANK[here], f"{where} imports {found.module}, which lies above it"


def test_imports_have_no_cycle():
    found = architecture.imports()
    assert architecture.cycle(architecture.room_graph(found)) == []
    assert architecture.cycle(architecture.module_graph(found)) == []


def test_private_names_stay_in_their_package():
    found = architecture.imports()
    assert architecture.private_across(found) == []


def test_no_module_is_shadowed_by_a_function_of_its_name():
    for name in bochner.__all__:
        getattr(bochner, name)  # whatever is imported when first asked for
    for name in architecture.modules():
        module = import_module(name)
        package, _, last = name.rpartition(".")
        assert not package or getattr(import_module(package), last) is module, name
    assert callable(bochner.distill)
    assert callable(bochner.diagnose)


def test_the_reader_of_imports_sees_relative_and_lazy_ones(tmp_path):
    """Planted defects: every kind of import that could break the layering is found, with its cycle."""
    pages = {
        "__init__.py": "",
        "low.py": "def f():\n    from .high.top import g, _h\n    return g, _h",
        "high/__init__.py": "",
        "high/top.py": "from ..low import f\nimport pkg.low\nfrom pkg.high import side",
        "high/side.py": "from .top import _h\nif 1:\n    from .. import low",
    }
    source = tmp_path / "pkg"
    for name, text in pages.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    found = architecture.imports(source)
    seen = {(i.importer, i.module, i.name) for i in found}
    assert seen == {
        ("pkg.low", "pkg.high.top", "g"),
        ("pkg.low", "pkg.high.top", "_h"),
        ("pkg.high.top", "pkg.low", "f"),
        ("pkg.high.top", "pkg.low", None),
        ("pkg.high.top", "pkg.high.side", None),
        ("pkg.high.side", "pkg.high.top", "_h"),
        ("pkg.high.side", "pkg.low", None),
    }
    assert architecture.cycle(architecture.room_graph(found)) == ["high", "low", "high"]
    without = [i for i in found if i.importer != "pkg.low"]
    assert architecture.cycle(architecture.room_graph(without)) == []
    assert architecture.cycle(architecture.module_graph(without)) == ["pkg.high.side", "pkg.high.top", "pkg.high.side"]
    assert [(i.importer, i.name) for i in architecture.private_across(found)] == [("pkg.low", "_h")]


def test_nothing_is_written_twice(tmp_path):
    assert architecture.repeated(ROOT / part for part in ("src", "benchmarks", "experiments")) == []
    body = "\n".join(f"    x{i} = f(x, {i})" for i in range(6))
    (tmp_path / "twice.py").write_text(f"def a(x):\n{body}\n\ndef b(x, y):\n    y = g(y)\n{body}\n    return y\n")
    assert architecture.repeated([tmp_path]) == [("twice.py:2", "twice.py:11")]
    assert architecture.repeated([tmp_path], lines=7) == []


def test_functions_of_attention_have_at_most_60_lines_without_their_docstring(tmp_path):
    assert architecture.long_functions(SOURCE / "attention") == []
    body = "\n".join(f"    x{i} = {i}" for i in range(60))
    (tmp_path / "long.py").write_text(f'def a():\n    """One.\n\n    Two.\n    """\n{body}\n')
    assert architecture.long_functions(tmp_path) == ["long.py:a (61 lines)"]
    assert architecture.long_functions(tmp_path, lines=61) == []


def test_every_benchmark_takes_the_option_that_all_of_them_are_given():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    other = sys.modules.pop("run", None)  # that of the experiments, if a test has imported it
    try:
        names = import_module("run").names()
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        sys.modules.pop("run", None)
        if other is not None:
            sys.modules["run"] = other
    assert "coverage" in names
    texts = {name: (ROOT / "benchmarks" / f"{name}.py").read_text() for name in names}
    assert [name for name, text in texts.items() if not re.search(r'"--quick"|arguments\(__doc__', text)] == []


def test_importing_the_package_imports_neither_extras_nor_the_larger_half_of_scipy():
    """`import bochner` costs what torch and numpy cost; torch itself may import what it likes."""
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import bochner; print(*sorted(set(sys.modules) - before))"
    )
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "bochner.attention" in added
    assert {name.partition(".")[0] for name in added} & (OPTIONAL | {"scipy", "pandas"}) == set()


def test_what_needs_an_extra_says_which():
    """However it is imported: one sentence that ends with what to install, in place of a module that is not found."""
    lines = {
        "from bochner.estimators import KernelRidge": "sklearn",
        "import bochner; bochner.estimators": "sklearn",
        "import bochner; bochner.convert": "hf",
    }
    code = "import sys, bochner\nfor name in ('sklearn', 'transformers'): sys.modules[name] = None\n"
    for line in lines:
        code += f"try: exec({line!r})\nexcept bochner.MissingExtraError as error: print(error)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = done.stdout.strip().splitlines()
    assert len(said) == len(lines)
    for sentence, name in zip(said, lines.values(), strict=True):
        assert re.search(rf"pip install 'bochner\[[\w,]*{name}", sentence), sentence


def test_names_that_are_imported_late_are_the_real_ones():
    code = "import bochner as b; print(b.KernelOperator is b.matvec.KernelOperator, 'KernelOperator' in dir(b))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["True", "True"]


def test_windows_and_policies_have_one_default_everywhere():
    config, fates, calibrate = (import_module(f"bochner.hf.{name}") for name in ("config", "fates", "calibrate"))
    fit, landmark = (import_module(f"bochner.maps.{name}") for name in ("landmark_fit", "landmark"))
    parallel = import_module("bochner.attention.parallel").sequence_parallel_attention
    windows = [bochner.linear_attention, bochner.exact_attention, bochner.attention_matrix]
    windows += [landmark.LandmarkFeatures.calibrate_]
    windows += [fit.Near, config.Recipe, fates.Window, calibrate.Far.of]
    assert {inspect.signature(f).parameters["window_kind"].default for f in windows} == {"block"}
    policies = {inspect.signature(f).parameters["on_small_normalizer"].default for f in (windows[0], parallel)}
    assert policies == {"mean"}


def test_every_public_name_exists_and_is_documented():
    for name in bochner.__all__:
        thing = getattr(bochner, name)
        assert (thing.__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = bochner.nonsense


def test_the_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert named <= targets
    assert {"demo", "test"} <= named


def test_the_oldest_versions_are_those_of_the_project_file():
    """constraints-min.txt pins the lower bounds that pyproject.toml promises, so that one job tests the promise."""
    text = (ROOT / "pyproject.toml").read_text()
    promised = dict(re.findall(r'"([a-z-]+)(?:\[\w+\])?>=([\d.]+)', text.partition("[tool.")[0]))
    pinned = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", (ROOT / "constraints-min.txt").read_text(), flags=re.MULTILINE))
    core = {"torch", "numpy", "scipy", "transformers", "scikit-learn", "dask", "typer", "matplotlib"}
    assert core <= set(pinned)
    for name in pinned.keys() & promised.keys():
        version = pinned[name]
        release = [int(part) for part in version.split(".")]
        bound = [int(part) for part in promised[name].split(".")]
        assert release[: len(bound)] == bound, f"{name} is promised from {promised[name]} and pinned to {version}"


def test_nothing_speaks_of_a_machine_or_a_registry_host():
    pattern = re.compile(r"(pypi\.org|npmjs\.|deb\.debian|/home/|/root/|/work/|/tmp/team)")
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "Makefile"]:
        assert not pattern.search(path.read_text()), path
