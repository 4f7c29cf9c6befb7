"""What `convert` attaches to an attention module: its plan, and a module for each fate that its key heads have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bochner._checks import spawn_seed
from bochner._timing import best_times
from bochner.hf.calls import Call, exact, one_by_one
from bochner.hf.fates import FATES, FateModule
from bochner.hf.plan import Fitted, LayerPlan

if TYPE_CHECKING:
    from bochner.hf.cache import RecurrentLayer

CHILD = "linear_attn"  # the name under which an attention module holds its `LinearAttention`


class LinearAttention(nn.Module):
    """Attention of one module by its plan: the key heads of each fate run together, then the heads are put back.

    With `plan.trainable` the learned parts of the maps are parameters that require gradients, else nothing does.
    """

    # Of the model that it is attached to: the implementation and the configuration that were there before, the warning
    # of strange inputs (a `drift.Alarm`), the place of the layer in caches, and what is hooked to its module.
    original = "sdpa"
    given: Any = None
    drift: Any = None
    cache_index = 0
    hooks: Sequence[Any] = ()

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan.check()
        groups: dict[Any, list[int]] = {}
        for g, fate in enumerate(plan.fates):
            groups.setdefault(fate.shared(), []).append(g)
        order = [name for name, cls in FATES.items() if cls.has_map]
        parts: dict[str, FateModule] = {}
        for fate, heads in groups.items():
            name = fate.name if fate.name not in parts else f"{fate.name}_{len(parts) + 1}"
            seed = spawn_seed(plan.seed, order.index(fate.name)) if fate.has_map else 0
            parts[name] = plan.fates[heads[0]].build(plan, heads, seed)
        # Trainers leave parameters under a name ending in "_norm" out of weight decay, where learned maps belong.
        self.map_norm = nn.ModuleDict(parts)
        self.needs_hidden = any(getattr(part, "needs_hidden", False) for part in parts.values())
        rows = [row for heads in groups.values() for row in self._rows(heads)]
        self.order = [rows.index(h) for h in range(plan.num_heads)]
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.freeze_()
        if plan.trainable:
            self.unfreeze_()

    @property
    def parts(self) -> dict[str, FateModule]:
        return dict(self.map_norm.items())  # type: ignore[arg-type]

    def unfreeze_(self, *, projections: bool = False) -> list[nn.Parameter]:
        """Make the learned parts of the maps parameters that require gradients; returns them.

        With `projections` random frequencies are learned as well.
        """
        self.trained = True
        return [p for part in self.parts.values() for p in part.learned(projections)]

    def freeze_(self) -> None:
        """Back to what the plan says of training."""
        self.trained = self.plan.trainable
        self.requires_grad_(self.plan.trainable)

    def fit(self, samples: Any) -> None:
        """Calibrate all maps on what was seen of the layer."""
        for part in self.parts.values():
            part.fit(samples)

    def fitted(self) -> Fitted:
        """The maps as they are now, for a plan to bring along."""
        return Fitted(list(self.plan.fates), {k: v.detach().cpu().clone() for k, v in self.state_dict().items()})

    def forward(self, call: Call, cache: RecurrentLayer | None = None) -> Tensor:
        """(b, h, n, v). With a cache, key and value are those it has not seen and `padding` is that of all keys."""
        if call.segments is not None:
            return one_by_one(call, self)
        outs = []
        for name, part in self.parts.items():
            mine = self._of(call, part.heads)
            if cache is None:
                out = part(mine)
            else:
                out, cache.states[name] = part.decode(mine, cache.states.get(name))
            outs.append(out)
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        in_order = self.order == list(range(self.plan.num_heads))
        return out if in_order else self._pick(out, self.order)

    def _rows(self, heads: Sequence[int]) -> list[int]:
        """The query heads of some key heads."""
        return [g * self.plan.group + i for g in heads for i in range(self.plan.group)]

    def _of(self, call: Call, heads: list[int]) -> Call:
        """The call with some key heads and their query heads."""
        if len(heads) == self.plan.num_kv_heads:
            return call
        key, value = (self._pick(x, heads) for x in (call.key, call.value))
        return call._replace(query=self._pick(call.query, self._rows(heads)), key=key, value=value)

    def _pick(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        # Indices are no buffers: models built on the meta device would leave those that are not saved without values.
        key = (tuple(heads), x.device)
        if key not in self._indices:
            self._indices[key] = torch.tensor(heads, device=x.device)
        return x.index_select(1, self._indices[key])


@torch.no_grad()
def layer_seconds(
    layers: Mapping[Any, LinearAttention], plan: LayerPlan, length: int, device: Any, dtype: torch.dtype
) -> dict[Any, float]:
    """Seconds of some layers and of "exact" attention at one length, taking turns on this machine."""
    g = torch.Generator().manual_seed(length)
    heads = ((plan.num_heads, plan.head_dim), (plan.num_kv_heads, plan.head_dim), (plan.num_kv_heads, plan.value_dim))
    q, k, v = (torch.randn(1, h, length, d, generator=g).to(device, dtype) for h, d in heads)
    call = Call(q, k, v, plan.is_causal, None, plan.head_dim**-0.5)

    def run(attention: Callable[[Call], Tensor]) -> None:
        attention(call)
        if call.query.is_cuda:
            torch.cuda.synchronize(call.query.device)

    runs = {"exact": partial(run, exact), **{name: partial(run, layer) for name, layer in layers.items()}}
    return best_times(runs, repeats=3, budget=0.5)
