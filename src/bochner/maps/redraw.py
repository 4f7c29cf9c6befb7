"""When random parts are drawn anew: on a schedule that a map keeps itself, or by an explicit call.

A training pass is a forward pass in training mode and the backward pass that follows it, however often the map is used
in between. The backward pass counts it; the new draw is made at the beginning of the next training pass. So a model is
saved and tested with the draw it was trained with, and recomputation in a backward pass (gradient checkpointing) sees
the draw of the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from bochner._checks import make_generator, positive_int, spawn_seed
from bochner._products import is_composed
from bochner.projections import DrawnModule, Projection

COUNT, SEED = "redraw_count", "redraw_seed"  # the buffers of a schedule


class RedrawnModule(DrawnModule):
    """A module whose random parts, and those of the projections in it, may be redrawn at regular intervals.

    A draw is a function of the schedule's seed and the number of training passes, which are saved with the module:
    processes and resumed runs agree. Parameters are learned parts and are never redrawn.
    """

    redraw_every: int | None = None
    redraw_count: Tensor
    redraw_seed: Tensor
    _count: int | None = None  # `redraw_count` as an int, for devices that make the host wait; None if not known
    _drawn_at: int = 0  # the count at the last draw of the schedule
    _is_open: bool = False  # whether a forward pass waits for its backward pass

    def schedule_redraws_(self, every: int | None, seed: int | None = 0, *, generator: Generator | None = None) -> Any:
        """Redraw after every so many training passes, None for never; `feature_map(..., redraw_every=100)` does it.

        Attention counts in eager mode. Under `torch.compile` nothing is counted: call `redraw_` between steps.
        """
        self.redraw_every = None if every is None else positive_int(every, "redraw_every", type(self).__name__)
        if every is not None and COUNT not in self._buffers:
            g = make_generator(seed, generator)
            self.register_buffer(COUNT, torch.zeros((), dtype=torch.int64, device="cpu"))
            self.register_buffer(SEED, torch.randint(2**62, (), generator=g, device="cpu"))
        return self

    def begin_pass_(self) -> None:
        """Before features are computed: a new draw if it is time for one."""
        if self.redraw_every is None or not self.training or is_composed() or in_backward():
            return
        if self._count is None:
            self._count = int(self.redraw_count)
        if self._count and self._count % self.redraw_every == 0 and self._count != self._drawn_at:
            self.redraw_(spawn_seed(int(self.redraw_seed), self._count))
            self._drawn_at = self._count
        self._is_open = True

    def end_pass(self, out: Tensor) -> Tensor:
        """`out`, whose backward pass is counted."""
        if self.redraw_every is not None and self.training and out.requires_grad and not is_composed():
            out.register_hook(self._count_pass)
        return out

    def _count_pass(self, grad: Tensor) -> None:
        if self._is_open and self._count is not None:
            self._is_open = False
            self._count += 1
            # Another tensor, not the same one changed: a backward pass may hold the map's buffers.
            self.redraw_count = torch.full_like(self.redraw_count, self._count)

    def _redraw(self, g: Generator) -> None:
        super()._redraw(g)
        for module in self.modules():
            if isinstance(module, Projection) and next(module.parameters(), None) is None:
                module._redraw(g)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A schedule may begin or end between saving and loading."""
        self._count, self._drawn_at = None, 0
        for name in (COUNT, SEED):
            if name in self._buffers:
                state_dict.setdefault(prefix + name, self._buffers[name])
            else:
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def in_backward() -> bool:
    """Whether a backward pass is computing this."""
    return torch._C._current_graph_task_id() != -1
