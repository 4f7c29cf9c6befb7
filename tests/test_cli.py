"""The command line: its commands run, its errors are one line, its report is self-contained."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from bochner import cli

runner = CliRunner()


def test_the_artefacts_are_listed() -> None:
    done = runner.invoke(cli.app, ["fetch"])
    assert done.exit_code == 0
    assert "minilm" in done.output


def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {("convert", str(tmp_path), "out"): 1, ("search", "minilm", "--keep", "3"): 2, ("fetch", "nothing"): 2}
    for arguments, code in refused.items():
        monkeypatch.setattr(sys, "argv", ["bochner", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == code
        captured = capsys.readouterr()
        assert "error:" in captured.err
        assert "Traceback" not in captured.err


def test_a_model_in_a_directory_is_advised_on_and_converted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hf_models import TEXT, build

    from bochner import Conversion

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(56))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    model, tokenizer = build("bert", TEXT), transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    passages = [" ".join(f"w{(7 * i + j * j) % 56}" for j in range(40)) for i in range(10)]
    (tmp_path / "text.txt").write_text("\n\n".join(passages))
    common = [str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    page = tmp_path / "advice.html"
    advised = runner.invoke(cli.app, ["search", *common, "--length", "64", "--keep", "0.9", "--report", str(page)])
    assert advised.exit_code == 0, advised.output
    # Whether so small a model gains time is the machine's to say.
    assert any(x in advised.output for x in ("Apply it: bochner convert", "Nothing is converted", "cannot be met"))
    assert "bochner.convert" not in advised.output  # a reader of the command line is told commands
    assert "with linear attention" in page.read_text(encoding="utf-8")
    done = runner.invoke(cli.app, ["convert", *common, str(tmp_path / "out"), "--features", "16", "--window", "8"])
    assert done.exit_code == 0, done.output
    assert "Plan: 2 layers, 8 key heads" in done.output
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert Conversion.of(loaded).plan.num_heads == 8
    page, goal = tmp_path / "report.html", ["--keep", "0.9", "--length", "64"]
    aimed = runner.invoke(cli.app, ["convert", *common, str(tmp_path / "aimed"), *goal, "--report", str(page)])
    assert aimed.exit_code == 0, aimed.output
    assert "with linear attention" in page.read_text(encoding="utf-8")
    page = tmp_path / "recipe.html"
    recipe = ["--features", "16", "--map", "positive", "--report", str(page), "--json"]
    again = runner.invoke(cli.app, ["convert", *common, str(tmp_path / "out2"), *recipe])
    assert again.exit_code == 0, again.output
    text = page.read_text(encoding="utf-8")
    assert "8 of 8 heads are approximate" in text
    assert "on 2 validation texts of up to" in text  # every fourth of ten
    # What is stated is what the saved model keeps on those two, measured here by hand.
    original = transformers.BertModel.from_pretrained(tmp_path / "model").eval()
    converted = transformers.AutoModel.from_pretrained(tmp_path / "out2").eval()
    assert "8 kernel" in str(Conversion.of(converted).plan)
    cosines = []
    for passage in passages[3::4]:
        ids = tokenizer(passage, return_tensors="pt")
        with torch.no_grad():
            a, b = (m(**ids).last_hidden_state.mean(1) for m in (original, converted))
        cosines.append(float(torch.nn.functional.cosine_similarity(a, b)))
    stated = re.search(r"cosine ([\d.]+)", text)
    assert stated is not None
    assert abs(float(stated[1]) - sum(cosines) / 2) < 2e-3
    (tmp_path / "short.txt").write_text("\n\n".join(passages[:3]))
    short = ["convert", common[0], str(tmp_path / "out3"), "--text", str(tmp_path / "short.txt"), "--report", str(page)]
    refused = runner.invoke(cli.app, short)
    assert "The --report needs validation texts: 3 passages" in str(refused.exception)


def test_a_search_says_the_command_that_applies_its_plan() -> None:
    pytest.importorskip("transformers")
    from bochner.cli.models import in_commands
    from bochner.hf.search.report import APPLY

    given = {"--text": Path("my text.txt"), "--keep": 0.9, "--memory": None}
    said = in_commands(f"Apply it: {APPLY}", "a model", given)
    assert said == "Apply it: bochner convert 'a model' OUT --text 'my text.txt' --keep 0.9"


def test_a_decoder_within_a_share_of_its_memory_is_trained_and_reported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from hf_models import GROUPED, build

    from bochner import Conversion

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(46))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    build("llama", GROUPED, head="AutoModelForCausalLM").save_pretrained(tmp_path / "model")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    passages = [" ".join(f"w{(7 * i + j * j) % 46}" for j in range(120)) for i in range(40)]
    (tmp_path / "text.txt").write_text("\n\n".join(passages))
    goal = ["--memory", "0.5", "--length", "400", "--judge-length", "200"]
    train, page = ["--lora", "2", "--steps", "1"], tmp_path / "page.html"
    place = [
        str(tmp_path / "model"),
        str(tmp_path / "out"),
        "--text",
        str(tmp_path / "text.txt"),
        "--report",
        str(page),
    ]
    done = runner.invoke(cli.app, ["convert", *place, *goal, *train, "--report", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert "Trained, the model retains" in text
    assert "retain the most quality with at most 50.0% of the decoding memory at 400 tokens" in html.unescape(text)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plan = Conversion.of(loaded).plan
    assert plan.cache_bytes(400) <= 0.5 * plan.cache_bytes(400, converted=False)
    assert not [name for name, _ in loaded.named_parameters() if "lora" in name]


def code_of(page: Path) -> list[str]:
    """What a page says to do next, piece by piece."""
    steps = page.read_text(encoding="utf-8").partition('<ol class="steps">')[2].partition("</ol>")[0]
    return [html.unescape(code) for code in re.findall("<pre>(.*?)</pre>", steps, flags=re.DOTALL)]


def test_what_a_report_says_to_do_next_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands in the page, in the folder in which the command was given: shell commands, and Python."""
    transformers = pytest.importorskip("transformers")
    from hf_models import TEXT, build

    import bochner
    from bochner.report.model import Place

    monkeypatch.chdir(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(55))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    build("bert", TEXT).save_pretrained("a model")
    transformers.BertTokenizer("vocab.txt").save_pretrained("a model")
    passages = [" ".join(f"w{(7 * i + j * j) % 55}" for j in range(40)) for i in range(12)]
    Path("my text.txt").write_text("\n\n".join(passages))
    # The page of a target is written when the model is saved; what is asked for again goes to the same place.
    Path("my text.txt").write_text("\n\n".join(passages * 4))
    command = Place("a model", text="my text.txt").convert("--keep 0.5 --length 64")
    done = runner.invoke(cli.app, [*shlex.split(command)[1:], "--report", "page.html"])
    assert done.exit_code == 0, done.output
    for step in code_of(Path("page.html")):
        if step.startswith("bochner"):
            assert runner.invoke(cli.app, shlex.split(step)[1:]).exit_code == 0
        else:
            names: dict[str, Any] = {}
            exec(step, names)
            assert bochner.Conversion.of(names["model"]).plan.num_heads == 8
    Path("my text.txt").write_text("\n\n".join(passages))
    # A target of a length that the model cannot read: the page asks for one that it can.
    goal = ["--keep", "0.9", "--length", "600", "--text", "my text.txt", "--report", "page.html"]
    assert runner.invoke(cli.app, ["search", "a model", *goal]).exit_code == 1  # three texts of 512 tokens are needed
    Path("my text.txt").write_text("\n\n".join(passages * 4))
    done = runner.invoke(cli.app, ["search", "a model", *goal])
    assert done.exit_code == 0, done.output
    assert "The model has positions for 512 tokens: at 600 its attention alone was timed." in done.output
    (step,) = code_of(Path("page.html"))
    assert step == "bochner search 'a model' --keep 0.9 --length 512 --text 'my text.txt'"
    assert runner.invoke(cli.app, shlex.split(step)[1:]).exit_code == 0


def test_without_its_extra_the_command_says_so_in_one_line() -> None:
    script = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['bochner']; from bochner.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: The command line needs typer; install it with: pip install 'bochner[cli]'."
    helped = subprocess.run([sys.executable, "-m", "bochner", "--help"], capture_output=True, text=True, check=True)
    assert "convert" in helped.stdout


def test_importing_bochner_does_not_import_the_extras() -> None:
    script = "import sys, bochner; print([m for m in ('transformers', 'rich', 'typer', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
def test_the_demonstration_shows_a_picture_first_and_says_what_was_gained(tmp_path: Path, monkeypatch: Any) -> None:
    """With a small decoder of random weights, which nothing is learned from."""
    transformers = pytest.importorskip("transformers")
    from bochner import data, demo

    try:
        path = data.fetch("minilm", quiet=True)
    except data.ArtefactUnavailable as error:
        pytest.skip(str(error))
    names = ["input_ids", "attention_mask"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, model_input_names=names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=len(tokenizer))).eval()
    monkeypatch.setattr(demo, "load_smollm2", lambda: (model, tokenizer))
    monkeypatch.setattr(demo, "LENGTH", 600)
    monkeypatch.setattr(data, "paragraphs", partial(data.paragraphs, source="python"))
    convert, pages = demo.convert, []

    def watched(model: Any, spec: Any, *rest: Any, **how: Any) -> Any:
        pages.append((tmp_path / "r.html").read_text(encoding="utf-8") if (tmp_path / "r.html").exists() else "")
        return convert(model, spec, *rest, **how)

    monkeypatch.setattr(demo, "convert", watched)
    rows, path = demo.run(lambda text: None, tmp_path / "r.html", quick=True)
    assert pages[0] == ""  # the recipe of the first look
    assert "a first look" in pages[1]  # there when the search begins
    (name, before, whole, _), (converted, after, retained, rate) = rows
    assert (name, whole, converted) == ("as it is", 100.0, "converted")
    assert before == pytest.approx(
        2 * 2 * 600 * 64 * 4 / 1e6, rel=0.05
    )  # layers, keys and values, tokens, width, bytes
    assert after < 0.12 * before
    assert retained > 0
    assert rate > 0
    assert f"takes {after:.1f} MB in place of {before:.1f} MB after 600 tokens" in path.read_text(encoding="utf-8")


@pytest.mark.model
@pytest.mark.slow
def test_the_demonstration_runs(tmp_path: Path) -> None:
    from bochner import data

    try:
        data.fetch("smollm2")
    except data.ArtefactUnavailable as error:
        pytest.skip(str(error))
    done = runner.invoke(cli.app, ["demo", "--quick", "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert "of its quality" in (tmp_path / "r.html").read_text()
