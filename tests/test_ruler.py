"""RULER's tasks: the same from the same seed, as long as asked for, and answerable from the prompt."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from bochner import BochnerError
from bochner.tasks.ruler import COMMON, TASKS, Sample, ruler, score


def by_pieces(text: str) -> Any:
    """A tokenizer: words of at most four letters, and marks."""
    return SimpleNamespace(input_ids=re.findall(r"\w{1,4}|[^\w\s]", text))


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_samples(task: str) -> None:
    first, second, other = (ruler(task, by_pieces, 2000, 3, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert all(a.answers != b.answers for a, b in zip(first, other, strict=True))
    assert len({s.answers for s in first}) == 3


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [2000, 4000])
def test_prompts_are_as_long_as_asked_for(task: str, length: int) -> None:
    for sample in ruler(task, by_pieces, length, 3):
        assert 0.98 * length < len(by_pieces(sample.prompt).input_ids) <= length


@pytest.mark.parametrize("task", TASKS)
def test_longer_prompts_hide_the_same(task: str) -> None:
    short, long = (ruler(task, by_pieces, n, 2) for n in (2000, 4000))
    assert [s.answers for s in short] == [s.answers for s in long]


def solve(task: str, prompt: str) -> set[str]:
    """The answers, by reading."""
    text, question = prompt.split("\nQuestion: ")
    if task in ("needle", "multikey", "multivalue"):
        asked = re.search(r"for (\w+) in the text", question)[1]
        return set(re.findall(rf"secret number of {asked} is (\d+)", text))
    if task == "variables":
        value = re.search(r"the value (\d+)", question)[1]
        having: set[str] = set()
        for name, given in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
            if given == value or given in having:
                having.add(name)
        return having
    body = text.split(". ", 2)[2] if task == "common_words" else text.split(". ", 3)[3]
    counted = Counter(re.findall(r"[a-z]+", body))
    return {w for w, _ in counted.most_common(COMMON if task == "common_words" else 3)}


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_prompt(task: str) -> None:
    for sample in ruler(task, by_pieces, 3000, 5):
        assert solve(task, sample.prompt) == set(sample.answers)


def test_multikey_prompts_have_other_needles() -> None:
    for sample in ruler("multikey", by_pieces, 1000, 5):
        numbers = re.findall(r"is (\d{7})\.", sample.prompt)
        assert len(numbers) == 4
        assert sample.answers[0] in numbers


def test_the_score_is_the_share_of_answers() -> None:
    sample = Sample("", ("12", "ABA"), 8)
    assert [score(sample, t) for t in ("12 and aba", "12", "no")] == [1.0, 0.5, 0.0]


def test_mistakes_get_a_sentence() -> None:
    with pytest.raises(BochnerError, match="RULER task 'qa'"):
        ruler("qa", by_pieces, 100)
    with pytest.raises(BochnerError, match=r"at least \d+ tokens, got 10"):
        ruler("needle", by_pieces, 10)
