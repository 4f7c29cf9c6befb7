"""The pictures of the page "How attention becomes linear", made by the library on a real head.

python experiments/pictures.py
"""

from __future__ import annotations

import torch
from _models import heads_of, tokenised
from _pictures import COLOURS, figure, save

from bochner import attention_matrix, feature_map, kernel_estimate
from bochner.data import paragraphs
from bochner.demo import load_minilm

LAYER, HEAD, WINDOW = 2, 4, 16


def kernel() -> None:
    """exp(x y) on a line as the product of random features, for two numbers of them."""
    fig, axes = figure(2, figsize=(9, 3.2), sharey=True)
    x = torch.linspace(-1.5, 1.5, 121, dtype=torch.float64)[:, None]
    y = torch.tensor([[1.0]], dtype=torch.float64)
    for ax, m in zip(axes, (8, 128), strict=True):
        phi = feature_map("positive", dim=1, num_features=m, num_heads=200, projection="iid", seed=0).double()
        estimates = kernel_estimate(phi, x.expand(200, -1, -1), y.expand(200, -1, -1))[..., 0]
        low, high = estimates.quantile(0.05, dim=0), estimates.quantile(0.95, dim=0)
        ax.fill_between(x[:, 0], low, high, color=COLOURS[0], alpha=0.25)
        ax.plot(x[:, 0], estimates[0], color=COLOURS[0])
        ax.plot(x[:, 0], (x * y).exp()[:, 0], color="black", linewidth=1)
        ax.set(xlabel="x", title=f"{m} features", ylim=(0, 8))
    axes[0].set_ylabel("exp(x y) at y = 1")
    axes[0].text(-1.4, 7, "black: the kernel; blue: one draw, and 90 % of all", fontsize=8)
    save(fig, "how_kernel")


def order() -> None:
    """The matrices of exact and of linear attention, to scale: 64 tokens, head size 10, 14 features."""
    from matplotlib.patches import Rectangle

    n, d, m = 64, 10, 14
    fig, axes = figure(2, figsize=(11, 2.9))
    exact = [("Q", n, d, 0), ("K'", d, n, 0), ("A = Q K'", n, n, 1), ("V", n, d, 0)]
    linear = [("psi(K)'", m, n, 2), ("V", n, d, 0), ("S", m, d, 1), ("phi(Q)", n, m, 2), ("S", m, d, 1)]
    signs = (("", "x", "=", "x"), ("", "x", "=", "then", "x"))
    titles = ("exact: a matrix of L x L numbers", "linear: sums over the keys first, m x d numbers")
    for ax, title, shapes, between in zip(axes, titles, (exact, linear), signs, strict=True):
        x = 0.0
        for (name, rows, columns, kind), sign in zip(shapes, between, strict=True):
            if sign:
                ax.text(x + (8 if len(sign) == 1 else 13), n / 2, sign, ha="center", va="center", fontsize=13)
                x += 16 if len(sign) == 1 else 26
            colour = (COLOURS[5], COLOURS[1], COLOURS[2])[kind]
            ax.add_patch(Rectangle((x, (n - rows) / 2), columns, rows, color=colour, alpha=0.55))
            ax.text(x + columns / 2, (n + rows) / 2 + 3, name, ha="center", fontsize=13)
            x += columns
        ax.set(xlim=(-2, max(x, 175)), ylim=(-2, n + 14), aspect="equal")
        ax.set_axis_off()
        ax.set_title(title, fontsize=14)
    save(fig, "how_order")


def head() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (1, 1, n, d) of one head on a held-out paragraph."""
    model, tokenizer = load_minilm()
    layer = heads_of(model, tokenised(tokenizer, paragraphs("heldout", 1), 96)[0])[LAYER]
    return layer.query[None, HEAD : HEAD + 1], layer.key[None, HEAD : HEAD + 1]


def matrices() -> None:
    """One head's attention: exact, by plain features, by calibrated ones, and with an exact window."""
    q, k = head()
    d = q.shape[-1]
    exact = torch.softmax(q @ k.mT * d**-0.5, -1)
    plain = feature_map("positive", dim=d, num_features=64, seed=0)
    fitted = feature_map("calibrated", dim=d, num_features=64, seed=0)
    fitted.calibrate_(q[0] * d**-0.25, k[0] * d**-0.25)
    by_kernel = attention_matrix(q, k, fitted)
    near = (torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])[None]).abs() < WINDOW
    # Exact inside the window, the kernel outside, one normaliser: in units of the kernel's own sums.
    scores = kernel_estimate(fitted, q * d**-0.25, k * d**-0.25)
    joint = torch.where(near, (q @ k.mT * d**-0.5).exp(), scores)
    joint = joint / joint.sum(-1, keepdim=True)
    shown = {
        "exact": exact,
        "64 positive features": attention_matrix(q, k, plain),
        "64 calibrated features": by_kernel,
        f"exact window of {WINDOW}, the rest calibrated": joint,
    }
    fig, axes = figure(4, figsize=(14, 4.5))
    for ax, (name, weights) in zip(axes, shown.items(), strict=True):
        ax.imshow(weights[0, 0].clamp(0, 1).sqrt(), cmap="Blues", vmin=0, vmax=0.6)
        error = float((weights - exact).norm() / exact.norm())
        ax.set_title(name if name == "exact" else f"{name}\nerror {error:.2f}", fontsize=12)
        ax.set(xticks=[], yticks=[])
    save(fig, "how_matrix")


if __name__ == "__main__":
    torch.set_num_threads(1)
    kernel()
    order()
    matrices()
