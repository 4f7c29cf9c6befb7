"""A Turing machine compiled into attention: every output of the transformer is the machine's configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))

from _turing import BALANCED, BLANK, INCREMENT, MACHINES, Machine, Transformer, gaussian, hard, simulate


@pytest.mark.parametrize("name", MACHINES)
def test_hard_attention_follows_the_machine_step_by_step(name: str) -> None:
    machine, word = MACHINES[name]
    truth = list(simulate(machine, word, 1000))
    assert truth[-1].state in machine.final
    assert list(Transformer(machine, hard).run(word, 1000)) == truth


@pytest.mark.parametrize("name", MACHINES)
def test_so_does_the_gaussian_kernel_where_its_precision_is_enough(name: str) -> None:
    machine, word = MACHINES[name]
    truth = list(simulate(machine, word, 1000))
    attention = gaussian(30.0 * (len(truth) + len(word)) ** 3)
    assert list(Transformer(machine, attention).run(word, 1000)) == truth
    loose = list(Transformer(machine, gaussian(0.1)).run(word, len(truth)))
    assert loose != truth  # the precision matters: the kernel then mixes visits


def test_the_machine_itself_decides_rightly() -> None:
    def last(machine: Machine, word: str) -> str:
        return list(simulate(machine, word, 1000))[-1].state

    for a in range(4):
        for b in range(4):
            assert last(BALANCED, "<" + "a" * a + "b" * b) == ("yes" if a == b else "no")


def test_the_increment_writes_the_next_number() -> None:
    tape = dict(enumerate("10111"))
    steps = list(Transformer(INCREMENT, hard).run("10111", 100))
    for now in steps[:-1]:
        tape[now.position] = INCREMENT.transitions[now.state, now.symbol][0]
    assert "".join(tape[i] for i in range(5)) == "11000"


def test_a_cell_that_was_never_visited_is_blank_and_one_that_was_is_what_was_written_last() -> None:
    runner = Machine({("go", "a"): ("a", "go", 1), ("go", BLANK): ("b", "go", 1)}, "go", frozenset({"never"}))
    seen = list(Transformer(runner, hard).run("aa", 6))
    assert [c.symbol for c in seen] == ["a", BLANK, BLANK, BLANK, BLANK, BLANK]
    swing = {
        ("l", "a"): ("b", "r", 1),
        ("r", BLANK): ("a", "l", -1),
        ("l", "b"): ("c", "r", 1),
        ("r", "a"): ("b", "l", -1),
    }
    swinger = Machine({**swing, ("l", "c"): ("a", "r", 1), ("r", "b"): ("c", "l", -1)}, "l", frozenset({"never"}))
    assert [c.symbol for c in Transformer(swinger, hard).run("a", 6)] == ["a", BLANK, "b", "a", "c", "b"]
