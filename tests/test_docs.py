"""The pages of the documentation: their code runs, page by page in one namespace, from the names a page presupposes.

A snippet that cannot run by itself has the comment `<!-- not run: why -->` above it.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import architecture
import pytest
import torch
import torch.distributed as dist

import bochner

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"(?:<!-- not run: (?P<why>[^\n]+?) -->\n+)?```python\n(?P<code>.*?)```", flags=re.DOTALL)


def snippets(page: Path) -> list[tuple[str, str | None]]:
    """The code of a page, each piece with the reason for which it is not run, if it has one."""
    return [(found["code"], found["why"]) for found in SNIPPET.finditer(page.read_text())]


def attention_inputs() -> dict[str, Any]:
    q, k, v = torch.randn(3, 1, 2, 300, 64, generator=torch.Generator().manual_seed(0)) * 0.5
    return {"torch": torch, "bochner": bochner, "q": q, "k": k, "v": v}


def minilm(kind: str) -> dict[str, Any]:
    """Names of the pages on pretrained models: MiniLM's tokenizer, and a model of the kind the page is about."""
    transformers = pytest.importorskip("transformers")
    try:
        path = bochner.data.fetch("minilm", quiet=True)
        texts = bochner.data.paragraphs("calibration", 24, words=20)
    except bochner.data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    model: Any = None
    small = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind in ("encoder", "converted"):
        model = transformers.AutoModel.from_pretrained(path).eval()
        if kind == "converted":
            bochner.convert(model, num_features=16, calibration=texts, tokenizer=tokenizer)
    elif kind == "decoder":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, **small
            )
        ).eval()
    inputs = tokenizer(texts[0], return_tensors="pt")
    inputs.pop("token_type_ids", None)
    names = {"path": path, "tokenizer": tokenizer, "texts": texts, "model": model, "inputs": inputs}
    return {"torch": torch, "bochner": bochner, **names, "pairs": list(itertools.pairwise(texts))}


# What the code of a page presupposes; pages that are not here presuppose nothing.
PRESUPPOSED: dict[str, Callable[[], dict[str, Any]]] = {
    "several-machines.md": attention_inputs,
    "howto-decoders.md": lambda: minilm("decoder"),
    "README.md": lambda: minilm("none"),
    "index.md": lambda: minilm("none"),
}
NEEDS_A_MODEL = {
    "README.md",
    "index.md",
    "howto-encoders.md",
    "howto-training.md",
    *(name for name in PRESUPPOSED if name.startswith("howto")),
}


LONG = {"index.md"}  # its code is that of README.md in other lines


def marks(page: Path) -> list[Any]:
    needs = [pytest.mark.model] if page.name in NEEDS_A_MODEL else []
    return [*needs, pytest.mark.slow] if page.name in LONG else needs


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one, for pages that speak of several."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=marks(page))
        for page in PAGES
        if any(why is None for _, why in snippets(page))
    ],
)
@pytest.mark.usefixtures("one_process", "own_maps")
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    names = {"__name__": page.stem} | PRESUPPOSED.get(page.name, dict)()
    monkeypatch.chdir(tmp_path)
    for number, (code, why) in enumerate(snippets(page), start=1):
        if why is None:
            try:
                exec(compile(code, f"{page.name}, snippet {number}", "exec"), names)
            except bochner.data.ArtefactUnavailable as reason:
                pytest.skip(str(reason))


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in navigation, f"{page.name} is not in mkdocs.yml"
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_are_short_enough_to_be_read() -> None:
    """A page has under 2,000 words, code aside."""
    texts = {p.name: re.sub(r"```.*?```", "", p.read_text(), flags=re.S) for p in (ROOT / "docs").glob("*.md")}
    long = {name: len(text.split()) for name, text in texts.items()}
    assert {name: words for name, words in long.items() if words >= 2000} == {}


def test_the_page_about_maps_names_every_map_and_says_what_the_code_chooses() -> None:
    page = (ROOT / "docs" / "which-map.md").read_text()
    table = page.partition("## Every map in a line")[2]
    missing = set(bochner.maps.FEATURE_MAPS) - set(re.findall(r"`(\w+)`", table))
    assert missing == set()
    tree = page.partition("**What do you have?**")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", tree)) & set(bochner.maps.FEATURE_MAPS)
    assert {"landmark", "calibrated", "positive", "fastfood_prf", "angular_hybrid", "tensor_sketch"} <= named

    def branch(call: str) -> str:
        """What the tree says that a call does."""
        return next(line for line in " ".join(tree.split()).split(" - ") if call in line).partition(call)[2]

    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(**small, vocab_size=50))
    batches = [{"input_ids": torch.arange(200).view(4, 50) % 49 + 1}]
    bochner.convert(model, calibration=batches, exact_below=0)
    layer = bochner.hf.plan_of(model).layers[0]
    assert f"`{layer.feature_map}`, m = {layer.num_features}" in branch("`convert(model, ...)`")
    assert layer.window is None
    assert "a window only if you give one" in branch("`convert(model, ...)`")
    bochner.revert(model)
    bochner.convert(model, window=8, sinks=1, calibration=batches, exact_below=0)
    assert bochner.hf.plan_of(model).layers[0].window_kind == "block"
    bochner.revert(model)
    bochner.convert(model, train=True)
    layer = bochner.hf.plan_of(model).layers[0]
    assert f"`{layer.feature_map}`, m = {layer.num_features}" in branch("`convert(model, train=True)`")
    bochner.revert(model)
    # A target weighs kinds of heads, and no map but the one that the tree names.
    advice = bochner.advise(model, batches, keep=0.5, minimize="time", length=64)
    maps = {layer.feature_map for c in advice.candidates for layer in c.plan.converted if layer.feature_map}
    assert maps <= {"landmark"}
    assert set(re.findall(r"`(\w+)`", branch("`convert(model, keep=0.99, ...)`"))) == {"landmark"}
    default = inspect.signature(bochner.nn.MultiheadAttention).parameters["feature_map"].default
    assert f": `{default}`" in branch("`bochner.nn.MultiheadAttention(embed_dim, num_heads)`")
    q, k, v = torch.randn(3, 1, 2, 128, 8, generator=torch.Generator().manual_seed(0))
    measured = bochner.advise(q, k, v).heads[0].measured
    fitted = {name.split()[0].removeprefix("window+") for name in measured} & {"landmark", "calibrated"}
    assert {f"`{name}`" for name in fitted} <= set(re.findall(r"`\w+`", branch("`advise(q, k, v)`")))
    assert len(fitted) == 2


@pytest.fixture
def extension() -> types.ModuleType:
    """What the site does to docstrings."""
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("doctests", ROOT / "docs" / "extensions" / "doctests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_in_docstrings_are_code_on_the_reference_page(extension: types.ModuleType) -> None:
    text = extension.fenced("What it does.\n\n>>> x = 1\n>>> x\n1\n\nMore.\n\n>>> y\n2")
    assert text.count("```pycon") == 2
    assert text.startswith("What it does.\n\n```pycon\n>>> x = 1\n>>> x\n1\n```\n\nMore.")


def test_what_a_docstring_says_of_arguments_is_a_list_on_the_reference_page(extension: types.ModuleType) -> None:
    least = {
        bochner.convert: 19, bochner.linear_attention: 14, bochner.advise: 11, bochner.KernelOperator: 16,
        bochner.distill: 13, bochner.nn.MultiheadAttention: 11, bochner.feature_map: 3,
    }  # fmt: skip
    for what, count in least.items():
        names = set(inspect.signature(what).parameters)
        text = extension.described(inspect.getdoc(what), names)
        listed = re.findall(r"(?m)^    (\w+): \S", text.partition("Args:\n")[2])
        assert len(listed) >= count, what
        assert set(listed) <= names, what
    assert extension.described("`x`: one.", set()) == "`x`: one."
    text = extension.described("It does.\n\n- `a` (b, s) bool: a mask.\n- `b=False` keeps it.\n- `c`: no.", {"a", "b"})
    assert text == "It does.\n\n- `c`: no.\n\nArgs:\n    a: (b, s) bool: a mask.\n    b: `b=False`: keeps it."


def test_code_on_the_pages_is_no_wider_than_a_column() -> None:
    wide = [
        (p.name, line) for p in (ROOT / "docs").glob("*.md") for code, _ in snippets(p) for line in code.split("\n")
    ]
    assert [(name, line) for name, line in wide if len(line) > 84] == []


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    modules = set(re.findall(r"^::: ([\w.]+)", page, flags=re.MULTILINE))

    def documented(value: Any, name: str) -> bool:
        home = getattr(value, "__module__", "")
        inside = any(home == m or home.startswith(f"{m}.") for m in modules)
        return inside or f"bochner.{name}" in modules or f"{home}.{name}" in modules

    missing = []
    for name in [*bochner.__all__, *bochner.hf.__all__]:
        value = getattr(bochner, name, None) or getattr(bochner.hf, name)
        if isinstance(value, (type, types.FunctionType)) and not documented(value, name):
            missing.append(name)
    assert missing == []


def test_unfinished_and_unmarked_snippets_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n\n<!-- not run: takes hours -->\n```python\nb = 2\n```\n```bash\nls\n```\n")
    assert snippets(page) == [("a = 1\n", None), ("b = 2\n", "takes hours")]


def test_the_pages_say_which_map_has_a_closed_form_and_which_has_none() -> None:
    """The table of docs/theory.md names every map once and functions that exist; the README gives their number."""
    table = (ROOT / "docs" / "theory.md").read_text().partition("## Which map has which")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    named = [name for maps, _ in rows for name in re.findall(r"`(\w+)`", maps)]
    assert sorted(named) == sorted(bochner.maps.FEATURE_MAPS)
    with_form = 0
    for maps, form in rows:
        functions = re.findall(r"`(\w+)`", form)
        assert all(hasattr(bochner.theory, name) for name in functions), form
        assert bool(functions) != ("none" in form)
        with_form += len(re.findall(r"`(\w+)`", maps)) if functions else 0
    readme = (ROOT / "README.md").read_text()
    assert f"{len(named)} feature maps" in readme
    assert f"closed-form error of the {with_form} maps that have one" in readme


def test_the_page_of_the_theory_names_every_function() -> None:
    page = (ROOT / "docs" / "theory.md").read_text()
    missing = [name for name in bochner.theory.__all__ if name[0].islower() and f"`{name}`" not in page]
    assert missing == []


def test_the_page_of_the_architecture_is_drawn_from_the_code() -> None:
    page = architecture.PAGE.read_text()
    assert page == architecture.with_generated(page, architecture.generated()), "run python tests/architecture.py"
    drawn = architecture.drawing(architecture.room_graph(architecture.imports()))
    assert architecture.DRAWING.read_text() == drawn, "run python tests/architecture.py"
    assert "images/architecture.svg" in page


def test_every_name_on_the_walks_through_the_architecture_is_in_the_code() -> None:
    walks = architecture.PAGE.read_text().partition("## Three walks")[2]
    names = {name for name in re.findall(r"`([\w.]+)`", walks) if "." in name}
    assert len(names) > 25
    assert [name for name in sorted(names) if not architecture.defined(name)] == []
    # Planted defects: a member, a function and a module that do not exist.
    for wrong in ("maps.base.FeatureMap.absent", "maps.base.absent", "absent.base"):
        assert not architecture.defined(wrong)


def test_rows_of_the_architecture_import_from_lower_rows_only() -> None:
    graph = architecture.room_graph(architecture.imports())
    row = {part: i for i, parts in enumerate(architecture.levels(graph)) for part in parts}
    assert all(row[other] < row[part] for part, others in graph.items() for other in others)
    assert architecture.levels({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [["c"], ["b"], ["a"]]
    graph = {"a": {"b", "c"}, "b": {"c", "_d"}, "c": set()}
    assert architecture.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    drawn = architecture.drawing(graph)
    assert (drawn.count("<rect"), drawn.count("marker-end")) == (3, 2)
