"""A small LSTM language model on the Brown corpus: words, model, training; for the experiments on softmax sampling."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from bochner import data

CLASSES, DIM, BATCH, LENGTH = 10_000, 64, 10, 20


def corpus(path: str = "") -> tuple[Tensor, Tensor]:
    """The words of the Brown corpus as numbers by descending frequency, to train on and to validate on.

    Every tenth text is held out. Words beyond the 9,999 most frequent of the training texts are one class, the first:
    it is the most frequent of all. `path`: a text file instead, words between blanks; its lines are dealt likewise.
    """
    if path:
        texts = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        files = sorted(p for p in data.fetch("brown", quiet=True).iterdir() if re.fullmatch(r"c[a-r]\d\d", p.name))
        texts = [[t.rpartition("/")[0].lower() for t in p.read_text(encoding="latin-1").split()] for p in files]
    train = list(itertools.chain(*(t for i, t in enumerate(texts) if i % 10)))
    held = list(itertools.chain(*(t for i, t in enumerate(texts) if i % 10 == 0)))
    number = {w: i for i, (w, _) in enumerate(collections.Counter(train).most_common(CLASSES - 1), start=1)}
    return tuple(torch.tensor([number.get(w, 0) for w in words]) for words in (train, held))  # type: ignore[return-value]


class Model(nn.Module):
    """Two LSTM layers between an embedding and the same embedding: `hidden . embedding_j + bias_j` are the logits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(CLASSES, DIM)
            nn.init.normal_(self.embedding.weight, std=0.1)
            self.lstm = nn.LSTM(DIM, 2 * DIM, num_layers=2, batch_first=True)
            self.out = nn.Linear(2 * DIM, DIM)
        self.bias = nn.Parameter(torch.zeros(CLASSES))
        self.temperature = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.temperature * hidden, self.embedding.weight.T)

    def forward(
        self, words: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(self.embedding(words), state)
        return self.out(y), (state[0].detach(), state[1].detach())


def batches(words: Tensor, batch: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (batch, LENGTH), each row going on where it stopped in the batch before."""
    rows = words[: len(words) // batch * batch].view(batch, -1)
    for i in range(0, rows.shape[1] - LENGTH - 1, LENGTH):
        yield rows[:, i : i + LENGTH], rows[:, i + 1 : i + LENGTH + 1]


def trained(steps: int, path: str = "", regularised: bool = False) -> tuple[Model, Tensor, Tensor]:
    """A model after some steps of the exact loss, the words it was trained on and those held out.

    `regularised`: eq. (105) of *Hybrid Random Features*, logits times 6, lengths of queries and keys held near 1.
    """
    words, held = corpus(path)
    model = Model(0)
    model.temperature = 6.0 if regularised else 1.0

    def loss(h: Tensor, t: Tensor) -> Tensor:
        entropy = nn.functional.cross_entropy(model.logits(h), t)
        if not regularised:
            return entropy
        lengths = (h.norm(dim=1), model.embedding.weight.norm(dim=1))
        return entropy + sum(2 * (x - 1).square().mean() for x in lengths)

    train(model, words, steps, loss)
    return model, words, held


@torch.no_grad()
def hidden_states(model: Model, words: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` pairs of hidden state and target."""
    parts, state, seen = [], None, 0
    for x, t in batches(words):
        h, state = model(x, state)
        parts.append((h.flatten(0, 1), t.flatten()))
        seen += t.numel()
        if seen >= count:
            break
    return torch.cat([p[0] for p in parts])[:count], torch.cat([p[1] for p in parts])[:count]


@torch.no_grad()
def validation_loss(model: Model, words: Tensor, count: int = 20_000) -> float:
    """The exact cross entropy of held-out words, in nats."""
    h, t = hidden_states(model, words, count)
    parts = [
        nn.functional.cross_entropy(model.logits(a), b, reduction="sum")
        for a, b in zip(h.split(500), t.split(500), strict=True)
    ]
    return float(sum(parts)) / len(t)  # type: ignore[arg-type]


def train(
    model: Model,
    words: Tensor,
    steps: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    after_step: Callable[[int, Tensor], None] = lambda step, hidden: None,
    *,
    every: int = 0,
    measure: Callable[[], float] | None = None,
    lr: float = 3e-3,
) -> list[float]:
    """Adam on `loss_of(hidden, target)`; `after_step(step, hidden)` follows each step. Returns what was measured."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    curve, state = [], None
    for step, (x, t) in enumerate(itertools.islice(itertools.cycle(batches(words)), steps), start=1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 2 * (1 - step / (steps + 1)))
        h, state = model(x, state)
        optimizer.zero_grad()
        loss_of(h.flatten(0, 1), t.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after_step(step, h.detach().flatten(0, 1))
        if measure is not None and every and step % every == 0:
            curve.append(measure())
    return curve
