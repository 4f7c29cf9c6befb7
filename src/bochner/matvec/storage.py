"""A kernel operator as plain arrays: for .npz files, pickles and workers. Nothing here unpickles."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch

from .choose import Options
from .engines.cells import CellsEngine
from .engines.paper import Constants
from .index import KeyIndex, index_from_labels, sort_queries
from .kernels import KERNELS
from .plan import Plan, near_rounding
from .problem import Problem
from .tiles import make_frame

if TYPE_CHECKING:
    from .operator import KernelOperator


def to_arrays(operator: KernelOperator) -> dict[str, np.ndarray]:
    """Points, settings (JSON text), the cells of the index, and the plan."""
    problem, options, engine = operator._problem, operator._options, operator._engine
    index = engine.index if isinstance(engine, CellsEngine) else operator._index
    settings = {
        "kernel": problem.kernel.name,
        "bandwidth": problem.bandwidth,
        "eps": problem.eps,
        "seed": problem.seed,
        "confidence": problem.confidence,
        "adaptive": operator.adaptive,
        "options": asdict(options),
        "chosen": operator.method,
        "reason": operator.reason,
        "planned_keys": operator._planned_keys,
    }
    arrays = {"queries": problem.queries.numpy()}
    if not problem.symmetric:
        arrays["keys"] = problem.keys.numpy()
    if index is not None:
        settings["arithmetic"] = index.frame.arithmetic
        arrays["centre"] = index.frame.centre.numpy()
        arrays["centres"] = index.centres.numpy()
        arrays["label"] = index.keys.caller_label.numpy().astype(np.int32)
    if isinstance(engine, CellsEngine):
        plan = engine.plan
        settings["plan"] = {
            "beta": plan.beta,
            "predicted": plan.predicted,
            "met": plan.met,
            "mean_row_sum": plan.mean_row_sum,
        }
        arrays["near"] = plan.near.numpy()
        for name in ("score", "rows", "columns"):
            tensor = getattr(plan, name)
            if tensor is not None:
                arrays[name] = tensor.numpy()
    arrays["settings"] = np.array(json.dumps(settings))
    return arrays


def from_arrays(operator: KernelOperator, arrays: dict[str, np.ndarray]) -> KernelOperator:
    """Fill an empty operator from `to_arrays`: no clustering, no measuring."""
    begun = time.perf_counter()
    settings = json.loads(str(arrays["settings"]))
    queries = torch.from_numpy(np.array(arrays["queries"]))
    keys = torch.from_numpy(np.array(arrays["keys"])) if "keys" in arrays else queries
    operator._problem = Problem(
        KERNELS[settings["kernel"]],
        settings["bandwidth"],
        queries,
        keys,
        "keys" not in arrays,
        settings["eps"],
        settings["confidence"],
        settings["seed"],
    )
    options = {**settings["options"], "constants": Constants(**settings["options"]["constants"])}
    operator.adaptive = settings["adaptive"]
    index = _index(operator._problem, settings, arrays)
    if "plan" in settings and index is not None:
        engine = CellsEngine(index, _plan(operator._problem, index, settings["plan"], arrays))
        operator._install(engine, settings["reason"], index)
        operator.build_seconds = time.perf_counter() - begun
    else:
        operator._options = Options(**{**options, "method": settings["chosen"]})
        operator._configure(index)
    operator._options, operator._planned_keys = Options(**options), settings["planned_keys"]
    operator.reason = settings["reason"]
    return operator


def _index(problem: Problem, settings: dict, arrays: dict[str, np.ndarray]) -> KeyIndex | None:
    if "centres" not in arrays:
        return None
    frame = make_frame(problem.kernel, problem.keys, problem.bandwidth, settings["arithmetic"])
    frame = frame._replace(centre=torch.from_numpy(np.array(arrays["centre"])))
    label = torch.from_numpy(arrays["label"].astype(np.int64))
    return index_from_labels(frame, problem.keys, label, torch.from_numpy(np.array(arrays["centres"])))[0]


def _plan(problem: Problem, index: KeyIndex, numbers: dict, arrays: dict[str, np.ndarray]) -> Plan:
    queries = index.keys if problem.symmetric else sort_queries(index, problem.queries)
    near = torch.from_numpy(np.array(arrays["near"]))
    plan = Plan(queries, near, symmetric=problem.symmetric, rounding=torch.zeros(0), **numbers)
    plan.rounding = near_rounding(index, queries, near, index.distances())
    for name in ("score", "rows", "columns"):
        if name in arrays:
            setattr(plan, name, torch.from_numpy(np.array(arrays[name])))
    return plan
