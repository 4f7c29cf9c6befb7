"""Statistics of the training experiments: patterns of attention, permutations of letters, what counts as close."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from bochner import data, tasks


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The experiments can be imported, each once: other tests may have left some of them behind, and these do not."""
    folder = Path(__file__).parent.parent / "experiments"
    monkeypatch.syspath_prepend(str(folder))
    for path in folder.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_diagonal_and_vertical_heads_are_told_apart(experiments: None) -> None:
    import protein_attention as pa

    n = 60
    i = torch.arange(n)
    equal = torch.full((n, n), 1 / n)
    band = ((i[:, None] - i).abs() <= pa.NEAR).float()
    band = band / band.sum(-1, keepdim=True)
    stripes = torch.zeros(n, n)
    stripes[:, [7, 30, 50]] = 1 / 3
    heads = torch.stack([equal, band, stripes])
    assert pa.diagonal(heads[:1]).item() == pytest.approx(1.0)
    assert pa.diagonal(heads)[1].item() == pytest.approx(1 / (band > 0).float().mean().item())
    assert pa.diagonal(heads)[2].item() < 1.1
    explained, top = pa.vertical(heads + 1e-6 * torch.rand(heads.shape, generator=torch.Generator().manual_seed(0)))
    assert explained[2].item() > 0.99
    assert explained[1].item() < 0.1
    assert top[2].item() == pytest.approx(20.0, rel=1e-2)  # all of it goes to 3 of 60
    assert top[0].item() == pytest.approx(1.0, rel=1e-2)


def test_attention_has_two_ways_that_agree_and_ignores_padding(experiments: None) -> None:
    import protein_attention as pa

    task = tasks.task("protein")
    preset = tasks.preset_of(task, "small", **{**pa.SIZES, "width": 32, "layers": 2, "features": 16})
    model = tasks.build(task, preset, tasks.choose(task, "positive", preset))
    ids = torch.randint(4, 24, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    matrix, by_values = (pa.attention(model, ids, mask, by_values=w) for w in (False, True))
    assert len(matrix) == 2
    for a, b in zip(matrix, by_values, strict=True):
        assert a.shape == (2, 8, 30, 30)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(a.sum(-1), torch.ones(2, 8, 30))
        assert not a[1, :, :, 20:].any()


def test_permuted_letters_tell_agreement_from_chance(experiments: None) -> None:
    import protein_attention as pa

    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 20))
    x = x + x.T
    noise = rng.normal(size=(20, 20))
    r, p = pa.mantel(x, x + 0.5 * (noise + noise.T), permutations=500)
    assert r > 0.8
    assert p == pytest.approx(1 / 501)
    r, p = pa.mantel(x, noise + noise.T, permutations=500)
    assert abs(r) < 0.3
    assert p > 0.01
    # What lies on the diagonal does not count.
    assert pa.mantel(x + 100 * np.eye(20), x, permutations=10)[0] == pytest.approx(1.0)
    similarity = np.zeros((20, 20))
    similarity[2, 3] = similarity[3, 2] = 1.0  # D and E
    assert pa.rank_of("DE", similarity) == 1
    assert pa.rank_of("FY", similarity) == 2


@pytest.mark.model
def test_the_substitution_matrix_is_the_published_one(experiments: None) -> None:
    import protein_attention as pa

    try:
        data.fetch("proteins", quiet=True)
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    found = pa.blosum()
    assert np.allclose(found, found.T)
    rounded = {
        pair: round(found[pa.AMINO.index(pair[0]), pa.AMINO.index(pair[1])]) for pair in ("WW", "DE", "FY", "AA")
    }
    assert rounded == {"WW": 11, "DE": 2, "FY": 3, "AA": 4}  # Henikoff & Henikoff 1992


def test_fastfood_variants_are_close_within_their_spread(experiments: None) -> None:
    import train_fastfood

    seen = {"FastFood": [60.0, 62.0, 64.0], "FastFood-S": [50.0, 50.0, 50.0], "FastFood-SGB": [60.0, 61.0, 62.0]}
    assert train_fastfood.close(seen) == pytest.approx((1.0, 2.0))
    seen["FastFood-S"] = [70.0, 70.0, 70.0]
    assert train_fastfood.close(seen) == pytest.approx((9.0, 1.0))
    assert train_fastfood.differ(seen)
    assert not train_fastfood.differ({v: [60.0, 61.0, 62.0] for v in train_fastfood.VARIANTS})
    runs: dict[str, Any] = {"text/FastFood/0": {"accuracy": 0.6}, "text/FastFood/2": {"accuracy": 0.7}}
    assert train_fastfood.scores(runs, "text") == {"FastFood": pytest.approx([60.0, 70.0])}


def test_fastfood_variants_that_do_not_differ_are_reproduced_in_part_only(experiments: None) -> None:
    import train_fastfood

    level = {v: [60.0, 61.0, 62.0] for v in train_fastfood.VARIANTS}
    apart = {"FastFood": [50.0, 51.0, 52.0], "FastFood-S": [55.0, 56.0, 57.0], "FastFood-SGB": [60.0, 61.0, 62.0]}
    last = {**apart, "FastFood-SGB": [40.0, 41.0, 42.0]}
    assert train_fastfood.judge_tasks(dict.fromkeys(train_fastfood.TASKS, level))[0] == "partly"
    assert "no variant differs" in train_fastfood.judge_tasks(dict.fromkeys(train_fastfood.TASKS, level))[1]
    assert train_fastfood.judge_tasks(dict.fromkeys(train_fastfood.TASKS, apart)) == ("reproduced", "")
    assert train_fastfood.judge_tasks(dict.fromkeys(train_fastfood.TASKS, last))[0] == "not"
    verdict, why = train_fastfood.judge_tasks({"text": apart})
    assert verdict == "partly"
    assert "nli" in why


def test_the_verdict_on_speed_comes_from_the_figures(experiments: None) -> None:
    import train_speed

    def said(kernel: float, exponent: float = 1.0, held: float = 1.0) -> Any:
        lengths = [1024, 2048, 4096, 8192]
        times = {"exact": 2.0, "identity": 1.0, "positive": kernel, "window+calibrated": kernel}
        grown = {k: {str(n): x * n**exponent for n in lengths} for k, x in times.items()}
        memory = {k: {str(n): x * n for n in lengths} for k, x in {**dict.fromkeys(times, 1.0), "exact": held}.items()}
        return train_speed.judge({"time": grown, "memory": memory})

    assert said(1.1, held=9.0)[1:] == ("reproduced", "")
    assert said(1.1, exponent=1.3, held=9.0).verdict == "not"
    assert said(1.7, held=9.0).verdict == "partly"
    assert "1.7" in said(1.7, held=9.0).why
    assert "hardly more memory" in said(1.1).why


def test_runs_that_do_no_better_than_copying_test_nothing(experiments: None) -> None:
    import train_kernels

    runs = {f"{name}/0": {"accuracy": 0.1} for name in ("relu", "relu, no normaliser")}
    assert train_kernels.judge(runs).verdict == "not tested"
    assert "copying" in train_kernels.judge(runs).why
    assert train_kernels.judge({**runs, "exact/0": {"accuracy": 0.5}}).verdict == "partly"
    assert "trig/0" in train_kernels.judge({**runs, "trig/0": {"stopped": "the loss is nan"}}).ours


def test_runs_of_other_presets_are_not_taken_for_these(experiments: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import _framework
    import _training
    import train_table

    preset = tasks.task("text").presets["small"]
    run = {"accuracy": 0.6, **{k: getattr(preset, k) for k in _training.SAME}}
    old = {**run, "steps": preset.steps + 1}
    store = _framework.Store("train_fastfood")
    store.figures = {"runs": {"text/FastFood/0": dict(run), "text/FastFood/1": old}}
    monkeypatch.setattr(store, "save", lambda: None)
    monkeypatch.setattr(train_table, "known", lambda: {"text/fastfood_prf/2": run, "text/relu/0": run})
    _framework.load("train_fastfood").measure(store, only="no such task")
    assert sorted(store.figures["runs"]) == ["text/FastFood-SGB/2", "text/FastFood/0"]


def test_a_learned_kernel_is_behind_only_beyond_the_noise_of_counting(experiments: None) -> None:
    import train_length

    assert train_length.noise(0.6, 5_000) == pytest.approx(0.0098, abs=1e-4)
    accuracy = {"exact/256": 0.60, "fastfood_prf/256": 0.585, "exact/512": 0.62, "fastfood_prf/512": 0.59}
    assert train_length.behind(accuracy, 5_000) == {"512": pytest.approx(0.03)}
    assert train_length.behind({**accuracy, "fastfood_prf/512": 0.7}, 5_000) == {}
    cells = train_length.wanted()
    assert cells[-1] == "exact/2048"
    assert len(cells) == len(set(cells)) == len(train_length.LENGTHS) * len(train_length.ATTENTIONS)


def test_cells_of_the_table_are_not_trained_again(experiments: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_length
    import train_table

    found = {"text/relu/0": 0.1, "text/positive/0": 0.6, "text/positive/1": 0.2}
    monkeypatch.setattr(train_table, "known", lambda: {k: {"accuracy": x} for k, x in found.items()})
    assert train_length.of_table() == {"positive/1024": 0.6}


def test_models_are_trained_without_a_normaliser_only_where_said(experiments: None) -> None:
    import train_kernels

    from bochner import linear_attention
    from bochner.hf import calls

    task = tasks.task("protein")
    preset = tasks.preset_of(task, "small", length=32, layers=1, width=16)
    model = tasks.build(task, preset, tasks.choose(task, "linear_elu", preset)).eval()
    ids = torch.randint(4, 24, (2, 30), generator=torch.Generator().manual_seed(0))
    found = {}
    with torch.no_grad():
        for wanted in (True, False):
            with train_kernels.normalised(wanted):
                found[wanted] = model(input_ids=ids).logits
        plain = model(input_ids=ids).logits
    assert calls.linear_attention is linear_attention
    assert torch.equal(found[True], plain)
    assert not torch.allclose(found[False], plain, rtol=0.1)
    assert sum(n.endswith(train_kernels.BARE) for n in train_kernels.RUNS) == 4


def test_recall_by_the_trainer_is_judged_by_its_seeds(experiments: None) -> None:
    import train_recall

    def runs(**rows: tuple[float, ...]) -> dict[str, Any]:
        return {f"copying/{name}/{s}": {"accuracy": x} for name, seeds in rows.items() for s, x in enumerate(seeds)}

    levels: Any = {"exact": (1.0, 0.99, 1.0), "identity": (0.02, 0.01, 0.02)}
    fixed: Any = {"relu": (0.50, 0.52, 0.54), "positive": (0.2, 0.2, 0.2)}
    tie = runs(**levels, **fixed, gmm_prf=(0.51, 0.53, 0.55))
    assert train_recall.learned_or_fixed(tie, "copying") == pytest.approx((1.0, 2.0))
    assert train_recall.judge(tie).verdict == "holds"
    better = train_recall.judge(runs(**levels, **fixed, gmm_prf=(0.71, 0.73, 0.75), hedgehog=(0.9, 0.9)))
    assert better[1:] == ("fails", "a learned kernel beats the best fixed one in copying")
    closed = train_recall.judge(runs(exact=(0.2, 0.5, 0.9), identity=(0.02, 0.01, 0.02), **fixed))
    assert closed.why.startswith("attention does not decide copying; learned kernels have not run")
    assert train_recall.judge(runs(**levels, **fixed, gmm_prf=(0.5, 0.5))).verdict == "fails"  # two seeds are not all
    assert (
        train_recall.judge(runs(exact=(1.0, 1.0), **fixed)).why == "not judged: copying"
    )  # no model without attention
    shown = train_recall.table(tie | {"recall/exact/0": {"accuracy": 1.0}, "copying/fnet/0": {"accuracy": 0.5}})
    assert shown.splitlines()[0] == "| copying | accuracy, % | seeds |"  # the others are not decided
    assert "| `gmm_prf` | 53.0 ± 2.0 | 3 |" in shown
    assert "fnet" not in shown
    assert train_recall.seeds_of({"copying/trig/0": {"stopped": "nan"}}, "copying", "trig") == [100 / 64]
    cells = train_recall.wanted()
    assert len(cells) == len(set(cells))
    assert "recall_causal/linformer/0" not in cells
    assert "recall/decay+relu/0" not in cells
    assert "recall_causal/decay+relu/2" in cells


def test_softmax_and_kernels_on_six_tasks_are_judged_by_their_seeds(experiments: None) -> None:
    import train_beside

    def runs(row: str, figure: str, **rows: tuple[float, ...]) -> dict[str, Any]:
        return {f"{row}/{name}/{s}": {figure: x} for name, seeds in rows.items() for s, x in enumerate(seeds)}

    trivial = dict.fromkeys(train_beside.ROWS, 0.3)
    found: dict[str, Any] = {"without learning": {**trivial, "lm_bpe": 3.0, "pixels": 6.9}}
    found |= runs("lm_bpe", "bits", exact=(2.2, 2.21), identity=(2.5, 2.51), positive=(2.4, 2.41), gmm_prf=(2.3, 2.31))
    found |= runs("nli", "accuracy", exact=(0.6, 0.61), identity=(0.59, 0.61), relu=(0.6, 0.6))
    gates = train_beside.gates(found)
    assert [train_beside.say_gate(gates[r]) for r in ("lm_bpe", "nli", "pixels")] == [
        *("decides", "not needed", "not judged: one seed"),
    ]
    assert train_beside.learned_or_fixed(found, "lm_bpe") == pytest.approx((0.1, 0.00707), abs=1e-4)
    assert train_beside.learned_or_fixed(found, "nli") is None
    assert "a learned kernel beats the best fixed one in lm_bpe; cells are missing in" in train_beside.judge(found).why
    shown = train_beside.table(found)
    assert "| lm_bpe (bits) | 3.000 | `exact` 2.205 ± 0.007, `gmm_prf` 2.305 ± 0.007, `positive` 2.405" in shown
    assert "pixels" not in shown  # what was not run has no row
    cells = train_beside.wanted()
    assert len(cells) == len(set(cells)) == len(train_beside.ROWS) * len(train_beside.ATTENTIONS) * 3
    begun = {a: cells.index(f"pretraining/{a}/0") for a in train_beside.ATTENTIONS}
    assert all(cells.index(f"nli, pretrained/{a}/0") > i for a, i in begun.items())
