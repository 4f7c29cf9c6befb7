"""A Performer in plain PyTorch: a model that learns to copy over a distance, with linear attention from the first step.

python examples/performer.py [STEPS]
"""

import sys

import torch
from torch import Tensor, nn

import bochner

LENGTH, SYMBOLS, WIDTH = 64, 16, 64


class Performer(nn.Module):
    """A decoder of two layers: token and position embeddings, linear attention, a head."""

    def __init__(self, feature_map: str = "positive", num_features: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        options = {"feature_map": feature_map, "num_features": num_features, "batch_first": True}
        self.attention = nn.ModuleList(bochner.nn.MultiheadAttention(WIDTH, 4, **options) for _ in range(2))
        self.hidden = nn.ModuleList(self.feedforward() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def feedforward(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for norm, attention, hidden in zip(self.norms, self.attention, self.hidden, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, is_causal=True)[0]
            x = x + hidden(x)
        return self.head(x)


def main(steps: int = 300) -> list[float]:
    torch.manual_seed(0)
    model, losses = Performer(), []
    optimizer = torch.optim.AdamW(bochner.nn.parameter_groups(model, 3e-3, map_lr=1e-2, weight_decay=0.01))
    schedule = bochner.nn.RedrawSchedule(model, every=100)  # new random features now and then
    for step in range(steps):
        first = torch.randint(SYMBOLS, (16, LENGTH))  # the second half of a row repeats it
        logits = model(first.repeat(1, 2)[:, :-1])[:, LENGTH - 1 :]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), first.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step:4d}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
