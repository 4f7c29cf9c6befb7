"""What users bring to the trainer: tasks, maps and models of their own; and the tasks that need attention."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import bochner
from bochner import BochnerError
from bochner.maps import FEATURE_MAPS, Features, to_features

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from bochner import tasks
from bochner.tasks import base, models, recall, training
from bochner.tasks.base import IGNORE, PAD, SEP, SPECIAL, Preset, Task

SIZES = Preset(12, 1, 2, 16, 16, 8, 4, learning_rate=3e-3, warmup=0, dropout=0.0, pooling="mean", features=8, redraw=0)


class Parity(Dataset):
    """Zeros and ones, and whether the first is a one."""

    def __init__(self, length: int = 12, label: Any = None) -> None:
        self.rows = torch.randint(2, (32, length), generator=torch.Generator().manual_seed(0))
        self.label = label

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "input_ids": self.rows[i] + SPECIAL,
            "labels": int(self.rows[i, 0]) if self.label is None else self.label,
        }


def own(**changes: Any) -> Task:
    parts = {"name": "first", "what": "the first symbol", "kind": "classify", "vocabulary": 2, "classes": 2}
    return Task(**{**parts, "load": lambda preset, split: Parity(), "presets": SIZES, **changes})


class Squares(bochner.FeatureMap):
    positive = True

    def __init__(self, dim: int, num_features: int, *, num_heads: int | None = None) -> None:
        super().__init__(dim, dim, num_heads=num_heads)

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(x.square())


@pytest.fixture(autouse=True)
def registry_as_before() -> Any:
    before = dict(FEATURE_MAPS)
    yield
    FEATURE_MAPS.clear()
    FEATURE_MAPS.update(before)


@pytest.mark.parametrize("report", [None, "bar"])
def test_no_library_talks_beside_the_training(report: str | None, tmp_path: Path, capfd: Any) -> None:
    """transformers shows a bar for every file it writes, and advice."""
    sizes: dict[str, Any] = {"length": 9, "steps": 3, "batch": 4, "test": 8, "data": {"symbols": 4}}
    bochner.train("copying", "relu", output=tmp_path, report=report, **sizes)
    said = capfd.readouterr().err
    assert "model shards" not in said
    assert "[transformers]" not in said
    assert bool(said) == (report is not None)


def test_a_score_that_is_no_number_is_said_to_be_none(tmp_path: Path) -> None:
    def metric(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.full((len(labels),), torch.nan)

    with pytest.raises(BochnerError, match="The 'score' of the task 'first' is not a number on its test split"):
        bochner.train(own(metric=metric), output=tmp_path / "metric", report=None)
    assert math.isnan(base.summary("causal", np.zeros((2, 4)))["loss"])  # not one position counts


@pytest.mark.parametrize("kind", ["classify", "causal"])
def test_a_sequence_may_be_as_short_as_one_likes(kind: str) -> None:
    task, sizes = own(kind=kind), replace(SIZES, length=3, positions="learned")
    model = tasks.build(task, sizes, tasks.choose(task, "relu", sizes))
    assert model(input_ids=torch.full((2, 3), SPECIAL)) is not None


def test_a_task_and_a_map_of_ones_own_are_trained_by_one_call(tmp_path: Path) -> None:
    given = bochner.train(own(), Squares, output=tmp_path / "class", report=None)
    assert given["attention"] == "Squares"
    assert 0 <= given["score"] <= 1
    assert bochner.train(own(), Squares, output=tmp_path / "class", report=None, resume=True) == given


def test_an_instance_is_copied_into_every_layer(tmp_path: Path) -> None:
    phi = bochner.feature_map("positive", dim=8, num_features=16, seed=5)
    kept = phi.projection.weight.clone()
    name = models.map_name(phi)
    preset = replace(SIZES, layers=2)
    model = tasks.build(own(), preset, tasks.choose(own(), name, preset))
    found = [m for m in model.modules() if type(m).__name__ == "PositiveFeaturesCopy"]
    assert len(found) == 2
    assert all(torch.equal(m.projection.weight, kept) for m in found)  # type: ignore[union-attr]
    assert found[0].projection is not found[1].projection
    result = bochner.train(own(), phi, output=tmp_path, report=None)
    assert result["attention"] == "PositiveFeaturesCopy"
    with pytest.raises(BochnerError, match="has 'dim' 8 and the heads of the model have size 4"):
        bochner.train(own(), phi, output=tmp_path / "b", report=None, heads=4)


def test_a_metric_of_ones_own_is_the_score(tmp_path: Path) -> None:
    always = own(metric=lambda logits, labels: torch.full((len(labels),), 0.25))
    assert bochner.train(always, output=tmp_path, report=None)["score"] == 0.25
    wrong = own(metric=lambda logits, labels: torch.tensor(0.25))
    with pytest.raises(BochnerError, match=r"one figure for each of the .* got shape"):
        bochner.train(wrong, output=tmp_path / "b", report=None)


class Mean(nn.Module):
    """A model that says its own loss: the mean embedding, classified."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, preset.width), nn.Linear(preset.width, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_and_a_collator_of_ones_own_are_used(tmp_path: Path) -> None:
    def collate(items: Any) -> dict[str, Tensor]:
        return {
            "input_ids": torch.stack([x["input_ids"] for x in items]),
            "labels": torch.tensor([x["labels"] for x in items]),
        }

    task = own(kind="own", model=Mean, collate=collate, metric=lambda logits, labels: logits.argmax(-1) == labels)
    result = bochner.train(task, output=tmp_path, report=None)
    assert result["parameters"] == 6 * 16 + 2 * 16 + 2


def test_a_configuration_of_transformers_is_a_model(tmp_path: Path) -> None:
    import transformers

    def config(preset: Preset) -> Any:
        sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes["intermediate_size"] = 24
        return transformers.RobertaConfig(
            vocab_size=6,
            max_position_embeddings=40,
            pad_token_id=0,
            num_labels=2,
            attention_probs_dropout_prob=0.0,
            **sizes,
        )

    chosen = tasks.choose(own(model=config), "relu", SIZES)
    assert type(tasks.build(own(model=config), SIZES, chosen)).__name__ == "RobertaForSequenceClassification"
    assert 0 <= bochner.train(own(model=config), "relu", output=tmp_path, report=None)["score"] <= 1


def test_options_of_a_map_reach_a_torch_model_of_ones_own() -> None:
    def encoder(preset: Preset) -> nn.Module:
        layer = nn.TransformerEncoderLayer(preset.width, preset.heads, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    task = own(kind="own", model=encoder, metric=lambda logits, labels: labels)
    preset = replace(SIZES, redraw=3, options={"num_components": 3})
    model = tasks.build(task, preset, tasks.choose(task, "gmm_prf", preset))
    (phi,) = (m for m in model.modules() if isinstance(m, bochner.FeatureMap))
    assert phi.num_components == 3
    assert phi.redraw_every == 3


def right(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1) == labels


class Masked(Mean):
    """`Mean`, which takes the mask that the usual collator makes, and drops nothing."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(input_ids, labels)


def test_a_module_itself_is_a_model_and_stays_as_it_was(tmp_path: Path) -> None:
    given = Masked(SIZES)
    before = {k: v.clone() for k, v in given.state_dict().items()}
    result = bochner.train(own(kind="own", model=given, metric=right), output=tmp_path, report=None)
    assert result["parameters"] == sum(p.numel() for p in given.parameters())
    assert all(torch.equal(v, before[k]) for k, v in given.state_dict().items())


@pytest.mark.parametrize(
    ("model", "attention", "said"),
    [
        (Mean, "exact", r"cannot be trained on a batch of input_ids \(8, 12\), .*unexpected keyword.*'attention_mask'"),
        (
            Masked,
            "linformer",
            "'first' has a model of its own, in which .linformer. cannot stand",
        ),
        (lambda preset: 3, "exact", "must be or make a torch module, as its kind is own, got int"),
        (lambda preset: nn.Linear(2, 2), "exact", "must take these and return a scalar 'loss' and 'logits'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_named_before_the_first_step(
    model: Any, attention: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(BochnerError, match=said):
        bochner.train(own(kind="own", model=model, metric=right), attention, output=tmp_path / "a", report=None)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


class Doubled(nn.Module):
    """Features with a weight to be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor, role: str) -> Tensor:
        return self.linear(x).exp()


def test_a_function_is_a_map_and_a_module_learns_in_every_layer(tmp_path: Path) -> None:
    def growing(x: Tensor, role: str) -> Tensor:
        return torch.cat([x.exp(), (-x).exp()], dim=-1)

    result = bochner.train(own(), growing, output=tmp_path, report=None)
    assert result["attention"] == "growing"
    assert bochner.train(own(), growing, output=tmp_path, report=None, resume=True) == result
    growing.__name__ = "relu"  # as a map of the library, which stays what it is
    assert (models.map_name(growing), models.map_name(growing)) == ("reluCall", "reluCall")
    assert isinstance(bochner.feature_map("relu", dim=4, num_features=8), FEATURE_MAPS["relu"])
    assert FEATURE_MAPS["relu"].__module__.startswith("bochner.maps.")
    preset, shared = replace(SIZES, layers=2), Doubled()
    model = tasks.build(own(), preset, tasks.choose(own(), models.map_name(shared), preset))
    parts = [m for m in model.modules() if isinstance(m, Doubled)]
    assert len({id(p) for m in (*parts, shared) for p in m.parameters()}) == 6
    assert all(torch.equal(m.linear.weight, shared.linear.weight) for m in parts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metric": None}, "The task 'first' has no metric: None is not one of"),
        ({"metric": "bits"}, "has no metric: 'bits' is not one of"),
        ({"kind": "own"}, "has no metric: 'accuracy'.*function of logits and labels"),
        ({"kind": "regress"}, "'kind' of Task must be one of"),
        ({"load": None}, "'load' of the task 'first' must be a function"),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused_when_it_is_made(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BochnerError, match=said):
        own(**changes)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "has no examples in its split 'train'"),
        ([{"labels": 1}] * 4, "must have 'input_ids' and 'labels', and as many rows"),
        ([[1, 2]] * 4, "cannot be made a batch"),
        (Parity(label=torch.tensor([1, 2, 3])), r"'labels' \(b,\), got \(2, 12\) and \(2, 12\)"),
        (Parity(label=2), "labels up to 2.*labels at 1"),
        (Parity(label=0.5), "must be ints, got torch.int64 and torch.float32"),
    ],
)
def test_a_batch_of_the_wrong_shape_is_named_before_the_first_step(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(BochnerError, match=said):
        bochner.train(own(load=lambda preset, split: data), output=tmp_path / "a", report=None)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("found", [[], None])
def test_a_split_without_examples_is_named_before_the_first_step(found: Any, split: str, tmp_path: Path) -> None:
    task = own(load=lambda preset, which: found if which == split else Parity())
    with pytest.raises(BochnerError, match=f"'first' has no examples in its split '{split}'"):
        bochner.train(task, output=tmp_path / "a", report=None)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


@pytest.mark.parametrize("kind", [list, np.asarray])
def test_examples_may_be_lists_and_arrays(kind: Any, tmp_path: Path) -> None:
    plain = [Parity()[i] for i in range(32)]
    other = [{**x, "input_ids": kind(x["input_ids"].tolist())} for x in plain]
    results = [
        bochner.train(own(load=lambda preset, split, d=data: d), output=tmp_path / str(i), report=None)["metrics"]
        for i, data in enumerate((plain, other))
    ]
    assert results[0] == results[1]


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BochnerError, match=r"ids up to 5.*ids end at 4"):
        bochner.train(own(vocabulary=1), output=tmp_path, report=None)


def test_a_map_that_cannot_be_causal_is_refused_for_a_decoder(tmp_path: Path) -> None:
    causal = own(kind="causal", load=lambda preset, split: base.Blocks(np.zeros(240, np.uint8), 12))
    with pytest.raises(BochnerError, match=r"'first' is causal, and 'moments' cannot be: .*num_groups=2"):
        bochner.train(causal, "moments", output=tmp_path / "a", report=None, options={"num_groups": 2})
    with pytest.raises(BochnerError, match="'attention' of train must be a name, a subclass"):
        bochner.train(causal, 3, output=tmp_path / "a", report=None)
    assert list(tmp_path.iterdir()) == []


def test_the_time_is_estimated_without_touching_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loud, silent = (
        bochner.train(own(), "gmm_prf", output=tmp_path / str(r), report=r, steps=6, dropout=0.1) for r in ("bar", None)
    )
    assert loud["metrics"] == silent["metrics"]
    assert "for 6 steps" in capsys.readouterr().err
    assert training.duration(8000) == "2.2 h"


def test_half_precision_is_an_option(tmp_path: Path) -> None:
    result = bochner.train(own(), "relu", output=tmp_path, report=None, precision="bfloat16")
    assert result["precision"] == "bfloat16"
    with pytest.raises(BochnerError, match="'precision' of train must be one of"):
        bochner.train(own(), output=tmp_path / "b", report=None, precision="int8")


def test_a_preset_prints_itself_and_its_departures() -> None:
    shown = str(replace(SIZES, departures=("fewer layers",)))
    assert "layers        1" in shown
    assert shown.endswith("departure: fewer layers")


def test_the_arena_schedule_is_that_of_the_paper(tmp_path: Path) -> None:
    """rate * min(1, step / warmup) / sqrt(max(step, warmup)), though the training ends within the warm-up."""
    preset = replace(SIZES, schedule="inverse_sqrt", learning_rate=5e-2 / 80**0.5, warmup=80, steps=50)
    model = tasks.build(own(), preset, tasks.choose(own(), "exact", preset))
    trainer = training.make_trainer(own(), preset, tasks.choose(own(), "exact", preset), model, tmp_path)
    trainer.create_scheduler(50, trainer.optimizer)
    for _ in range(50):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(5e-2 * (50 / 80) / 80**0.5, rel=0.03)


def test_presets_named_after_a_paper_list_their_departures() -> None:
    for name, task in tasks.TASKS.items():
        for preset in {"paper", "medium"} & set(task.presets):
            if name != "recall" and name != "recall_causal":
                assert tasks.preset_of(task, preset).departures, (name, preset)
    for name in ("image", "pathfinder", "lm", "protein", "retrieval"):
        assert "medium" in tasks.task(name).presets
    assert "manual pages" in str(tasks.preset_of(tasks.task("retrieval"), "paper"))


# Tasks that need attention.


def rows(name: str, split: str, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    task = tasks.task(name)
    found = task.load(tasks.preset_of(task, "small", **{"test": 50, "train": 200, **changes}), split)
    assert isinstance(found, recall.Rows)
    return found.ids.numpy(), found.labels.numpy()


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_of_recall_stands_in_its_sequence(split: str) -> None:
    for name, late in (("recall", 0), ("recall_causal", 1)):
        ids, labels = rows(name, split)
        assert ids.shape == labels.shape == (200 if split == "train" else 50, 32)
        for line, wanted in zip(ids - SPECIAL, labels, strict=True):
            pairs = [
                divmod(t - recall.KEYS - recall.VALUES, recall.VALUES) for t in line if t >= recall.KEYS + recall.VALUES
            ]
            table = dict(pairs)
            assert len(table) == len(pairs)
            places = np.flatnonzero(wanted != IGNORE)
            assert len(places)
            for i in places:
                assert wanted[i] - SPECIAL - recall.KEYS == table[line[i - late]]


def test_tests_have_the_full_number_of_pairs_and_training_has_fewer_too() -> None:
    count = lambda ids: (ids >= SPECIAL + recall.KEYS + recall.VALUES).sum(1)  # noqa: E731
    assert (count(rows("recall", "test")[0]) == 16).all()
    assert len(set(count(rows("recall", "train")[0]).tolist())) > 8
    with pytest.raises(BochnerError, match="'pairs' of the task's data must be 2 to 64"):
        rows("recall", "test", data={"pairs": 65}, length=256)
    with pytest.raises(BochnerError, match="got 40 pairs and a length of 32"):
        rows("recall", "test", data={"pairs": 40})


def test_copies_are_copies() -> None:
    for split in ("train", "test"):
        ids, labels = rows("copying", split)
        for line, wanted in zip(ids, labels, strict=True):
            (n,) = np.flatnonzero(line == SEP)
            np.testing.assert_array_equal(line[:n], line[n + 1 : 2 * n + 1])
            np.testing.assert_array_equal(wanted[n + 1 : 2 * n + 1], line[:n])
            assert (wanted[: n + 1] == IGNORE).all()
            assert (line[2 * n + 1 :] == PAD).all()


def test_induction_asks_for_what_came_next() -> None:
    for split in ("train", "test"):
        ids, labels = rows("induction", split)
        for line, wanted in zip(ids, labels, strict=True):
            for i in np.flatnonzero(wanted != IGNORE):
                first = np.flatnonzero(line == line[i - 1])[0]
                assert first < i - 1
                assert wanted[i] == line[first + 1]


def test_splits_differ_and_are_drawn_alike_each_time() -> None:
    assert not np.array_equal(rows("recall", "test")[0], rows("recall", "validation")[0])
    np.testing.assert_array_equal(rows("recall", "test")[0], rows("recall", "test")[0])
