"""Large matrix products in memory that is used again."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

LOOKS = True  # set to False to take the path of other devices on the CPU
WORTHWHILE, LARGEST = 2**14, 2**22  # elements of a product between which its memory is kept: at most 16 MB in float32


def is_composed() -> bool:
    """Whether everything must be plain differentiable operations: in tracing, under torch.func, with dual numbers."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 or is_fake()


def is_exporting() -> bool:
    """Whether a graph for all lengths is made; older releases of torch cannot tell that from any other."""
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())


def is_known(size: int) -> bool:
    """Whether a graph is compiled for this size alone, so that it may have parts one after another."""
    if not torch.compiler.is_compiling() or is_exporting():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(size < 2**40)


def may_look(x: Tensor) -> bool:
    """Whether asking for a value is cheap and possible: not on other devices, not while tracing or transforming."""
    return LOOKS and x.device.type == "cpu" and not is_composed()


def in_place(x: Tensor) -> bool:
    """Whether results on the CPU may be written into memory that is used again: no gradient may need them."""
    return x.device.type == "cpu" and not (torch.is_grad_enabled() or is_composed())


def is_fake() -> bool:
    """Whether tensors have shapes but no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class _Workspace(threading.local):
    """Memory of one thread that large products are written into again and again, by name."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, torch.dtype, bool], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        key = (name, dtype, torch.is_inference_mode_enabled())  # what is made in inference mode must stay there
        memory = self.memory.get(key)
        if memory is None or len(memory) < size:
            memory = self.memory[key] = torch.empty(size, dtype=dtype, device="cpu")
        return memory[:size].view(*shape)


_WORKSPACE = _Workspace()


def memory(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory on the CPU to write into where no gradient may need it, valid on this thread until it is asked for again.

    A fresh tensor of several megabytes costs as much in page faults as the product that fills it.
    """
    if not WORTHWHILE <= math.prod(shape) <= LARGEST:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    return _WORKSPACE.take(name, shape, dtype)


def product(name: str, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, valid on this thread until the next product of this name, where no gradient may need it."""
    if not in_place(a):
        return a @ b
    same = b.dim() == 2 or a.shape[:-2] == b.shape[:-2]
    lead = a.shape[:-2] if same else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*lead, a.shape[-2], b.shape[-1])
    if not WORTHWHILE <= math.prod(shape) <= LARGEST:
        return a @ b
    return torch.matmul(a, b, out=memory(name, shape, a.dtype))
