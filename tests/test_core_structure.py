"""What a reader and a device see of the core: how far a call walks, its operators, and how often it waits."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bochner
from bochner import _products, feature_map, linear_attention

PACKAGE = Path(bochner.__file__).parent
CORE = PACKAGE / "attention"
VIEWS = {"view", "slice", "detach", "unsqueeze", "expand", "alias", "transpose", "squeeze", "select", "unfold"}
VIEWS |= {"_unsafe_view", "as_strided", "lift_fresh", "permute", "split", "split_with_sizes", "unsafe_split"}


class Operators(TorchDispatchMode):
    """Counts the operators that do work, and those that wait for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.waits = 0, 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"):
            self.waits += 1
        elif name not in VIEWS:
            self.work += 1
        return f(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> Operators:
    with torch.no_grad(), Operators() as found:
        call()
    return found


def switches(call: Callable[[], Any]) -> int:
    """How often one file of the package calls into another, in a warm call."""
    call()
    count = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_back is not None:
            here, there = frame.f_back.f_code.co_filename, frame.f_code.co_filename
            count += here != there and str(PACKAGE) in here and str(PACKAGE) in there

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def inputs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    return q, k, v


def a_call(n: int = 200, **how: Any) -> Callable[[], Any]:
    phi, qkv = feature_map("positive", dim=16, num_features=32), inputs(n)
    return lambda: linear_attention(*qkv, phi, **how)


def a_step(name: str = "positive", **how: Any) -> Callable[[], Any]:
    phi, diagnostics = feature_map(name, dim=16, num_features=32), how.pop("diagnostics", True)
    how |= {"is_causal": True, "return_state": True}
    with torch.no_grad():
        _, state = linear_attention(*inputs(200), phi, **how)
    token = inputs(1)
    return lambda: linear_attention(*token, phi, state=state, diagnostics=diagnostics, **how)


WINDOW = {"window": 16, "sinks": 2}
WALKS: dict[str, tuple[Callable[[], Any], int]] = {
    "bidirectional": (a_call(), 25),
    "causal": (a_call(is_causal=True), 40),
    "causal block window with sinks": (a_call(is_causal=True, **WINDOW), 50),
    "step": (a_step(), 25),
}


@pytest.mark.parametrize("name", WALKS)
def test_a_call_does_not_walk_far(name: str) -> None:
    call, most = WALKS[name]
    with torch.no_grad():
        assert switches(call) <= most


@pytest.mark.parametrize("how", [{}, {"window": 16}, WINDOW, WINDOW | {"window_kind": "sliding"}], ids=str)
def test_a_step_asks_for_few_operators_and_fewer_without_diagnostics(how: dict[str, Any]) -> None:
    plain, trusted = counted(a_step(**how)), counted(a_step(**how, diagnostics=False))
    assert plain.work <= 60
    assert trusted.work <= plain.work


def test_sinks_are_copied_with_the_window_of_a_step() -> None:
    assert counted(a_step(**WINDOW)).work <= counted(a_step(window=16)).work


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, WINDOW, WINDOW | {"is_causal": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_another_device_never_waits_for_the_host_without_diagnostics(
    how: dict[str, Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of other devices on the CPU: nothing is looked at, and the numbers are the same."""
    mask = torch.arange(200) < torch.tensor([[5]]) if padded else None
    call = a_call(**how, key_padding_mask=mask)
    want = call()
    monkeypatch.setattr(_products, "LOOKS", False)
    assert counted(a_call(**how, key_padding_mask=mask, diagnostics=False)).waits == 0
    assert counted(call).waits <= 1
    torch.testing.assert_close(call(), want, atol=2e-5, rtol=2e-5)


def test_no_function_of_the_core_is_long() -> None:
    for path in CORE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno + 1 <= 60, f"{path.name}: {node.name}"  # type: ignore[operator]
