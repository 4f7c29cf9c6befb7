"""The frequencies w: m random directions in R^d, one class per law.

Every projection draws on the CPU in float64 from a seed and is then cast, so that one seed gives one projection on
every device and in every dtype. `projection(x)` is `x @ matrix().T`. The last two laws apply it without the matrix
where d is at least `LONG`: that serves maps of plain products, such as `trig`. Exponential maps ask for the matrix.

| name         | rows                                      | marginal law of a row | projection(x) |
|--------------|-------------------------------------------|-----------------------|---------------|
| `iid`        | independent                               | N(0, I), exactly      | O(m d)        |
| `orthogonal` | Haar blocks, chi norms                    | N(0, I), exactly      | O(m d)        |
| `simplex`    | Haar-rotated simplex blocks, chi norms    | N(0, I), exactly      | O(m d)        |
| `halton`     | scrambled Halton points, normal quantile  | N(0, I), exactly      | O(m d)        |
| `sobol`      | scrambled Sobol points, normal quantile   | N(0, I), exactly      | O(m d)        |
| `givens`     | products of random rotations, chi norms   | N(0, I), nearly       | O(m d)        |
| `fastfood`   | S H G P H B blocks                        | N(0, I), exactly      | O(m log d)    |
| `hadamard`   | H D H D H D blocks, chi norms             | N(0, I), nearly       | O(m log d)    |
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from bochner._checks import BochnerError, lookup, make_generator, one_of, positive_int

LONG = 256  # from here on transforms of a vector are faster than its product with the matrix


class FullPrecisionModule(nn.Module):
    """A module whose floating-point state never drops below float32: `model.to(torch.bfloat16)` only moves it."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def keep(t: Tensor) -> Tensor:
            out = fn(t)
            if out.is_floating_point() and out.dtype not in (torch.float32, torch.float64):
                return t.to(device=out.device, dtype=torch.promote_types(t.dtype, torch.float32))
            return out

        return super()._apply(keep, recurse)


class DrawnModule(FullPrecisionModule):
    """A module with random parts: buffers, drawn by `_draw`, one head after another."""

    num_heads: int | None = None

    def redraw_(self, seed: int | None = None, *, generator: Generator | None = None) -> Any:
        """Draw new random parts in place; learned parameters and calibration stay."""
        with torch.no_grad():
            self._redraw(make_generator(seed, generator))
        return self

    def _redraw(self, g: Generator) -> None:
        for name, value in self._draw_heads(g).items():
            if name in self._buffers:
                getattr(self, name).copy_(value)
            elif name not in self._parameters:
                self.register_buffer(name, value.float() if value.is_floating_point() else value)

    def _draw_heads(self, g: Generator) -> dict[str, Tensor]:
        if self.num_heads is None:
            return self._draw(g)
        draws = [self._draw(g) for _ in range(self.num_heads)]
        return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        """The random parts of one head by name, drawn on the CPU in float64."""
        return {}


class Projection(DrawnModule):
    """Base of all projections: `num_features` (m) directions in R^`dim` (d), per head if `num_heads` is given.

    `norms`: `"chi"` gives each row the length of a Gaussian vector, `"fixed"` the length sqrt(d).
    """

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_heads: int | None = None,
        norms: str = "chi",
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        self.dim = positive_int(dim, "dim", owner)
        self.num_features = positive_int(num_features, "num_features", owner)
        self.num_heads = None if num_heads is None else positive_int(num_heads, "num_heads", owner)
        self.norms = one_of(norms, "norms", owner, ("chi", "fixed"))
        self._redraw(make_generator(seed, generator))

    def matrix(self) -> Tensor:
        """The frequencies as rows: (m, d), or (h, m, d) with heads."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x (..., n, d), with heads (..., h, n, d), to x @ matrix().T (..., n, m)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        return f"dim={self.dim}, num_features={self.num_features}{heads}"


class DenseProjection(Projection):
    """A projection kept as its matrix."""

    weight: Tensor

    def matrix(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype).mT

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        w = self._rows(g)
        if self.norms == "fixed":
            w = w * (math.sqrt(self.dim) / w.norm(dim=-1, keepdim=True))
        return {"weight": w}

    def _rows(self, g: Generator) -> Tensor:
        raise NotImplementedError


class IIDProjection(DenseProjection):
    """Independent Gaussian rows."""

    def _rows(self, g: Generator) -> Tensor:
        return gaussian(self.num_features, self.dim, g=g)


class OrthogonalProjection(DenseProjection):
    """Blocks of d orthogonal rows, each row marginally N(0, I): for positive features Theorem 2 of Performers."""

    def _rows(self, g: Generator) -> Tensor:
        return gaussian_blocks(self.num_features, self.dim, g=g)


class SimplexProjection(DenseProjection):
    """Rows towards the vertices of a randomly rotated simplex: pairwise angles beyond 90 degrees.

    Reid et al. 2023: of all fixed couplings of directions, the one with the smallest variance for positive features.
    """

    def _rows(self, g: Generator) -> Tensor:
        return gaussian_blocks(self.num_features, self.dim, g=g, directions=simplex_vertices(self.dim))


class HaltonProjection(DenseProjection):
    """Scrambled Halton points pushed through the normal quantile; each row is marginally N(0, I)."""

    def _rows(self, g: Generator) -> Tensor:
        from scipy.stats import qmc

        return normal_quantile(qmc.Halton(self.dim, scramble=True, seed=numpy_generator(g)).random(self.num_features))


class SobolProjection(DenseProjection):
    """Scrambled Sobol points, as `HaltonProjection`; balanced best when m is a power of two."""

    def _rows(self, g: Generator) -> Tensor:
        from scipy.stats import qmc

        sobol, m = qmc.Sobol(self.dim, scramble=True, bits=52, seed=numpy_generator(g)), self.num_features
        return normal_quantile(sobol.random_base2((m - 1).bit_length())[:m])


class GivensProjection(DenseProjection):
    """Random signs, then `2 ceil(log2 d) + 2` rounds of Givens rotations of random disjoint pairs by uniform angles.

    Rows exactly orthogonal, nearly Haar; the signs make both orientations reachable.
    """

    def _rows(self, g: Generator) -> Tensor:
        m, d = self.num_features, self.dim
        rounds, blocks, half = 2 * math.ceil(math.log2(d)) + 2, -(-m // d), d // 2
        orders = permutations(rounds * blocks, d, g).view(rounds, blocks, d)
        angles = 2 * math.pi * torch.rand(rounds, blocks, half, dtype=torch.float64, generator=g, device="cpu")
        x = torch.eye(d, dtype=torch.float64, device="cpu").unsqueeze(-2) * rademacher(blocks, d, g=g)
        for order, angle in zip(orders, angles, strict=True):
            u, v, rest = x.gather(-1, order.expand(x.shape)).split([half, half, d - 2 * half], dim=-1)
            c, s = angle.cos(), angle.sin()
            x = torch.cat([c * u - s * v, s * u + c * v, rest], dim=-1)
        return x.flatten(-2).mT[:m] * chi(m, dof=d, g=g)[:, None]


class StructuredProjection(Projection):
    """Blocks of p rows, p the power of two that holds d, drawn as the parts of a fast operator and a `scale` per row.

    A subclass gives `_parts(g)`, and `_rotate(x, parts)`, which takes (..., n, blocks, p) through the operator.
    """

    scale: Tensor

    @property
    def blocks(self) -> int:
        return -(-self.num_features // padded_dim(self.dim))

    def matrix(self) -> Tensor:
        return self._matrix(self.scale.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._transformed(x) if self.dim >= LONG else x @ self._matrix(x.dtype).mT

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        eye = torch.eye(self.dim, dtype=dtype, device=self.scale.device)
        return self._transformed(eye if self.num_heads is None else eye.expand(self.num_heads, -1, -1)).mT

    def _transformed(self, x: Tensor) -> Tensor:
        parts = {name: b if self.num_heads is None else b.unsqueeze(1) for name, b in self.named_buffers()}
        parts = {name: b.to(x.dtype) if b.is_floating_point() else b for name, b in parts.items()}
        return self._products(x, parts) * parts["scale"]

    def _products(self, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """x (..., n, d) times the unscaled rows, (..., n, m)."""
        x = in_blocks(x, self.blocks, padded_dim(self.dim))
        return self._rotate(x, parts).flatten(-2)[..., : self.num_features]

    def _rotate(self, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def _parts(self, g: Generator) -> dict[str, Tensor]:
        raise NotImplementedError

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        parts = self._parts(g)
        if self.norms == "chi":
            return parts
        eye = torch.eye(self.dim, dtype=torch.float64, device="cpu")
        while not (lengths := self._products(eye, parts).norm(dim=0)).all():
            parts = self._parts(g)  # a padded transform can have a row of zeros: draw again
        return {**parts, "scale": math.sqrt(self.dim) / lengths}


class HadamardProjection(StructuredProjection):
    """Three randomised Hadamard transforms `H D H D H D`: rows orthogonal for d a power of two, nearly Gaussian."""

    def _parts(self, g: Generator) -> dict[str, Tensor]:
        p = padded_dim(self.dim)
        signs = dict(zip(("signs_a", "signs_b", "signs_c"), rademacher(3, self.blocks, p, g=g), strict=True))
        # The rows of the plain transform are visited in random order, so that a truncated block has no fixed row.
        order = permutations(self.blocks, p, g)
        return {**signs, "order": order, "scale": chi(self.num_features, dof=p, g=g) * p**-1.5}

    def _rotate(self, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
        for name in ("signs_a", "signs_b", "signs_c"):
            x = hadamard_transform(x * parts[name])
        return x.gather(-1, parts["order"].expand(x.shape))


class FastfoodProjection(StructuredProjection):
    """`V = S H G P H B / sqrt(p)` (Le, Sarlos, Smola 2013) with chi row norms: each row exactly N(0, I).

    Row i is `(H_i * g) / |g|` turned by an orthogonal matrix, uniform on the sphere whatever p; rows of one block
    share g and are not independent.
    """

    def _parts(self, g: Generator) -> dict[str, Tensor]:
        p, blocks, m = padded_dim(self.dim), self.blocks, self.num_features
        gauss, order, row_norms = gaussian(blocks, p, g=g), permutations(blocks, p, g), chi(m, dof=p, g=g)
        scale = row_norms / (gauss.norm(dim=-1).repeat_interleave(p)[:m] * math.sqrt(p))
        return {"signs": rademacher(blocks, p, g=g), "gauss": gauss, "order": order, "scale": scale}

    def _rotate(self, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return hadamard_transform(mixed(x, parts["signs"], parts["order"]) * parts["gauss"])


def gaussian(*shape: int, g: Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=g, device="cpu")


def rademacher(*shape: int, g: Generator) -> Tensor:
    return torch.randint(2, shape, generator=g, device="cpu").to(torch.float64) * 2 - 1


def permutations(count: int, n: int, g: Generator) -> Tensor:
    return torch.stack([torch.randperm(n, generator=g, device="cpu") for _ in range(count)])


def some_seed(g: Generator) -> int:
    """A seed from a generator, for random parts that must not depend on what else is drawn from it."""
    return int(torch.randint(2**62, (), generator=g, device="cpu"))


def numpy_generator(g: Generator) -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**31, (), generator=g, device="cpu")))


def normal_quantile(u: np.ndarray) -> Tensor:
    """Points of the unit cube to normal ones."""
    return torch.special.ndtri(torch.from_numpy(np.clip(u, 1e-15, 1 - 1e-15)))


def chi(m: int, *, dof: int, g: Generator) -> Tensor:
    """Lengths of m independent Gaussian vectors in R^dof."""
    return gaussian(m, dof, g=g).norm(dim=-1)


def haar(d: int, g: Generator) -> Tensor:
    """A uniformly distributed orthogonal matrix: QR with the sign of R's diagonal fixed (Mezzadri 2007).

    Without it LAPACK's signs bias positive features.
    """
    q, r = torch.linalg.qr(gaussian(d, d, g=g))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def gaussian_blocks(m: int, d: int, *, g: Generator, directions: Tensor | None = None) -> Tensor:
    """m rows, each marginally N(0, I): blocks of d directions (orthogonal unless given), rotated, with chi lengths."""
    rotations = [haar(d, g) for _ in range(-(-m // d))]
    rows = torch.cat(rotations if directions is None else [directions @ r for r in rotations])[:m]
    return rows * chi(m, dof=d, g=g)[:, None]


def simplex_vertices(d: int) -> Tensor:
    """d unit vectors in R^d with pairwise inner products -1/(d-1), as rows: the basis less its mean."""
    if d == 1:
        return torch.ones(1, 1, dtype=torch.float64, device="cpu")
    eye = torch.eye(d, dtype=torch.float64, device="cpu")
    return (eye - 1 / d) * math.sqrt(d / (d - 1))


def padded_dim(d: int) -> int:
    """The least power of two that holds d coordinates."""
    return 1 << (d - 1).bit_length()


def hadamard_transform(x: Tensor) -> Tensor:
    """The unnormalised Walsh-Hadamard transform of the last axis, of p entries, a power of two: O(p log p).

    `H_(a b) = H_a (x) H_b`: products with matrices of at most 64 are faster than log2(p) passes over memory.
    """
    bits = x.shape[-1].bit_length() - 1
    if bits <= 6:
        return x @ sylvester(bits, x)
    left = sylvester(min(bits // 2, 6), x)
    return (left @ hadamard_transform(x.unflatten(-1, (len(left), -1)))).flatten(-2)


def sylvester(bits: int, like: Tensor) -> Tensor:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=like.dtype, device=like.device)
    return reduce(torch.kron, [two] * bits, two.new_ones(1, 1))


def in_blocks(x: Tensor, blocks: int, padded: int) -> Tensor:
    """(..., n, d) padded with zeros and repeated: (..., n, blocks, p)."""
    x = nn.functional.pad(x, (0, padded - x.shape[-1])).unsqueeze(-2)
    return x.expand(*x.shape[:-2], blocks, padded)


def mixed(x: Tensor, signs: Tensor, order: Tensor) -> Tensor:
    """`P H B x` of the last axis: signs B, the Hadamard transform, the permutation P. The first half of Fastfood."""
    x = hadamard_transform(x * signs)
    return x.gather(-1, order.expand(x.shape))


PROJECTIONS: dict[str, type[Projection]] = {
    "iid": IIDProjection,
    "orthogonal": OrthogonalProjection,
    "hadamard": HadamardProjection,
    "givens": GivensProjection,
    "simplex": SimplexProjection,
    "halton": HaltonProjection,
    "sobol": SobolProjection,
    "fastfood": FastfoodProjection,
}


def make_projection(
    projection: str | Projection,
    dim: int,
    num_features: int,
    *,
    num_heads: int | None = None,
    norms: str = "chi",
    seed: int | None = 0,
    generator: Generator | None = None,
) -> Projection:
    """A projection by name, or the given instance after checking that it fits.

    >>> make_projection("orthogonal", dim=4, num_features=8, seed=0).matrix().shape
    torch.Size([8, 4])
    """
    if isinstance(projection, Projection):
        wanted = {"dim": dim, "num_features": num_features, "num_heads": num_heads, "norms": norms}
        if wrong := [name for name, value in wanted.items() if getattr(projection, name) != value]:
            got, need = (", ".join(f"{s}={o[s]!r}" for s in wrong) for o in (vars(projection), wanted))
            raise BochnerError(f"The 'projection' has {got}, but the feature map needs {need}; build it with that.")
        return projection
    cls = lookup(PROJECTIONS, projection, "projection")
    return cls(dim, num_features, num_heads=num_heads, norms=norms, seed=seed, generator=generator)
