"""A kernel operator as plain arrays: for .npz files, pickles and workers. Nothing here unpickles."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..._checks import BochnerError
from .choose import Options
from .engines.base import Engine
from .engines.cells import CellsEngine
from .engines.paper import Constants
from .engines.sparse import SparseEngine
from .index import KeyIndex, index_from_labels, sort_queries
from .kernels import KERNELS
from .plan import Plan, near_rounding
from .problem import Problem
from .tiles import make_frame


@dataclass(frozen=True)
class Stored:
    """What an operator is made of. `engine` None: it is built again from the problem and the options."""

    problem: Problem
    options: Options
    adaptive: bool
    method: str
    reason: str
    planned_keys: int
    engine: Engine | None
    index: KeyIndex | None


def to_arrays(stored: Stored) -> dict[str, np.ndarray]:
    """Points, settings (JSON text), the cells of the index, and the plan."""
    problem, engine = stored.problem, stored.engine
    index = engine.index if isinstance(engine, (CellsEngine, SparseEngine)) else stored.index
    settings: dict[str, Any] = {
        "kernel": problem.kernel.name,
        "bandwidth": problem.bandwidth,
        "eps": problem.eps,
        "seed": problem.seed,
        "confidence": problem.confidence,
        "adaptive": stored.adaptive,
        "options": asdict(stored.options),
        "chosen": stored.method,
        "reason": stored.reason,
        "planned_keys": stored.planned_keys,
    }
    arrays = {"queries": problem.queries.numpy()}
    if not problem.symmetric:
        arrays["keys"] = problem.keys.numpy()
    if index is not None:
        settings["arithmetic"] = index.frame.arithmetic
        arrays["centre"] = index.frame.centre.numpy()
        arrays["centres"] = index.centres.numpy()
        arrays["label"] = index.keys.caller_label.numpy().astype(np.int32)
    if isinstance(engine, (CellsEngine, SparseEngine)):
        plan = engine.plan
        settings["plan"] = {
            "beta": plan.beta,
            "predicted": plan.predicted,
            "met": plan.met,
            "mean_row_sum": plan.mean_row_sum,
            "rough": plan.rough,
            "near_norm": plan.near_norm,
            "rounded": plan.rounded,
        }
        arrays["near"] = plan.near.numpy()
        for name in ("score", "rows", "columns"):
            tensor = getattr(plan, name)
            if tensor is not None:
                arrays[name] = tensor.numpy()
    arrays["settings"] = np.array(json.dumps(settings))
    return arrays


def from_arrays(arrays: dict[str, np.ndarray]) -> Stored:
    """The inverse of `to_arrays`: no clustering, no measuring."""
    settings = json.loads(str(arrays["settings"]))
    if "kernel" not in settings:
        raise BochnerError("This kernel operator was saved by an earlier version; build it again and save it.")
    queries = torch.from_numpy(np.array(arrays["queries"]))
    keys = torch.from_numpy(np.array(arrays["keys"])) if "keys" in arrays else queries
    problem = Problem(
        KERNELS[settings["kernel"]],
        settings["bandwidth"],
        queries,
        keys,
        "keys" not in arrays,
        settings["eps"],
        settings["confidence"],
        settings["seed"],
    )
    options = Options(**{**settings["options"], "constants": Constants(**settings["options"]["constants"])})
    index = _index(problem, settings, arrays)
    engine: Engine | None = None
    if "plan" in settings and index is not None:
        plan = _plan(problem, index, settings["plan"], arrays)
        kept = settings["chosen"] == "sparse"
        engine = SparseEngine(index, plan, problem.eps, options.memory) if kept else CellsEngine(index, plan)
    return Stored(
        problem,
        options,
        settings["adaptive"],
        settings["chosen"],
        settings["reason"],
        settings["planned_keys"],
        engine,
        index,
    )


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
