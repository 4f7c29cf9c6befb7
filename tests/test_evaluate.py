"""Quality retained: right for every kind of model, near 0 for random outputs, with intervals that are true."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from hf_models import ENCODERS, GROUPED, TEXT, build

from bochner.hf import evaluate
from bochner.hf.evaluate import (
    Measure,
    Outputs,
    Quality,
    Reading,
    Text,
    compare_readings,
    evaluation_mode,
    jackknife,
    kind_of,
    language_quality,
    rank_correlation,
    rank_of_similarities,
    read,
    score_quality,
)
from bochner.hf.observe import run


def batches(count: int = 6, rows: int = 2, length: int = 16) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(4, 50, (rows, length), generator=g)} for _ in range(count)]


def classifier(labels: int) -> Any:
    return build("bert", {**TEXT, "num_labels": labels}, head="AutoModelForSequenceClassification")


def replaced(x: Tensor) -> Any:
    return SimpleNamespace(logits=x)


@pytest.mark.parametrize("labels", [1, 3])
def test_random_scores_and_predictions_retain_nothing(labels: int) -> None:
    model = classifier(labels)
    judge = Outputs(model, batches())
    assert judge.kind == ("scores" if labels == 1 else "distributions")
    same = judge.quality(lambda batch: run(model, batch))
    assert same.retained == pytest.approx(1, abs=1e-6)
    assert same.lower == pytest.approx(1, abs=1e-6)
    g = torch.Generator().manual_seed(1)
    noise = judge.quality(lambda batch: replaced(30 * torch.randn(len(batch["input_ids"]), labels, generator=g)))
    assert noise.retained < 0.15


def test_scores_are_compared_by_order_and_by_error() -> None:
    truth = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    shifted = score_quality(truth, truth + 5)  # the order is right, the numbers are not
    assert shifted.figures["rank_correlation"] == pytest.approx(1)
    assert shifted.figures["error"] == pytest.approx(25 / truth.var().item())
    assert shifted.retained == 0
    shuffled = score_quality(truth, truth.flip(0))
    assert shuffled.retained < 0.3
    constant = score_quality(truth, torch.zeros(20, 1))
    assert constant.retained == 0
    assert not math.isnan(constant.lower)
    lost = score_quality(truth, torch.full((20, 1), math.nan))
    assert lost.retained == 0
    assert rank_correlation(torch.ones(5), torch.ones(5)) == 1
    assert rank_correlation(torch.ones(5), torch.arange(5.0)) == 0


def test_dropout_is_off_while_a_model_is_judged_and_its_mode_comes_back() -> None:
    model = classifier(3)
    model.train()
    model.bert.eval()
    modes = [m.training for m in model.modules()]
    judge = Outputs(model, batches())
    assert [m.training for m in model.modules()] == modes
    with evaluation_mode(model):
        assert judge.quality(lambda batch: model(**batch)).retained == pytest.approx(1, abs=1e-6)
    assert [m.training for m in model.modules()] == modes


def test_kinds_of_outputs() -> None:
    encoder = build("bert", ENCODERS["bert"])
    batch = batches(1)[0]
    assert kind_of(encoder, run(encoder, batch)) == "embeddings"
    for labels, kind in ((1, "scores"), (2, "distributions")):
        model = classifier(labels)
        assert kind_of(model, run(model, batch)) == kind
    model = classifier(3)
    model.config.problem_type = "regression"
    assert kind_of(model, run(model, batch)) == "scores"


def test_embeddings_are_compared_by_cosine_and_by_neighbours() -> None:
    model = build("bert", ENCODERS["bert"])
    judge = Outputs(model, batches())
    g = torch.Generator().manual_seed(0)

    def disturbed(batch: dict[str, Tensor], size: float) -> Any:
        hidden = run(model, batch).last_hidden_state
        return (hidden + size * torch.randn(len(hidden), 1, hidden.shape[-1], generator=g),)

    found = [judge.quality(lambda batch, size=size: disturbed(batch, size)) for size in (0.0, 0.1, 1.0)]
    assert [set(q.measures) for q in found] == [{"cosine", "rank_correlation"}] * 3
    assert found[0].retained == pytest.approx(1, abs=1e-5)
    assert 1 > found[1].retained > found[2].retained
    assert found[1].lower < found[1].retained


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    g = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        low, high = Measure(0.1 + 0.05 * torch.randn(6, generator=g)).bounds(0.9)
        covered += low <= 0.9 <= high
    assert 0.86 <= covered / 400 <= 0.94


def test_the_lower_bound_is_below_the_mean_and_rises_with_more_texts() -> None:
    losses = torch.tensor([0.0, 0.02, 0.01, 0.03])
    few, many = Quality({"a": Measure(losses)}), Quality({"a": Measure(losses.repeat(10))})
    assert few.lower < many.lower < few.retained == pytest.approx(many.retained)
    alone = Quality({"a": Measure(losses[1:2])})
    assert alone.lower == alone.retained == pytest.approx(0.98)


def test_quality_is_that_of_the_worst_measure_and_never_nan() -> None:
    both = Quality({"a": Measure(torch.tensor([0.1, 0.1])), "b": Measure(torch.tensor([0.3, 0.3]), True)})
    assert both.retained == pytest.approx(math.exp(-0.3))
    assert Quality({"a": Measure(torch.tensor([math.nan, 0.0]))}).retained == pytest.approx(0.5)


def test_pseudo_values_have_the_mean_and_the_spread_of_a_mean() -> None:
    x = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(jackknife(lambda keep: x[keep].mean().item(), 12), x)


def decoder() -> Any:
    return build("llama", GROUPED, head="AutoModelForCausalLM")


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 50, (n,), generator=torch.Generator().manual_seed(seed))


def test_a_language_model_is_the_worse_of_perplexity_and_recall() -> None:
    rise, again = torch.full((4,), 0.02), torch.full((3,), 0.1)
    found = language_quality(rise, again, 2.0, 0.5)
    assert found.retained == pytest.approx(0.95)
    assert found.figures["recall_retained"] == pytest.approx(0.95)
    assert language_quality(rise, 0 * again, 2.0, 0.5).retained == pytest.approx(math.exp(-0.02))
    assert set(language_quality(rise, again, 0.1, 0.5).measures) == {"perplexity"}  # it never looked anything up


@pytest.mark.parametrize(("length", "count"), [(100, 1), (480, 1), (1000, 2), (4000, 4)])
def test_a_text_repeats_passages_from_all_over_it_at_its_end(length: int, count: int) -> None:
    tokens = torch.arange(length)
    for turn in range(4):
        text = Text(tokens, turn)
        assert text.ids.shape == (1, length)
        assert len(text.starts) == count
        pieces = text.again.view(count, -1)
        assert all(torch.equal(p, text.body[a : a + text.passage]) for p, a in zip(pieces, text.starts, strict=True))
        stretches, repeats = text.split(torch.ones(length - 1))
        assert len(repeats) == count
        assert len(stretches) == max(1, round((len(text.body) - 1) / evaluate.STRETCH))


def test_reading_in_pieces_gives_the_losses_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "PIECE", 16)
    model, text = decoder(), Text(ids(120))
    model.train()
    found = read(model, text.ids)
    assert model.training
    model.eval()
    with torch.no_grad():
        logits = model(text.ids).logits[0, :-1]
    assert torch.allclose(
        found.losses, nn.functional.cross_entropy(logits, text.ids[0, 1:], reduction="none"), atol=1e-4
    )
    assert compare_readings([text], [found], [found]).retained == 1


def test_readings_are_compared_by_the_rise_of_the_loss_and_by_the_gain_that_is_left() -> None:
    text = Text(torch.arange(1000))

    def reading(body: float, again: float) -> Reading:
        sizes = (len(text.body) - 1, body), (len(text.again), again)
        return Reading(torch.cat([torch.full((n,), loss) for n, loss in sizes]), {})

    figures = compare_readings([text], [reading(2.0, 0.5)], [reading(2.1, 0.7)]).figures
    assert figures["perplexity_ratio"] == pytest.approx(math.exp(0.1), rel=1e-5)
    assert figures["recall_retained"] == pytest.approx(1 - 0.2 / (2.0 - 0.5), rel=1e-5)
    assert figures["recall_perplexity_original"] == pytest.approx(math.exp(0.5), rel=1e-5)
    assert figures["recall_perplexity"] == pytest.approx(math.exp(0.7), rel=1e-5)


def test_the_lower_bound_of_similarities_holds_on_other_texts() -> None:
    """Chosen by 8 texts, held against 8 others of the kind: the bound of four fifths holds in about as many cases."""
    g = torch.Generator().manual_seed(0)
    holds = 0
    for _ in range(60):
        a = torch.nn.functional.normalize(torch.randn(16, 6, generator=g) + 2.0, dim=-1)
        b = torch.nn.functional.normalize(a + 0.03 * torch.randn(16, 6, generator=g), dim=-1)
        first, second = (a[:8], b[:8]), (a[8:], b[8:])
        found = jackknife(lambda keep, x=first: rank_of_similarities(x[0][keep], x[1][keep]), 8)  # type: ignore[misc]
        holds += rank_of_similarities(*second) >= Measure(1 - found).bounds(0.6)[0]
    assert 0.7 <= holds / 60 <= 0.95
