"""A task and a feature map of your own in one training run: which symbol is the commonest?"""

import torch
from torch import Tensor

import bochner
from bochner.maps import Features, to_features
from bochner.tasks import SPECIAL, Preset, Task

SYMBOLS = 5


class Counted(torch.utils.data.Dataset):
    """Random symbols, one twice as likely as the others; it is the label."""

    def __init__(self, rows: int, length: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(SYMBOLS, (rows,), generator=g)
        weights = 1.0 + torch.nn.functional.one_hot(self.labels, SYMBOLS)
        self.symbols = torch.multinomial(weights, length, replacement=True, generator=g)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor | int]:
        return {"input_ids": self.symbols[i] + SPECIAL, "labels": int(self.labels[i])}  # ids below 4 are special


def load(preset: Preset, split: str) -> Counted:
    return Counted(4000 if split == "train" else 400, preset.length, seed=len(split))


def score(logits: Tensor, labels: Tensor) -> Tensor:
    """1 for the right symbol, one half for the second guess."""
    places = logits.argsort(dim=-1, descending=True)
    return (places[:, 0] == labels) + 0.5 * (places[:, 1] == labels)


class Squares(bochner.FeatureMap):
    """`phi(x) = x^2`, one feature for each coordinate."""

    positive = True

    def __init__(self, dim: int, num_features: int, *, num_heads: int | None = None) -> None:
        super().__init__(dim, dim, num_heads=num_heads)  # whatever number of features is asked for

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(x.square())


def main(steps: int = 200) -> float:
    sizes = Preset(40, 1, 2, 32, 32, 16, steps, learning_rate=3e-3, warmup=10, dropout=0.0, pooling="mean")
    task = Task("commonest", "the commonest symbol", "classify", SYMBOLS, SYMBOLS, load, sizes, metric=score)
    result = bochner.train(task, Squares, output="runs/commonest", resume=True)
    print(f"score {result['score']:.2f}; chance is 0.30")
    return float(result["score"])


if __name__ == "__main__":
    main()
