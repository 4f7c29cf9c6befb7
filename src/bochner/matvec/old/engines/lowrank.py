"""Low rank: `K ~ F F'` by randomly pivoted Cholesky, for smooth kernels.

Pivots are drawn in proportion to the diagonal of the residual R = K - F F' (Chen, Epperly, Tropp and Webber 2023), a
block at a time. R stays positive semidefinite, so that its trace, known exactly, bounds its norm: |R|_2 <= tr R, and
between queries and keys |R_qk|_2 <= sqrt(tr R_qq tr R_kk). Where queries are keys, the diagonal of R is added back: the
sparse part of the residual, which costs nothing and makes isolated points right.

The trace is many times the norm where the spectrum decays slowly. Gaussian vectors w give a sharper bound that holds
with probability 1 - 2^-q over q of them, |R|_2 <= 2 sqrt(2/pi) max |R w_i| (Halko, Martinsson and Tropp 2011, lemma
4.1), and a sharper one still when R is applied p times: |R|_2^p = |R...R|_2, in turn with its transpose. All of them
fail only if every w_i is nearly orthogonal to the first singular vector: one event, whatever p is.

Where the trace stays too large, `keep_remainder` evaluates R itself, keeps its larger entries as a sparse matrix and
knows what every row and column of the rest sums to: a deterministic bound again, `budget.Budget`'s.

The same factor solves: (F F' + ridge I)^-1 is a preconditioner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from ...._checks import spawn_seed
from ..budget import Budget, first_threshold
from ..csr import POSITION, CompressedRows, RowWriter
from ..problem import Problem
from ..tiles import PRECISE, Tiles, argument_error, extent, left, precise_frame, right
from .base import Applied, Engine, Likely
from .exact import precise_engine

BLOCK = 128  # pivots drawn at once
PROBES, POWERS = 10, 3  # Gaussian vectors of the sharper bound, and how often R is applied to them, at most
PROBED = 64  # rows of the residual that say how many of its entries would be kept
STRIP = 64  # rows of the residual evaluated at once
KEPT_SHARE = 0.05  # of the entries, at most: a sparse remainder must stay sparse
DEPENDENT = 1e-8  # pivots this close to the span of the others are left out


@dataclass(frozen=True)
class Factor:
    """F for the keys and for the queries (the same tensor if they are), and the diagonals of what is left."""

    keys: Tensor  # (s, r) float64
    queries: Tensor  # (n, r)
    left_keys: Tensor  # (s,)
    left_queries: Tensor  # (n,)

    @property
    def rank(self) -> int:
        return self.keys.shape[1]

    @property
    def trace_bound(self) -> float:
        """sqrt(tr R_qq tr R_kk), an upper bound on |R_qk|_2."""
        return math.sqrt(float(self.left_keys.sum()) * float(self.left_queries.sum()))


def pivoted_cholesky(problem: Problem, rank: int, tolerance: float) -> Factor:
    """At most `rank` columns, fewer once the trace bound is below `tolerance`. Cost: O((n + s) rank (d + rank))."""
    s, n = problem.keys.shape[0], problem.queries.shape[0]
    total = s if problem.symmetric else s + n
    points = problem.keys if problem.symmetric else torch.cat([problem.keys, problem.queries])
    frame = precise_frame(problem.kernel, points, points, problem.bandwidth)
    z = left(frame.place(points))
    tiles = Tiles(frame)
    generator = torch.Generator().manual_seed(spawn_seed(problem.seed, 2))
    factor = torch.zeros(total, min(rank, s), dtype=torch.float64)
    rest = torch.ones(total, dtype=torch.float64)
    r = 0
    while r < factor.shape[1]:
        keys, queries = rest[:s].sum(), rest[s:].sum() if total > s else rest[:s].sum()
        if math.sqrt(float(keys) * float(queries)) <= tolerance or float(keys) <= 0.0:
            break
        # 1. Pivots in proportion to what is left of the keys' diagonal.
        size = min(BLOCK, factor.shape[1] - r, int((rest[:s] > 0).sum()))
        pivots = torch.multinomial(rest[:s], size, generator=generator)
        # 2. Their columns of the residual, and an orthonormal basis of them in the kernel's inner product.
        part = right(frame.place(points[pivots]))
        columns = torch.cat([tiles(rows, part).clone() for rows in z.split(2048)])
        columns -= factor[:, :r] @ factor[pivots, :r].T
        values, vectors = torch.linalg.eigh(columns[pivots])
        good = values > DEPENDENT * max(1.0, float(values[-1]))
        columns = columns @ (vectors[:, good] / values[good].sqrt())
        # 3. Append them and take their squares off the diagonal.
        factor[:, r : r + columns.shape[1]] = columns
        rest = (rest - columns.square().sum(1)).clamp_min_(0.0)
        rest[pivots] = 0.0 if bool(good.all()) else rest[pivots]
        r += columns.shape[1]
        if columns.shape[1] == 0:
            break
    factor = factor[:, :r]
    if problem.symmetric:
        return Factor(factor, factor, rest, rest)
    return Factor(factor[:s], factor[s:], rest[:s], rest[s:])


class LowRankEngine(Engine):
    """Products by the factor: strictly linear, never checked one by one. `certain` if the trace bound is below eps."""

    name, linear = "lowrank", True
    dtype = torch.float64

    remainder: CompressedRows | None = None
    mirror: CompressedRows | None = None  # of the remainder, if queries are keys

    def __init__(self, problem: Problem, rank: int) -> None:
        self.problem = problem
        self.factor = pivoted_cholesky(problem, rank, 0.5 * problem.eps)
        self.bound = self.factor.trace_bound
        self.confidence, self.typical = 1.0, 0.0

    @property
    def certain(self) -> bool:  # type: ignore[override]
        lost = self._entries + self._rounding(max(self.problem.shape))
        return self.bound + lost <= self.problem.eps and self.confidence == 1.0

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        rows, columns = self.factor.queries, self.factor.keys
        if adjoint:
            rows, columns = columns, rows
        x = x.double()
        y = rows @ (columns.T @ x)
        if self.problem.symmetric:
            y += self.factor.left_keys[:, None] * x
        pairs = (rows.shape[0] + columns.shape[0]) * self.factor.rank
        if self.remainder is not None:
            back = adjoint and not self.problem.symmetric
            y += self._transposed @ x if back else self.remainder @ x
            if self.mirror is not None:
                y += self.mirror @ x
            pairs += self.remainder.entries
        return Applied(y, pairs)

    @cached_property
    def _transposed(self) -> CompressedRows:
        assert self.remainder is not None
        return self.remainder.transposed()

    # ---- the sparse remainder ---------------------------------------------------------------------------------------

    def keep_remainder(self, memory: int) -> bool:
        """Keep the entries of R = K - F F' that are too large to drop, if those are few; whether it was done.

        Cost: O(n s rank), in double precision; half if queries are keys.
        """
        problem, (n, s) = self.problem, self.problem.shape
        frame = precise_frame(problem.kernel, problem.queries, problem.keys, problem.bandwidth)
        tiles, w = Tiles(frame), right(frame.place(problem.keys))

        def residual(rows: Tensor, begin: int) -> Tensor:
            """Rows of R from a column onwards."""
            tile = tiles(left(frame.place(problem.queries[rows])), w[begin:])
            return tile.addmm_(self.factor.queries[rows], self.factor.keys[begin:].T, alpha=-1)

        some = torch.arange(0, n, max(1, n // PROBED))
        sizes = residual(some, 0).abs_()
        if problem.symmetric:
            sizes[torch.arange(some.numel()), some] = 0.0
        limit = 0.9 * problem.eps
        tau, share = first_threshold([sizes.sort(1).values], limit)
        if share > KEPT_SHARE or 2 * (POSITION + 8) * share * n * s > memory:
            return False
        lost = Budget(torch.zeros(n).double(), torch.zeros(s).double(), limit, problem.symmetric)
        written = RowWriter(np.dtype(np.float64), int(share * n * s))
        for lo in range(0, n, STRIP):
            rows = torch.arange(lo, min(lo + STRIP, n))
            begin = lo if problem.symmetric else 0
            tile = residual(rows, begin)
            if problem.symmetric:
                tile.triu_(1)
            position = torch.arange(begin, s)
            dropped = lost.drop(tile, lo, position, tau, signed=True)
            written.add(tile.numpy(), np.not_equal(tile.numpy(), dropped.numpy()), position.to(torch.int32).numpy())
        self.name = "lowrank+sparse"
        self.remainder = written.matrix((n, s))
        self.mirror = self.remainder.transposed() if problem.symmetric else None
        self.bound, self.confidence = min(lost.norm, self.factor.trace_bound), 1.0
        return True

    # ---- bounds -----------------------------------------------------------------------------------------------------

    def probe(self, target: float, powers: int = POWERS) -> float:
        """The sharper bound on |R|_2, with probability 1 - 2^-10: R is applied until it is below `target` or cannot be.

        Cost of an application: one exact product with 10 vectors in double precision.
        """
        generator = torch.Generator().manual_seed(spawn_seed(self.problem.seed, 3))
        x = torch.randn(self.problem.shape[1], PROBES, generator=generator, dtype=torch.float64)
        exact, length = precise_engine(self.problem), x.norm(dim=0)
        for power in range(1, powers + 1):
            back = power % 2 == 0
            x = exact.apply(x, back).value - self.apply(x, back).value
            before, length = length, x.norm(dim=0)
            sharper = (2.0 * math.sqrt(2.0 / math.pi) * float(length.max())) ** (1.0 / power) + self._entries
            if power == 1:
                self.typical = float((length / before).mean())
            if sharper < self.bound:
                self.bound, self.confidence = sharper, 1.0 - 2.0**-PROBES
            if self.bound <= target or float((length / before).max()) > target:  # the latter is a lower bound
                break
        return self.bound

    @cached_property
    def _entries(self) -> float:
        """What the rounding of kernel entries in double precision can add to a norm."""
        problem = self.problem
        frame = precise_frame(problem.kernel, problem.queries, problem.keys, problem.bandwidth)
        reach = 2 * max(extent(frame, problem.queries), extent(frame, problem.keys))
        lost = problem.kernel.change(argument_error(reach, problem.keys.shape[1], frame))
        return 10 * min(PRECISE, lost + 8 * torch.finfo(torch.float64).eps) * math.sqrt(math.prod(problem.shape))

    def _rounding(self, length: int) -> float:
        """Sums of n and of r terms in double precision, against |F| |F'| |x|."""
        return torch.finfo(torch.float64).eps * (length + self.factor.rank) * self._size

    @cached_property
    def _size(self) -> float:
        """|F| |F'|, and 1 for the rest of the diagonal."""
        return float(self.factor.queries.norm()) * float(self.factor.keys.norm()) + 1.0

    def error_bound(self, x: Tensor, adjoint: bool = False) -> tuple[Tensor, int]:
        known = self.bound if self.confidence == 1.0 else self.factor.trace_bound
        return (known + self._rounding(x.shape[0]) + self._entries) * x.double().norm(dim=0), 0

    def likely(self, x: Tensor) -> Likely:
        norm = float(x.double().norm())
        return Likely((self.bound + self._rounding(x.shape[0])) * norm, self.typical * norm, self.confidence)

    def describe(self) -> str:
        how = "" if self.confidence == 1.0 else f" with probability {self.confidence:.1%}"
        kept = "" if self.remainder is None else f" and {self.remainder.entries} entries of the rest"
        return f"Rank {self.factor.rank}{kept}; what is left out is at most {self.bound:.2g} |x|{how}, for every x."


def preconditioner(factor: Tensor, ridge: float) -> LinearOperator:
    """(F F' + ridge I)^-1 as an operator: x -> (x - F (ridge I + F'F)^-1 F' x) / ridge."""
    gram = factor.T @ factor
    gram.diagonal().add_(ridge)
    root = torch.linalg.cholesky(gram)

    def solve(x: np.ndarray) -> np.ndarray:
        b = torch.from_numpy(np.require(x, np.float64, ["C", "W"])).reshape(factor.shape[0], -1)
        y = (b - factor @ torch.cholesky_solve(factor.T @ b, root)) / ridge
        return y.numpy().reshape(x.shape)

    n = factor.shape[0]
    return LinearOperator((n, n), matvec=solve, rmatvec=solve, matmat=solve, rmatmat=solve, dtype=np.float64)
