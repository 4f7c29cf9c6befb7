"""A kernel operator as plain arrays: for .npz files, pickles and workers. Nothing here unpickles."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator

from .._checks import make_generator
from .cells import index_from_labels
from .engines import CellsEngine
from .exact import make_frame
from .paper import Constants
from .planning import make_plan

if TYPE_CHECKING:
    from .operator import KernelOperator


def to_arrays(operator: KernelOperator) -> dict[str, np.ndarray]:
    """Points, settings (JSON text), the cells of the index, and the plan."""
    settings = {
        "bandwidth": operator.bandwidth,
        "eps": operator.eps,
        "method": operator.requested,
        "seed": operator.seed,
        "cells": operator.num_cells,
        "num_features": operator.num_features,
        "adaptive": operator.adaptive,
        "confidence": operator.confidence,
        "constants": asdict(operator.constants),
        "chosen": operator.method,
        "reason": operator.reason,
    }
    arrays = {"settings": np.array(json.dumps(settings)), "queries": operator._queries.numpy()}
    if not operator._symmetric:
        arrays["keys"] = operator._keys.numpy()
    index, engine = operator._index, operator._engine
    if index is not None:
        arrays["centre"] = index.frame.centre.numpy()
        arrays["centres"] = index.centres.numpy()
        arrays["label"] = index.caller_label.numpy().astype(np.int32)
    if isinstance(engine, CellsEngine):
        planned = engine.planned
        numbers = [planned.plan.beta, planned.predicted, planned.mean_row_sum, planned.fraction, operator._planned_keys]
        arrays["near"] = planned.plan.near.numpy()
        arrays["score"] = planned.score.numpy()
        arrays["plan"] = np.array(numbers, dtype=np.float64)
    return arrays


def from_arrays(operator: KernelOperator, arrays: dict[str, np.ndarray]) -> KernelOperator:
    """Fill an empty operator from `to_arrays`: no clustering, no measuring."""
    begun = time.perf_counter()
    settings = json.loads(str(arrays["settings"]))
    operator._queries = torch.from_numpy(np.array(arrays["queries"]))
    operator._symmetric = "keys" not in arrays
    operator._keys = operator._queries if operator._symmetric else torch.from_numpy(np.array(arrays["keys"]))
    operator.bandwidth, operator.eps, operator.seed = settings["bandwidth"], settings["eps"], settings["seed"]
    operator.num_cells, operator.num_features = settings["cells"], settings["num_features"]
    operator.adaptive, operator.confidence = settings["adaptive"], settings["confidence"]
    operator.constants = Constants(**settings["constants"])
    index = None
    if "centres" in arrays:
        centres = torch.from_numpy(np.array(arrays["centres"]))
        frame = make_frame(operator._keys, operator.bandwidth, str(centres.dtype).removeprefix("torch."))
        frame = frame._replace(centre=torch.from_numpy(np.array(arrays["centre"])))
        label = torch.from_numpy(arrays["label"].astype(np.int64))
        index, _ = index_from_labels(frame, frame.place(operator._keys), label, centres)
    if "plan" not in arrays or index is None:
        operator.requested = settings["chosen"]
        operator._configure(index)
    else:
        LinearOperator.__init__(
            operator, np.dtype(arrays["queries"].dtype), (len(operator._queries), len(operator._keys))
        )
        beta, predicted, row_sum, fraction, planned_keys = arrays["plan"].tolist()
        reuse = (torch.from_numpy(np.array(arrays["near"])), beta)
        z = None if operator._symmetric else index.frame.place(operator._queries)
        planned = make_plan(index, z, operator.eps, make_generator(operator.seed), reuse)
        planned.score = torch.from_numpy(np.array(arrays["score"]))
        planned.predicted, planned.mean_row_sum, planned.fraction = predicted, row_sum, fraction
        operator._planned, operator._planned_keys, operator._index = planned, int(planned_keys), index
        operator._engine = CellsEngine(index, planned)
        operator.build_seconds = time.perf_counter() - begun
    operator.requested, operator.reason = settings["method"], settings["reason"]
    return operator
