"""`KernelOperator`: the kernel matrix as a scipy linear operator, with its error stated."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from ..._checks import BochnerError, lookup, make_generator, one_of, positive_float, positive_int
from . import choose, storage
from .autograd import KernelProduct
from .certificate import Cost, Estimate, multiply, state
from .choose import METHODS, SMALL, Options
from .engines.base import Engine
from .engines.cells import CellsEngine
from .engines.exact import exact_engine
from .engines.lowrank import LowRankEngine, pivoted_cholesky, preconditioner
from .engines.paper import Constants
from .index import KeyIndex, assign, index_from_labels
from .inputs import OWNER, as_points, as_values, resolve_bandwidth
from .kernels import ALIASES, KERNELS
from .plan import Plan
from .problem import Problem

FLOORS = {torch.float32: 1e-6, torch.float64: 1e-13}


class KernelOperator(LinearOperator):
    """The matrix `K_ij = exp(-|q_i - k_j|^2 / (2 sigma^2))` as an operator: `y = K @ x` for any signed x.

    The contract is |Kx - y|_2 <= eps |x|_2. Where the geometry of the points allows it, it holds by construction, for
    every x (`certain`). Elsewhere every product is checked: columns that carry much of x are exact, the rest is
    compared with 1,024 exact hold-out rows (with all of up to 2,048) and repaired when they say otherwise: more pairs
    first, exact at last. A product beyond eps then stays unnoticed with probability below 1 - confidence.
    `matvec_with_certificate` states how large the error can be and how surely.

    Args:
        queries: (n, d) array, numpy or torch (on the CPU), float32 or float64; shared, not copied, where it can be:
            whoever changes it afterwards changes K without the operator's knowing.
        keys: (s, d); None means the queries, and then K is symmetric and so is the operator.
        bandwidth: sigma. Give this or `gamma` = 1 / (2 sigma^2). A tensor that requires a gradient receives one from
            products with tensors, as x does; after a step of an optimizer build a new operator: this one refuses.
        kernel: "gaussian", or "laplace" (= "matern12"), "matern32", "matern52", "student".
        eps: the error allowed, relative to |x|_2.
        method: "exact" tiles; "cells" near tiles and, where needed, blurred far cells (sparse or clustered kernels);
            "sparse" the near entries evaluated once and kept, for many products (strictly linear, never checked);
            "lowrank" a factor by randomly pivoted Cholesky, for smooth kernels (the same); "lowrank+sparse" with the
            larger entries of what the factor leaves;
            "paper" hashing and sampling; "features" random Fourier features; "auto" measures and chooses.
        seed: the operator is a deterministic function of its arguments.
        cells: number of key cells; None means about 2 sqrt(s).
        num_features: number of Fourier frequencies for method="features".
        adaptive: check and repair products that need it. False: strictly linear in x, unchecked.
        confidence: of the statement in a certificate.
        constants: of method="paper".
        products: how many products are expected; from 4 on, "auto" keeps what can be kept ("sparse", "lowrank").
        memory: bytes that kept entries, or a factor, may take while they are built.
        rank: at most, of the factor; None: as much as memory and time allow.
        progress: show a bar in the terminal during products; also an attribute that can be set later.

    Unbiased: exact, features (over seeds); paper up to the median. Linear in x and repeatable: exact, cells,
    features, except for products that needed exact columns or repair; paper is repeatable only.
    Cost: exact n s pairs (half if symmetric); cells the near pairs and at most n sqrt(s) far pairs; see `explain()`.
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
    _bandwidth: Tensor | None = None

    def __init__(
        self,
        queries: Any,
        keys: Any = None,
        *,
        bandwidth: float | Tensor | None = None,
        gamma: float | None = None,
        kernel: str = "gaussian",
        eps: float = 0.1,
        method: str = "auto",
        seed: int = 0,
        cells: int | None = None,
        num_features: int = 1024,
        adaptive: bool = True,
        confidence: float = 0.95,
        constants: Constants | None = None,
        products: int = 1,
        memory: int = 1 << 31,
        rank: int | None = None,
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
        positive_float(eps, "eps", OWNER)
        if eps < FLOORS[dtype]:
            remedy = "pass float64 points" if dtype == torch.float32 else "no dtype here is finer"
            raise BochnerError(
                f"The 'eps' of {OWNER} is {eps!r}, below what {dtype} can resolve ({FLOORS[dtype]:g}); {remedy}."
            )
        make_generator(seed)
        if seed is None:
            raise BochnerError(f"The 'seed' of {OWNER} must be an int: the operator has to be repeatable.")
        if not 0.5 <= confidence < 1:
            raise BochnerError(f"The 'confidence' of {OWNER} must be in [0.5, 1), got {confidence!r}.")
        points = points.to(dtype)
        self._problem = Problem(
            lookup(KERNELS, ALIASES.get(kernel, kernel), "kernel"),
            resolve_bandwidth(bandwidth, gamma),
            points,
            points if keys is None else other.to(dtype),
            keys is None,
            float(eps),
            float(confidence),
            seed,
        )
        self._options = Options(
            one_of(method, "method", OWNER, METHODS),
            None if cells is None else positive_int(cells, "cells", OWNER),
            positive_int(num_features, "num_features", OWNER),
            constants or Constants(),
            positive_int(products, "products", OWNER),
            positive_int(memory, "memory", OWNER),
            None if rank is None else positive_int(rank, "rank", OWNER),
        )
        self.adaptive = bool(adaptive)
        self._bandwidth = bandwidth if isinstance(bandwidth, Tensor) else None
        self._configure(None)

    def _configure(self, index: KeyIndex | None) -> None:
        """Build the engine for the present problem."""
        begun = time.perf_counter()
        choice = choose.choose(self._problem, self._options, index)
        self._install(choice.engine, choice.reason, choice.index)
        self._planned_keys = self.shape[1]
        self.build_seconds = time.perf_counter() - begun

    def _install(self, engine: Engine, reason: str, index: KeyIndex | None) -> None:
        numpy_dtype = np.float32 if self._problem.dtype == torch.float32 else np.float64
        super().__init__(np.dtype(numpy_dtype), self._problem.shape)
        self._engine, self.reason, self._index = engine, reason, index

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """The method in use; differs from the one asked for only if that was "auto"."""
        return self._engine.name

    @property
    def requested(self) -> str:
        return self._options.method

    @property
    def kernel(self) -> str:
        return self._problem.kernel.name

    @property
    def bandwidth(self) -> float:
        return self._problem.bandwidth

    @property
    def gamma(self) -> float:
        """1 / (2 bandwidth^2), scikit-learn's convention."""
        return 0.5 / self.bandwidth**2

    @property
    def eps(self) -> float:
        return self._problem.eps

    @property
    def seed(self) -> int:
        return self._problem.seed

    @property
    def confidence(self) -> float:
        return self._problem.confidence

    @property
    def symmetric(self) -> bool:
        """Whether the queries are the keys."""
        return self._problem.symmetric

    @property
    def queries(self) -> Tensor:
        return self._problem.queries

    @property
    def keys(self) -> Tensor:
        return self._problem.keys

    @property
    def certain(self) -> bool:
        """Whether the contract holds by construction, for every x; otherwise products are checked one by one."""
        return self._engine.certain

    @property
    def plan(self) -> Plan | None:
        """Which blocks of cells are evaluated, if the method has a plan."""
        return getattr(self._engine, "plan", None)

    def explain(self) -> str:
        """What was chosen, why, and what it costs, in words."""
        n, s = self.shape
        lines = [
            f"{n} x {s} {self.kernel} kernel {self._problem.kernel.formula}, bandwidth {self.bandwidth:.6g} "
            f"(gamma {self.gamma:.6g}), eps {self.eps:g}.",
            f"Method: {self.method} ({self.reason}). Built in {self.build_seconds:.2g} s.",
            self._engine.describe(),
        ]
        return "\n".join(line for line in lines if line)

    def __repr__(self) -> str:
        kernel = "" if self.kernel == "gaussian" else f"kernel={self.kernel!r}, "
        return (
            f"KernelOperator(shape={self.shape}, {kernel}bandwidth={self.bandwidth:.6g}, gamma={self.gamma:.6g}, "
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
        return self if self.symmetric and self.method != "paper" else super()._adjoint()

    def _transpose(self) -> LinearOperator:
        return self._adjoint()

    def _public(self, x: Any, adjoint: bool, columns: bool) -> Any:
        self._refuse_stale()
        learns = self._bandwidth is not None and self._bandwidth.requires_grad
        if isinstance(x, Tensor) and torch.is_grad_enabled() and (x.requires_grad or learns):
            return KernelProduct.apply(
                x,
                self._bandwidth,
                lambda v: self._product(v, adjoint, columns),
                lambda g: self._product(g, not adjoint, columns),
                lambda v: self._slope(v, adjoint, columns) / self.bandwidth,
            )
        return self._product(x, adjoint, columns)

    def _refuse_stale(self) -> None:
        """Plans and factors are those of the bandwidth at building: one that an optimizer has moved since is another K.

        By value, not by version: `.data` changes a tensor without a trace.
        """
        if self._bandwidth is not None and self._bandwidth.item() != self.bandwidth:
            raise BochnerError(
                f"The 'bandwidth' of this {OWNER} was {self.bandwidth:.9g} when it was built, and its tensor is now "
                f"{self._bandwidth.item():.9g}; build a new {OWNER} after every change of it."
            )

    def _slope(self, x: Tensor, adjoint: bool, columns: bool) -> Tensor:
        """bandwidth * dK/dbandwidth x: by the near blocks if the plan is certain, else by exact tiles."""
        length = self.shape[0] if adjoint else self.shape[1]
        table, restore, _ = as_values(x, length, columns, self._problem.dtype)
        value = None if adjoint else self._engine.slope(table)
        if value is None:
            problem = self._problem
            if adjoint:
                problem = replace(problem, queries=problem.keys, keys=problem.queries)
            exact = exact_engine(problem)
            value = exact.slope(table.to(exact.dtype))
        return restore(value)

    def _product(self, x: Any, adjoint: bool, columns: bool) -> Any:
        length = self.shape[0] if adjoint else self.shape[1]
        table, restore, _ = as_values(x, length, columns, self._problem.dtype)
        if table.shape[1] == 0:
            return restore(table.new_zeros(sum(self.shape) - length, 0))
        self._engine.progress = self.progress
        return restore(multiply(self._problem, self._engine, table, adjoint, self.adaptive).value)

    def matvec_with_certificate(self, x: Any) -> Estimate:
        """`K x` for one x of shape (s,), with a statement about |Kx - y|_2.

        Tries the deterministic bound, then the guarantee at `confidence`, and states the strongest one that is
        within eps |x|; otherwise the estimate. If even the estimate misses eps, the product is repaired first.
        Cost: about two products, and 1,024 exact rows if the engine is not certain.

        Example:
            >>> import torch, bochner.matvec as bm
            >>> points = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
            >>> K = bm.KernelOperator(points, bandwidth=1.0)
            >>> K.matvec_with_certificate(torch.ones(300)).kind
            'deterministic'
        """
        self._refuse_stale()
        begun = time.perf_counter()
        table, restore, scale = as_values(x, self.shape[1], False, self._problem.dtype)
        self._engine.progress = self.progress
        checked = multiply(self._problem, self._engine, table, False, check=True)
        said = state(self._problem, self._engine, table, checked)
        factor = float(scale)
        # Beyond relative rounding: an answer near the end of its dtype is rounded to a multiple of the last number.
        norm = float(table.norm()) * factor
        last = math.sqrt(self.shape[0]) * float(np.finfo(self.dtype).smallest_subnormal) if norm else 0.0
        return Estimate(
            value=restore(checked.value),
            error=said.error * factor,
            bound=said.bound * factor + last,
            confidence=1.0 if said.kind == "deterministic" else self.confidence,
            kind=said.kind,
            cost=Cost(checked.pairs, math.prod(self.shape), time.perf_counter() - begun, tuple(checked.repairs)),
            method=self.method,
            eps=self.eps,
            norm_x=norm,
            deterministic_bound=said.deterministic * factor + last,
            hold_out_rows=said.rows,
        )

    def materialize(self, *, memory: int | None = None) -> KernelOperator:
        """The same operator made ready for many products (cg, eigsh): near entries, or a factor, are kept.

        Strictly linear. Returns this operator if its method has nothing to keep, or if that would take more than
        `memory` bytes.

        Example:
            >>> import numpy as np, bochner.matvec as bm
            >>> points = np.arange(6000.0)[:, None]
            >>> K = bm.KernelOperator(points, bandwidth=0.5, eps=1e-6).materialize()
            >>> K.method
            'sparse'
        """
        engine = self._engine
        begun = time.perf_counter()
        other = object.__new__(KernelOperator)
        other.__dict__.update(self.__dict__)
        if memory is not None:
            other._options = replace(self._options, memory=positive_int(memory, "memory", "materialize"))
        choice = choose.kept(self._problem, other._options, choose.Choice(engine, self.reason, self._index))
        if choice.engine is engine:
            return self
        other._install(choice.engine, choice.reason, choice.index)
        other.build_seconds = time.perf_counter() - begun
        return other

    def preconditioner(self, ridge: float, *, rank: int | None = None) -> LinearOperator:
        """An approximate inverse of K + ridge I from a low-rank factor of K, for conjugate gradients.

        `rank`: at most; None: that of the operator's own factor, or about 10 sqrt(n). Cost: O(n rank^2) once, O(n rank)
        per product.

        Example:
            >>> import numpy as np, bochner.matvec as bm
            >>> from scipy.sparse.linalg import aslinearoperator, cg
            >>> X = np.random.default_rng(0).normal(size=(600, 3))
            >>> K = bm.KernelOperator(X, bandwidth=2.0)
            >>> A = K + 1e-3 * aslinearoperator(np.eye(600))
            >>> solution, status = cg(A, X[:, 0], M=K.preconditioner(1e-3), maxiter=30)
            >>> status
            0
        """
        if not self.symmetric:
            raise BochnerError(f"The preconditioner of {OWNER} needs a symmetric kernel: build it with keys=None.")
        ridge = positive_float(ridge, "ridge", "preconditioner")
        engine, n = self._engine, self.shape[0]
        if isinstance(engine, LowRankEngine) and rank is None:
            return preconditioner(engine.factor.keys, ridge)
        most = min(n, 10 * math.isqrt(n)) if rank is None else positive_int(rank, "rank", "preconditioner")
        return preconditioner(pivoted_cholesky(self._problem, most, 1e-3 * ridge).keys, ridge)

    # ---- other queries, streaming, saving ---------------------------------------------------------------------------

    def share_index(self) -> KernelOperator:
        """Build the index of the keys now if the method may use one, so that `with_queries` need not; returns self."""
        if self._index is None and self.requested in ("auto", "cells", "sparse"):
            self._index = choose.make_index(self._problem, self._options)
        return self

    def with_queries(self, queries: Any, *, seed: int | None = None) -> KernelOperator:
        """The operator for other queries and the same keys; the index of the keys is shared, not rebuilt."""
        points = self._more(queries, "queries", "with_queries")
        if points.shape[0] * self.shape[1] > SMALL:
            self.share_index()
        other = object.__new__(KernelOperator)
        other.progress, other.adaptive, other._options = self.progress, self.adaptive, self._options
        other._bandwidth = self._bandwidth
        seed = self.seed if seed is None else seed
        other._problem = replace(self._problem, queries=points, symmetric=False, seed=seed)
        other._configure(self._index)
        return other

    def _more(self, points: Any, name: str, owner: str) -> Tensor:
        more = as_points(points, name).to(self._problem.dtype)
        if more.shape[1] != self.keys.shape[1]:
            raise BochnerError(
                f"The {name!r} of {OWNER}.{owner} must have {self.keys.shape[1]} columns, got {more.shape[1]}."
            )
        return more

    def add(self, keys: Any) -> None:
        """Append keys (and queries, if they are the same points) without rebuilding: x grows at its end.

        New keys join the nearest cell; a measured plan is measured again once the keys have grown by a quarter.
        Cost: O(m cells d) for m new keys, one copy of the points, and the plan.
        """
        points = self._more(keys, "keys", "add")
        self._update(torch.cat([self.keys, points]), torch.arange(self.shape[1]), points)

    def remove(self, ids: Sequence[int] | np.ndarray | Tensor) -> None:
        """Delete the keys at these positions, as `numpy.delete` does; without rebuilding."""
        drop = torch.from_numpy(np.array(ids)).long().reshape(-1)
        s = self.shape[1]
        if drop.numel() and (int(drop.min()) < 0 or int(drop.max()) >= s):
            raise BochnerError(f"The 'ids' of {OWNER}.remove must be in 0..{s - 1}, got {drop.tolist()[:5]}.")
        keep = torch.ones(s, dtype=torch.bool)
        keep[drop] = False
        if not bool(keep.any()):
            raise BochnerError(f"The 'ids' of {OWNER}.remove name every key; an operator needs at least one.")
        kept = keep.nonzero()[:, 0]
        self._update(self.keys[kept], kept, self.keys[:0])

    def _update(self, keys: Tensor, kept: Tensor, fresh: Tensor) -> None:
        """New keys: the kept old ones followed by fresh ones, in the same cells."""
        old, index = self._engine, self._index
        self._problem = replace(self._problem, keys=keys, queries=keys if self.symmetric else self.queries)
        if index is None:
            self._configure(None)
            return
        label = torch.cat([index.keys.caller_label[kept], assign(fresh, index.frame, index.centres)])
        updated, filled = index_from_labels(index.frame, keys, label, index.centres)
        grown = abs(keys.shape[0] - self._planned_keys) > 0.25 * self._planned_keys
        if grown or not isinstance(old, CellsEngine) or old.certain:
            self._configure(updated)
            return
        self._install(choose.replanned(self._problem, updated, old.plan, filled), self.reason, updated)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything needed to restore the operator, as plain arrays (settings as JSON text)."""
        return storage.to_arrays(
            storage.Stored(
                self._problem,
                self._options,
                self.adaptive,
                self.method,
                self.reason,
                self._planned_keys,
                self._engine,
                self._index,
            )
        )

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> KernelOperator:
        """The inverse of `to_arrays`: no clustering, no measuring, the same products."""
        begun = time.perf_counter()
        stored = storage.from_arrays(arrays)
        operator = object.__new__(cls)
        operator._problem, operator.adaptive = stored.problem, stored.adaptive
        operator._options = replace(stored.options, method=stored.method)
        if stored.engine is None:
            operator._configure(stored.index)
        else:
            operator._install(stored.engine, stored.reason, stored.index)
        operator._options, operator._planned_keys, operator.reason = stored.options, stored.planned_keys, stored.reason
        operator.build_seconds = time.perf_counter() - begun
        return operator

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
