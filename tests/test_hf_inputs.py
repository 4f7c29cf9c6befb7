"""What models are run on: positions are counted, both sides of an encoder-decoder told apart, arrays taken."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from hf_models import DECODERS, ENCODERS, GROUPED, IMAGE, SEQ2SEQ, TEXT, build, texts_as_batches  # noqa: E402

from bochner import BochnerError, Calibration, Conversion, Distillation, Recipe, Target, convert, revert, search  # noqa: E402
from bochner.hf import Plan, discover  # noqa: E402
from bochner.hf.inputs import batches, positions  # noqa: E402
from bochner.hf.search.texts import batches_for, settle  # noqa: E402

WHISPER = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 20}
PADDED = {**TEXT, "max_position_embeddings": 130, "pad_token_id": 1}


def ids(n: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(4, 50, (rows, n), generator=torch.Generator().manual_seed(seed))


def words() -> Any:
    """A tokenizer of words w4 to w59."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 60)}}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")


def texts(count: int, length: int) -> list[str]:
    return [" ".join(f"w{i}" for i in ids(length, seed)[0].tolist()) for seed in range(count)]


@pytest.mark.parametrize(
    ("family", "settings", "most"),
    [
        ("bert", TEXT, 512),
        ("distilbert", {**ENCODERS["distilbert"], "max_position_embeddings": 128}, 128),
        ("gpt2", DECODERS["gpt2"], 512),
        ("opt", DECODERS["opt"], 512),
        ("roberta", PADDED, 128),
        ("esm", {**PADDED, "position_embedding_type": "absolute"}, 128),
        ("esm", {**PADDED, "position_embedding_type": "rotary"}, None),
        ("llama", GROUPED, None),
        ("bart", SEQ2SEQ, 64),
        ("vit", IMAGE, None),
    ],
)
def test_positions_are_those_that_a_forward_pass_can_use(
    family: str, settings: dict[str, Any], most: int | None
) -> None:
    model = build(family, settings)
    assert positions(model).get("input_ids") == most
    if most is not None:
        with torch.no_grad():
            model(input_ids=ids(most))
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=ids(most + 1))


def test_the_sides_of_an_encoder_decoder_have_positions_of_their_own() -> None:
    assert positions(build("bart", SEQ2SEQ)) == {"input_ids": 64, "decoder_input_ids": 64}
    assert positions(build("whisper", WHISPER)) == {"decoder_input_ids": 20}


def test_a_decoder_with_learned_positions_is_judged_within_them() -> None:
    """Its default length is 4096, and maps are fitted to 640 tokens; here are 128."""
    model = build("gpt2", {**DECODERS["gpt2"], "n_positions": 128}, head="AutoModelForCausalLM")
    report = search(model, Target(keep=0.7), Calibration(texts(12, 100), words()))
    assert report.goal.length == report.verified.length == 128
    assert any("positions for 128 tokens" in reason for reason in report.reasons)
    convert(model, Recipe(None, window=8, exact_heads=0.2), Calibration(texts(8, 200), tokenizer=words()))


def test_lengths_beyond_what_a_rotary_model_was_made_for_are_said() -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    data = [{"input_ids": ids(64, i)} for i in range(3)]
    goal = settle(Target(keep=0.9, length=1000), model, discover(model), data)
    assert goal.length == 1000
    assert "made for 512 tokens" in goal.notes[0]
    assert not settle(Target(keep=0.9, length=512), model, discover(model), data).notes


@pytest.mark.parametrize("family", ["roberta", "esm"])
def test_encoders_that_count_from_the_padding_token_read_texts_to_their_last_position(family: str) -> None:
    model = build(family, {**PADDED, "position_embedding_type": "absolute"})
    data = batches_for(model, Calibration(texts(12, 100), words(), batch_size=2), Target())
    assert max(batch["input_ids"].shape[1] for batch in data) == 100
    data = batches_for(model, Calibration(texts(12, 100), words(), batch_size=2), Target(length=300))
    assert max(batch["input_ids"].shape[1] for batch in data) == 128
    convert(model, Recipe(window=8, num_features=8), Calibration(texts(4, 300), tokenizer=words()))


def test_cross_attention_is_told_where_both_sides_have_one_length() -> None:
    model = build("bart", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    data = [{"input_ids": ids(60, i), "decoder_input_ids": ids(60, i + 9)} for i in range(4)]
    parts = {name.split(".")[-1]: shape.part for name, shape in discover(model, data[0]).items() if "decoder" in name}
    assert parts == {"self_attn": "decoder", "encoder_attn": "cross"}
    one = {"input_ids": ids(1), "decoder_input_ids": ids(1)}
    assert {shape.part for shape in discover(model, one).values()} == {"encoder", "decoder", "cross"}
    convert(model, Recipe("positive", 8, window=8, sinks=1), data)
    model.generate(ids(40), max_new_tokens=3)
    assert [layer.fates[0].name for layer in Conversion.of(model).plan.layers if layer.is_cross] == ["kernel"] * 2


def test_the_encoder_alone_is_converted_by_texts_alone() -> None:
    model = build("bart", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    convert(model, Recipe(None, window=8), texts_as_batches(4, length=60), parts=["encoder"])
    assert {layer.name.split(".")[1] for layer in Conversion.of(model).plan.converted} == {"encoder"}


@pytest.mark.parametrize("family", ["bart", "marian", "mbart", "t5"])
def test_decoders_get_their_inputs_from_labels_by_the_shift_of_the_model(family: str) -> None:
    small = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    settings = {**small, "vocab_size": 60} if family == "t5" else SEQ2SEQ
    model = build(family, settings, head="AutoModelForSeq2SeqLM")
    labels = ids(9, 1, rows=2)
    labels[1, 6:] = -100
    (batch,) = batches({"input_ids": ids(20, rows=2), "labels": labels}, None, model=model)
    assert "labels" not in batch
    with torch.no_grad():
        own = model(input_ids=batch["input_ids"], labels=labels).logits
        torch.testing.assert_close(model(**batch).logits[0], own[0])
        torch.testing.assert_close(model(**batch).logits[1, :6], own[1, :6])
    assert batch["decoder_attention_mask"].sum().item() == 15


def test_decoders_without_labels_read_the_text_and_beside_sounds_begin() -> None:
    marian = build("marian", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    (batch,) = batches({"input_ids": ids(20)}, None, model=marian)
    assert batch["decoder_input_ids"].tolist() == [[2, *batch["input_ids"][0, :-1].tolist()]]
    whisper = build("whisper", WHISPER, head="AutoModelForSpeechSeq2Seq")
    sounds = [{"input_features": torch.randn(1, 8, 80)} for _ in range(3)]
    assert [b["decoder_input_ids"].tolist() for b in batches(sounds, None, model=whisper)] == [[[2]]] * 3
    labelled = [{**b, "labels": ids(7, i)} for i, b in enumerate(sounds)]
    report = search(whisper, Target(keep=0.9), labelled)
    assert {layer.name.split(".")[1] for layer in report.plan.layers} == {"encoder", "decoder"}


def test_arrays_and_lists_are_taken_for_tensors() -> None:
    vit = build("vit", IMAGE)
    (batch,) = batches({"pixel_values": np.zeros((2, 3, 16, 16)), "labels": [0, 1]}, None, model=vit)
    assert batch["pixel_values"].dtype == torch.float32
    bert = build("bert", TEXT)
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "text": "a b c"}, {"input_ids": [[8, 9]]}]
    first, second = batches(rows, None, model=bert)
    assert first["input_ids"].tolist() == [[5, 6, 7]]
    assert set(first) == {"input_ids", "attention_mask"}
    assert second["input_ids"].tolist() == [[8, 9]]
    loader = torch.utils.data.DataLoader([{"input_ids": ids(8)[0]} for _ in range(4)], batch_size=2)
    assert [b["input_ids"].shape for b in batches(loader, None, model=bert)] == [(2, 8)] * 2


def call(model: Any, data: Any = None, **options: Any) -> Any:
    return convert(model, Target(keep=0.9), texts_as_batches(4) if data is None else data, **options)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"data": Calibration(5)}, r"must be texts or batches, .* got int: name them, as in {'input_ids': x}"),
    "a tensor": ({"data": torch.ones(3, 8)}, r"got Tensor: name them, as in {'input_ids': x}"),
    "tensors": ({"data": [torch.ones(3, 8)] * 3}, r"got a list of Tensor: name them"),
    "an empty text": ({"data": Calibration(["", " "], words())}, r"The texts of 'data' are empty"),
    "no tokens": ({"data": [{"input_ids": ids(0)}] * 4}, r"hold no tokens: leave empty texts out"),
    "texts and batches": ({"data": ["w4", {"input_ids": ids(4)}]}, r"got a list of dict and str: name them"),
    "a number for parts": ({"parts": 3}, r"'parts' must be of \['encoder'\], .* got 3"),
    "an empty batch": ({"data": [{}]}, r"holds no inputs, but \[\]: give dicts of tensors"),
    "ragged rows": ({"data": [{"input_ids": [[1, 2], [3]]}]}, r"'input_ids' .* pad its rows to one length"),
    "a wrong key": (
        {"data": [{"pixel_values": torch.ones(1, 3, 4, 4)}] * 4},
        r"BertModel could not be run on the first of 'data' with pixel_values \(1, 3, 4, 4\)",
    ),
    "unknown tokens": (
        {"data": [{"input_ids": ids(9) + 50}] * 4},
        r"in \[0, 60\), .* the model's own tokenizer",
    ),
    "too many tokens": (
        {"data": [{"input_ids": ids(700)}] * 4},
        r"700 tokens, and BertModel has positions for 512",
    ),
    "no seed": ({"seed": "a"}, r"'seed' of convert must be an int >= 0, got 'a'"),
    "no parts": ({"parts": ["x"]}, r"'parts' must be of \['encoder'\], or names of modules with attention, got 'x'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_data_is_answered_by_one_sentence(mistake: str) -> None:
    options, sentence = MISTAKES[mistake]
    model = build("bert", TEXT)
    with pytest.raises(BochnerError, match=sentence) as caught:
        call(model, **options)
    assert re.fullmatch(r"[^\n]*[.\]]", str(caught.value))


def test_a_language_model_is_judged_by_tokens() -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    with pytest.raises(BochnerError, match="give texts or 'input_ids'"):
        call(model, [{"inputs_embeds": torch.randn(1, 64, 32)}] * 4)


def test_settings_that_cannot_be_are_refused_when_they_are_made() -> None:
    with pytest.raises(BochnerError, match="'keep' of Target"):
        Target(keep=2)
    with pytest.raises(BochnerError, match="Distillation has no setting 'stepz'; the settings are"):
        Distillation.from_dict({"stepz": 3})
    with pytest.raises(BochnerError, match="'train' of Target must be a Distillation"):
        Target(keep=0.9, train={"steps": 3})  # type: ignore[arg-type]
    with pytest.raises(BochnerError, match="'tokenizer' of Calibration must be the model's tokenizer, got 'bert'"):
        Calibration(["a"], "bert")
    with pytest.raises(BochnerError, match="'layers' of a Plan must be LayerPlans"):
        Plan(["encoder"])  # type: ignore[list-item]
    with pytest.raises(BochnerError, match="'batch_size' of Calibration must be a positive int, got 0"):
        Calibration(["a"], batch_size=0)


def test_a_target_says_what_it_does_where_somebody_can_read_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build("bert", TEXT)
    for terminal, said in ((False, False), (True, True)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        conversion = convert(model, Target(keep=0.9), texts_as_batches(6))
        assert ("bochner:" in capsys.readouterr().err) == said
        assert conversion.report is not None
        revert(model)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    convert(model, Recipe("positive", 8), texts_as_batches(4))
    assert not capsys.readouterr().err


def test_an_iterator_of_texts_is_a_list_of_texts() -> None:
    model, several = build("llama", GROUPED, head="AutoModelForCausalLM"), texts(3, 500)
    wanted = batches_for(model, Calibration(several, words()), Target())
    data = Calibration(iter(several), words())
    for _ in range(2):
        found = batches_for(model, data, Target())
        assert [b["input_ids"].tolist() for b in found] == [b["input_ids"].tolist() for b in wanted]


def test_empty_texts_among_others_are_left_out() -> None:
    found = batches([*texts(2, 9), "", " "], words(), model=build("bert", TEXT))
    assert sum(len(batch["input_ids"]) for batch in found) == 2
    assert all(batch["attention_mask"].all() for batch in found)


def test_rows_of_a_batch_may_be_tensors_in_a_list() -> None:
    model = build("bert", TEXT)
    one, two = ids(12), ids(12, 1)
    (found,) = batches({"input_ids": [one[0], two[0]]}, None, model=model)
    assert torch.equal(found["input_ids"], torch.cat([one, two]))
    with pytest.raises(BochnerError, match="pad its rows"):
        batches({"input_ids": [one[0], ids(5)[0]]}, None, model=model)
