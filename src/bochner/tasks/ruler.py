"""RULER's tasks that need no corpus: needles, chains of variables, common and frequent words, made from a seed.

Each task hides something in a text of a wanted number of tokens and asks for it at the end. The tasks and their
difficulty follow Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
section 3; the wording is our own, so that scores compare models and caches with each other, not with published tables.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bochner._checks import ArgumentError, lookup, positive_int

NOISE = (
    "The river is calm in the evening. ",
    "Rain fell on the hills all night. ",
    "The road leads back to the village. ",
    "Birds gather on the roof at noon. ",
    "Nobody has opened the window today. ",
)
COMMON, COMMON_TIMES, RARE_TIMES = 10, 30, 3  # common words, how often they come, and how often others do
FREQUENT, EXPONENT = 3, 2.0  # frequent words to name, and how fast frequencies fall
HOPS = 4  # variables that get their value from another one
KEYS = 4  # needles among which one is asked for
SYLLABLES = ("ba", "do", "fi", "gu", "ka", "lo", "mi", "nu", "pa", "ro", "si", "tu", "ve", "wo", "xa", "ze")


class Sample(NamedTuple):
    """A prompt, the answers that its continuation must contain, and how many tokens they may take."""

    prompt: str
    answers: tuple[str, ...]
    new_tokens: int


class Draft(NamedTuple):
    """A sample without its text: `body(n)` is the text with n units of noise."""

    before: str
    body: Callable[[int], str]
    after: str
    answers: tuple[str, ...]


def word(rng: random.Random) -> str:
    """A made-up word, so that no model knows it."""
    return "".join(rng.choice(SYLLABLES) for _ in range(3))


def words(rng: random.Random, count: int) -> list[str]:
    """Different made-up words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[word(rng)] = None
    return list(found)


def number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def scattered(rng: random.Random, lines: Sequence[str]) -> Callable[[int], str]:
    """Lines in this order at random places of n sentences of noise; the places are shares, whatever n is."""
    places = sorted(rng.random() for _ in lines)

    def body(n: int) -> str:
        units = [NOISE[i % len(NOISE)] for i in range(n)]
        for place, line in reversed(list(zip(places, lines, strict=True))):
            units.insert(int(place * (n + 1)), line)
        return "".join(units)

    return body


def needle(key: str, value: str) -> str:
    return f"The secret number of {key} is {value}. "


def needles(rng: random.Random, keys: int, values: int) -> Draft:
    """One key of several is asked for, which has one or several values."""
    names = words(rng, keys)
    pairs = [(name, number(rng)) for name in names for _ in range(values)]
    rng.shuffle(pairs)
    asked = rng.choice(names)
    answers = tuple(value for name, value in pairs if name == asked)
    what = "number is" if values == 1 else f"{values} numbers are"
    return Draft(
        "Some secret numbers are hidden in this text. Remember them. ",
        scattered(rng, [needle(*pair) for pair in pairs]),
        f"\nQuestion: what secret {what} given for {asked} in the text?\nAnswer: The secret {what[:-3]} of {asked} "
        + ("is" if values == 1 else "are"),
        answers,
    )


def variables(rng: random.Random) -> Draft:
    """A value passes from variable to variable; all that have it are asked for."""
    names = [w.upper() for w in words(rng, HOPS + 1)]
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}. "]
    lines += [f"VAR {new} = VAR {old}. " for old, new in pairwise(names)]
    return Draft(
        "Assignments of variables are hidden in this text. Follow them. ",
        scattered(rng, lines),
        f"\nQuestion: which {len(names)} variables have the value {value}?\n"
        f"Answer: The variables with the value {value} are",
        tuple(names),
    )


def common_words(rng: random.Random) -> Draft:
    """Of a numbered list of words, those that come ten times as often as the others."""
    seed = rng.random()
    common = words(rng, COMMON)

    def body(n: int) -> str:
        own = random.Random(seed)
        others = [w for w in words(own, n + COMMON) if w not in common][:n]
        listed = common * COMMON_TIMES + others * RARE_TIMES
        own.shuffle(listed)
        return "".join(f"{i}. {w} " for i, w in enumerate(listed, start=1))

    return Draft(
        "This is a numbered list of words. Some of them come more often than the others. ",
        body,
        f"\nQuestion: what are the {COMMON} most common words of the list?\nAnswer: The most common words are",
        tuple(common),
    )


def frequent_words(rng: random.Random) -> Draft:
    """Of made-up words with frequencies as 1 / rank^2, the first three."""
    seed = rng.random()
    coded = words(rng, 400)
    share = [rank**-EXPONENT for rank in range(1, len(coded) + 1)]

    def body(n: int) -> str:
        own = random.Random(seed)
        # Shares, not draws: the order of the first words is certain.
        listed = [w for w, s in zip(coded, share, strict=True) for _ in range(max(1, round(n * s / sum(share))))]
        own.shuffle(listed)
        return "".join(f"{w} ... " for w in listed[: max(n, 1)])

    return Draft(
        "This is a coded text. Count its words. The dots mean nothing. ",
        body,
        f"\nQuestion: what are the {FREQUENT} most frequent words of the coded text?\n"
        f"Answer: The {FREQUENT} most frequent words are",
        tuple(coded[:FREQUENT]),
    )


TASKS: dict[str, tuple[Callable[[random.Random], Draft], int]] = {
    "needle": (lambda rng: needles(rng, 1, 1), 16),
    "multikey": (lambda rng: needles(rng, KEYS, 1), 16),
    "multivalue": (lambda rng: needles(rng, 1, KEYS), 64),
    "variables": (variables, 48),
    "common_words": (common_words, 96),
    "frequent_words": (frequent_words, 32),
}


def ruler(task: str, tokenizer: Any, length: int, samples: int = 10, *, seed: int = 0) -> list[Sample]:
    """Samples of a task with prompts of at most `length` tokens, as close to that as whole sentences allow.

    `task`: a name of `TASKS`. `tokenizer`: any callable that returns `input_ids`. The same seed gives the same samples;
    a sample hides the same at every length.

    >>> class Words:
    ...     def __call__(self, text):
    ...         return type("Encoded", (), {"input_ids": text.split()})
    >>> found = ruler("needle", Words(), 200, samples=1)[0]
    >>> found.answers[0] in found.prompt
    True
    """
    make, new_tokens = lookup(TASKS, task, "RULER task")
    positive_int(length, "length", "ruler")
    positive_int(samples, "samples", "ruler")
    made = []
    for index in range(samples):
        draft = make(random.Random(f"{task} {seed} {index}"))
        made.append(Sample(fitted(draft, tokenizer, length), draft.answers, new_tokens))
    return made


def fitted(draft: Draft, tokenizer: Any, length: int) -> str:
    """The longest prompt of at most `length` tokens: bisection over the units of noise."""

    def prompt(n: int) -> str:
        return draft.before + draft.body(n) + draft.after

    def tokens(n: int) -> int:
        return len(tokenizer(prompt(n)).input_ids)

    least = tokens(0)
    if least > length:
        raise ArgumentError(f"The 'length' of this RULER task must be at least {least} tokens, got {length}.")
    low, high = 0, 1
    while tokens(high) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle)
    return prompt(low)


def score(sample: Sample, continuation: str) -> float:
    """The share of the answers that a continuation contains, whatever their case."""
    said = continuation.lower()
    return sum(answer.lower() in said for answer in sample.answers) / len(sample.answers)


def evaluate(model: Any, tokenizer: Any, samples: Sequence[Sample], **options: Any) -> list[float]:
    """The score of each sample, from the greedy continuation of a causal language model.

    `options` go to the model's `generate`.
    """
    found = []
    for sample in samples:
        inputs = tokenizer(sample.prompt, return_tensors="pt").to(model.device)
        settings = {"max_new_tokens": sample.new_tokens, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
        out = model.generate(**inputs, **{**settings, **options})
        found.append(score(sample, tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)))
    return found
