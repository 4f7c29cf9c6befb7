"""The former place of linearised feed-forward layers; they are in `bochner.papers`."""

from bochner.papers.polyfit import PolynomialFit, fit_polynomial
from bochner.papers.sketched_layer import LinearizedLayer, LinearizedMLP, MLPReport, block_output
from bochner.papers.taylor_layer import TaylorComposition

__all__ = [
    "LinearizedLayer",
    "LinearizedMLP",
    "MLPReport",
    "PolynomialFit",
    "TaylorComposition",
    "block_output",
    "fit_polynomial",
]
