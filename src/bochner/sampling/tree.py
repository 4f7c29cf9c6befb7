"""A tree of feature sums: classes drawn from an estimated softmax in O(m log n)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from bochner._checks import BochnerError, accumulation_dtype, finite, positive_float, positive_int
from bochner.maps import FeatureMap, Features, MapLike, feature_map
from bochner.sampling.samplers import Sampler, check_classes, check_ids, check_rows

FAN = 8  # children of a node
BLOCK = 1 << 20  # numbers gathered at a time: they stay in cache
CALIBRATION_ROWS = 2048
ROOM = 30.0  # a class may grow by exp(30) beyond the largest at the last build before the scale is taken anew
BELOW_ONE = 1 - 1e-6  # rounding must not carry a random number past the last entry with any mass
ROWS = 1 << 16  # classes whose features are computed at a time


class FeatureTree(Sampler):
    """Classes drawn in proportion to an estimate of `exp(x . y_j + b_j)`, one branch after another.

    A leaf holds `leaf_size` classes, a node 8 children, and each the sum S of the features `psi(y_j) exp(b_j)` of the
    classes under it: `phi(x) . S` estimates their share of the partition function, and a draw goes down by these
    shares. In the leaf it takes the exact softmax (`leaf_size=1`: features to the last class, the method of the
    papers). Of signed features negative shares count as zero, and one draw in ten is uniform.

    Args:
        vectors, bias: y (n, d), of which the tree keeps a copy, and b (n,).
        feature_map: a name, a class or an instance for the softmax kernel; `num_features` m as there.
        leaf_size: classes in a leaf.
        normalize: a length to which x and y are brought for sampling alone, as appendix I of the paper does: another
            law with less variance.
        seed: of the feature map.

    Cost: a draw O(m log n + leaf_size d); `update_` of u classes O(u m (d leaf_size + log n)); memory n d for the
    vectors and about 1.15 n m / leaf_size for the sums.
    References: Blanc and Rendle 2018; Rawat et al. 2019; Choromanski et al. 2022, section 4.2.

    >>> g = torch.Generator().manual_seed(0)
    >>> tree = FeatureTree(torch.randn(1000, 16, generator=g) / 4, seed=0)
    >>> ids, log_prob = tree.draw(torch.randn(3, 16, generator=g), 5, generator=g)
    >>> ids.shape, bool((log_prob < 0).all())
    (torch.Size([3, 5]), True)
    """

    vectors: Tensor
    bias: Tensor
    order: Tensor
    place: Tensor

    def __init__(
        self,
        vectors: Tensor,
        bias: Tensor | None = None,
        *,
        feature_map: MapLike = "calibrated",
        num_features: int = 64,
        leaf_size: int = 16,
        normalize: float | None = None,
        seed: int = 0,
    ) -> None:
        owner = type(self).__name__
        y, b = check_classes(vectors, bias, owner)
        super().__init__(len(y))
        self.leaf_size = positive_int(leaf_size, "leaf_size", owner)
        self.normalize = None if normalize is None else positive_float(normalize, "normalize", owner)
        self.phi = _softmax_map(feature_map, y.shape[1], num_features, seed)
        self.uniform = 0.0 if self.phi.positive else 0.1  # the share of uniform draws
        self._prepared: Callable[[Tensor], Features] | None = None  # the map of queries, as it was at the last build
        self._group(y, b)
        # The sums are those of the map: one that was read from a file makes new ones.
        self.register_load_state_dict_post_hook(FeatureTree._build)

    @torch.no_grad()
    def calibrate_(self, queries: Tensor) -> FeatureTree:
        """Fit the statistics of the map to queries (b, d) like those to come, and to the classes; builds anew."""
        queries = self._check(queries)
        pick = torch.linspace(0, self.num_classes - 1, min(self.num_classes, CALIBRATION_ROWS)).long()
        self.phi.calibrate_(self._scaled(queries[:CALIBRATION_ROWS]), self._scaled(self.vectors[pick]))
        self._build()
        return self

    @torch.no_grad()
    def set_classes_(self, vectors: Tensor, bias: Tensor | None = None) -> FeatureTree:
        """New vectors of all classes, grouped anew: the tree is then what a new one would be, its map apart."""
        vectors, bias = check_rows(vectors, bias, tuple(self.vectors.shape), "set_classes_")
        self._group(vectors.to(self.vectors.dtype), self.bias[self.place] if bias is None else bias.to(self.bias.dtype))
        return self

    def _group(self, vectors: Tensor, bias: Tensor) -> None:
        """Put like classes next to each other, and build."""
        order = similar_order(vectors)
        for name, value in (
            ("order", order),  # the class at each place
            ("place", order.argsort()),
            ("vectors", vectors[order]),  # by place
            ("bias", bias[order]),
        ):
            self.register_buffer(name, value, persistent=False)
        self._build()

    @torch.no_grad()
    def update_(self, ids: Tensor, vectors: Tensor, bias: Tensor | None = None) -> FeatureTree:
        """New vectors of some classes: the sums on their paths are added up again, so that no rounding piles up."""
        check_ids(ids, self.num_classes, "update_")
        vectors, bias = check_rows(vectors, bias, (len(ids), self.vectors.shape[1]), "update_")
        if len(ids) == 0:
            return self
        place = self.place[ids]
        self.vectors[place] = vectors.to(self.vectors.dtype)
        if bias is not None:
            self.bias[place] = bias.to(self.bias.dtype)
        leaves = torch.unique(place // self.leaf_size)
        members = (leaves[:, None] * self.leaf_size + torch.arange(self.leaf_size)).flatten()
        sums, top = self._leaf_sums(members)
        if top > self._shift + ROOM:
            self._build()
            return self
        self._sums[0][leaves] = sums
        node = leaves
        for level in range(1, len(self._sums)):
            node = torch.unique(node // FAN)
            self._sums[level][node] = self._sums[level - 1].view(-1, FAN, sums.shape[1])[node].sum(1)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def _build(self, *_: object) -> None:
        """The sums of every level: leaves first, each level a multiple of FAN rows, the last the root's children."""
        self._prepared, n, size = None, self.num_classes, self.leaf_size
        self._shift = max(float(self._logs(place).max()) for place in torch.arange(n).split(ROWS))
        leaves = torch.arange(-(-n // size) * size).split(max(1, ROWS // size) * size)
        sums = _padded(torch.cat([self._leaf_sums(members)[0] for members in leaves]))
        self._sums = [sums]
        while len(sums) > FAN:
            sums = _padded(sums.view(-1, FAN, sums.shape[1]).sum(1))
            self._sums.append(sums)
        if not bool(sums.isfinite().all()):
            longest = float(self.vectors.abs().max())
            raise BochnerError(
                f"The 'vectors' of {type(self).__name__} have entries as large as {longest:.3g}, whose squares "
                "overflow; scale them down, or give 'normalize'."
            )

    def _logs(self, place: Tensor) -> Tensor:
        return self._key_features(self.vectors[place]).log_scale[:, 0] + self.bias[place]

    def _leaf_sums(self, members: Tensor) -> tuple[Tensor, float]:
        """The sums of whole leaves, given all their places (those beyond n are empty), and the largest log scale."""
        real = members < self.num_classes
        place = members.clamp(max=self.num_classes - 1)
        values, log_scale = self._key_features(self.vectors[place])
        logs = log_scale[:, 0] + self.bias[place]
        weight = torch.where(real, (logs - self._shift).exp(), 0.0)
        sums = (values * weight[:, None]).view(-1, self.leaf_size, values.shape[1]).sum(1)
        return sums.to(accumulation_dtype(self.vectors.dtype)), float(torch.where(real, logs, -math.inf).max())

    def _draw(self, x: Tensor, k: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        f = self._features(x).values
        u = torch.rand(len(self._sums) + 1, len(x), k, generator=generator, dtype=f.dtype).to(x.device)
        node, logs = torch.zeros(len(x), k, dtype=torch.long, device=x.device), torch.zeros_like(u[0])
        for level in reversed(range(len(self._sums))):
            child, log = choose(self._shares(level, node, f), u[level])
            node, logs = node * FAN + child, logs + log
        if self.leaf_size > 1:
            child, log = choose(self._leaf(node, x), u[-1])
            node, logs = node * self.leaf_size + child, logs + log
        if self.uniform > 0:
            other = torch.rand(len(x), k, generator=generator).to(x.device) < self.uniform
            anywhere = torch.randint(self.num_classes, (len(x), k), generator=generator).to(x.device)
            node = torch.where(other, anywhere, node)
            if bool(other.any()):  # what was not walked to has a probability to be found
                logs[other] = self._walk(x[other.nonzero()[:, 0]], node[other][:, None])[:, 0]
        return self.order[node], self._mixed(logs)

    def _log_prob(self, x: Tensor, ids: Tensor) -> Tensor:
        return self._mixed(self._walk(x, self.place[ids]))

    def _rows(self, k: int) -> int:
        return max(1, BLOCK // (k * FAN * self.phi.feature_dim))

    def _walk(self, x: Tensor, place: Tensor) -> Tensor:
        """The log probability of going down to each place (b, k)."""
        f = self._features(x).values
        node = place // self.leaf_size
        logs = torch.zeros(place.shape, dtype=f.dtype, device=x.device)
        if self.leaf_size > 1:
            logs += log_share(self._leaf(node, x), place % self.leaf_size)
        for level in range(len(self._sums)):
            logs += log_share(self._shares(level, node // FAN, f), node % FAN)
            node = node // FAN
        return logs

    def _mixed(self, logs: Tensor) -> Tensor:
        """With the share of uniform draws, if there is one."""
        if self.uniform == 0:
            return logs
        flat = torch.full_like(logs, math.log(self.uniform / self.num_classes))
        return torch.logaddexp(logs + math.log1p(-self.uniform), flat)

    def _shares(self, level: int, parent: Tensor, f: Tensor) -> Tensor:
        """The masses of the children of nodes (b, k), not negative, (b, k, FAN); by number where all vanish."""
        sums = self._sums[level]
        b, k = parent.shape
        children = sums.view(-1, FAN * sums.shape[1])[parent.flatten()].view(b, k * FAN, sums.shape[1])
        mass = torch.bmm(children, f.unsqueeze(-1)).view(b, k, FAN).clamp_(min=0)
        lost = mass.sum(-1) <= 0
        if bool(lost.any()):
            size = self.leaf_size * FAN**level  # classes under a child
            first = (parent[lost][:, None] * FAN + torch.arange(FAN, device=parent.device)) * size
            mass[lost] = (self.num_classes - first).clamp(0, size).to(mass.dtype)
        return mass

    def _leaf(self, leaf: Tensor, x: Tensor) -> Tensor:
        """The softmax of the classes of leaves (b, k) up to a factor, (b, k, leaf_size)."""
        b, k = leaf.shape
        place = leaf[..., None] * self.leaf_size + torch.arange(self.leaf_size, device=leaf.device)
        real = place < self.num_classes
        place = place.clamp_(max=self.num_classes - 1).view(b, k * self.leaf_size)
        y = self._scaled(self.vectors[place.flatten()]).view(b, k * self.leaf_size, x.shape[1])
        logits = torch.bmm(y, self._scaled(x).to(y.dtype).unsqueeze(-1)).squeeze(-1) + self.bias[place]
        logits = logits.view(real.shape).masked_fill_(~real, -math.inf)
        return (logits - logits.amax(-1, keepdim=True)).exp_()

    @torch.no_grad()
    def log_partition(self, x: Tensor) -> Tensor:
        """`log Z(x)` by features alone, (b,): O(m) a query, with the error of the map.

        Where a signed map (`trig`) estimates a Z that is not positive, -inf. From k draws with logits o,
        `(o - log_prob).logsumexp(1) - log(k)` is the log of an unbiased estimate of Z.
        """
        if self.normalize is not None:
            raise BochnerError(
                f"The features of this {type(self).__name__} are those of vectors brought to length normalize="
                f"{self.normalize:g}, which say nothing of log Z(x); use draws, or a tree without 'normalize'."
            )
        with torch.autocast(self.vectors.device.type, enabled=False):
            values, log_scale = self._features(self._check(x))
            return (values @ self._sums[-1].sum(0)).clamp_min(0).log() + log_scale[:, 0] + self._shift

    def _scaled(self, x: Tensor) -> Tensor:
        """x or y as the kernel `exp(x . y)` takes it."""
        return x if self.normalize is None else torch.nn.functional.normalize(x, dim=-1) * self.normalize

    def _features(self, x: Tensor) -> Features:
        """Of queries. The map is prepared once: for a query alone that takes longer than all else."""
        if self._prepared is None:
            self._prepared = self.phi.prepare("query")
        return self._prepared(finite(self._cast(x), "x", type(self).__name__))

    def _key_features(self, y: Tensor) -> Features:
        return self.phi(self._cast(y), "key")

    def _cast(self, x: Tensor) -> Tensor:
        return self._scaled(x).to(accumulation_dtype(self.vectors.dtype))


def _softmax_map(name: MapLike, d: int, m: int, seed: int) -> FeatureMap:
    phi = feature_map(name, dim=d, num_features=m, projection="orthogonal", seed=seed)
    if phi.dim != d or phi.num_heads is not None or phi.kernel != "softmax":
        raise BochnerError(
            f"The 'feature_map' of FeatureTree must estimate the softmax kernel in {d} dimensions, without heads, got "
            f"{type(phi).__name__} of kernel {phi.kernel!r}, dim={phi.dim}, num_heads={phi.num_heads}."
        )
    return phi


def choose(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One of the last axis in proportion to its mass, by inversion of u in [0, 1), and the log of its share."""
    total = mass.cumsum(-1)
    child = (total <= (u * BELOW_ONE).unsqueeze(-1) * total[..., -1:]).sum(-1)
    return child, log_share(mass, child)


def log_share(mass: Tensor, child: Tensor) -> Tensor:
    """The log of the share that a child has of the masses on the last axis."""
    return (mass.gather(-1, child.unsqueeze(-1)).squeeze(-1) / mass.sum(-1)).log()


def _padded(sums: Tensor) -> Tensor:
    """With rows of zeros, to a multiple of FAN of them."""
    return torch.nn.functional.pad(sums, (0, 0, 0, -len(sums) % FAN))


def similar_order(y: Tensor, smallest: int = 64) -> Tensor:
    """An order in which neighbours are alike: halves along the line of a far pair, again and again; O(n d log n)."""
    order = torch.arange(len(y))
    stack = [(0, len(y))]
    while stack:
        low, high = stack.pop()
        part = order[low:high]
        rows = y[part]
        first = rows[(rows - rows[0]).square().sum(1).argmax()]
        second = rows[(rows - first).square().sum(1).argmax()]
        order[low:high] = part[(rows @ (second - first)).argsort()]
        if high - low > smallest:
            middle = (low + high) // 2
            stack += [(low, middle), (middle, high)]
    return order
