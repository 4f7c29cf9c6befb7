"""`KernelOperator`: the Gaussian kernel matrix as a scipy linear operator, with its error stated."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from .._checks import BochnerError, make_generator, one_of, positive_float, positive_int
from . import cells as cells_module
from . import storage
from .certificate import Cost, Estimate, HoldOut, hold_out
from .engines import Applied, CellsEngine, Engine, ExactEngine, FeaturesEngine, PaperEngine
from .exact import COLUMNS, FLOOR, Tiles, exact_product, left, make_frame, right, rounding_error
from .features import frequencies
from .inputs import OWNER, as_points, real_dtype, resolve_bandwidth
from .paper import Constants
from .planning import Planned, make_plan

METHODS = ("auto", "exact", "cells", "paper", "features")
SMALL = 1 << 24  # pairs below which exact is simply fastest
HOLD_OUT_ROWS = 1024
WORTHWHILE = 0.5  # of the exact cost: above, approximating does not pay
FLOORS = {torch.float32: 1e-6, torch.float64: 1e-13}
RESOLUTION = 0.5  # of eps: m rows can miss a fraction 3/m of bad ones, so an estimate never claims less


class KernelOperator(LinearOperator):
    """The matrix `K_ij = exp(-|q_i - k_j|^2 / (2 sigma^2))` as an operator: `y = K @ x` for any signed x.

    The contract is |Kx - y|_2 <= eps |x|_2. Every product is checked against exact hold-out rows (1,024
    of them) and repaired when they say otherwise: more pairs first, exact at last. A few rows can hold nearly all of
    the error and be missed: a product beyond eps stays unnoticed with probability below 1 - confidence.
    `matvec_with_certificate` states how large the error can be and how surely.

    Args:
        queries: (n, d) array, numpy or torch, float32 or float64.
        keys: (s, d); None means the queries, and then K is symmetric and so is the operator.
        bandwidth: sigma. Give this or `gamma` = 1 / (2 sigma^2).
        eps: the error allowed, relative to |x|_2.
        method: "exact" tiles; "cells" near tiles and blurred far cells (sparse or clustered kernels); "paper"
            hashing and sampling; "features" random Fourier features (smooth kernels); "auto" measures and chooses.
        seed: the operator is a deterministic function of its arguments.
        cells: number of key cells; None means about 2 sqrt(s).
        num_features: number of Fourier frequencies for method="features".
        adaptive: check and repair products. False: strictly linear in x, unchecked.
        confidence: of the statement in a certificate.
        constants: of method="paper".
        progress: show a bar in the terminal during products; also an attribute that can be set later.

    Unbiased: exact, features (over seeds); paper up to the median. Linear in x and repeatable: exact, cells,
    features, except for products that needed repair; paper is repeatable only.
    Cost: exact n s pairs (half if symmetric); cells about n sqrt(s) far pairs and the near pairs; see `explain()`.
    Reference: kernel matrix-vector multiplication under sparsity assumptions, theorem 1.1, for the contract.

    Example:
        >>> import torch, bochner.matvec as bm
        >>> points = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
        >>> K = bm.KernelOperator(points, bandwidth=1.0)
        >>> y = K @ torch.ones(500)
        >>> bool((y >= 1).all())
        True
        >>> K.method
        'exact'
    """

    progress = False

    def __init__(
        self,
        queries: Any,
        keys: Any = None,
        *,
        bandwidth: float | None = None,
        gamma: float | None = None,
        eps: float = 0.1,
        method: str = "auto",
        seed: int = 0,
        cells: int | None = None,
        num_features: int = 1024,
        adaptive: bool = True,
        confidence: float = 0.95,
        constants: Constants | None = None,
        progress: bool = False,
    ) -> None:
        self.progress = bool(progress)
        points = as_points(queries, "queries")
        other = points if keys is None else as_points(keys, "keys")
        if points.shape[1] != other.shape[1]:
            raise BochnerError(
                f"The 'queries' and 'keys' of {OWNER} must have the same number of columns, got {points.shape[1]} "
                f"and {other.shape[1]}."
            )
        dtype = torch.promote_types(points.dtype, other.dtype)
        self._symmetric = keys is None
        self._queries = points.to(dtype)
        self._keys = self._queries if keys is None else other.to(dtype)
        self.bandwidth = resolve_bandwidth(bandwidth, gamma)
        self.eps = positive_float(eps, "eps", OWNER)
        if self.eps < FLOORS[dtype]:
            remedy = "pass float64 points" if dtype == torch.float32 else "no dtype here is finer"
            raise BochnerError(
                f"The 'eps' of {OWNER} is {eps!r}, below what {dtype} can resolve ({FLOORS[dtype]:g}); {remedy}."
            )
        self.requested = one_of(method, "method", OWNER, METHODS)
        make_generator(seed)
        if seed is None:
            raise BochnerError(f"The 'seed' of {OWNER} must be an int: the operator has to be repeatable.")
        self.seed = seed
        self.num_cells = None if cells is None else positive_int(cells, "cells", OWNER)
        self.num_features = positive_int(num_features, "num_features", OWNER)
        if not 0.5 <= confidence < 1:
            raise BochnerError(f"The 'confidence' of {OWNER} must be in [0.5, 1), got {confidence!r}.")
        self.confidence, self.adaptive = float(confidence), bool(adaptive)
        self.constants = constants or Constants()
        self._configure(None)

    # ---- choosing ---------------------------------------------------------------------------------------------

    def _configure(self, index: cells_module.KeyIndex | None) -> None:
        """Set shape and dtype, then build the engine that `method` asks for."""
        n, s = self._queries.shape[0], self._keys.shape[0]
        numpy_dtype = np.float32 if self._queries.dtype == torch.float32 else np.float64
        super().__init__(np.dtype(numpy_dtype), (n, s))
        begun = time.perf_counter()
        method = self.requested
        self._planned_keys = s
        self._planned: Planned | None = None
        self.reason = "as asked"
        self._index = index
        if method == "auto" and n * s <= SMALL:
            method, self.reason = "exact", f"{n} x {s} is small: exact is fastest"
        if method in ("auto", "cells"):
            self._engine: Engine = self._cells_engine(index)
            if method == "auto":
                self._engine = self._judge(self._engine)
        elif method == "exact":
            self._engine = self._exact_engine()
        elif method == "paper":
            frame = make_frame(self._keys, self.bandwidth, "float32" if self._single else "float64")
            self._engine = PaperEngine(
                frame,
                frame.place(self._queries),
                frame.place(self._keys),
                self.eps,
                self.constants,
                self.seed,
                self._symmetric,
            )
        else:
            frame = make_frame(self._keys, self.bandwidth, "float32" if self._single else "float64")
            omega = frequencies(frame.centre.numel(), self.num_features, make_generator(self.seed))
            self._engine = FeaturesEngine(frame.place(self._queries), frame.place(self._keys), omega)
        self.build_seconds = time.perf_counter() - begun

    @property
    def _single(self) -> bool:
        """Whether approximate methods may work in single precision: eps is far above its rounding."""
        return self._queries.dtype == torch.float32 or self.eps >= 1e-3

    @property
    def method(self) -> str:
        """The method in use; differs from the one asked for only if that was "auto"."""
        return self._engine.name

    @property
    def gamma(self) -> float:
        """1 / (2 bandwidth^2), scikit-learn's convention."""
        return 0.5 / self.bandwidth**2

    def _exact_engine(self, arithmetic: str | None = None) -> ExactEngine:
        tolerance = min(self.eps / 10, 1e-3)
        candidates = ["float32", "float64"] if self._queries.dtype == torch.float32 else ["float64"]
        for name in [arithmetic] if arithmetic else candidates:
            frame = make_frame(self._keys, self.bandwidth, name)
            z = frame.place(self._queries)
            w = z if self._symmetric else frame.place(self._keys)
            if arithmetic or max(rounding_error(z), rounding_error(w)) <= tolerance:
                engine = ExactEngine(frame, z, w, self._symmetric)
                engine.progress = self.progress
                return engine
        return self._exact_engine("difference")

    def _build_index(self, generator: torch.Generator) -> cells_module.KeyIndex:
        frame = make_frame(self._keys, self.bandwidth, "float32" if self._single else "float64")
        number = self.num_cells or max(1, math.ceil(2 * math.sqrt(self._keys.shape[0])))
        return cells_module.build_index(frame, frame.place(self._keys), number, generator)

    def share_index(self) -> KernelOperator:
        """Build the index of the keys now if the method may use one, so that `with_queries` need not; returns self."""
        if self._index is None and self.requested in ("auto", "cells"):
            self._index = self._build_index(make_generator(self.seed))
        return self

    def _cells_engine(self, index: cells_module.KeyIndex | None) -> CellsEngine:
        generator = make_generator(self.seed)
        index = self._index = index or self._build_index(generator)
        z = None if self._symmetric else index.frame.place(self._queries)
        self._planned = make_plan(index, z, self.eps, generator)
        return CellsEngine(index, self._planned)

    def _judge(self, engine: CellsEngine) -> Engine:
        """Keep the cells if they meet eps for less than half the exact cost; else exact. Says why."""
        planned = engine.planned
        n, s = self.shape
        pairs = planned.plan.pairs(engine.index) + n * engine.index.count.numel()
        exact_pairs = n * s / 2 if self._symmetric else n * s
        facts = (
            f"a row sums to {planned.mean_row_sum:.3g} on average, {planned.fraction:.1%} of the pairs near give a "
            f"predicted error of {planned.predicted:.2g} |x|"
        )
        if planned.met and pairs <= WORTHWHILE * exact_pairs:
            self.reason = f"sparse enough: {facts}"
            return engine
        self.reason = f"not sparse enough at this bandwidth and eps: {facts}"
        return self._exact_engine()

    def explain(self) -> str:
        """What was chosen, why, and what it costs, in words."""
        n, s = self.shape
        lines = [
            f"{n} x {s} Gaussian kernel, bandwidth {self.bandwidth:.6g} (gamma {self.gamma:.6g}), eps {self.eps:g}.",
            f"Method: {self.method} ({self.reason}). Built in {self.build_seconds:.2g} s.",
        ]
        if isinstance(self._engine, CellsEngine):
            plan, index = self._engine.plan, self._engine.index
            near = plan.pairs(index)
            far = n * index.count.numel()
            lines.append(
                f"{index.count.numel()} cells; a product evaluates {near} near and {far} far pairs, "
                f"{(near + far) / (n * s):.2%} of the matrix."
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"KernelOperator(shape={self.shape}, bandwidth={self.bandwidth:.6g}, gamma={self.gamma:.6g}, "
            f"eps={self.eps:g}, method={self.method!r}, dtype={self.dtype})"
        )

    # ---- products ---------------------------------------------------------------------------------------------

    def matvec(self, x: Any) -> Any:
        """`K x` for x of shape (s,) or (s, 1)."""
        return self._public(x, adjoint=False, columns=False)

    def rmatvec(self, x: Any) -> Any:
        """`K' x` for x of shape (n,) or (n, 1)."""
        return self._public(x, adjoint=True, columns=False)

    def matmat(self, X: Any) -> Any:
        """`K X` for X of shape (s, r): one pass for all columns."""
        return self._public(X, adjoint=False, columns=True)

    def rmatmat(self, X: Any) -> Any:
        """`K' X` for X of shape (n, r)."""
        return self._public(X, adjoint=True, columns=True)

    def dot(self, x: Any) -> Any:
        """`K x`, `K X`, or the composition with a scalar or another operator."""
        if isinstance(x, Tensor) and x.ndim > 0:
            return self.matvec(x) if x.ndim == 1 else self.matmat(x)
        return super().dot(x)

    def __matmul__(self, other: Any) -> Any:
        return self.dot(other) if isinstance(other, Tensor) else super().__matmul__(other)

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self.matvec(x)

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return self.matmat(X)

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self.rmatvec(x)

    def _rmatmat(self, X: np.ndarray) -> np.ndarray:
        return self.rmatmat(X)

    def _adjoint(self) -> LinearOperator:
        return self if self._symmetric and self.method != "paper" else super()._adjoint()

    def _transpose(self) -> LinearOperator:
        return self._adjoint()

    def _public(self, x: Any, adjoint: bool, columns: bool) -> Any:
        table, restore, _ = self._coerce(x, adjoint, columns)
        value, _, _ = self._solve(table, adjoint, certify=False)
        return restore(value)

    def _coerce(self, x: Any, adjoint: bool, columns: bool) -> tuple[Tensor, Any, float]:
        """x as a (length, r) tensor in the engine's dtype, the function that gives the answer its form, and the
        power of two by which x was divided: neither tiny nor huge x must meet the ends of single precision.
        """
        length = self.shape[0] if adjoint else self.shape[1]
        is_tensor = isinstance(x, Tensor)
        tensor = (
            x.detach().cpu()
            if is_tensor
            else torch.from_numpy(np.ascontiguousarray(np.asarray(x, dtype=real_dtype(x))))
        )
        shape = tuple(tensor.shape)
        valid = tensor.ndim == 2 if columns else tensor.ndim == 1 or (tensor.ndim == 2 and shape[1] == 1)
        if not valid or shape[0] != length:
            wanted = f"({length}, r)" if columns else f"({length},)"
            raise BochnerError(f"The 'x' of {OWNER} must have shape {wanted}, got {shape}.")
        if not bool(torch.isfinite(tensor).all()):
            where = tuple((~torch.isfinite(tensor)).nonzero()[0].tolist())
            raise BochnerError(f"The 'x' of {OWNER} must be finite, got {tensor[where].item()} at index {where}.")
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        factor = 2.0 ** (math.frexp(largest)[1] if largest > 0 else 0)
        table = (tensor.reshape(length, -1).double() / factor).to(self._work_dtype)

        def restore(value: Tensor) -> Any:
            out = (value.double() * factor).reshape(-1, *shape[1:]).to(self._queries.dtype)
            return out.to(x.device) if is_tensor else out.numpy()

        return table, restore, factor

    @property
    def _work_dtype(self) -> torch.dtype:
        engine = self._engine
        if isinstance(engine, CellsEngine):
            return engine.index.keys.dtype
        return engine.z.dtype  # type: ignore[attr-defined]

    def _exact_rows(self, x: Tensor, adjoint: bool, certify: bool) -> Any:
        """The function ids -> exact rows of the product: in float64, or as placed by the cells where that will do.

        Single precision will do for a mere check, when neither wide clouds nor long sums lose eps/20 to rounding.
        """
        engine = self._engine
        if isinstance(engine, CellsEngine) and not (certify or adjoint or engine.plan.local):
            lost = engine.plan.rounding + 16 * torch.finfo(x.dtype).eps
            if lost * engine.planned.mean_row_sum <= self.eps / 20:
                index, table = engine.index, x[engine.index.order]

                def single(ids: Tensor) -> Tensor:
                    z = left(index.frame.place(self._queries[ids]))
                    return exact_product(Tiles(index.frame), z, index.keys, table).double()

                return single
        rows, others = (self._keys, self._queries) if adjoint else (self._queries, self._keys)
        frame = make_frame(self._keys, self.bandwidth, "float64")
        x = x.double()

        def truth(ids: Tensor) -> Tensor:
            z = left(frame.place(rows[ids]))
            tiles = Tiles(frame)
            total = torch.zeros(ids.numel(), x.shape[1], dtype=torch.float64)
            for i in range(0, others.shape[0], 16 * COLUMNS):
                part = right(frame.place(others[i : i + 16 * COLUMNS]))
                total += exact_product(tiles, z, part, x[i : i + 16 * COLUMNS])
            return total

        return truth

    def _solve(self, x: Tensor, adjoint: bool, certify: bool) -> tuple[Tensor, Applied, list[Any]]:
        """Multiply; check on hold-out rows; repair columns whose upper estimate exceeds eps |x|.

        The confidence of the k-th attempt is halved each time, so that stopping at the first success keeps it.
        """
        engine = self._engine
        engine.progress = self.progress
        applied = engine.apply(x, adjoint)
        if engine.exact or not (self.adaptive or certify):
            return applied.value, applied, []
        limit = (self.eps * x.double().norm(dim=0)).square()
        truth = self._exact_rows(x, adjoint, certify)
        value, scores = applied.value, applied.scores
        fraction = self._planned.fraction if self._planned else 1.0
        repairs: list[Any] = []
        held: HoldOut | None = None
        for attempt in range(8):
            confidence = 1 - (1 - self.confidence) * 0.5 ** (attempt + 1)
            generator = torch.Generator().manual_seed(self.seed + 7919 * (attempt + 1))
            held = hold_out(value, truth, scores, HOLD_OUT_ROWS, confidence, generator)
            bad = (held.bound > limit).nonzero()[:, 0]
            if bad.numel() == 0:
                break
            if attempt == 0:
                continue  # one draw can look worse than it is: draw again before spending more
            fraction = max(0.01, 4 * fraction)
            better = None if fraction > WORTHWHILE or adjoint else engine.repair(x[:, bad], fraction)
            if better is None:
                repairs.append("exact")
                exact = self._exact_engine("float64").apply(x[:, bad].double(), adjoint)
                value = value.to(torch.float64)
                value[:, bad] = exact.value
                applied = Applied(value, applied.pairs + exact.pairs)
                break
            repairs.append(f"near {fraction:.1%}")
            value = value.clone()
            value[:, bad] = better.value
            scores = better.scores
            applied = Applied(value, applied.pairs + better.pairs, scores, better.far, better.plan)
        return value, applied, [*repairs, held]

    def matvec_with_certificate(self, x: Any) -> Estimate:
        """`K x` for one x of shape (s,), with a statement about |Kx - y|_2.

        Tries the deterministic bound, then the guarantee at `confidence`, and states the strongest one that is
        within eps |x|; otherwise the estimate. If even the estimate misses eps, the product is repaired first.
        Cost: one product, 1,024 exact rows, and n cells pairs for the deterministic bound.

        Example:
            >>> import torch, bochner.matvec as bm
            >>> points = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
            >>> K = bm.KernelOperator(points, bandwidth=1.0)
            >>> K.matvec_with_certificate(torch.ones(300)).kind
            'deterministic'
        """
        begun = time.perf_counter()
        table, restore, factor = self._coerce(x, adjoint=False, columns=False)
        value, applied, extra = self._solve(table, adjoint=False, certify=True)
        repairs = [r for r in extra if isinstance(r, str)]
        held = next((h for h in extra if isinstance(h, HoldOut)), None)
        norm = float(table.double().norm())
        limit = self.eps * norm
        pairs = applied.pairs
        if self._engine.exact or "exact" in repairs:
            if self._engine.exact:
                deterministic, more = self._rounding_bound(table)
                pairs += more
                if deterministic > limit and value.dtype == torch.float32:
                    engine = self._exact_engine("float64")
                    value = engine.apply(table.double()).value
                    repairs.append("float64")
                    deterministic = 2.0**-29 * deterministic + 2.0**-23 * float(value.norm())
            else:
                unit = torch.finfo(self._queries.dtype).eps  # the exact value is rounded once, to the output
                deterministic = (unit + 1e-12) * float(value.double().norm()) + 1e-12 * norm * math.sqrt(self.shape[0])
            kind, bound, stderr, rows = "deterministic", deterministic, 0.0, 0
        else:
            assert held is not None
            row_bound = self._engine.row_bound(table[:, 0], applied)
            stderr, kind = math.sqrt(float(held.mean)), "estimate"
            bound = max(math.sqrt(float(held.bound)), RESOLUTION * limit)
            deterministic, rows = math.inf, held.rows
            if row_bound is not None:
                rounding, more = self._rounding_of(table, applied)
                pairs += more
                deterministic = float(row_bound.double().norm()) + float(rounding.norm())
                if deterministic <= limit:
                    kind, bound = "deterministic", deterministic
                else:
                    again = hold_out(
                        value,
                        self._exact_rows(table, False, True),
                        [*applied.scores, row_bound],
                        HOLD_OUT_ROWS,
                        1 - (1 - self.confidence) / 2,
                        torch.Generator().manual_seed(self.seed + 7919 * (16 + len(repairs))),
                        row_bound.double() + rounding,
                    )
                    guaranteed = math.sqrt(float(again.guarantee))
                    if guaranteed <= limit:
                        kind, bound, stderr, rows = "guarantee", guaranteed, math.sqrt(float(again.mean)), again.rows
        cost = Cost(pairs, self.shape[0] * self.shape[1], time.perf_counter() - begun, tuple(repairs))
        return Estimate(
            restore(value),
            stderr * factor,
            bound * factor,
            1.0 if kind == "deterministic" else self.confidence,
            kind,
            cost,
            self.method,
            self.eps,
            norm * factor,
            deterministic * factor,
            rows,
        )

    def _rounding_bound(self, x: Tensor) -> tuple[float, int]:
        """Rounding of the exact product of one column: entry error times K|x|, and the sums."""
        engine = self._engine
        assert isinstance(engine, ExactEngine)
        absolute = engine.apply(x.abs())
        unit = torch.finfo(x.dtype).eps
        d = engine.z.shape[1] - 2
        entry = max(rounding_error(engine.z[:, :d]), rounding_error(engine.w[:, :d])) + 4 * unit
        if engine.frame.arithmetic == "difference":
            entry = 1e-12
        relative = entry + unit * (COLUMNS + self.shape[1] / COLUMNS)
        floor = 2.0**FLOOR * float(x.abs().sum()) * math.sqrt(self.shape[0])
        relative += torch.finfo(self._queries.dtype).eps  # the answer is rounded to the dtype of the points
        return relative * float(absolute.value.double().norm()) + floor, absolute.pairs

    def _rounding_of(self, x: Tensor, applied: Applied) -> tuple[Tensor, int]:
        """Rounding of each row of a cells product: measured entry error and summation, times K|x|."""
        assert applied.plan is not None
        absolute = self._engine.apply(x.abs())
        relative = applied.plan.rounding + 256 * torch.finfo(x.dtype).eps
        return relative * absolute.value[:, 0].double().abs() + 2.0**FLOOR * float(x.abs().sum()), absolute.pairs

    # ---- other queries, streaming, saving ---------------------------------------------------------------------

    def with_queries(self, queries: Any, *, seed: int | None = None) -> KernelOperator:
        """The operator for other queries and the same keys; the index of the keys is shared, not rebuilt."""
        points = as_points(queries, "queries")
        if points.shape[1] != self._keys.shape[1]:
            raise BochnerError(
                f"The 'queries' of {OWNER}.with_queries must have {self._keys.shape[1]} columns, got {points.shape[1]}."
            )
        if points.shape[0] * self._keys.shape[0] > SMALL:
            self.share_index()
        other = object.__new__(KernelOperator)
        other.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_engine", "_planned")})
        other._queries, other._symmetric = points.to(self._keys.dtype), False
        if seed is not None:
            other.seed = seed
        other._configure(self._index)
        return other

    def add(self, keys: Any) -> None:
        """Append keys (and queries, if they are the same points) without rebuilding: x grows at its end.

        New keys join the nearest cell, whose moments are updated; the plan is measured again once the keys have
        grown by a quarter. Cost: O(m cells d) for m new keys and one copy of the points.
        """
        points = as_points(keys, "keys").to(self._keys.dtype)
        if points.shape[1] != self._keys.shape[1]:
            raise BochnerError(
                f"The 'keys' of {OWNER}.add must have {self._keys.shape[1]} columns, got {points.shape[1]}."
            )
        self._update(torch.cat([self._keys, points]), torch.arange(self._keys.shape[0]), points)

    def remove(self, ids: Sequence[int] | np.ndarray | Tensor) -> None:
        """Delete the keys at these positions, as `numpy.delete` does; without rebuilding."""
        drop = torch.as_tensor(np.asarray(ids)).long().reshape(-1)
        s = self._keys.shape[0]
        if drop.numel() and (int(drop.min()) < 0 or int(drop.max()) >= s):
            raise BochnerError(f"The 'ids' of {OWNER}.remove must be in 0..{s - 1}, got {drop.tolist()[:5]}.")
        keep = torch.ones(s, dtype=torch.bool)
        keep[drop] = False
        if not bool(keep.any()):
            raise BochnerError(f"The 'ids' of {OWNER}.remove name every key; an operator needs at least one.")
        kept = keep.nonzero()[:, 0]
        self._update(self._keys[kept], kept, self._keys[:0])

    def _update(self, keys: Tensor, kept: Tensor, fresh: Tensor) -> None:
        """New keys: the kept old ones followed by fresh ones."""
        old = self._engine
        self._keys = keys
        if self._symmetric:
            self._queries = keys
        grown = abs(keys.shape[0] - self._planned_keys) > 0.25 * self._planned_keys
        if self._index is None:
            self._configure(None)
            return
        frame, centres = self._index.frame, self._index.centres
        label = torch.cat([self._index.caller_label[kept], cells_module.assign(frame.place(fresh), centres)])
        index, filled = cells_module.index_from_labels(frame, frame.place(keys), label, centres)
        if grown or not isinstance(old, CellsEngine):
            self._configure(index)
            return
        super().__init__(self.dtype, (self._queries.shape[0], keys.shape[0]))
        reuse = (old.plan.near[filled][:, filled], old.plan.beta)
        z = None if self._symmetric else index.frame.place(self._queries)
        planned = make_plan(index, z, self.eps, make_generator(self.seed), reuse)
        planned.score = old.planned.score[filled][:, filled]
        planned.predicted, planned.mean_row_sum = old.planned.predicted, old.planned.mean_row_sum
        self._planned, self._index = planned, index
        self._engine = CellsEngine(index, planned)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything needed to restore the operator, as plain arrays (settings as JSON text)."""
        return storage.to_arrays(self)

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> KernelOperator:
        """The inverse of `to_arrays`: no clustering, no measuring, the same products."""
        return storage.from_arrays(object.__new__(cls), arrays)

    def save(self, path: str | PathLike[str]) -> None:
        """Write an .npz file; nothing in it is pickled."""
        with open(path, "wb") as file:
            np.savez(file, **self.to_arrays())  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | PathLike[str]) -> KernelOperator:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls.from_arrays(dict(file))

    def __reduce__(self) -> Any:
        return (KernelOperator.from_arrays, (self.to_arrays(),))
