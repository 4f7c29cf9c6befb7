"""Attention as a monoid: `linear_attention`, its state, its quadratic oracles, and sequences over several ranks."""

from bochner.attention.core import linear_attention
from bochner.attention.exact import attention_matrix, exact_attention
from bochner.attention.state import State, absorb, empty_state, merge, read

__all__ = [
    "State",
    "absorb",
    "attention_matrix",
    "empty_state",
    "exact_attention",
    "linear_attention",
    "merge",
    "read",
]
