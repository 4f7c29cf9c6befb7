"""Typical mistakes in calls: each is answered by one sentence that names the argument, the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bochner

Q = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))


def attend(q: Any = Q, k: Any = Q, v: Any = Q, phi: Any = "positive", **options: Any) -> Any:
    return bochner.linear_attention(q, k, v, phi, **options)


def in_fake_mode(name: str) -> Any:
    with FakeTensorMode():
        return bochner.feature_map(name, dim=16)


def operator(**options: Any) -> bochner.KernelOperator:
    return bochner.KernelOperator(Q[0, 0], **{"bandwidth": 1.0, **options})


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a map for another head size": (
        lambda: attend(phi=bochner.feature_map("positive", dim=32, num_features=8)),
        r"must have shape \(\.\.\., n, 32\), got \(1, 2, 64, 16\); build the map with dim=16",
    ),
    "a misspelt map": (lambda: attend(phi="postive"), r"Unknown feature map 'postive'; did you mean 'positive'"),
    "no head size": (lambda: bochner.feature_map("positive"), r"'dim' of feature map 'positive' is missing"),
    "a negative number of features": (
        lambda: bochner.feature_map("positive", dim=16, num_features=-3),
        r"'num_features' of PositiveFeatures must be a positive int, got -3",
    ),
    "no axis of heads": (lambda: attend(*(Q[0],) * 3), r"must have 4 axes \(b, h, n, d\), got shape \(2, 64, 16\)"),
    "keys and values of different lengths": (lambda: attend(v=Q[..., :9, :]), r"must agree in batch, heads and length"),
    "an array": (lambda: attend(q=Q.numpy()), r"must be a torch.Tensor, got ndarray"),
    "integers": (
        lambda: attend(*(Q.long(),) * 3),
        r"must be a floating-point tensor, got torch.int64; call .float",
    ),
    "NaN": (lambda: attend(q=Q * float("nan")), r"must be finite, got nan at index \(0, 0, 0, 0\)"),
    "a mask of numbers": (
        lambda: attend(key_padding_mask=torch.zeros(1, 64)),
        r"must be a bool tensor of shape \(1, 64\), True for keys to ignore, got torch.float32",
    ),
    "half a window": (lambda: attend(window=8.5), r"'window' of linear_attention must be a positive int or None"),
    "no map": (
        lambda: bochner.kernel_estimate(None, Q, Q),  # type: ignore[arg-type]
        r"'phi' of kernel_estimate must be a feature map, got None; make one by bochner.feature_map",
    ),
    "a map without values": (lambda: in_fake_mode("landmark"), r"'landmark' cannot be made under FakeTensorMode"),
    "points without columns": (lambda: bochner.KernelOperator(Q[0, 0, 0]), r"must have shape \(n, d\)"),
    "a negative error": (lambda: operator(eps=-1), r"'eps' of KernelOperator must be a positive finite number, got -1"),
    "a vector of another length": (lambda: operator() @ torch.ones(65), r"'x' .* must have shape \(64,\), got \(65,\)"),
    "an unknown artefact": (
        lambda: bochner.data.fetch("minilmm"),
        r"Unknown artefact 'minilmm'; did you mean 'minilm'\?",
    ),
    "a name for a model": (lambda: bochner.convert("bert-base").model, r"must be a transformers model, got str"),
    "a model that was not converted": (
        lambda: bochner.revert(torch.nn.Linear(2, 2)),
        r"This Linear is not converted; call bochner.convert first",
    ),
    "99 for 99 %": (
        lambda: (
            bochner.convert(
                bert(), bochner.Target(keep=99), [{"input_ids": torch.ones(1, 8, dtype=torch.long)}] * 4
            ).model
        ),
        r"'keep' of Target must be a share in \[0.5, 1\), got 99",
    ),
    "texts without a tokenizer": (
        lambda: bochner.convert(bert(), bochner.Recipe(), ["some text"] * 4).model,
        r"Calibration texts need a 'tokenizer'; pass the model's, or pass tokenized batches",
    ),
    "nothing to calibrate on": (
        lambda: bochner.convert(bert(), bochner.Recipe("landmark")).model,
        r"needs 'data': some texts of the kind",
    ),
}


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_one_sentence(mistake: str) -> None:
    call, sentence = MISTAKES[mistake]
    if mistake in ("a name for a model", "a model that was not converted"):
        pytest.importorskip("transformers")
    with pytest.raises(bochner.BochnerError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "]", "?"))
