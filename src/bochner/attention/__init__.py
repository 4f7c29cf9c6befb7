"""Attention as a monoid: `linear_attention`, its state, its quadratic oracles, and sequences over several ranks."""

from bochner.attention.api import linear_attention
from bochner.attention.features import PreparedMap
from bochner.attention.oracle import attention_matrix, exact_attention
from bochner.attention.state import State, absorb, empty_state, merge, read

__all__ = [
    "PreparedMap",
    "State",
    "absorb",
    "attention_matrix",
    "empty_state",
    "exact_attention",
    "linear_attention",
    "merge",
    "read",
]
