"""The papers' tasks: generators agree with a second opinion, splits share nothing, figures mean what they say."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import math
import re
import statistics
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from bochner import BochnerError, data, tasks
from bochner.tasks import base, images, listops, pathfinder, protein, registry, speech, text


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made data goes to a directory of the test."""
    monkeypatch.setenv("BOCHNER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def needs(*names: str) -> None:
    for name in names:
        try:
            data.fetch(name, quiet=True)
        except data.ArtefactUnavailable as reason:
            pytest.skip(str(reason))


def evaluate(expression: str) -> tuple[int, int, list[int]]:
    """A second evaluator of ListOps, with a stack: the value, the depth and the numbers of arguments."""
    stack: list[list] = [[]]
    depth, counts = 0, []
    for word in expression.split():
        if word.startswith("["):
            stack.append([word[1:]])
            depth = max(depth, len(stack) - 1)
        elif word == "]":
            name, *values = stack.pop()
            counts.append(len(values))
            middle = math.floor(statistics.median(values))
            stack[-1].append({"MIN": min(values), "MAX": max(values), "MED": middle, "SM": sum(values) % 10}[name])
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return value, depth, counts


def test_values_of_listops_agree_with_another_evaluator() -> None:
    rows = list(islice(listops.expressions(0, 50, 300), 400))
    seen = [evaluate(listops.show(symbols)) for symbols, _ in rows]
    assert [value for value, _, _ in seen] == [value for _, value in rows]
    assert {depth for _, depth, _ in seen} <= set(range(1, 10))
    assert {n for _, _, counts in seen for n in counts} == set(range(2, 11))
    assert all(50 < len(symbols) < 300 for symbols, _ in rows)
    assert len({symbols for symbols, _ in rows}) == len(rows)


def test_listops_has_the_majority_class_of_the_arena() -> None:
    values = [value for _, value in islice(listops.expressions(1, 100, 600), 1500)]
    share = max(values.count(d) for d in range(10)) / len(values)
    # 0.17 within four standard errors of a share of 1,500: alpha about 6e-5.
    assert abs(share - 0.165) < 4 * math.sqrt(0.165 * 0.835 / 1500)


def test_listops_is_the_same_every_time_and_splits_share_nothing(own_cache: Path) -> None:
    preset = tasks.preset_of(tasks.task("listops"), "small", train=60, test=20, data={"low": 20, "high": 80})
    splits = [listops.load(preset, s) for s in base.SPLITS]
    assert [len(s) for s in splits] == [60, 20, 20]
    texts = [bytes(s.raw(i)) for s in splits for i in range(len(s))]
    assert len(set(texts)) == 100
    stream = listops.expressions(0, 20, 80)
    assert texts == [next(stream)[0] for _ in range(100)]
    assert list(islice(listops.expressions(1, 20, 80), 3)) != list(islice(listops.expressions(0, 20, 80), 3))


def test_a_damaged_file_of_examples_is_made_again(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"x": np.arange(1000)}

    first = base.stored("some", make)
    assert np.array_equal(base.stored("some", make)["x"], first["x"])
    assert len(calls) == 1
    (path,) = own_cache.rglob("some.npz")
    whole = path.read_bytes()
    for broken in (whole[:100], b"", whole[:300] + b"?" + whole[301:], whole[:-30]):
        path.write_bytes(broken)
        assert np.array_equal(base.stored("some", make)["x"], first["x"])
        assert "some.npz in the cache is damaged" in capsys.readouterr().err
        assert path.read_bytes()[:100] == whole[:100]
    assert len(calls) == 5


def test_a_full_disk_is_named_when_examples_are_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(BochnerError, match=r"'some' could not be kept: the disk of .* is full"):
        base.stored("some", lambda: {"x": np.zeros(3)})
    assert not list(own_cache.rglob("*.npz"))


SMALL = pathfinder.Style(side=12, dashes=3, distractors=1, short=2)


def connected(shown: pathfinder.Picture, side: int, fine: int = 8) -> bool:
    """A second opinion on Pathfinder from the ink alone: thicken it by a quarter of a pixel, look for one component."""
    ink = pathfinder.draw(shown, side, fine)
    parts, _ = ndimage.label(ndimage.distance_transform_edt(~ink) <= 0.25 * fine)
    first, second = (parts[int(y * fine), int(x * fine)] for x, y in shown.discs)
    return bool(first == second)


@pytest.mark.parametrize(("style", "count"), [(pathfinder.PAPER, 60), (SMALL, 200)])
def test_discs_of_pathfinder_are_connected_exactly_where_the_label_says_so(style: pathfinder.Style, count: int) -> None:
    pictures = [pathfinder.picture(0, i, style) for i in range(count)]
    assert [connected(p, style.side) for p in pictures] == [p.same for p in pictures]
    assert sum(p.same for p in pictures) == count // 2


def test_where_the_discs_are_does_not_tell_the_label() -> None:
    """Two-sample t-tests on what the discs' places alone would tell, alpha 1e-6 each."""
    pictures = [pathfinder.picture(1, i, SMALL) for i in range(1_200)]
    apart, middle = (np.array([f(p.discs) for p in pictures]) for f in (_apart, _off_centre))
    for seen in (apart, middle):
        assert stats.ttest_ind(seen[0::2], seen[1::2]).pvalue > 1e-6
    # Ends of two curves that were drawn anywhere, as in the usual way to make these pictures, are found out.
    loose = [math.dist(p.dashes[0, 0], p.dashes[SMALL.dashes, 0]) for p in pictures[1::2]]
    assert stats.ttest_ind(loose, apart[1::2]).pvalue < 1e-6


def _apart(discs: np.ndarray) -> float:
    return math.dist(*discs)


def _off_centre(discs: np.ndarray) -> float:
    return math.dist(discs.mean(0), (SMALL.side / 2, SMALL.side / 2))


def test_pictures_of_pathfinder_have_the_parts_they_should() -> None:
    shown = pathfinder.picture(3, 5)
    assert np.bincount(shown.curve).tolist() == [14, 14, 4, 4, 4, 4, 4]
    assert np.array_equal(shown.discs, [shown.dashes[0, 0], shown.dashes[13, 1]])
    apart = pathfinder.picture(3, 4)
    assert np.array_equal(apart.discs, [apart.dashes[0, 0], apart.dashes[14, 0]])
    pixels = pathfinder.image(shown)
    assert pixels.shape == (32, 32)
    assert pixels.max() == 255
    assert np.array_equal(pixels, pathfinder.image(pathfinder.picture(3, 5)))
    assert not np.array_equal(pixels, pathfinder.image(pathfinder.picture(4, 5)))


def test_curves_that_cannot_fit_are_refused() -> None:
    with pytest.raises(BochnerError, match=r"no room for Style\(side=6, dashes=9.*larger 'side'"):
        pathfinder.picture(0, 0, pathfinder.Style(side=6, dashes=9))


def test_sequences_are_cut_padded_and_masked() -> None:
    rows = base.Sequences.of([np.arange(3, dtype=np.uint8), np.arange(9, dtype=np.uint8)], [1, 0], length=6)
    batch = base.Collator(6, multiple=4)([rows[0], rows[1]])
    s = base.SPECIAL
    assert batch["input_ids"].tolist() == [[base.CLS, s, s + 1, s + 2, 0, 0, 0, 0], [base.CLS, *range(s, s + 5), 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 6 + [0] * 2]
    assert batch["labels"].tolist() == [1, 0]
    assert "attention_mask" not in base.Collator(6, masks=False)([rows[0]])


def test_masks_hide_as_many_symbols_as_they_should_and_always_the_same() -> None:
    rng = np.random.default_rng(0)
    rows = base.Sequences(rng.integers(0, 20, 40_000).astype(np.uint8), np.arange(0, 40_001, 200), None, 201)
    hidden = base.Masked(rows, 20, seed=1, passes=2)
    assert len(hidden) == 400
    items = [hidden[i] for i in range(200)]
    original = torch.stack([rows.ids(i) for i in range(200)])
    ids, labels = (torch.stack([x[k] for x in items]) for k in ("input_ids", "labels"))
    chosen = labels != base.IGNORE
    assert torch.equal(labels[chosen], original[chosen])
    assert torch.equal(ids[~chosen], original[~chosen])
    assert not chosen[:, 0].any()
    # Shares of 40,000 and of about 6,000 within five standard errors: alpha below 1e-5.
    n = int(chosen.sum())
    assert abs(n / 40_000 - 0.15) < 5 * math.sqrt(0.15 * 0.85 / 40_000)
    assert abs((ids[chosen] == base.MASK).float().mean().item() - 0.8) < 5 * math.sqrt(0.16 / n)
    kept = (ids == original)[chosen].float().mean().item()  # 10 %, and one in twenty of those replaced
    assert abs(kept - 0.105) < 5 * math.sqrt(0.1 / n)
    assert torch.equal(hidden[7]["input_ids"], items[7]["input_ids"])
    assert not torch.equal(hidden[207]["input_ids"], items[7]["input_ids"])


def test_rows_to_train_on_are_not_those_to_validate() -> None:
    preset = tasks.preset_of(tasks.task("text"), "small", train=4, test=3)
    found = {s: base.part(np.arange(10), preset, s, 2).tolist() for s in base.SPLITS}
    assert found == {"train": [0, 1, 2, 3], "validation": [8, 9], "test": [0, 1, 2]}
    assert base.ends(["ab", "", "cde"]).tolist() == [0, 2, 2, 5]


def test_blocks_are_the_text_in_order() -> None:
    blocks = base.Blocks(np.arange(23, dtype=np.uint8), 5)
    assert len(blocks) == 4
    assert torch.cat([blocks[i]["input_ids"] for i in range(4)]).tolist() == [i + base.SPECIAL for i in range(20)]


def test_blocks_to_test_on_are_spread_over_the_text() -> None:
    preset = tasks.preset_of(tasks.task("lm"), "small", length=4, test=3)
    rows = text._blocks(np.arange(42, dtype=np.uint8), preset, "test").tokens.reshape(-1, 4)
    assert rows.tolist() == [[4 * i + j for j in range(4)] for i in (0, 4, 9)]
    assert len(text._blocks(np.arange(42, dtype=np.uint8), preset, "train")) == 10


@pytest.mark.parametrize("kind", ["classify", "masked", "causal"])
def test_figures_agree_with_a_loop(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    shape = (6, 5) if kind == "classify" else (6, 9, 5)
    logits = torch.randn(shape, generator=g)
    labels = torch.randint(5, shape[:-1], generator=g)
    if kind != "classify":
        labels[:, 6:] = base.IGNORE
    task = next(t for t in tasks.TASKS.values() if t.kind == kind)
    found = np.concatenate([base.figures(task, logits[i : i + 2], labels[i : i + 2]).numpy() for i in (0, 2, 4)])
    losses, hits = [], []
    for i in range(6):
        for t in range(1 if kind == "classify" else 9):
            row, label = (logits[i], labels[i]) if kind == "classify" else (logits[i, t], labels[i, t])
            if kind == "causal":
                if t == 0:
                    continue
                row = logits[i, t - 1]
            if label != base.IGNORE:
                losses.append(row.exp().sum().log().item() - row[label].item())
                hits.append(row.argmax().item() == label.item())
    out = base.summary(kind, found)
    assert out["loss"] == pytest.approx(statistics.mean(losses), rel=1e-5)
    assert out["accuracy"] == pytest.approx(statistics.mean(hits))
    if kind != "classify":
        assert out["bits"] == pytest.approx(statistics.mean(losses) / math.log(2), rel=1e-5)


def test_error_rate_counts_edits_of_the_greedy_reading() -> None:
    path = torch.tensor([[1, 1, 0, 1, 2, 2, 0], [3, 0, 0, 0, 0, 0, 0]])  # reads 1 1 2, and 3
    labels = torch.tensor([[1, 2, -100], [4, 3, 5]])
    found = base.figures(tasks.task("speech"), torch.nn.functional.one_hot(path, 6).float(), labels).numpy()
    assert found.tolist() == [[1.0, 2.0], [2.0, 3.0]]
    assert base.summary("ctc", found) == {"error_rate": 3 / 5}


def test_the_arena_schedule_is_its_own() -> None:
    transformers = pytest.importorskip("transformers")
    preset = tasks.task("text").presets["paper"]
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=preset.learning_rate)
    schedule = transformers.get_scheduler(preset.schedule, optimizer, preset.warmup, preset.steps)
    for step in (1, 4_000, 8_000, 20_000):
        wanted = 0.05 * min(1.0, step / 8_000) / math.sqrt(max(step, 8_000))
        assert preset.learning_rate * schedule.lr_lambdas[0](step) == pytest.approx(wanted, rel=1e-6)


def test_presets_fit_their_heads_and_lengths() -> None:
    for task in tasks.TASKS.values():
        assert "small" in task.presets
        assert set(task.presets) <= {"paper", "small", "medium"}
        for preset in task.presets.values():
            assert preset.width % preset.heads == 0
            assert preset.warmup <= preset.steps or task.name == "retrieval"  # as table 4 has it
        assert set(task.artefacts) <= set(data.ARTEFACTS)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(BochnerError, match=r"Unknown task 'chess'.*listops"):
        tasks.task("chess")
    with pytest.raises(BochnerError, match=r"preset of text 'huge'.*paper"):
        tasks.preset_of(tasks.task("text"), "huge")
    with pytest.raises(BochnerError, match="no 'colour'"):
        tasks.preset_of(tasks.task("text"), "small", colour=3)


@pytest.mark.model
def test_reviews_come_back_in_their_official_halves() -> None:
    needs("imdb")
    preset = tasks.preset_of(tasks.task("text"), "small", test=None, length=4_000)
    parts = {s: text.imdb(preset, s) for s in base.SPLITS}
    assert [len(parts[s]) for s in base.SPLITS] == [23_000, 2_000, 25_000]
    assert parts["test"].labels is not None
    assert parts["test"].labels.sum() == 12_500
    known = {bytes(parts[s].raw(i)) for s in ("train", "validation") for i in range(len(parts[s]))}
    unknown = [bytes(parts["test"].raw(i)) not in known for i in range(25_000)]
    assert sum(unknown) > 24_800  # a few reviews were written twice
    # Sentiment is what the label says: words speak.
    praise = [b"excellent" in bytes(parts["test"].raw(i)) for i in range(25_000)]
    assert parts["test"].labels[praise].mean() > 0.7


@pytest.mark.model
def test_pictures_are_grey_as_the_formula_says() -> None:
    needs("cifar10")
    pictures, labels = images.cifar("test")
    assert pictures.shape == (10_000, 32, 32, 3)
    assert np.bincount(labels).tolist() == [1_000] * 10
    preset = tasks.preset_of(tasks.task("image"), "paper", test=50)
    rows = images.grey(preset, "test")
    first = int(base.shuffled(10_000, 0)[0])
    r, g, b = pictures[first, 5, 7].astype(float)
    assert rows.raw(0)[5 * 32 + 7] == round(0.2989 * r + 0.587 * g + 0.114 * b)
    assert rows[0]["labels"] == labels[first]
    small = images.grey(tasks.preset_of(tasks.task("image"), "small", test=50), "test")
    mean = rows.raw(0).reshape(32, 32)[:2, :2].mean()
    assert small.raw(0)[0] in {int(mean + 0.51) // 16, int(mean - 0.51) // 16}, "sixteen greys"
    assert {int(x) for i in range(50) for x in small.raw(i)} == set(range(16))
    sequence = images.colour(tasks.preset_of(tasks.task("pixels"), "paper", test=5), "test")[0]["input_ids"]
    assert (sequence[:6] - base.SPECIAL).tolist() == pictures[first, 0, :2].ravel().tolist()


def test_see_also_is_cut_off_and_read() -> None:
    page = """.\\" a comment about foo(1)
.TH ACCEPT 2
.SH NAME
accept \\- see also nothing(9)
.SH "SEE ALSO"
.BR bind (2),
.BR socket (7)
.Xr vnode 9 ,
\\fBTcl_Alloc\\fR(3tcl), App::Cpan\\|(3)
.SH AUTHORS
somebody
"""
    body, found = text.split_page(page)
    assert found == ["bind(2)", "socket(7)", "Tcl_Alloc(3)", "App::Cpan(3)", "vnode(9)"]
    assert "bind" not in body
    assert "comment" not in body
    assert "somebody" in body


@pytest.mark.model
def test_linked_manual_pages_name_each_other_and_the_text_does_not_give_it_away() -> None:
    needs(*text.MANUALS)
    arrays = base.stored("retrieval-2", text._manuals)
    assert len(arrays["home"]) > 4_000
    bodies = arrays["tokens"].tobytes()
    assert not re.search(rb'^\.S[Hh]\s+"?SEE ALSO', bodies, flags=re.MULTILINE)
    # accept(2) refers to bind(2), by a search of the page itself.
    source = gzip.decompress((data.fetch("manpages_dev") / "man2" / "accept.2.gz").read_bytes()).decode()
    assert ".BR bind (2)" in source
    pages = base.Sequences(arrays["tokens"], arrays["offsets"], None, 10)
    titles = [bytes(pages.raw(i)[:400]) for i in range(len(pages))]
    accept, bind = (next(i for i, t in enumerate(titles) if b".TH %s 2" % n in t) for n in (b"accept", b"bind"))
    assert sorted([accept, bind]) in arrays["links"].tolist()


@pytest.mark.model
def test_neither_page_of_a_pair_tells_whether_the_pages_refer_to_each_other() -> None:
    needs(*text.MANUALS)
    preset = tasks.task("retrieval").presets["small"]
    parts = {s: text.retrieval(preset, s) for s in base.SPLITS}
    arrays = base.stored("retrieval-2", text._manuals)
    linked = set(map(tuple, arrays["links"].tolist()))
    pages = [set(parts[s].pairs.ravel().tolist()) for s in base.SPLITS]
    assert not pages[0] & pages[1]
    assert not pages[0] & pages[2]
    assert not pages[1] & pages[2]
    assert len(parts["train"]) > 12_000
    assert 900 < len(parts["test"]) <= 1_000
    for part in parts.values():
        pairs, labels = part.pairs, part.labels
        assert labels.mean() == 0.5
        assert [(min(p), max(p)) in linked for p in pairs.tolist()] == labels.astype(bool).tolist()
        assert len({(min(p), max(p)) for p in pairs.tolist()}) == len(pairs)
        assert (arrays["home"][pairs[:, 0]] == arrays["home"][pairs[:, 1]]).all()
        for column in pairs.T:
            counts = np.stack([np.bincount(column[labels == y], minlength=len(arrays["home"])) for y in (0, 1)])
            assert counts.max(0).sum() / len(pairs) == 0.5  # the best guess from the number of one page, in sample
    # Two pages do tell: those that refer to each other have more alike letters.
    part = parts["test"]
    letters = np.stack([np.bincount(part.sequences.raw(i)[:255], minlength=256) for i in range(len(arrays["home"]))])
    letters = letters / np.linalg.norm(letters, axis=1, keepdims=True)
    alike = (letters[part.pairs[:, 0]] * letters[part.pairs[:, 1]]).sum(1)
    assert ((alike > np.median(alike)) == part.labels).mean() > 0.6


def test_pages_that_are_not_linked_are_as_frequent_as_linked_ones() -> None:
    rng = np.random.default_rng(0)
    hub = [(0, i) for i in range(1, 30)]  # one page that many refer to
    links = np.array(sorted({*hub, *((min(p), max(p)) for p in rng.integers(1, 60, (60, 2)).tolist() if p[0] != p[1])}))
    home = np.zeros(62, int)
    home[60:] = 1
    pairs = np.concatenate([rng.permuted(links, axis=1), [(60, 61)]])  # the last one has nobody to exchange with
    links = np.concatenate([links, [(60, 61)]])
    kept, others = text.unlinked(pairs, links, home, rng)
    taken = {frozenset(p) for p in links.tolist()}
    assert not taken & {frozenset(p) for p in others.tolist()}
    assert len({frozenset(p) for p in others.tolist()}) == len(others) == len(kept)
    assert 60 not in kept
    assert len(kept) > len(pairs) / 2  # the hub has few that it could be paired with
    for column in (0, 1):
        assert sorted(kept[:, column]) == sorted(others[:, column])


def test_the_performer_presets_have_the_optimizer_of_their_paper() -> None:
    for name in ("lm", "protein", "pixels"):
        preset = tasks.task(name).presets["paper"]
        assert (preset.learning_rate, preset.schedule, preset.warmup) == (1e-3, "constant", 0)
        assert (preset.betas, preset.eps, preset.weight_decay, preset.clip) == ((0.9, 0.98), 1e-9, 0.1, 0.5)
    protein_preset = tasks.task("protein").presets["paper"]
    assert tasks.choose(tasks.task("protein"), "linformer", protein_preset).features == 600
    assert tasks.choose(tasks.task("protein"), "positive", protein_preset).features == 256
    asked = tasks.preset_of(tasks.task("protein"), "paper", features=32)  # what is asked for comes before a table
    assert tasks.choose(tasks.task("protein"), "linformer", asked).features == 32


@pytest.mark.model
def test_held_out_protein_families_are_not_trained_on() -> None:
    needs("proteins")
    preset = tasks.task("protein").presets["paper"]
    parts = {s: protein.sequences(preset, s) for s in (*base.SPLITS, "unseen")}
    assert sum(map(len, parts.values())) == 20_000
    assert len(parts["unseen"]) > 300
    families: dict[bool, set[str]] = {True: set(), False: set()}
    with gzip.open(data.fetch("proteins") / "DB.fasta.gz", "rt") as file:
        for line in file:
            if line.startswith(">"):
                families[protein.held_out(protein.family(line))].add(protein.family(line))
    assert not families[True] & families[False]
    letters = "".join(protein.LETTERS[c] for c in parts["train"].raw(0))
    assert re.fullmatch(f"[{protein.LETTERS}]+", letters)
    counts = np.bincount(parts["train"].tokens, minlength=26)
    test = np.bincount(parts["test"].tokens, minlength=26)
    baseline = protein.baseline(preset)
    assert baseline["accuracy"] == test[counts.argmax()] / test.sum()
    assert 9 < 100 * baseline["accuracy"] < 11  # leucine; the paper has 9.92 %
    assert 17 < baseline["perplexity"] < 19  # the paper has 17.80


def test_swiss_prot_is_read_once_from_all_its_databases(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    standard = rng.choice([i for i, x in enumerate(protein.BLAST) if x in "ACDEFGHIKLMNPQRSTVWY"], (300, 9))
    rows = [bytes(r.astype(np.uint8)) for r in standard]
    rows.append(bytes(protein.BLAST.index(x) for x in "MOU*XBZJ"))
    for name, some in (("BPO", rows[:200]), ("MFO", rows[100:])):  # they overlap
        (own_cache / name).mkdir()
        (own_cache / name / "goasp.fasta.psq").write_bytes(b"\0" + b"".join(r + b"\0" for r in some))
    monkeypatch.setattr(data, "fetch", lambda name: own_cache)
    preset = tasks.preset_of(tasks.task("protein"), "medium", test=None)
    assert preset.data["source"] == "swissprot"
    parts = {s: protein.sequences(preset, s) for s in (*base.SPLITS, "unseen")}
    found = ["".join(protein.LETTERS[c] for c in p.raw(i)) for p in parts.values() for i in range(len(p))]
    assert sorted(found) == sorted("".join(protein.BLAST[c] for c in r).replace("*", "X") for r in rows)
    assert 0 < len(parts["unseen"]) < 40  # one in twenty of 301
    assert len(parts["test"]) == len(parts["validation"]) == (301 - len(parts["unseen"])) // 20
    hidden, next_one = (tasks.task(n).load(preset, "test") for n in ("protein", "protein_causal"))
    assert hidden[0]["labels"].shape == next_one[0]["input_ids"].shape
    assert torch.equal(next_one[0]["labels"], next_one[0]["input_ids"])


def test_swiss_prot_without_databases_is_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "fetch", lambda name: own_cache)
    with pytest.raises(BochnerError, match="Swiss-Prot has no sequences"):
        protein.sequences(tasks.task("protein").presets["medium"], "train")


@pytest.mark.model
def test_copying_shown_letters_is_worth_what_the_masks_give_away() -> None:
    needs("proteins")
    preset = tasks.preset_of(tasks.task("protein"), "small")
    found = protein.masked_baseline(preset)
    # 80 % hidden, 10 % shown as they are, 10 % replaced by one of 20: alpha 1e-6 for some 15,000 letters.
    expected = 0.8 * found["accuracy"] + 0.1 + 0.1 / 20
    assert abs(found["copying"] - expected) < 4.9 * math.sqrt(expected * (1 - expected) / 15_000)


@pytest.mark.model
def test_no_author_is_in_two_splits_of_the_books() -> None:
    authors = [{name.split("-")[0] for name in text.BOOKS[s]} for s in base.SPLITS]
    assert not authors[0] & authors[1]
    assert not authors[0] & authors[2]
    assert not authors[1] & authors[2]
    needs("books")
    blocks = tasks.dataset("lm", "test")
    book = (data.fetch("books") / "carroll-alice.txt").read_bytes()
    assert bytes((blocks[0]["input_ids"] - base.SPECIAL).tolist()) == book[:256]


def test_two_processes_may_learn_the_word_pieces_at_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    learn, plain, others = text.wordpieces.__wrapped__, Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if not others:
            others.append(True)
            learn()  # the other process, just before this one puts its file in place
        return plain(self, target)

    monkeypatch.setattr(text, "_books", lambda split: ["a choir sings to the masses"])
    monkeypatch.setattr(Path, "replace", replace)
    assert learn().get_vocab_size() == learn().get_vocab_size()
    assert len(list((own_cache / "cache" / "tasks").iterdir())) == 1


LINE = "a choir sings to the masses, the masses sing; \u00e9t\u00e9 "


@pytest.mark.slow
def test_word_pieces_are_the_same_in_every_process(own_cache: Path) -> None:
    pytest.importorskip("tokenizers")
    code = """
from bochner.tasks import text
text._books = lambda split: [" ".join(f"{a}{b}{a}{c}" for a in "pqrstuvw" for b in "abcdefgh" for c in "xyzklmn")]
text.stored = lambda name, make: make()
print(text.wordpieces().to_str())
"""
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(4)]
    assert len(said[0]) > 1_000
    assert len(set(said)) == 1


def merged(word: list[str], merges: list[tuple[str, str]]) -> list[str]:
    """Byte pair encoding as it was written down: the earliest of the known pairs is joined, until there is none."""
    while found := [p for p in pairwise(word) if p in merges]:
        first = min(found, key=merges.index)
        out: list[str] = []
        for letter in word:
            if out and (out[-1], letter) == first:
                out[-1] += letter
            else:
                out.append(letter)
        word = out
    return word


def test_byte_pairs_are_merged_in_order_and_give_every_text_back(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    whole = LINE + "Caf\u00e9 \u00b6\r\n"
    monkeypatch.setattr(text, "_books", lambda split: [20 * LINE] if split == "train" else [whole])
    for cached in (text.byte_pairs, text.pair_sizes):
        cached.cache_clear()
    try:
        tokenizer, sizes = text.byte_pairs(), text.pair_sizes()
        blocks = text.books_pairs(tasks.preset_of(tasks.task("lm_bpe"), "small", length=4, test=None), "test")
    finally:
        for cached in (text.byte_pairs, text.pair_sizes):
            cached.cache_clear()
    ids = blocks.tokens.tolist()
    assert tokenizer.decode(ids) == whole
    assert len(ids) < len(whole) / 2
    assert sizes[ids].sum() == len(whole.encode("latin-1"))
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    words = [list(word) for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(whole)]
    assert [tokenizer.id_to_token(i) for i in ids] == [s for word in words for s in merged(word, merges)]


def test_bits_are_counted_by_the_bytes_of_the_symbols() -> None:
    g = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 5, 8, generator=g), torch.tensor([[4, 5, 6, 7, 5], [4, 6, 6, -100, -100]])
    sizes = np.array([1, 2, 3, 7])
    task = dataclasses.replace(tasks.task("lm_bpe"), sizes=lambda: sizes)
    out = base.summary("causal", base.figures(task, logits, labels).numpy())
    pairs = [(i, t) for i in range(2) for t in range(1, 5) if labels[i, t] >= 0]
    nats = sum(-logits[i, t - 1].log_softmax(-1)[labels[i, t]].item() for i, t in pairs)
    counted = sum(sizes[labels[i, t] - base.SPECIAL] for i, t in pairs)
    assert counted == 2 + 3 + 7 + 2 + 3 + 3
    assert out["bits"] == pytest.approx(nats / math.log(2) / counted, rel=1e-5)
    assert out["perplexity"] == pytest.approx(math.exp(nats / len(pairs)), rel=1e-5)


@pytest.mark.model
def test_inference_pairs_keep_their_sentences_apart() -> None:
    needs("snli", "books")
    rows = tasks.dataset("nli", "test")
    assert isinstance(rows, base.Sequences)
    ids = rows.ids(0).tolist()
    assert ids.count(base.SEP) == 1
    words = text.wordpieces().decode(ids[1:], skip_special_tokens=True)
    assert "church choir" in words
    assert rows[0]["labels"] == text.LABELS.index("neutral")


@pytest.mark.model
def test_syllables_tested_on_were_never_heard() -> None:
    needs("syllables")
    pytest.importorskip("soundfile")
    parts = {s: tasks.dataset("speech", s) for s in base.SPLITS}
    assert sum(map(len, parts.values())) == 2_358  # type: ignore[arg-type]
    spelled = [{tuple(parts[s][i]["labels"].tolist()) for i in range(len(parts[s]))} for s in base.SPLITS]  # type: ignore[arg-type]
    assert not spelled[0] & spelled[2]
    assert len(speech.alphabet()) == registry.TASKS["speech"].classes
    frames = parts["test"][0]["input_features"]
    assert frames.shape[1] == speech.BANDS
    assert abs(frames.mean().item()) < 1e-3
