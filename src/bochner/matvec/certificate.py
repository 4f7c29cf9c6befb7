"""What is known about the error of one product. Every statement is deterministic: rounding included, luck excluded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """A product y and bounds on its error: |Kx - y|_2 <= `bound`, and |Kx - y|_i <= `row_bounds[i]` for every row.

    `relative` divides the bound by |x|_2, which is what `eps` limits. `pairs`: kernel entries evaluated, or
    numbers of the factor read, of `all_pairs` in the matrix.
    """

    value: Any
    bound: float
    row_bounds: Any
    norm_x: float
    eps: float
    method: str
    pairs: int
    all_pairs: int
    seconds: float

    @property
    def relative(self) -> float:
        return self.bound / self.norm_x if self.norm_x > 0 else 0.0

    @property
    def met(self) -> bool:
        """Whether the bound is within eps |x|."""
        return self.bound <= self.eps * self.norm_x

    @property
    def statement(self) -> str:
        return (
            f"|Kx - y| <= {self.bound:.3g} = {self.relative:.3g} |x|, and no row is off by more than "
            f"{float(self.row_bounds.max()):.3g}: deterministically, rounding included."
        )

    def __str__(self) -> str:
        share = self.pairs / max(1, self.all_pairs)
        return f"{self.statement} {self.method}: {share:.1%} of the pairs, {self.seconds:.3g} s."
