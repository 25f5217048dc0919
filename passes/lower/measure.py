# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Measuring spellings on this machine.

Each spelling is a chain of a few of its kind in a session with the runtime's default options. All
spellings of a computation take turns, in bursts of a few milliseconds; what counts of a burst is
its fastest run, since a busy machine only ever adds time. On one thread it is the thread's own time
that counts, which other programs do not add to, and the lower quartile of all bursts. On several
it is the fastest run of a chain of one, and where that takes longer than one thread does, something
else had the cores, and the figure is dropped. The graph that the runtime made of a spelling at load
time is looked at, too: that is what was timed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from passes.lower.candidates import COMPUTATIONS, Computation
from toolkit.errors import RuntimeRefused, one_line
from toolkit.runtime.cost_table import (
    Costs,
    Progress,
    Regime,
    Spelling,
    cores,
    cpu_name,
    runtime_version,
)

SCRIPT = "benchmarks/spellings.py"
_QUANTIZERS = {"scale": 1 / 32, "zero": 128, "ws": 1 / 2048, "wz": 0}
_HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
_BURST_SECONDS = 0.003
_FEWEST_ROUNDS = 3
_DISTURBED = 1.3
_CALL_SECONDS = 15e-6
"""What calling the runtime takes, which a chain of one does not hide."""
_SPIN_SECONDS = 0.002
"""The threads of the session before still spin that long, and would take a core from this one."""


def measure(
    progress: Progress = lambda done, total, what: None,
    seconds: float = 60.0,
    threads: Sequence[int] = (),
    computations: Sequence[Computation] = COMPUTATIONS,
) -> Costs:
    """Measure all spellings of these computations, on one thread and on two where there are two."""
    counts = tuple(threads) or ((1,) if cores() == 1 else (1, 2))
    plan = [
        (computation, Regime(tokens, width, count))
        for computation in computations
        for tokens, width in computation.regimes
        for count in counts
    ]
    left = sum(len(computation.spellings) for computation, _ in plan)
    end = time.perf_counter() + seconds
    found: dict[str, dict[str, _Timed]] = {c.name: {} for c in computations}
    for done, (computation, regime) in enumerate(plan):
        progress(done, len(plan), f"{computation.name} {regime}")
        # what took longer than planned is taken from what is still to come
        budget = (end - time.perf_counter()) * len(computation.spellings) / left
        left -= len(computation.spellings)
        for name, (runs, each) in time_spellings(computation, regime, budget).items():
            timed = found[computation.name].setdefault(name, _Timed())
            timed.runs.update(dict.fromkeys(runs))
            timed.seconds[regime] = each
    for timed in found.values():
        _drop_disturbed(timed)
    progress(len(plan), len(plan), "done")
    return Costs(
        runtime=runtime_version(),
        cpu=cpu_name(),
        script=SCRIPT,
        computations={c.name: _spellings(c, found[c.name]) for c in computations},
    )


@dataclass(slots=True)
class _Timed:
    runs: dict[str, None] = field(default_factory=dict[str, None])
    seconds: dict[Regime, float] = field(default_factory=dict[Regime, float])


def _drop_disturbed(found: Mapping[str, _Timed]) -> None:
    """Forget regimes of several threads in which a spelling took longer than on one."""
    regimes = {regime for timed in found.values() for regime in timed.seconds}
    for regime in regimes:
        alone = replace(regime, threads=1)
        if regime != alone and any(
            timed.seconds[regime] > _DISTURBED * timed.seconds[alone] + _CALL_SECONDS
            for timed in found.values()
            if alone in timed.seconds
        ):
            for timed in found.values():
                del timed.seconds[regime]


def _spellings(computation: Computation, found: Mapping[str, _Timed]) -> tuple[Spelling, ...]:
    usual = found[next(iter(computation.spellings))].seconds
    return tuple(
        Spelling(
            name=name,
            runs=tuple(sorted(timed.runs)),
            undone=set(computation.kept.get(name, timed.runs)) != set(timed.runs),
            cost={regime: each / usual[regime] for regime, each in timed.seconds.items()},
            microseconds={regime: each * 1e6 for regime, each in timed.seconds.items()},
        )
        for name, timed in found.items()
    )


# -- one computation


def time_spellings(
    computation: Computation, regime: Regime, budget: float
) -> dict[str, tuple[list[str], float]]:
    """Of each spelling the operators that the runtime runs, and the seconds of one application."""
    alike = computation if regime.threads == 1 else replace(computation, stages=1)
    feeds = contents(alike, alike.inputs, regime)
    built = {name: load(chain(alike, name, regime), regime.threads) for name in alike.spellings}
    runners = {name: _runner(session, feeds) for name, (session, _) in built.items()}
    times = _interleaved(runners, budget, alone=regime.threads == 1)
    return {name: (operators, times[name] / alike.stages) for name, (_, operators) in built.items()}


def _runner(session: Any, feeds: Mapping[str, Any]) -> Callable[[], object]:
    read = {value.name: feeds[value.name] for value in session.get_inputs()}
    return lambda: session.run(None, read)


def _interleaved(
    runners: Mapping[str, Callable[[], object]], budget: float, alone: bool
) -> dict[str, float]:
    """Seconds of one call of each, taken in turns; `alone`: the caller's thread does it all."""
    clock = time.thread_time if alone else time.perf_counter
    repeats: dict[str, int] = {}
    for name, run in runners.items():
        run()
        repeats[name] = max(1, int(_BURST_SECONDS / max(_seconds(run, clock), 1e-6)))
    fastest: dict[str, list[float]] = {name: [] for name in runners}
    end, rounds = time.perf_counter() + budget, 0
    while rounds < _FEWEST_ROUNDS or time.perf_counter() < end:
        rounds += 1
        for name, run in runners.items():
            if not alone:
                time.sleep(_SPIN_SECONDS)
            run()
            fastest[name].append(min(_seconds(run, clock) for _ in range(repeats[name])))
    counts = 0.25 if alone else 0.0
    return {name: float(np.quantile(found, counts)) for name, found in fastest.items()}


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    run()
    return clock() - started


# -- models


def chain(computation: Computation, spelling: str, regime: Regime) -> ModelProto:
    """A model that applies a spelling several times, each to what the one before gave."""
    sizes = _sizes(regime)
    inputs = computation.inputs.format(**sizes)
    weights = computation.weights.format(**sizes)
    nodes = computation.spellings[spelling].format(**sizes)
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
    """What the declared values hold, by their names: numbers without denormals or overflow."""
    if not declared:
        return {}
    text = f"{_HEADER}g ({declared.format(**_sizes(regime))}) => () {{ }}"
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for value in parser.parse_model(text).graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if value.name.startswith("mask_"):
            arrays[value.name] = _causal_mask(shape, value.name.removeprefix("mask_"))
        elif value.name.startswith("range_"):
            start = 0 if value.name == "range_low" else shape[0]
            arrays[value.name] = np.arange(start, start + shape[0])
        elif value.name == "quarter":
            arrays[value.name] = np.full(shape, 0.25, dtype)
        elif tensor.elem_type == TensorProto.INT64:
            arrays[value.name] = np.ones(shape, dtype)
        elif value.name in _QUANTIZERS:
            arrays[value.name] = np.full(shape, _QUANTIZERS[value.name], dtype)
        elif tensor.elem_type == TensorProto.INT8:
            arrays[value.name] = random.integers(-127, 128, shape).astype(dtype)
        elif value.name in ("x", "r", "k", "v") and not computation.positive:
            arrays[value.name] = random.standard_normal(shape).astype(dtype)
        else:
            fan_in = int(np.prod(shape[1:])) if value.name in ("w", "w2") else 1
            arrays[value.name] = (random.uniform(0.5, 0.9, shape) / fan_in).astype(dtype)
    return arrays


def _causal_mask(shape: Sequence[int], kind: str) -> Any:
    allowed = np.broadcast_to(np.tril(np.ones(shape[-2:], bool)), shape)
    if kind == "boolean":
        return np.ascontiguousarray(allowed)
    low = {"lowest": np.finfo(np.float32).min, "infinite": -np.inf, "finite": -50.0}[kind]
    return np.where(allowed, np.float32(0), np.float32(low)).astype(np.float32)


def _sizes(regime: Regime) -> dict[str, int]:
    return {
        "T": regime.tokens,
        "D": regime.width,
        "H": max(1, regime.width // 64),
        "half": regime.width // 2,
        "side": round(regime.tokens**0.5),
    }


def load(model: ModelProto, threads: int) -> tuple[Any, list[str]]:
    """A session with default options, and the operators that it runs, constants aside."""
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
