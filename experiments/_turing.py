"""A Turing machine compiled into a transformer: the proof of theorem 1 of *On Learning the Transformer Kernel*.

One encoder layer and two decoder layers with Gaussian attention, all weights written down from the transition table
(appendix A of the paper, after Perez et al. 2019). The decoder's i-th output holds the state of the machine, the symbol
under the head, the last move and the position of the head before step i. Departures from the paper: the state that
copies the input and the blank symbol have one-hot entries of their own instead of zeros, and the feed-forward layers
are written as one hidden layer of ReLU units each.

Attention is given as a function of queries, keys and values: hard (the paper's proof), the Gaussian kernel itself, or
random features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bochner import exact_attention, linear_attention
from bochner.maps import feature_map

BLANK, COPY = "_", "copy"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (d,), (s, d), (s, v) -> (v,)
Transition = tuple[str, str, int]  # symbol to write, next state, move


@dataclass(frozen=True)
class Machine:
    """Transitions {(state, symbol): (written, next state, -1 or 1)}; the head starts on the last input symbol."""

    transitions: dict[tuple[str, str], Transition]
    start: str
    final: frozenset[str]

    @property
    def states(self) -> list[str]:
        named = {q for q, _ in self.transitions} | {t[1] for t in self.transitions.values()}
        return [COPY, *sorted(named | {self.start} | self.final)]

    @property
    def symbols(self) -> list[str]:
        named = {s for _, s in self.transitions} | {t[0] for t in self.transitions.values()}
        return [BLANK, *sorted(named - {BLANK})]


class Configuration(NamedTuple):
    """What the machine is doing before a step."""

    state: str
    symbol: str
    position: int


def simulate(machine: Machine, word: str, steps: int) -> Iterator[Configuration]:
    """The machine itself, from its first step on the copied input: what the transformer must say."""
    tape = dict(enumerate(word))
    state, position = machine.start, len(word) - 1
    for _ in range(steps):
        symbol = tape.get(position, BLANK)
        yield Configuration(state, symbol, position)
        if state in machine.final:
            return
        tape[position], state, move = machine.transitions[state, symbol]
        position += move


def hard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean of the values at the nearest keys, eq. (29) and (30)."""
    distance = (q - k).square().sum(-1)
    nearest = distance == distance.min()
    return v[nearest].mean(0)


def gaussian(precision: float) -> Attention:
    """`exp(-precision |q - k|^2)`, normalised: softmax attention with the keys' lengths as one more coordinate."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        root = (2 * precision) ** 0.5
        query = torch.cat([root * q, q.new_ones(1)])
        keys = torch.cat([root * k, -precision * k.square().sum(-1, keepdim=True)], dim=-1)
        return exact_attention(query[None, None, None], keys[None, None], v[None, None], scale=1.0)[0, 0, 0]

    return attend


def features(precision: float, num_features: int, seed: int = 0) -> Attention:
    """The same kernel by random Fourier features, in linear attention."""
    phi = feature_map("trig", dim=2, num_features=num_features, kernel="gaussian", projection="iid", seed=seed).double()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        root = (2 * precision) ** 0.5
        rows = (root * q)[None, None, None], (root * k)[None, None], v[None, None]
        return linear_attention(*rows, phi, scale=1.0)[0, 0, 0]

    return attend


class Transformer:
    """Encoder and decoder whose weights are a machine; `run` yields the decoder's outputs, read as configurations."""

    def __init__(self, machine: Machine, attention: Attention = hard) -> None:
        self.machine, self.attention = machine, attention
        self.Q, self.S = machine.states, machine.symbols
        # Fields of the model's vectors, eq. (18): outputs; layer 1; layer 2; positions.
        sizes = {"q1": len(self.Q), "s1": len(self.S), "move": 1, "c": 1}
        sizes |= {"q2": len(self.Q), "s2": len(self.S), "move2": 1, "before": 1, "copied": len(self.S)}
        sizes |= {"found": len(self.S), "last": 1, "one": 1, "i": 1, "inverse": 1}
        self.at: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self.at[name] = slice(start, start + size)
            start += size
        self.width = start
        self.first, self.second = self._first_layer(), self._second_layer()

    def vector(self, **fields: Tensor | float) -> Tensor:
        v = torch.zeros(self.width, dtype=torch.float64)
        for name, value in fields.items():
            v[self.at[name]] = torch.as_tensor(value, dtype=torch.float64)
        return v

    def one_hot(self, names: list[str], name: str) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(names.index(name)), len(names)).double()

    def _first_layer(self) -> tuple[Tensor, Tensor, Tensor]:
        """W1, b, W2: one ReLU unit for every (state, symbol), which reads the table; c + move and the old fields."""
        rows, bias, columns = [], [], []
        for state in self.Q:
            for symbol in self.S:
                # In the copying state the symbol comes from the encoder, else from under the head.
                source = "copied" if state == COPY else "s1"
                rows.append(
                    self.vector(q1=self.one_hot(self.Q, state)) + self.vector(**{source: self.one_hot(self.S, symbol)})
                )
                bias.append(-1.0)
                written, after, move = self._transition(state, symbol)
                out = self.vector(q2=self.one_hot(self.Q, after), s2=self.one_hot(self.S, written), move2=float(move))
                columns.append(out + self.vector(c=float(move)))
        return torch.stack(rows), torch.tensor(bias, dtype=torch.float64), torch.stack(columns)

    def _transition(self, state: str, symbol: str) -> Transition:
        if state == COPY:
            return (symbol, COPY, 1) if symbol != BLANK else (BLANK, self.machine.start, -1)
        return self.machine.transitions.get((state, symbol), (symbol, state, 1))

    def _second_layer(self) -> tuple[Tensor, Tensor, Tensor]:
        """W1, b, W2: is the last visit the present step (then the cell is new, and blank), and what was written."""
        rows = [self.vector(last=1.0, i=-1.0)]  # u = relu(1 + last - i) is 1 where last = i, else 0
        bias = [1.0]
        columns = [self.vector(s1=self.one_hot(self.S, BLANK))]
        for symbol in self.S:  # relu(found - u), for which u is written out
            rows.append(self.vector(found=self.one_hot(self.S, symbol), last=-1.0, i=1.0))
            bias.append(-1.0)
            columns.append(self.vector(s1=self.one_hot(self.S, symbol)))
            rows.append(self.vector(last=-1.0, i=1.0))
            bias.append(-1.0)
            columns.append(-self.vector(s1=self.one_hot(self.S, symbol)))
        return torch.stack(rows), torch.tensor(bias, dtype=torch.float64), torch.stack(columns)

    @staticmethod
    def feed_forward(x: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        w1, b, w2 = weights
        return torch.relu(w1 @ x + b) @ w2

    def run(self, word: str, steps: int) -> Iterator[Configuration]:
        """The configurations after the input has been copied, until the machine halts or `steps` are made."""
        # 1. The encoder: keys (j, -1), values the symbols; the last cell is blank.
        tape = [*word, BLANK]
        places = torch.arange(len(tape), dtype=torch.float64)
        encoder_keys = torch.stack([places, -torch.ones_like(places)], dim=-1)
        encoder_values = torch.stack([self.one_hot(self.S, s) for s in tape])
        y = self.vector(q1=self.one_hot(self.Q, COPY), s1=self.one_hot(self.S, BLANK))
        keys, values = torch.empty(0, 2, dtype=torch.float64), torch.empty(0, len(self.S) + 1, dtype=torch.float64)
        made = 0
        for i in range(len(word) + 1 + steps):
            x = y + self.vector(one=1.0, i=float(i), inverse=1 / (i + 1))
            # 2. Layer 1: the input's symbol by cross-attention, then the transition.
            query = torch.stack([x[self.at["i"]], -x[self.at["one"]]], dim=-1)[0]
            x[self.at["copied"]] = self.attention(query, encoder_keys, encoder_values)
            out = self.feed_forward(x, self.first)
            z = out + self.vector(one=1.0, i=float(i), inverse=1 / (i + 1))
            z[self.at["c"]] += x[self.at["c"]]
            # 3. Layer 2: keys (c_j, 1/(j + 1)), c_j before the move; query (c_(i+1), 0); what was written last.
            position = z[self.at["c"]] - z[self.at["move2"]]
            keys = torch.cat([keys, torch.stack([position, z[self.at["inverse"]]], dim=-1)])
            values = torch.cat([values, torch.cat([z[self.at["s2"]], z[self.at["i"]]])[None]])
            query = torch.cat([z[self.at["c"]], torch.zeros(1, dtype=torch.float64)])
            found = self.attention(query, keys, values)
            z[self.at["found"]], z[self.at["last"]] = found[:-1], found[-1]
            y = self.feed_forward(z, self.second)
            y = y + self.vector(q1=z[self.at["q2"]], move=z[self.at["move2"]], c=z[self.at["c"]])
            configuration = self.read(y)
            if configuration.state != COPY:
                yield configuration
                made += 1
                if configuration.state in self.machine.final or made == steps:
                    return

    def read(self, y: Tensor) -> Configuration:
        """An output as a configuration: the largest entries, the rounded position."""
        state = self.Q[int(y[self.at["q1"]].argmax())]
        position = float(y[self.at["c"]])
        return Configuration(
            state,
            self.S[int(y[self.at["s1"]].argmax())],
            round(position) if abs(position) < 1e9 else -(10**9),  # random features can run away
        )


# Binary increment; the same word written backwards is a fixed point of nothing, so mistakes show.
INCREMENT = Machine(
    {
        ("carry", "1"): ("0", "carry", -1),
        ("carry", "0"): ("1", "done", 1),
        ("carry", BLANK): ("1", "done", 1),
    },
    "carry",
    frozenset({"done"}),
)
# Is the word a^n b^n, fenced by '<'? Marks an 'a' and a 'b' per round: visits every cell many times.
BALANCED = Machine(
    {
        ("end", "b"): ("x", "left", -1),
        ("end", "x"): ("x", "end", -1),
        ("end", "<"): ("<", "yes", 1),
        ("end", "a"): ("a", "no", 1),
        ("left", "b"): ("b", "left", -1),
        ("left", "a"): ("a", "left", -1),
        ("left", "x"): ("x", "left", -1),
        ("left", "<"): ("<", "first", 1),
        ("first", "x"): ("x", "first", 1),
        ("first", "a"): ("x", "right", 1),
        ("first", "b"): ("b", "no", 1),
        ("first", BLANK): (BLANK, "no", -1),
        ("right", "a"): ("a", "right", 1),
        ("right", "b"): ("b", "right", 1),
        ("right", "x"): ("x", "right", 1),
        ("right", BLANK): (BLANK, "end", -1),
    },
    "end",
    frozenset({"yes", "no"}),
)
MACHINES = {"increment": (INCREMENT, "10111"), "balanced": (BALANCED, "<aaabbb"), "not balanced": (BALANCED, "<aabbb")}
