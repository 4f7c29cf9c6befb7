"""A Performer in plain PyTorch: it learns to repeat what it read, and then does so in constant memory.

python examples/performer.py [STEPS]
"""

import sys

import torch
from torch import Tensor, nn

from bochner.nn import Attention, LayerOptions, Performer, parameter_groups

LENGTH, SYMBOLS = 32, 16


def rows(count: int) -> Tensor:
    """Random symbols, and the same symbols again."""
    return torch.randint(SYMBOLS, (count, LENGTH)).repeat(1, 2)


def make() -> Performer:
    options = LayerOptions(hidden=128, local_heads=2, local_window=4)  # two of four heads see their neighbours only
    how = {"attention": Attention("positive", 64), "positions": 2 * LENGTH, "options": options}
    return Performer(SYMBOLS, 64, 4, decoder_layers=2, **how)


def main(steps: int = 300) -> list[float]:
    torch.manual_seed(0)
    model, losses = make(), []
    optimizer = torch.optim.AdamW(parameter_groups(model, 3e-3, weight_decay=0.01))
    for step in range(steps):
        ids = rows(16)
        logits = model(ids[:, :-1])[:, LENGTH - 1 :]  # the second half can be known
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, LENGTH:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step:4d}: loss {losses[-1]:.3f}")
    ids, model = rows(8), model.eval()
    repeated = model.generate(ids[:, : LENGTH + 1], LENGTH - 1)
    right = (repeated == ids)[:, LENGTH + 1 :].float().mean()
    _, state = model.step(ids, model.start())
    print(f"generated: {right:.0%} of the symbols right, from a state of {state.nbytes / len(ids) / 1000:.0f} kB a row")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
