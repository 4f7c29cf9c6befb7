"""The pages of the documentation: their code runs, page by page in one namespace, from the names a page presupposes.

A snippet that cannot run by itself has the comment `<!-- not run: why -->` above it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bochner

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+?) -->\s+)?^ *```python\n(?P<code>.*?)^ *```", flags=re.DOTALL | re.MULTILINE
)


def snippets(page: Path) -> list[tuple[str, str | None]]:
    """The code of a page, each piece with the reason for which it is not run, if it has one."""
    return [(textwrap.dedent(found["code"]), found["why"]) for found in SNIPPET.finditer(page.read_text())]


def attention_inputs() -> dict[str, Any]:
    q, k, v = torch.randn(3, 1, 2, 300, 64, generator=torch.Generator().manual_seed(0)) * 0.5
    return {"torch": torch, "bochner": bochner, "q": q, "k": k, "v": v}


def decoder(folder: str | None = None) -> dict[str, Any]:
    """Names of the pages on decoders: a small model with the tokenizer of MiniLM, saved where a page loads it from."""
    transformers = pytest.importorskip("transformers")
    try:
        path = bochner.data.fetch("minilm", quiet=True)
        texts = bochner.data.paragraphs("calibration", 8, words=60)
    except bochner.data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config).eval()
    if folder is None:
        return {"model": model, "tokenizer": tokenizer, "texts": texts}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {}


def encoder(folder: str) -> dict[str, Any]:
    """A small encoder with the tokenizer of MiniLM, saved where a page loads it from."""
    transformers = pytest.importorskip("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(bochner.data.fetch("minilm", quiet=True))
    except bochner.data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {}


SMALL = {"smollm2": "small-decoder", "minilm": "small-encoder"}  # what stands in for the models of the pages

# What the code of a page presupposes; pages that are not here presuppose nothing.
PRESUPPOSED: dict[str, Callable[[], dict[str, Any]]] = {
    "several-machines.md": attention_inputs,
    "shrink-a-cache.md": decoder,
    "README.md": lambda: decoder(SMALL["smollm2"]),
    "start.md": lambda: decoder(SMALL["smollm2"]) | encoder(SMALL["minilm"]),
    "distil.md": lambda: decoder(SMALL["smollm2"]) | encoder(SMALL["minilm"]),
    "speed-up-an-encoder.md": lambda: encoder(SMALL["minilm"]),
}
NEEDS_A_MODEL = {"README.md", "shrink-a-cache.md", "start.md", "speed-up-an-encoder.md", "distil.md"}


def marks(page: Path) -> list[Any]:
    return [pytest.mark.model] if page.name in NEEDS_A_MODEL else []


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
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem} | PRESUPPOSED.get(page.name, dict)()
    fetch = bochner.data.fetch  # searches and fits on the real models take minutes
    monkeypatch.setattr(bochner.data, "fetch", lambda name, **how: SMALL.get(name) or fetch(name, **how))
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


def test_the_page_about_maps_names_every_map_and_says_what_the_code_chooses() -> None:
    page = (ROOT / "docs" / "which-map.md").read_text()
    table = page.partition("## Every map in a line")[2]
    missing = set(bochner.maps.FEATURE_MAPS) - set(re.findall(r"`(\w+)`", table))
    assert missing == set()
    tree = page.partition("## What do you have?")[2].partition("\n## ")[0]

    def branch(call: str) -> str:
        """What the page says that a call does."""
        return next(line for line in tree.splitlines() if f"`{call}" in line).partition(f"`{call}")[2]

    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(**small, vocab_size=50))
    batches = [{"input_ids": torch.arange(200).view(4, 50) % 49 + 1}]

    def chosen(*arguments: Any) -> Any:
        conversion = bochner.convert(model, *arguments)
        (fate,) = set(conversion.plan.layers[0].fates)
        conversion.revert()
        return fate

    fate = chosen(bochner.Recipe(), batches)
    assert (fate.feature_map, fate.num_features) == ("landmark", 64)
    assert branch("convert(model, Recipe(), texts)").startswith("` takes `landmark`, m = 64,")
    fate = chosen()
    assert (fate.feature_map, fate.window, fate.sinks, fate.window_kind) == ("moments", 32, 1, "block")
    assert branch("convert(model)").startswith("` takes `moments` with a block window of 32 and one sink")
    fate = chosen(bochner.Recipe(trainable=True))
    assert (fate.feature_map, fate.num_features) == ("calibrated", 128)
    assert branch("Recipe(trainable=True)").startswith("` takes `calibrated`, m = 128")
    default = inspect.signature(bochner.nn.MultiheadAttention).parameters["attention"].default
    assert f"`bochner.nn.MultiheadAttention(embed_dim, num_heads)` takes `{default}`" in tree
    q, k, v = torch.randn(3, 1, 2, 128, 8, generator=torch.Generator().manual_seed(0))
    measured = bochner.diagnose(q, k, v).heads[0].measured
    fitted = {name.split()[0].removeprefix("window+") for name in measured} & {"landmark", "calibrated"}
    assert fitted == set(re.findall(r"`(landmark|calibrated)`", branch("diagnose(q, k, v)")))


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
        bochner.convert: 6, bochner.linear_attention: 11, bochner.KernelOperator: 8, bochner.distill: 3,
        bochner.nn.MultiheadAttention: 1, bochner.nn.Attention: 8, bochner.nn.Performer: 8,
        bochner.feature_map: 3, bochner.Recipe: 8, bochner.Target: 6,
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
    pages = "\n".join(p.read_text() for p in (ROOT / "docs").glob("reference*.md"))
    listed = set(re.findall(r"^::: ([\w.]+)", pages, flags=re.MULTILINE))
    missing = []
    for package in (bochner, bochner.hf):
        for name in package.__all__:
            value = getattr(package, name)
            home = getattr(value, "__module__", "")
            inside = any(home == m or home.startswith(f"{m}.") for m in listed)
            public = {f"{place}.{name}" for place in ("bochner", "bochner.hf", "bochner.nn", home)} & listed
            if isinstance(value, (type, types.FunctionType)) and not inside and not public:
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


def test_tables_of_the_pages_are_the_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    sys.modules.pop("tables", None)
    tables = importlib.import_module("tables")
    used = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        used |= {found["name"] for found in tables.MARKED.finditer(text)}
        assert text == tables.filled(text), f"{page.name}: run python docs/extensions/tables.py"
    assert used == set(tables.TABLES), "a table that no page has"
    # A planted fault: a changed cell is written over.
    wrong = "<!-- table: window-kinds -->\n| 1 | 2 |\n<!-- end -->"
    assert "| window and sinks |" in tables.filled(wrong)


def test_formulas_become_mathml() -> None:
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("formulas", ROOT / "docs" / "extensions" / "formulas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = '<p>With <span class="arithmatex">\\(x &lt; y\\)</span></p><div class="arithmatex">\\[x^2\\]</div>'
    made = module.on_page_content(page)
    assert made.count("<math") == 2
    assert 'display="block"' in made
    assert "arithmatex" not in made
