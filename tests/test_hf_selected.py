"""Selected keys: rows against an oracle that replays the selection key by key, and the laws of a stream."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bochner.hf.precision import PRECISIONS, Basis, balance, precision_of, rotation, row_bytes
from bochner.hf.selected import SelectedKeys, SelectedState


def random_input(
    n: int, *, b: int = 2, g: int = 3, r: int = 2, d: int = 8, v: int = 4, seed: int = 0, coarse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and scores in float64; coarse scores have many ties."""
    made = torch.Generator().manual_seed(seed)
    q, k, values = (
        torch.randn(b, h, n, size, generator=made, dtype=torch.float64) for h, size in ((g * r, d), (g, d), (g, v))
    )
    scores = torch.randn(b, g, n, generator=made)
    return q, k, values, (scores * 2).round() if coarse else scores


def oracle(
    kept: SelectedKeys, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, scale: float, padding: Tensor | None = None
) -> Tensor:
    """Each row by itself: the keys that a head holds are replayed, one key leaving the window at a time."""
    code = precision_of(kept.precision)
    whole_k, whole_v = k, v
    k, v = code.decode(code.encode(k), k.dtype), code.decode(code.encode(v), v.dtype)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype)
    r = q.shape[1] // k.shape[1]
    for b in range(len(q)):
        start = 0 if padding is None else int(padding[b].sum())
        for head in range(q.shape[1]):
            g = head // r
            held: list[int] = []
            for i in range(start, q.shape[2]):
                left = i - kept.window
                if left >= start + kept.sinks:
                    held.append(left)
                    if len(held) > kept.budgets[g]:  # the least goes, the newest of equal ones
                        held.remove(min(held, key=lambda j: (float(scores[b, g, j].half()), -j)))
                first = range(start, min(start + kept.sinks, i + 1))
                seen = sorted({*first, *held, *range(max(start, i - kept.window + 1), i + 1)})
                sink = torch.tensor([[j < start + kept.sinks] for j in seen])
                key, value = (torch.where(sink, x[b, g, seen], y[b, g, seen]) for x, y in ((whole_k, k), (whole_v, v)))
                out[b, head, i] = (scale * key @ q[b, head, i]).softmax(0) @ value
    return out


def read(
    kept: SelectedKeys,
    inputs: tuple[Tensor, ...],
    pieces: list[int],
    padding: Tensor | None = None,
    basis: Basis | None = None,
) -> Tensor:
    q, k, v, scores = inputs
    state = SelectedState(kept, len(q), k.shape[-1], v.shape[-1], k.dtype, basis=basis)
    out, at = [], 0
    for n in pieces:
        here = slice(at, at + n)
        hidden = None if padding is None else padding[:, here]
        part = state.attend(
            q[:, :, here], k[:, :, here], v[:, :, here], scores=scores[..., here], scale=0.7, padding=hidden
        )
        out.append(part)
        at += n
    return torch.cat(out, dim=2)


KEPT = {
    "selected": SelectedKeys(8, (5, 0, 40)),
    "no sinks": SelectedKeys(1, (1, 2, 3), sinks=0),
    "sinks alone": SelectedKeys(5, (0, 0, 0)),
    "more room than keys": SelectedKeys(16, (200, 3, 7), sinks=20),
    "more window than spare slots": SelectedKeys(24, (3, 0, 30)),
    "int8": SelectedKeys(8, (5, 0, 40), precision="int8"),
    "int6": SelectedKeys(8, (5, 0, 40), precision="int6"),
    "int4": SelectedKeys(8, (5, 0, 40), precision="int4"),
}


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_rows_are_those_of_the_oracle(name: str, coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bochner.hf.selected.BLOCK", 16)
    inputs = random_input(75, coarse=coarse)
    want = oracle(KEPT[name], *inputs, scale=0.7)
    torch.testing.assert_close(read(KEPT[name], inputs, [75]), want)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("pieces", [[1] * 75, [30, 1, 1, 7, 36], [2, 73]], ids=["token by token", "pieces", "two"])
def test_pieces_give_what_the_whole_text_gives(name: str, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bochner.hf.selected.BLOCK", 16)
    inputs = random_input(75, coarse=True)
    torch.testing.assert_close(read(KEPT[name], inputs, pieces), read(KEPT[name], inputs, [75]))


@pytest.mark.parametrize("pieces", [[40], [1] * 40, [3, 20, 17]], ids=["whole", "token by token", "pieces"])
def test_padding_in_front_changes_nothing(pieces: list[int]) -> None:
    kept = KEPT["selected"]
    inputs = random_input(40, coarse=True)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1, :13] = True
    got = read(kept, inputs, pieces, padding)
    torch.testing.assert_close(got, oracle(kept, *inputs, scale=0.7, padding=padding))
    alone = tuple(t[1:, :, 13:] for t in inputs)
    torch.testing.assert_close(got[1:, :, 13:], read(kept, alone, [27]))
    assert (got[1, :, :13] == 0).all()


def held_ranks(kept: SelectedKeys, inputs: tuple[Tensor, ...], pieces: list[int]) -> Tensor:
    q, k, v, scores = inputs
    state = SelectedState(kept, len(q), k.shape[-1], v.shape[-1], k.dtype)
    for x in zip(*(t.split(pieces, dim=2) for t in (q, k, v, scores)), strict=True):
        state.attend(*x[:3], scores=x[3], scale=1.0)
    state._settle()
    older = zip((state.first + state.ring).tolist(), kept.budgets, strict=True)
    return torch.cat([state.rank[:, a : a + n].sort(1).values for a, n in older], 1)


def test_selection_is_the_same_to_the_bit_however_a_text_is_cut() -> None:
    kept = SelectedKeys(8, (5, 0, 40))
    inputs = random_input(200, coarse=True)
    want = held_ranks(kept, inputs, [200])
    for pieces in ([1] * 200, [100, 100], [3, 190, 7]):
        assert torch.equal(held_ranks(kept, inputs, pieces), want)


def test_beams_are_reordered_and_repeated() -> None:
    kept = KEPT["int8"]
    q, k, v, scores = random_input(30)
    order = torch.tensor([1, 1, 0])
    state = SelectedState(kept, 2, 8, 4, k.dtype)
    state.attend(q[:, :, :29], k[:, :, :29], v[:, :, :29], scores=scores[..., :29], scale=0.7)
    state = state.map(lambda t: t.index_select(0, order))
    got = state.attend(q[order, :, 29:], k[order, :, 29:], v[order, :, 29:], scores=scores[order, :, 29:], scale=0.7)
    torch.testing.assert_close(got, read(kept, (q, k, v, scores), [30])[order, :, 29:])


def test_bytes_are_those_of_the_tensors_and_do_not_grow() -> None:
    kept = SelectedKeys(16, (10, 0, 30), precision="int8")
    state = SelectedState(kept, 1, 64, 64, torch.float32)
    q, k, v, scores = (t.float() for t in random_input(100, b=1, d=64, v=64))
    before = state.nbytes
    state.attend(q, k, v, scores=scores, scale=1.0)
    slots = 3 * (16 + 16) + 40  # the ring has 16 slots to spare
    counters = 3 * 16 * 12 + 8 + 10  # of what waits to be moved; of tokens; the place of no key
    assert state.nbytes == before == slots * (2 * (64 + 2) + 6) + 3 * 4 * 2 * 64 * 2 + counters


@pytest.mark.parametrize("name", PRECISIONS)
def test_stored_rows_come_back_within_half_a_step(name: str) -> None:
    x = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]
    code = PRECISIONS[name]
    back = code.decode(code.encode(x), x.dtype)
    top = {"model": math.inf, "bfloat16": 128, "int8": 127, "int6": 31, "int4": 7}[name]
    largest = x.abs().amax(-1, keepdim=True)
    assert ((back - x).abs() <= 0.502 * largest / top).all()
    again = code.decode(code.encode(x[2:3, 3:4]), x.dtype)
    assert torch.equal(again, back[2:3, 3:4])  # a row does not depend on its neighbours


@pytest.mark.parametrize("size", [64, 128, 4])
@pytest.mark.parametrize("name", PRECISIONS)
def test_stored_rows_are_linear_in_their_columns(name: str, size: int) -> None:
    code = PRECISIONS[name]
    x = torch.randn(2, 9, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes, *step = code.encode(x)
    columns, unpacking = torch.cat(code.columns(codes, x.dtype), dim=-1), code.unpacking(size)
    rows = columns if unpacking is None else columns @ unpacking.double() - code.zero
    torch.testing.assert_close(rows * step[0] if step else rows, code.decode((codes, *step), x.dtype))


def test_a_basis_changes_nothing_but_rounding() -> None:
    inputs = random_input(40)
    q, k = inputs[:2]
    basis = Basis(*balance(q.transpose(0, 1).flatten(1, 2), k.transpose(0, 1).flatten(1, 2)))
    for pieces in ([40], [39, 1]):
        got = read(KEPT["selected"], inputs, pieces, basis=basis)
        torch.testing.assert_close(got, read(KEPT["selected"], inputs, [40]), atol=1e-5, rtol=1e-5)


def test_a_basis_rounds_channels_of_different_size_better() -> None:
    q, k, v, scores = random_input(60, d=16)
    size = torch.logspace(-1, 1, 16, dtype=torch.float64)
    inputs = (q / size, k * size + 20 * size, v, scores)
    q, k = inputs[:2]
    basis = Basis(*balance(q.transpose(0, 1).flatten(1, 2), k.transpose(0, 1).flatten(1, 2)))
    kept = {name: SelectedKeys(8, (5, 0, 40), precision=name) for name in ("model", "int6")}
    want = read(kept["model"], inputs, [60])
    plain, turned = (read(kept["int6"], inputs, [60], basis=b) for b in (None, basis))
    assert (turned - want).norm() < 0.2 * (plain - want).norm()


@pytest.mark.parametrize("size", [1, 6, 64, 80])
def test_rotations_are_orthogonal(size: int) -> None:
    torch.testing.assert_close(rotation(size) @ rotation(size).mT, torch.eye(size))


def test_bytes_of_a_row_are_counted() -> None:
    assert {name: row_bytes(name, 64, torch.float32) for name in PRECISIONS} == {
        "model": 256,
        "bfloat16": 128,
        "int8": 66,
        "int6": 50,
        "int4": 34,
    }
