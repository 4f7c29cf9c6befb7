"""Modules for PyTorch: attention with torch's signature, Performers, and what a training loop needs of their maps."""

from bochner.nn.attention import Attention, DecodingState, MultiheadAttention, rotate
from bochner.nn.performer import LayerOptions, Performer, PerformerLayer, PerformerState
from bochner.nn.torch_layers import TorchConversion, convert_torch
from bochner.nn.training import maps_of, parameter_groups, redraw_

__all__ = [
    "Attention",
    "DecodingState",
    "LayerOptions",
    "MultiheadAttention",
    "Performer",
    "PerformerLayer",
    "PerformerState",
    "TorchConversion",
    "convert_torch",
    "maps_of",
    "parameter_groups",
    "redraw_",
    "rotate",
]
