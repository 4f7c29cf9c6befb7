"""The fit behind `LandmarkFeatures`, one head at a time: landmarks, targets, low-rank regression, measured error.

A head is fitted to `T_ij = exp(x_i . y_j - z(x_i))` over sampled queries x and keys y of all its sequences, z(x) being
the log of the mean weight that x gives to a key, as the landmarks estimate it: T has the size of attention weights
times the number of keys. Pairs that attention treats exactly, or never sees, are missing data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bochner.moments import matrix_power

ROWS = 4096  # of queries and of keys, for landmarks, caps and scales
TARGET_ROWS = (1536, 2048)  # of queries and of keys, for the regression
RIDGES = (1e-1, 1e-2, 1e-3)  # relative to the mean eigenvalue of the hidden features' second moment
TOP_UPS = (0.5, 0.2, 0.1, 0.05)  # least normaliser of a signed map, that of uniform attention being 1
SHARES = (0.3, 0.1, 0.03, 1e-9)  # of the weight that a map gives to far keys, where it gives them too much
SLACK = 1.02  # the first choice within this factor of the least error is taken: cautious ridges, the full weight
FILLS = 4  # rounds of filling in the missing pairs
ROUNDS = 5  # of alternating regression for the positive map
FLOOR = 1e-3  # share of uniform attention in every row of the positive map: a query unlike all seen averages the values
HELD_BACK = 16  # sequences at most to choose and measure on
MEASURED_ROWS = 512  # of each of them
CONFIDENCE = 0.95
UNKNOWN = (0.0, math.inf)
NOTHING = 1e-5  # an error that is rounding alone
WINDOW_KINDS = ("block", "sliding")


class Near(NamedTuple):
    """Which pairs of positions attention treats exactly: in a window of blocks or a sliding one, and the first keys."""

    is_causal: bool = False
    window: int | None = None
    sinks: int = 0
    window_kind: str = "block"

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """Pairs of positions i (n,) and j (s,) that attention sees at all, (n, s)."""
        i, j = i[:, None], j[None, :]
        return j <= i if self.is_causal else torch.ones_like(j <= i)

    def far(self, i: Tensor, j: Tensor) -> Tensor:
        """Those of them that are left to the map."""
        allowed = self.allowed(i, j)
        i, j = i[:, None], j[None, :]
        far = allowed & (j >= self.sinks)
        if self.window is None:
            return far
        w = self.window
        return far & ((i // w - j // w).abs() > 1 if self.window_kind == "block" else (i - j).abs() >= w)


class Rows(NamedTuple):
    """One sequence of one key head: x (N, d), the queries of each head of the group in turn; y (s, d) and v (s, v).

    i (N,) and j (s,) are their positions.
    """

    x: Tensor
    y: Tensor
    v: Tensor
    i: Tensor
    j: Tensor


class Hidden(NamedTuple):
    """The hidden features f of a query and g of a key; see `LandmarkFeatures`."""

    c: Tensor  # (M, d)
    log_w: Tensor  # (M,)
    b: Tensor  # (M, d)
    t: Tensor  # (M,)
    cap: Tensor  # (M,)

    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f (N, M) and z (N, 1)."""
        logits = x @ self.c.mT + self.log_w
        return logits.softmax(-1), logits.logsumexp(-1, keepdim=True)

    def key(self, y: Tensor) -> Tensor:
        return torch.minimum(y @ self.b.mT - self.t, self.cap).exp()


class Head(NamedTuple):
    """A fitted head: `phi(x) = f(x) P` and `psi(y) = [g(y) R + r, 1]`, rectified where the map is positive."""

    hidden: Hidden
    p: Tensor  # (M, m)
    r: Tensor  # (M, m - 1)
    bias: Tensor  # (m - 1,)
    positive: bool
    top_up: float = 0.0
    error: float = math.inf
    interval: tuple[float, float] = UNKNOWN

    def weights(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`phi(x) . psi(y)`, the estimate of exp(x . y - z(x)), (N, s); and z (N, 1)."""
        f, z = self.hidden.query(x)
        phi, psi = f @ self.p, pad(self.hidden.key(y) @ self.r + self.bias, (0, 1), value=1.0)
        if self.positive:
            phi, psi = rectified(phi), psi.clamp_min(0)
        return phi @ psi.mT, z


class Problem(NamedTuple):
    """The regression of one head: hidden features of sampled rows with unit root mean squares, and what to fit."""

    f: Tensor  # (N, M)
    g: Tensor  # (S, M + 1), the last one constant
    target: Tensor  # (N, S)
    missing: Tensor | None  # (N, S)
    f_scale: Tensor
    g_scale: Tensor


def fit_head(
    sequences: list[Rows], m: int, num_landmarks: int, near: Near, *, positive: bool, generator: torch.Generator
) -> Head:
    """Fit one head to its first sequences, choose the ridge on the others and measure the error there."""
    several = sequences if len(sequences) > 1 else divided(sequences[0])
    n = len(several)
    held = min(HELD_BACK, max(n // 4, min(n // 3, 2), min(n // 2, 1)))
    seen, unseen = several[: n - held], several[n - held :]
    hidden, problem = _pose(seen, num_landmarks, near, generator)
    # 1. The signed fit for every ridge, the missing pairs filled in on the way, and every top-up.
    found: list[tuple[float, Tensor, Tensor, Head]] = []
    errors = []
    for ridge in RIDGES:
        p, r, problem = low_rank(problem, m, ridge, FILLS // 2 if found else FILLS)
        head = _assemble(hidden, problem, p, r, positive=False)
        wrong, total = measure(head, unseen or seen, near, TOP_UPS)
        found += [(ridge, p, r, head._replace(top_up=tau)) for tau in TOP_UPS]
        errors.append(wrong)
    wrong = torch.cat(errors)
    ridge, p, r, head = found[choose(wrong)]
    heads = [head for *_, head in found]
    if positive:
        p, r = nonnegative(problem, p, r, ridge)
        head = _assemble(hidden, problem, p, r, positive=True)
        wrong, heads = measure(head, unseen or seen, near, (0.0,))[0], [head]
    # 2. Beside exact terms the map may be too loud as a whole.
    if near.window is not None or near.sinks:
        quieter = [head._replace(hidden=hidden._replace(log_w=hidden.log_w + math.log(s))) for s in SHARES]
        wrong = torch.cat([wrong, *(measure(h, unseen or seen, near, (h.top_up,))[0] for h in quieter)])
        heads += quieter
    # 3. The error of what is chosen; for sequences of one half by what the other half would have chosen.
    head = heads[choose(wrong)]
    if len(total) > 1:
        half = torch.arange(len(total)) % 2 == 0
        wrong = torch.where(half, wrong[choose(wrong, ~half)], wrong[choose(wrong, half)])
    else:
        wrong = wrong[choose(wrong)]
    error, interval = relative_error(wrong, total)
    return head._replace(error=error if held else math.inf, interval=interval if held > 1 else UNKNOWN)


def divided(rows: Rows) -> list[Rows]:
    """A sequence without its last quarter, and the queries of that quarter with all keys; itself if too short."""
    x, y, v, i, j = rows
    n, s = int(i.max()) + 1, len(j)
    if min(n, s) < 3:
        return [rows]
    a, b = i < n - max(n // 4, 1), j < s - max(s // 4, 1)
    return [Rows(x[a], y[b], v[b], i[a], j[b]), Rows(x[~a], y, v, i[~a], j)]


def choose(wrong: Tensor, some: Tensor | None = None) -> int:
    """The first candidate about as good as the best on (some of) the sequences; the preferred ones come first."""
    error = (wrong if some is None else wrong[:, some]).sum(-1)
    return int((error <= SLACK**2 * error.min()).nonzero()[0])


def rectified(phi: Tensor, out: Tensor | None = None) -> Tensor:
    """Non-negative query features, the last of them, which all keys share, at least `FLOOR`."""
    return torch.maximum(phi, pad(phi.new_zeros(phi.shape[-1] - 1), (0, 1), value=FLOOR), out=out)


def landmarks(rows: Tensor, metric: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Centres (count, d) of rows (N, d) by k-means in a metric (d, d), and the share of rows of each (count,).

    The metric is the second moment of what the centres will meet: a distance is the difference of products with that.
    """
    largest = torch.linalg.matrix_norm(metric, 2).clamp_min(1e-12)
    metric = metric + 1e-4 * largest * torch.eye(len(metric), dtype=metric.dtype)
    x = rows @ matrix_power(metric, 0.5)
    # Fewer rows than centres: some centres coincide, the ridge shares their coefficients out.
    centres = x[torch.randperm(len(x), generator=generator).repeat(-(-count // len(x)))[:count]]
    for _ in range(8):
        label = (0.5 * centres.square().sum(-1) - x @ centres.mT).argmin(-1)
        size = torch.bincount(label, minlength=count).to(x.dtype)
        total = torch.zeros_like(centres).index_add_(0, label, x)
        centres = torch.where(size[:, None] > 0, total / size.clamp_min(1)[:, None], centres)
    return centres @ matrix_power(metric, -0.5), size.clamp_min(0.5) / len(x)


def low_rank(problem: Problem, m: int, ridge: float, fills: int) -> tuple[Tensor, Tensor, Problem]:
    """P (M, m) and R (M + 1, m) that minimise `|T - f P R' g'|^2` with a ridge, the last key feature being 1.

    Whitened by both second moments this is the best approximation of a matrix by one of rank m whose right space holds
    a given vector: its projection on that, and the leading m - 1 singular vectors of the rest. The fit fills in missing
    pairs `fills` times; the problem is returned with them.
    """
    f, g, target, missing, _, _ = problem
    wf, wg = _whitening(f, ridge), _whitening(g, ridge)
    constant = torch.linalg.inv(wg)[:, -1:]
    size = constant.norm()
    constant = constant / size
    for _ in range(1 if missing is None else fills):
        b = wf.mT @ (f.mT @ target @ g).double() @ wg / (len(f) * len(g))
        first = b @ constant
        u, s, vh = torch.linalg.svd(b - first @ constant.mT, full_matrices=False)
        root = s[: m - 1].sqrt()
        p = torch.cat([wf @ (u[:, : m - 1] * root), wf @ first / size], dim=-1)
        r = torch.cat([wg @ (vh[: m - 1].mT * root), wg @ constant * size], dim=-1)
        p, r = (pad(t, (m - t.shape[-1], 0)).to(f.dtype) for t in (p, r))  # fewer hidden features than m
        if missing is not None:
            target = torch.where(missing, (f @ p) @ (g @ r).mT, target)
    return p, r, problem._replace(target=target)


def nonnegative(problem: Problem, p: Tensor, r: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """P and R for rectified features, from a signed fit: factorise, regress each factor on its hidden features, refit.

    A factor is refitted by multiplicative updates with the other one fixed. Where it is zero the regression may be
    anything below zero: its own negative values there are taken as the target.
    """
    f, g, target, missing, _, _ = problem
    m = p.shape[-1]
    ones = torch.ones_like(g[:, :1])
    solve_f, solve_g = _ridge_solver(f, ridge), _ridge_solver(g, ridge)
    # 1. The positive and the negative parts of the leading signed features.
    half = m // 2
    a, b = f @ p[:, :half], g @ r[:, :half]
    phi, psi = (torch.cat([t.clamp_min(0), (-t).clamp_min(0)], dim=-1)[:, : m - 1] for t in (a, b))
    phi, psi = (t + 1e-3 * t.mean(0) + 1e-8 for t in (phi, psi))
    phi, psi = torch.cat([phi, 0.5 * target.mean(-1, keepdim=True).clamp_min(1e-6)], -1), torch.cat([psi, ones], -1)
    target = target.clamp_min(0)
    for _ in range(3):
        phi = _multiplicative(phi, target @ psi, psi.mT @ psi)
        psi = _multiplicative(psi, target.mT @ phi, phi.mT @ phi, last=ones)
    # 2. Rounds of regression and refit.
    p, r = solve_f(phi), solve_g(psi)
    for _ in range(ROUNDS):
        p = _rectified_regression(f, phi, p, solve_f)
        phi = (f @ p).clamp_min(1e-6 * float(phi.mean()))
        if missing is not None:
            target = torch.where(missing, phi @ psi.mT, target)
        psi = _multiplicative(psi, target.mT @ phi, phi.mT @ phi, last=ones)
        r = _rectified_regression(g, psi, r, solve_g)
        psi = torch.cat([(g @ r)[:, :-1].clamp_min(1e-6 * float(psi.mean())), ones], dim=-1)
        if missing is not None:
            target = torch.where(missing, phi @ psi.mT, target)
        phi = _multiplicative(phi, target @ psi, psi.mT @ psi)
    return p, r


def measure(head: Head, sequences: list[Rows], near: Near, top_ups: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Squared errors of the attention output, (top-ups, sequences), and squared outputs (sequences,).

    The map on far pairs, topped up, and the exponential on near ones in one normaliser.
    """
    wrong, total = [], []
    for rows in sequences:
        pick = torch.linspace(0, len(rows.x) - 1, min(len(rows.x), MEASURED_ROWS)).long()
        x, i = rows.x[pick], rows.i[pick]
        far, allowed = near.far(i, rows.j), near.allowed(i, rows.j)
        logits = x @ rows.y.mT
        exact = logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0) @ rows.v
        weights, z = head.weights(x, rows.y)
        weights = weights * far
        mass, count = weights.sum(-1, keepdim=True), far.sum(-1, keepdim=True)
        mean = (far.to(x.dtype) @ rows.v) / count.clamp_min(1)
        shown = (logits - z).clamp_max(80).exp() * (allowed & ~far)
        num, den = (weights + shown) @ rows.v, (weights + shown).sum(-1, keepdim=True)
        errors = []
        for tau in top_ups:
            lam = (tau * count - mass).clamp_min(0)
            out = (num + lam * mean) / (den + lam).clamp_min(1e-30)
            errors.append((out - exact).square().sum(dtype=torch.float64))
        wrong.append(torch.stack(errors))
        total.append(exact.square().sum(dtype=torch.float64))
    return torch.stack(wrong, dim=-1), torch.stack(total)


def relative_error(wrong: Tensor, total: Tensor) -> tuple[float, tuple[float, float]]:
    """The root of a ratio of sums over sequences, and the prediction interval for the error on one new sequence.

    With l the logarithms of the sequences' own errors, `mean(l) +- t std(l) sqrt(1 + 1/n)` by Student's law. Sequences
    too short to leave the map a pair do not count.
    """
    from scipy.special import stdtrit

    error = math.sqrt(float(wrong.sum() / total.sum().clamp_min(1e-300)))
    own = (wrong / total.clamp_min(1e-300)).sqrt()
    own = own[own > NOTHING]
    n = len(own)
    if n < 2:
        return error, UNKNOWN
    middle, spread = float(own.log().mean()), float(own.log().std())
    half = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * spread * math.sqrt(1 + 1 / n)
    return error, (math.exp(middle - half), math.exp(min(middle + half, 700.0)))


def _pose(sequences: list[Rows], num_landmarks: int, near: Near, generator: torch.Generator) -> tuple[Hidden, Problem]:
    """Landmarks at the data, and the regression on a sample of rows."""
    far_keys = [s.j >= near.sinks if bool((s.j >= near.sinks).any()) else s.j >= 0 for s in sequences]
    x, i = torch.cat([s.x for s in sequences]), torch.cat([s.i for s in sequences])
    y = torch.cat([s.y[keep] for s, keep in zip(sequences, far_keys, strict=True)])
    j = torch.cat([s.j[keep] for s, keep in zip(sequences, far_keys, strict=True)])
    some_x, some_y = (torch.randperm(len(t), generator=generator)[:ROWS] for t in (x, y))
    x, i, y, j = x[some_x], i[some_x], y[some_y], j[some_y]
    # 1. Landmarks, their weights and offsets; no hidden feature of a key exceeds the largest seen.
    c, share = landmarks(y, x.mT @ x / len(x), num_landmarks, generator)
    b, _ = landmarks(x, y.mT @ y / len(y), num_landmarks, generator)
    logits = y @ b.mT
    t = logits.logsumexp(0) - math.log(len(y))
    hidden = Hidden(c, share.log(), b, t, (logits - t).amax(0))
    # 2. Targets, at most the weight of a row that attends to one key alone.
    x, i, y, j = x[: TARGET_ROWS[0]], i[: TARGET_ROWS[0]], y[: TARGET_ROWS[1]], j[: TARGET_ROWS[1]]
    f, z = hidden.query(x)
    g = pad(hidden.key(y), (0, 1), value=1.0)
    length = sum(len(s.y) for s in sequences) / len(sequences)
    target = (x @ y.mT - z).clamp_max_(math.log(length)).exp_()
    f_scale, g_scale = (u.square().mean(0).sqrt().clamp_min(1e-12) for u in (f, g))
    missing = ~near.far(i, j)
    if bool(missing.any()):
        seen = ~missing
        mean = (target * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
        target = torch.where(missing, mean, target)
    return hidden, Problem(f / f_scale, g / g_scale, target, missing if bool(missing.any()) else None, f_scale, g_scale)


def _assemble(hidden: Hidden, problem: Problem, p: Tensor, r: Tensor, *, positive: bool) -> Head:
    """Coefficients for hidden features as they are, and key features of size at most 1 on the sampled keys."""
    psi = (problem.g @ r)[:, :-1]
    size = psi.abs().amax(0)
    size = torch.where(size > 0, size, 1.0)
    p = torch.cat([p[:, :-1] * size, p[:, -1:]], dim=-1) / problem.f_scale[:, None]
    r = r[:, :-1] / size / problem.g_scale[:, None]
    return Head(hidden, p, r[:-1], r[-1], positive)


def _whitening(x: Tensor, ridge: float) -> Tensor:
    """W with `W' (x'x / n + ridge) W = 1`, in float64."""
    values, vectors = torch.linalg.eigh((x.mT @ x).double() / len(x))
    return vectors * (values.clamp_min(0) + ridge * values.mean()).rsqrt()


def _ridge_solver(x: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """y to the coefficients of its regression on x."""
    w = _whitening(x, ridge)
    inverse = (w @ w.mT).to(x.dtype) / len(x)
    return lambda y: inverse @ (x.mT @ y)


def _rectified_regression(x: Tensor, y: Tensor, c: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    """Coefficients c with `relu(x c) ~ y` for y >= 0."""
    zero = y <= 1e-6 * y.amax()
    for _ in range(3):
        c = solve(torch.where(zero, (x @ c).clamp_max(0), y))
    return c


def _multiplicative(a: Tensor, target: Tensor, gram: Tensor, last: Tensor | None = None) -> Tensor:
    """Ten steps towards the a >= 0 that minimises `|T - a b'|^2`, given `T b` and `b' b`; `last`, a fixed column."""
    for _ in range(10):
        a = a * target.clamp_min(0) / (a @ gram).clamp_min(1e-12)
        if last is not None:
            a = torch.cat([a[:, :-1], last], dim=-1)
    return a
