"""Bad input is refused in one sentence that names the argument and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from naive import assert_same, draw_qkv

from bochner import (
    BochnerError,
    attention_matrix,
    empty_state,
    exact_attention,
    feature_map,
    linear_attention,
)

PHI = feature_map("positive", dim=4, num_features=8)
Q, K, V = draw_qkv(10, dtype=torch.float32)
STATE = empty_state((2, 2), 8, 3, dtype=torch.float32)
_, WINDOWED = linear_attention(Q, K, V, PHI, is_causal=True, return_state=True, window=3, sinks=1)

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"q": [1.0]}, "'q' of linear_attention must be a torch.Tensor, got list"),
    "integers": ({"k": K.long()}, "'k' of linear_attention must be a floating-point tensor, got torch.int64"),
    "three axes": ({"v": V[0]}, r"'v' of linear_attention must have 4 axes \(b, h, n, d\)"),
    "no batch": ({"q": Q[:0], "k": K[:0], "v": V[:0]}, "must have 4 axes .b, h, n, d., none of them empty"),
    "no heads": ({"k": K[:, :0], "v": V[:, :0]}, "must have 4 axes .b, h, n, d., none of them empty"),
    "no keys": ({"k": K[:, :, :0], "v": V[:, :, :0]}, "must have 4 axes .b, h, n, d., none of them empty"),
    "heads": ({"q": Q[:, :1].repeat(1, 3, 1, 1)}, "q's heads a multiple of k's"),
    "head size": ({"k": K[..., :3]}, "must agree in batch and head size"),
    "batch": ({"q": Q[:1]}, "must agree in batch and head size"),
    "values": ({"v": V[:, :, :5]}, "'k' and 'v' of linear_attention must agree in batch, heads and length"),
    "dtype": ({"k": K.double()}, "must share dtype and device, got torch.float32 on cpu for 'q' and torch.float64"),
    "device": ({"v": V.to("meta")}, "must share dtype and device, .* on meta for 'v'"),
    "map size": ({"phi": feature_map("positive", dim=5)}, r"must have shape \(..., n, 5\)"),
    "map heads": ({"phi": feature_map("positive", dim=4, num_heads=1)}, "The map has num_heads=1 but 'k' has 2"),
    "map name": ({"phi": "performer"}, "Unknown feature map 'performer'; the valid names are"),
    "map type": ({"phi": 3}, "Unknown feature map 3"),
    "mask shape": ({"key_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}, r"bool tensor of shape \(2, 10\)"),
    "mask dtype": ({"key_padding_mask": torch.zeros(2, 10)}, "bool tensor .* got torch.float32"),
    "mask type": ({"key_padding_mask": [True]}, "bool tensor .* got list"),
    "scale zero": ({"scale": 0}, "'scale' of linear_attention must be a positive finite number, got 0"),
    "scale nan": ({"scale": float("nan")}, "positive finite number, got nan"),
    "scale tensor": ({"scale": torch.ones(())}, "positive finite number, got tensor"),
    "window zero": ({"window": 0}, "'window' of linear_attention must be a positive int or None, got 0"),
    "window float": ({"window": 2.5}, "'window' of linear_attention must be a positive int or None, got 2.5"),
    "window bool": ({"window": True}, "'window' of linear_attention must be a positive int or None, got True"),
    "window cross": (
        {"q": Q[:, :, :5], "window": 2},
        "A 'window' that is not causal needs as many queries as keys, got n=5 and s=10",
    ),
    "sinks": ({"sinks": -1}, "'sinks' of linear_attention must be an int >= 0, got -1"),
    "recompute": ({"recompute": "no"}, "'recompute' of linear_attention must be True or False, got 'no'"),
    "diagnostics": ({"diagnostics": "no"}, "'diagnostics' of linear_attention must be True or False, got 'no'"),
    "float8": (
        {name: x.to(torch.float8_e4m3fn) for name, x in (("q", Q), ("k", K), ("v", V))},
        "must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn; call .bfloat16()",
    ),
    "policy": ({"on_small_normalizer": "eps"}, "must be one of .*'mean', 'zero', 'raise'.*, got 'eps'"),
    "causal cross": (
        {"k": Q[:, :, :5], "v": Q[:, :, :5], "is_causal": True},
        "needs at least as many keys as queries, got n=10 and s=5",
    ),
    "state type": ({"is_causal": True, "state": (1, 2, 3)}, "must be a bochner.State, got tuple"),
    "state of a map": (
        {"is_causal": True, "state": empty_state((2, 2), 9, 3, dtype=torch.float32)},
        r"sums of shape \(2, 2, 9, 4\), this call needs \(2, 2, 8, 4\): it belongs to another map",
    ),
    "state dtype": (
        {"is_causal": True, "state": empty_state((2, 2), 8, 3, dtype=torch.float64)},
        "The 'state' is torch.float64 on cpu, this call needs torch.float32",
    ),
    "state window": ({"is_causal": True, "state": STATE, "window": 3}, "made with window=0, sinks=0, this call has"),
    "state sinks": (
        {"is_causal": True, "state": WINDOWED, "window": 3, "sinks": 2},
        "made with window=3, sinks=1, window_kind='block', this call has window=3, sinks=2",
    ),
    "state not causal": ({"state": STATE}, "can be resumed only with is_causal=True"),
    "return_state": ({"return_state": True}, "'return_state' needs is_causal=True"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_in_one_sentence(case: str) -> None:
    change, message = CASES[case]
    with pytest.raises(BochnerError, match=message) as caught:
        linear_attention(**{"q": Q, "k": K, "v": V, "phi": PHI} | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"sinks": 2}])
def test_values_that_are_not_finite_are_found(name: str, bad: float, is_causal: bool, options: dict[str, Any]) -> None:
    inputs = {"q": Q, "k": K, "v": V}
    inputs[name] = inputs[name].clone()
    inputs[name][1, 0, 8, 2] = bad
    with pytest.raises(BochnerError, match=rf"'{name}' of linear_attention must be finite.*\(1, 0, 8, 2\)"):
        linear_attention(**inputs, phi=PHI, is_causal=is_causal, **options)


@pytest.mark.parametrize("owner", [exact_attention, attention_matrix])
def test_the_oracles_refuse_the_same(owner: Any) -> None:
    rest = (K, V) if owner is exact_attention else (K, PHI)
    with pytest.raises(BochnerError, match=f"{owner.__name__} must be a positive finite number, got -1.0"):
        owner(Q, *rest, scale=-1.0)
    with pytest.raises(BochnerError, match=f"'key_padding_mask' of {owner.__name__} must be a bool tensor"):
        owner(Q, *rest, key_padding_mask=torch.zeros(2, 10))
    with pytest.raises(BochnerError, match="must agree in batch and head size"):
        owner(Q[..., :3], *rest[:1], V if owner is exact_attention else feature_map("positive", dim=3))


ORACLE_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "is_causal": ({"is_causal": "no"}, "'is_causal' of OWNER must be True or False, got 'no'"),
    "kind": ({"window": 2, "window_kind": "blocks"}, r"'window_kind' of OWNER must be one of .*, got 'blocks'"),
    "window -2": ({"window": -2}, "'window' of OWNER must be a positive int or None, got -2"),
    "window 0": ({"window": 0}, "'window' of OWNER must be a positive int or None, got 0"),
    "window 2.5": ({"window": 2.5}, "'window' of OWNER must be a positive int or None, got 2.5"),
    "window '3'": ({"window": "3"}, "'window' of OWNER must be a positive int or None, got '3'"),
    "sinks -1": ({"sinks": -1}, "'sinks' of OWNER must be an int >= 0, got -1"),
    "sinks 1.5": ({"sinks": 1.5}, "'sinks' of OWNER must be an int >= 0, got 1.5"),
    "NaN queries": ({"q": Q * torch.nan}, r"'q' of OWNER must be finite, got nan at index \(0, 0, 0, 0\)"),
    "NaN keys": ({"k": K * torch.nan}, "'k' of OWNER must be finite"),
    "few keys": ({"q": torch.cat([Q, Q], dim=2), "is_causal": True}, "as many keys as queries, got n=20 and s=10"),
    "a window across": ({"q": Q[:, :, :5], "window": 2}, "needs as many queries as keys, got n=5 and s=10"),
}


@pytest.mark.parametrize("case", ORACLE_MISTAKES)
@pytest.mark.parametrize("owner", [exact_attention, attention_matrix])
def test_the_oracles_refuse_what_linear_attention_does(owner: Any, case: str) -> None:
    change, message = ORACLE_MISTAKES[case]
    rest = {"v": V} if owner is exact_attention else {"phi": PHI}
    with pytest.raises(BochnerError, match=message.replace("OWNER", owner.__name__)):
        owner(**{"q": Q, "k": K} | rest | change)


@pytest.mark.parametrize("chunk", [0, -1, 2.0])
def test_a_chunk_has_rows(chunk: Any) -> None:
    with pytest.raises(BochnerError, match="'chunk' of exact_attention must be a positive int"):
        exact_attention(Q, K, V, chunk=chunk)


@pytest.mark.parametrize("owner", [exact_attention, attention_matrix])
def test_what_masked_keys_hold_does_not_matter_to_the_oracles(owner: Any) -> None:
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[:, 7:] = True
    rest = {"v": V} if owner is exact_attention else {"phi": PHI}
    bad = {
        name: x.masked_fill(mask[:, None, :, None], torch.nan) for name, x in (("k", K), *rest.items()) if name != "phi"
    }
    want = owner(**{"q": Q, "k": K, "key_padding_mask": mask} | rest)
    assert torch.equal(owner(**{"q": Q, "k": K, "key_padding_mask": mask} | rest | bad), want)


def test_flags_may_be_those_of_numpy() -> None:
    yes, no = np.True_, np.False_
    want = linear_attention(Q, K, V, PHI, is_causal=True)
    assert torch.equal(linear_attention(Q, K, V, PHI, is_causal=yes, recompute=no, diagnostics=yes), want)
    assert torch.equal(exact_attention(Q, K, V, is_causal=yes), exact_attention(Q, K, V, is_causal=True))
    assert torch.equal(attention_matrix(Q, K, PHI, is_causal=no), attention_matrix(Q, K, PHI))


@pytest.mark.parametrize("how", [{"window": 10**30}, {"sinks": 10**30}, {"window": 10**30, "window_kind": "block"}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_may_be_longer_than_any_sequence(how: dict[str, Any], is_causal: bool) -> None:
    exact = exact_attention(Q, K, V, is_causal=is_causal)
    assert_same(linear_attention(Q, K, V, PHI, is_causal=is_causal, **how), exact, tol=1e-5)
    assert_same(exact_attention(Q, K, V, is_causal=is_causal, **how), exact, tol=1e-6)
    assert_same(attention_matrix(Q, K, PHI, is_causal=is_causal, **how) @ V, exact, tol=1e-5)
    if is_causal:
        first, state = linear_attention(
            *(t[:, :, :4] for t in (Q, K, V)), PHI, is_causal=True, return_state=True, **how
        )
        rest = linear_attention(*(t[:, :, 4:] for t in (Q, K, V)), PHI, is_causal=True, state=state, **how)
        assert_same(torch.cat([first, rest], dim=2), exact, tol=1e-5)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(BochnerError, match=r"must be one of \('softmax', 'gaussian'\), a function or a map, got 'rbf'"):
        exact_attention(Q, K, V, kernel="rbf")
