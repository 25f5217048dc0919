# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Measure lowering candidates on this machine.

A candidate is timed as a chain of several applications, in a session with the runtime's default
options; `latency.paired` interleaves all candidates of a computation. The graph after
load-time optimization shows which operators were timed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from passes.lower.candidates import COMPUTATIONS, Computation
from toolkit.errors import RuntimeRefused, one_line
from toolkit.runtime.cost_table import (
    Candidate,
    Costs,
    Progress,
    Regime,
    cores,
    cpu_name,
    runtime_version,
)
from toolkit.runtime.latency import Effort, Timing, paired

SCRIPT = "benchmarks/kernel_forms.py"
_CONSTANTS = {"quarter": 0.25, "scale": 1 / 32, "zero": 128, "ws": 1 / 2048, "wz": 0}
"""Contents of inputs and weights, by name."""
_MASKS = {"mask_lowest": float(np.finfo(np.float32).min), "mask_finite": -50.0}
"""The values of masked scores in causal masks, by name."""
_HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
_FEWEST_ROUNDS = 3


def measure(
    progress: Progress = lambda done, total, what: None,
    seconds: float = 60.0,
    threads: Sequence[int] = (),
    computations: Sequence[Computation] = COMPUTATIONS,
) -> Costs:
    """Measure all candidates of these computations, on one thread and, if available, on two."""
    counts = tuple(threads) or ((1,) if cores() == 1 else (1, 2))
    plan = [
        (computation, Regime(*size, count))
        for computation in computations
        for size in computation.regimes
        for count in counts
    ]
    left = sum(len(computation.candidates) for computation, _ in plan)
    end = time.perf_counter() + seconds
    found: dict[str, dict[Regime, _Measured]] = {}
    for done, (computation, regime) in enumerate(plan):
        progress(done, len(plan), f"{computation.name} {regime}")
        # Overruns of earlier computations shorten the later ones.
        budget = (end - time.perf_counter()) * len(computation.candidates) / left
        left -= len(computation.candidates)
        found.setdefault(computation.name, {})[regime] = _measured(computation, regime, budget)
    progress(len(plan), len(plan), "done")
    costs = {one.name: _costs_of(one, found[one.name]) for one in computations}
    return Costs(runtime_version(), cpu_name(), SCRIPT, costs)


_Measured = Mapping[str, tuple[Sequence[str], Timing]]
"""Operators that the runtime ran, and the time of the whole chain, by candidate."""


def _measured(computation: Computation, regime: Regime, budget: float) -> _Measured:
    feeds = contents(computation, computation.inputs, regime)
    loaded = {
        name: load(chain(computation, name, regime), regime.threads)
        for name in computation.candidates
    }
    runners = {name: _runner(session, feeds) for name, (session, _) in loaded.items()}
    clock = time.thread_time if regime.threads == 1 else time.perf_counter
    timings = paired(runners, Effort(max(budget, 1e-3), _FEWEST_ROUNDS), clock)
    return {name: (operators, timings[name]) for name, (_, operators) in loaded.items()}


def _costs_of(computation: Computation, found: Mapping[Regime, _Measured]) -> tuple[Candidate, ...]:
    costs: list[Candidate] = []
    for name in computation.candidates:
        runs = {operator for one in found.values() for operator in one[name][0]}
        timings = {regime: one[name][1] for regime, one in found.items()}
        costs.append(
            Candidate(
                name=name,
                runs=tuple(sorted(runs)),
                undone=set(computation.kept.get(name, runs)) != runs,
                cost={regime: one.ratio for regime, one in timings.items()},
                microseconds={
                    regime: one.seconds * 1e6 / computation.stages
                    for regime, one in timings.items()
                },
            )
        )
    return tuple(costs)


def _runner(session: Any, feeds: Mapping[str, Any]) -> Callable[[], object]:
    read = {value.name: feeds[value.name] for value in session.get_inputs()}
    return lambda: session.run(None, read)


# -- models


def chain(computation: Computation, candidate: str, regime: Regime) -> ModelProto:
    """Return a model that applies a candidate repeatedly, each time to the previous result."""
    sizes = _sizes(regime)
    inputs = computation.inputs.format(**sizes)
    weights = computation.weights.format(**sizes)
    nodes = computation.candidates[candidate].format(**sizes)
    signature = ", ".join(filter(None, (inputs, weights)))
    result = computation.result or "float[N] y"
    stage = parser.parse_model(f"{_HEADER}g ({signature}) => ({result}) {{ {nodes} }}")
    model = ModelProto()
    model.CopyFrom(stage)
    graph = model.graph
    stored = contents(computation, computation.weights, regime)
    given = {value.name: value for value in graph.input}
    del graph.node[:], graph.input[:]
    if not computation.result:
        graph.output[0].CopyFrom(given["x"])
        graph.output[0].name = "y"
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in stored.items())
    read = {name for node in stage.graph.node for name in node.input}
    graph.input.extend(v for n, v in given.items() if n not in stored and n in read)
    for index in range(computation.stages):
        names = {"x": f"y{index}" if index else "x"}
        last = index == computation.stages - 1
        names["y"] = "y" if last else f"y{index + 1}"
        for node in stage.graph.node:
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{node.op_type}_{len(graph.node)}"
            for values in (copy.input, copy.output):
                values[:] = [
                    names.get(v, v if v in given or not v else f"{v}_{index}_") for v in values
                ]
    return model


def contents(computation: Computation, declared: str, regime: Regime) -> dict[str, Any]:
    """Return the contents of the declared values, by name, free of denormals and overflow."""
    if not declared:
        return {}
    text = f"{_HEADER}g ({declared.format(**_sizes(regime))}) => () {{ }}"
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for value in parser.parse_model(text).graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if value.name in _MASKS:
            arrays[value.name] = np.triu(np.full(shape, _MASKS[value.name], dtype), 1)
        elif value.name.startswith("range_"):
            start = 0 if value.name == "range_low" else shape[0]
            arrays[value.name] = np.arange(start, start + shape[0])
        elif tensor.elem_type == TensorProto.INT64:
            arrays[value.name] = np.ones(shape, dtype)
        elif value.name in _CONSTANTS:
            arrays[value.name] = np.full(shape, _CONSTANTS[value.name], dtype)
        elif tensor.elem_type == TensorProto.INT8:
            arrays[value.name] = random.integers(-127, 128, shape).astype(dtype)
        elif value.name in ("x", "r", "k", "v") and not computation.positive:
            arrays[value.name] = random.standard_normal(shape).astype(dtype)
        else:
            fan_in = int(np.prod(shape[1:])) if value.name in ("w", "w2") else 1
            arrays[value.name] = (random.uniform(0.5, 0.9, shape) / fan_in).astype(dtype)
    return arrays


def _sizes(regime: Regime) -> dict[str, int]:
    return {
        "T": regime.tokens,
        "D": regime.width,
        "H": max(1, regime.width // 64),
        "half": regime.width // 2,
        "side": round(regime.tokens**0.5),
    }


def load(model: ModelProto, threads: int) -> tuple[Any, list[str]]:
    """Return a session with default options, and the operators it runs, without constants."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        written = Path(folder) / "model.onnx"
        options.optimized_model_filepath = os.fspath(written)
        try:
            session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the binding raises a dozen unrelated classes
            raise RuntimeRefused(one_line(error)) from error
        runs = ModelProto.FromString(written.read_bytes()).graph.node
    names = (f"{n.domain}:{n.op_type}" if n.domain else n.op_type for n in runs)
    return session, sorted(set(names) - {"Constant"})
