"""Linearised feed-forward layers: one matrix product in place of an activation between two."""

from bochner.feedforward.layer import (
    Calibration,
    LayerPlan,
    LinearizedLayer,
    LinearizedMLP,
    MLPReport,
    block_output,
    calibrate_layer,
    plan_layer,
)
from bochner.feedforward.polyfit import PolynomialFit, fit_polynomial
from bochner.feedforward.taylor import TaylorComposition

__all__ = [
    "Calibration",
    "LayerPlan",
    "LinearizedLayer",
    "LinearizedMLP",
    "MLPReport",
    "PolynomialFit",
    "TaylorComposition",
    "block_output",
    "calibrate_layer",
    "fit_polynomial",
    "plan_layer",
]
