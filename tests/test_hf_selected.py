"""Selected keys: rows against an oracle that replays the selection key by key, and the laws of a stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from bochner.hf.precision import INT8, PRECISIONS, Basis, Turns, balance, rotation, row_bytes
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
    kept: SelectedKeys,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    scale: float,
    padding: Tensor | None = None,
    basis: Basis | None = None,
) -> Tensor:
    """Each row by itself: the keys that a head holds are replayed, one key leaving the window at a time."""
    d, older = max(k.shape[-1], v.shape[-1]), PRECISIONS[kept.precision]
    centre, *turns = (x.to(k) for x in basis or Basis.plain(k.shape[1], k.shape[-1], v.shape[-1]))
    rows = [(k - centre[:, None]) @ turns[0], v @ turns[1]]
    near = INT8.decode(INT8.encode(torch.stack([pad(x, (0, d - x.shape[-1])) for x in rows], dim=1)), k.dtype)
    far = older.decode(older.encode(near), k.dtype)  # what leaves the window is rounded again
    near, far = (
        [
            y[..., : len(t[0])] @ torch.linalg.inv(t) + c
            for y, t, c in zip(x.unbind(1), turns, (centre[:, None], 0.0), strict=True)
        ]
        for x in (near, far)
    )
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
                place = torch.tensor([[j] for j in seen])
                sink, last = place < start + kept.sinks, place > i - kept.window
                key, value = (
                    torch.where(sink, x[b, g, seen], torch.where(last, y[b, g, seen], z[b, g, seen]))
                    for x, y, z in zip((k, v), near, far, strict=True)
                )
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
    turns = None if basis is None else Turns.of(basis, PRECISIONS[kept.precision], k.dtype)
    state = SelectedState(kept, len(q), k.shape[-1], v.shape[-1], k.dtype, turns=turns)
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
    older = zip(state.older.tolist(), kept.budgets, strict=True)
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
    slots = 3 * (16 + 16) + 40  # there are 16 for keys that leave the ring
    counters = 3 * 16 * 12 + 8 + 10  # of what waits to be moved; of tokens; the place of no key
    assert state.nbytes == before == slots * (2 * (64 + 2) + 6) + 3 * 4 * (2 * 64 * 2 + 10) + counters


def rows_of(size: int, *, loud: float = 1.0) -> Tensor:
    """Keys and values (1, 2, 7, size) of many sizes; the first half of the channels is `loud` times the second."""
    x = torch.randn(1, 2, 7, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x * torch.logspace(-3, 3, 7)[:, None]
    x[..., : size // 2] *= loud
    return x


@pytest.mark.parametrize("name", PRECISIONS)
def test_stored_rows_come_back_within_half_a_step(name: str) -> None:
    x, code = rows_of(64), PRECISIONS[name]
    back = code.decode(code.encode(x), x.dtype)
    top = {"int8": (127, 127), "int4": (31.5, 7.5)}[name]
    for i, (row, error) in enumerate(zip(x[0], (back - x).abs()[0], strict=True)):
        strong = slice(0, 32 if name == "int4" and i == 0 else 64)  # two bits of keys are another matter
        largest = row[:, strong].abs().amax(-1, keepdim=True)
        assert (error[:, strong] <= 0.502 * largest / top[i]).all()
    again = code.decode(code.encode(x[..., 3:4, :]), x.dtype)
    assert torch.equal(again, back[..., 3:4, :])  # a row does not depend on its neighbours


def test_the_second_half_of_keys_has_two_bits_and_a_step_of_one() -> None:
    x = torch.randn(1, 2, 50, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([30.0] * 8 + [0.7] * 8)
    back = PRECISIONS["int4"].decode(PRECISIONS["int4"].encode(x), x.dtype)[0, 0, :, 8:]
    weak = x[0, 0, :, 8:]
    inside = weak.abs() < 2  # -1.5, -0.5, 0.5, 1.5
    assert ((back - weak).abs()[inside] <= 0.5001).all()
    assert back.unique().tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("size", [64, 128, 4])
@pytest.mark.parametrize("name", PRECISIONS)
def test_stored_rows_are_linear_in_their_columns(name: str, size: int) -> None:
    code, x = PRECISIONS[name], rows_of(size)
    rows = code.encode(x)
    for i, want in enumerate(code.decode(rows, x.dtype).unbind(1)):
        columns = code.columns(rows.codes[:, i], i, x.dtype)
        parts = [part - zero for part, zero in zip(columns, code.zero[i], strict=True)]
        steps = [rows.steps[:, i, :, None]] * len(parts)
        if name == "int4" and i == 0:
            steps[1] = torch.ones_like(steps[1])
        torch.testing.assert_close(torch.cat([a * b for a, b in zip(parts, steps, strict=True)], dim=-1), want)


def basis_of(q: Tensor, k: Tensor, v: Tensor) -> Basis:
    """That of keys and values, given the queries that meet them; all errors in values cost the same."""
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
    centre = k.mean(1)
    second = [x.mT @ x / x.shape[1] for x in (q, k - centre[:, None], v)]
    same = torch.eye(v.shape[-1], dtype=v.dtype).expand(len(v), -1, -1)
    return Basis(centre, balance(second[1], second[0], 2)[0], balance(second[2], same)[0])


@pytest.mark.parametrize("name", ["int8", "selected"])
def test_a_basis_changes_nothing_but_rounding(name: str) -> None:
    inputs = random_input(40)
    basis = basis_of(*inputs[:3])
    want = oracle(KEPT[name], *inputs, scale=0.7, basis=basis)
    for pieces in ([40], [20, *[1] * 20]):
        torch.testing.assert_close(read(KEPT[name], inputs, pieces, basis=basis), want)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_basis_rounds_channels_of_different_size_better(precision: str) -> None:
    q, k, v, scores = random_input(60, d=16)
    size = torch.logspace(-1, 1, 16, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    strong = torch.tensor([1.0] * 8 + [0.05] * 8, dtype=torch.float64)  # half of the channels carry the products
    q, k = q * strong @ turn / size, (k * strong @ turn + 20) * size
    kept = SelectedKeys(8, (60, 60, 60), precision=precision)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True)
    basis = basis_of(q, k, v)
    basis = basis._replace(values=Basis.plain(3, 16, 4).values)  # of values both are rounded alike
    plain, turned = (read(kept, (q, k, v, scores), [60], basis=b) for b in (None, basis))
    assert (turned - want).norm() < 0.2 * (plain - want).norm()


def test_the_balanced_basis_makes_rows_and_damages_alike() -> None:
    made = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 8, 8, generator=made, dtype=torch.float64) for _ in range(2))
    turn, _ = balance(x @ x.mT, y @ y.mT)
    turn = turn.double()
    back = torch.linalg.inv(turn)
    rows, damage = turn.mT @ (x @ x.mT) @ turn, back @ (y @ y.mT) @ back.mT
    scale = (rows.diagonal(dim1=-2, dim2=-1).sum(-1) / damage.diagonal(dim1=-2, dim2=-1).sum(-1))[:, None, None]
    torch.testing.assert_close(rows, scale * damage, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 6, 64, 80])
def test_rotations_are_orthogonal(size: int) -> None:
    torch.testing.assert_close(rotation(size) @ rotation(size).mT, torch.eye(size))


def test_bytes_of_a_row_are_counted() -> None:
    assert {name: row_bytes(code, 64) for name, code in PRECISIONS.items()} == {"int8": 132, "int4": 68}
