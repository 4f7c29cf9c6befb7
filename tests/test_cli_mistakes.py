"""Typical mistakes at the command line and in the API: each is answered by one clear sentence, before any long work."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

import transformers
from hf_models import TEXT, build

import bochner
from bochner import BochnerError, cli


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with a tokenizer of 56 words, and text for it."""
    folder = tmp_path_factory.mktemp("model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(56))]
    (folder / "vocab.txt").write_text("\n".join(words))
    build("bert", TEXT).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    passages = [" ".join(f"w{(7 * i + j * j) % 50}" for j in range(40)) for i in range(10)]
    (folder / "text.txt").write_text("\n\n".join(passages))
    return folder


def complaint(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int = 1
) -> str:
    """What the command says when it refuses, on one line; exit code 1 for what it met, 2 for what it was told."""
    monkeypatch.setattr(sys, "argv", ["bochner", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == code, said
    assert len(said) == 1, said
    assert said[0].startswith("error: ")
    return said[0]


def broken(directory: Path, tmp_path: Path, how: str) -> Path:
    """A copy of the model directory with one thing wrong."""
    copy = tmp_path / how.replace(" ", "_")
    shutil.copytree(directory, copy)
    if how == "broken config":
        (copy / "config.json").write_text("{ not json")
    elif how == "unknown type":
        (copy / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    elif how == "no weights":
        (copy / "model.safetensors").unlink()
    elif how == "damaged weights":
        file = copy / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "no tokenizer":
        for file in copy.glob("*"):
            if file.name.startswith(("tokenizer", "vocab", "special")):
                file.unlink()
    elif how == "another tokenizer":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "foreign", "words"]
        for file in copy.glob("tokenizer*"):
            file.unlink()
        (copy / "vocab.txt").write_text("\n".join(words))
        transformers.BertTokenizer(str(copy / "vocab.txt")).save_pretrained(copy)
    elif how == "vision":
        shutil.rmtree(copy)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
        transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(copy)
    return copy


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("broken config", "config.json in .* cannot be read"),
        ("unknown type", "transformers cannot load the model"),
        ("no weights", "no weights"),
        ("damaged weights", "transformers cannot load the model"),
        ("no tokenizer", r"no tokenizer .* save it with the model"),
        ("another tokenizer", r"knows \d+% of the tokens"),
        ("vision", "takes pixel_values, not text"),
    ],
)
def test_a_wrong_directory_is_described(
    how: str,
    sentence: str,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = broken(model_directory, tmp_path, how)
    text = str(model_directory / "text.txt")
    for command in (["search", str(directory)], ["convert", str(directory), str(tmp_path / "out")]):
        said = complaint([*command, "--text", text], monkeypatch, capsys)
        assert re.search(sentence, said), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--exact-heads", "1.5"], "--exact-heads must be a fraction"),
        (["--exact-heads", "nan"], "--exact-heads must be a fraction"),
        (["--map", "favor"], "Unknown feature map 'favor'; the valid names are"),
        (["--features", "0"], "needs a 'window' or 'sinks'"),
        (["--keep", "0.3"], "The --keep must be a share in [0.5, 1)"),
        (["--keep", "0.9", "--map", "positive"], "--map is chosen by the search"),
        (["--keep", "0.9", "--exact-heads", "0.1"], "--exact-heads is chosen by the search"),
        (["--memory", "1.5"], "The --memory must be a share in (0, 1)"),
        (["--memory", "0.5", "--minimize", "time"], "leave out minimize='time'"),
        (["--memory", "0.5", "--map", "positive"], "--map is chosen by the search"),
        (["--length", "100"], "--length needs a target"),
        (["--minimize", "time"], "--minimize needs a target"),
        (["--text", "nowhere.txt"], "There is no text file 'nowhere.txt'"),
        (["--keep", "0.9", "--report", "."], "'.' is a directory; give a file"),
        (["--keep", "0.9", "--report", f"{__file__}/report.html"], f"{__file__!r} is a file, not a directory"),
    ],
)
def test_a_wrong_option_is_refused_before_the_model_is_measured(
    options: list[str],
    sentence: str,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was observed before the option was refused")

    monkeypatch.setattr("bochner.hf.calibrate.observe", never)
    text = [] if "--text" in options else ["--text", str(model_directory / "text.txt")]
    code = 1 if {"--report", "--text"} & set(options) else 2  # what is on the disk, and what was typed
    arguments = ["convert", str(model_directory), str(tmp_path / "out"), *text, *options]
    assert sentence in complaint(arguments, monkeypatch, capsys, code)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--out", "."], "'.' is a directory; give a file"),
        (["demo", "--out", f"{__file__}/page.html"], f"{__file__!r} is a file, not a directory"),
        (["convert", "minilm", "minilm"], "has the name of a built-in model"),
        (["train", "listops", "--attention", "favour"], "favour"),
        (["train", "listops", "--option", "learnable"], "An --option is NAME=VALUE"),
        (["fetch", "nothing"], "nothing"),
        (["search", "minilm", "--report", "."], "'.' is a directory; give a file"),
        (["plan", "features", "--error", "nan"], "The --error must be positive"),
    ],
)
def test_a_wrong_value_is_refused_at_once_and_by_the_name_of_its_option(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded before the option was refused")

    monkeypatch.setattr("bochner.demo.load_minilm", never)
    monkeypatch.setattr("bochner.demo.run", never)
    code = 1 if {"--out", "--report"} & set(arguments) else 2
    assert sentence in complaint(arguments, monkeypatch, capsys, code)


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "page.html")

    monkeypatch.setattr("bochner.demo.run", full)
    said = complaint(["demo", "--out", "page.html"], monkeypatch, capsys)
    assert said == "error: No space left on device (page.html)."


def test_absurd_numbers_of_features_stay_readable(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["bochner", "plan", "features", "--norm", "60"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "beyond 1e308" in said
    assert "e+77" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "minilm", "--length", "-5"],
        ["search", "minilm", "--window", "0"],
        ["convert", "minilm", "out", "--sinks", "-1"],
        ["convert", "minilm", "out", "--features", "many"],
        ["convert", "minilm"],
        ["demo", "--threads", "-1"],
        ["convert", "minilm", "out", "--steps", "-3"],
        ["train", "listops", "--steps", "-3"],
        ["train", "listops", "--features", "0"],
        ["train", "listops", "--threads", "-1"],
        ["unheard-of"],
    ],
)
def test_wrong_usage_exits_with_two_and_names_the_option(arguments: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["bochner", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "Traceback" not in said
    option = next((a for a in arguments if a.startswith("--")), "")
    assert option in said


def test_text_that_is_not_text(tmp_path: Path, monkeypatch: Any, capsys: Any, model_directory: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("\n\n")
    for name, sentence in (("bytes.txt", "is not UTF-8"), ("empty.txt", "is empty"), ("", "no text file")):
        said = complaint(["search", str(model_directory), "--text", str(tmp_path / name)], monkeypatch, capsys)
        assert sentence in said


def test_a_converted_model_is_not_converted_again(
    tmp_path: Path, monkeypatch: Any, capsys: Any, model_directory: Path
) -> None:
    text = ["--text", str(model_directory / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["bochner", "convert", str(model_directory), str(tmp_path / "out"), *text])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    capsys.readouterr()
    said = complaint(["convert", str(tmp_path / "out"), str(tmp_path / "again"), *text], monkeypatch, capsys)
    assert said.endswith("out' is converted already; give the directory that it was made from.")


def test_ctrl_c_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: Any, capsys: Any, model_directory: Path
) -> None:
    def interrupted(self: Any, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.BertModel, "save_pretrained", interrupted)
    text = ["--text", str(model_directory / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["bochner", "convert", str(model_directory), str(tmp_path / "out"), *text])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m, t: bochner.convert(m, bochner.Recipe("favor"), t).model, "Unknown feature map 'favor'"),
        (lambda m, t: bochner.convert(m, bochner.Recipe("positive", -3), t).model, "positive int, got -3"),
        (
            lambda m, t: bochner.convert(m, bochner.Recipe("positive", 8, options={"projection": "haar"}), t).model,
            "haar",
        ),
        (lambda m, t: bochner.convert(m, bochner.Recipe("positive", 8, options={"colour": 1}), t).model, "colour"),
        (
            lambda m, t: bochner.search(m, bochner.Target(length=-5), t),
            "'length' of Target must be a positive int, got -5",
        ),
        (lambda m, t: bochner.feature_map("positve", dim=4), "'positive'"),
        (lambda m, t: bochner.linear_attention(torch.ones(1, 2, 3), *[torch.ones(1, 1, 2, 3)] * 2, "positive"), "q"),
    ],
)
def test_mistakes_in_python_are_refused_before_anything_is_measured(
    call: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was observed before the mistake was refused")

    monkeypatch.setattr("bochner.hf.calibrate.observe", never)
    batches = [{"input_ids": torch.arange(40).view(1, 40) % 50 + 1}] * 4
    with pytest.raises(BochnerError, match=sentence):
        call(build("bert", TEXT), batches)
