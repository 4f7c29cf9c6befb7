"""The remark of section 2.1 of *Data Mining Problems*: iterated Bernstein operators in place of the plain one.

The k-th iterate is `I - (I - B_n)^k` (Guan 2009, the paper's [3]); k = 1 is the Bernstein operator itself. Its
polynomial is again of degree n and again in Bernstein form, with coefficients `sum_{j<k} (I - B)^j f`, where B is
the operator on the n + 1 equal steps. The paper offers it for functions without a second derivative. Beside it stand
the fits of the library and, for GELU, the Taylor series of eq. (52).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, table
from _pictures import figure, log_ticks, save
from torch import Tensor

from bochner.papers.polyfit import PolynomialFit, activation_function, fit_polynomial

LOW, HIGH = -4.0, 4.0
DEGREES, ITERATIONS = (4, 8, 16, 32, 64), (1, 2, 3, 5, 10, 100)
FITS = ("chebyshev", "least_squares")
GRID = torch.linspace(LOW, HIGH, 1025, dtype=torch.float64)[:, None]


def operator(degree: int) -> Tensor:
    """`B_ij = C(n, j) t^j (1 - t)^(n - j)` at t = i / n: the Bernstein operator on its own steps."""
    t = torch.arange(degree + 1, dtype=torch.float64)[:, None] / degree
    j = torch.arange(degree + 1)
    ways = torch.tensor([float(math.comb(degree, int(i))) for i in j], dtype=torch.float64)
    return ways * t**j * (1 - t) ** (degree - j)


def iterated(activation: str, degree: int, iterations: int) -> PolynomialFit:
    """The iterate's polynomial on [LOW, HIGH]."""
    plain = fit_polynomial(activation, LOW, HIGH, degree, method="bernstein")
    term = coefficients = plain.coefficients
    for _ in range(iterations - 1):
        term = term - term @ operator(degree).mT
        coefficients = coefficients + term
    return plain._replace(coefficients=coefficients)


def error(activation: str, fit: Any) -> float:
    """The largest deviation on the interval."""
    return float((fit(GRID) - activation_function(activation)(GRID)).abs().max())


def taylor(degree: int) -> Any:
    """The Taylor polynomial of GELU, eq. (52)."""

    def value(t: Tensor) -> Tensor:
        total = t / 2
        for k in range((degree - 2) // 2 + 1):
            size = (-1) ** k / ((2 * k + 1) * 2**k * math.factorial(k) * math.sqrt(2 * math.pi))
            total = total + size * t ** (2 * k + 2)
        return total

    return value


@experiment(
    claim="Iterated Bernstein operators may take the place of the plain one where the function has no second "
    "derivative.",
    items=("000 Section 2.1, remark",),
    paper="no sizes; a reference",
    ours="GELU and ReLU on [-4, 4], degrees 4 to 64, 1 to 100 iterations",
    quick={"degrees": (16, 32, 64)},
)
def measure(store: Store, degrees: tuple[int, ...] = DEGREES) -> None:
    for name in ("gelu", "relu"):
        table = store.table(name)
        for k in ITERATIONS:
            table[f"bernstein x {k}"] = {str(n): error(name, iterated(name, n, k)) for n in degrees}
        for method in FITS:
            fits = {n: fit_polynomial(name, LOW, HIGH, n, method=method) for n in degrees}
            table[method] = {str(n): error(name, fit) for n, fit in fits.items()}
        print(name, table, flush=True)
    store.table("gelu")["taylor"] = {str(n): error("gelu", taylor(n)) for n in degrees}


def order(row: dict[str, float]) -> float:
    """The exponent of 1/n between the last two degrees."""
    (a, x), (b, y) = ((int(n), e) for n, e in list(row.items())[-2:])
    return math.log(x / y) / math.log(b / a)


def judge(found: Any) -> Said:
    last = list(found["gelu"]["chebyshev"])[-1]
    told, better, faster, beaten = {}, True, {}, 0
    for name in ("gelu", "relu"):
        rows = {k: found[name][f"bernstein x {k}"] for k in ITERATIONS}
        better &= all(rows[10][n] < rows[1][n] for n in rows[1])
        faster[name] = order(rows[10]) > order(rows[1]) + 0.5
        best = {n: min(row[n] for row in rows.values()) for n in rows[1]}
        beaten += sum(found[name]["chebyshev"][n] < best[n] for n in best)
        told[name.upper()] = {
            **{f"{k} times": f"{rows[k][last]:.1e}" for k in (1, 10, 100)},
            "Chebyshev": f"{found[name]['chebyshev'][last]:.1e}",
            "order in 1/n, once and 10 times": f"{order(rows[1]):.2f}, {order(rows[10]):.2f}",
        }
    cells = 2 * len(found["gelu"]["chebyshev"])
    why = "iterating lowers the error, but of ReLU, for which the paper offers it, not the order"
    return Said(
        f"Largest error at degree {last}, the operator iterated:"
        + table(told)
        + f"Chebyshev interpolation is below every iterate in {beaten} of {cells} cells.",
        graded(better and faster["relu"], better),
        why if better else "iterating does not lower the error everywhere",
    )


def draw(found: Any) -> None:
    fig, axes = figure(2, figsize=(10, 3.6), sharey=True)
    for ax, name in zip(axes, ("gelu", "relu"), strict=True):
        for label, row in found[name].items():
            style = "o-" if label.startswith("bernstein") else "s:"
            ax.plot([int(n) for n in row], [min(e, 10.0) for e in row.values()], style, ms=3, label=label)
        log_ticks(ax, [int(n) for n in row], base=2)
        ax.set(yscale="log", xlabel="degree", title=name.upper())
    axes[0].set_ylabel("largest error on [-4, 4]")
    axes[0].legend(fontsize=7, frameon=False)
    save(fig, "iterated_bernstein")
