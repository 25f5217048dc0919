"""The compared tools, each of which converts a model file to a model file with its best options.

A peer is a function that imports everything its tool needs and returns the call to measure, which
separates start-up from work. Run as a script, this file is the process that `measure.py` samples:

    python benchmarks/peers.py PEER SOURCE TARGET CORES

It prints `ready` after the imports, waits for a line, runs, and answers with one line of JSON.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Work = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool; `python` marks the peers of the time claim, which are called as Python libraries."""

    prepare: Callable[[], Work]
    packages: tuple[str, ...]
    ours: bool = False
    python: bool = False


def _toolkit(validate: Literal["off", "each"]) -> Work:
    import onnxruntime  # noqa: F401

    from toolkit import optimize
    from toolkit.pass_manager.registry import parse_passes

    parse_passes("simplify")  # passes are imported lazily: now, as the other tools do on import

    def work(source: str, target: str) -> None:
        optimize(source, passes="simplify", validate=validate).save(target)

    return work


def _onnxslim() -> Work:
    import onnxruntime  # noqa: F401
    import onnxslim
    import onnxslim.cli._main
    import onnxslim.core

    def work(source: str, target: str) -> None:
        onnxslim.slim(source, target)

    return work


def _onnxsim() -> Work:
    import onnxruntime  # noqa: F401
    import onnxsim

    def work(source: str, target: str) -> None:
        onnxsim.simplify(source, output_path=target)

    return work


def _onnxscript() -> Work:
    import onnx_ir
    import onnxscript.optimizer
    import onnxscript.version_converter

    def work(source: str, target: str) -> None:
        model = onnx_ir.load(source)
        onnxscript.optimizer.optimize(model)
        sidecar = Path(target).name + ".data" if _has_sidecar(source) else None
        onnx_ir.save(model, target, external_data=sidecar)

    return work


def _onnxruntime(level: str) -> Work:
    import onnxruntime

    def work(source: str, target: str) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath = target
        options.log_severity_level = 3
        if _has_sidecar(source):
            key = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(key, Path(target).name + ".data")
        onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    return work


def _has_sidecar(source: str) -> bool:
    return Path(source + ".data").exists()


PEERS: dict[str, Peer] = {
    "toolkit": Peer(lambda: _toolkit("off"), (), ours=True),
    "toolkit-each": Peer(lambda: _toolkit("each"), (), ours=True),
    "onnxslim": Peer(_onnxslim, ("onnxslim",), python=True),
    "onnxsim": Peer(_onnxsim, ("onnxsim",), python=True),
    "onnxscript": Peer(_onnxscript, ("onnxscript", "onnx-ir"), python=True),
    "ort-basic": Peer(lambda: _onnxruntime("ORT_ENABLE_BASIC"), ("onnxruntime",)),
    "ort-extended": Peer(lambda: _onnxruntime("ORT_ENABLE_EXTENDED"), ("onnxruntime",)),
}


def main(name: str, source: str, target: str, cores: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    # Tools print to stdout: keep it for the answer alone.
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work = PEERS[name].prepare()
    gc.collect()
    modules = set(sys.modules)
    print("ready", file=answer)
    sys.stdin.readline()
    error = ""
    cpu, start = time.process_time(), time.perf_counter()
    try:
        work(source, target)
    # Whatever a tool raises is its result for this model.
    except Exception as problem:
        lines = str(problem).strip().splitlines()
        error = f"{type(problem).__name__}: {lines[0] if lines else ''}"
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    late = len(set(sys.modules) - modules)
    result = {"seconds": seconds, "cpu_seconds": cpu, "late_imports": late, "error": error}
    print(json.dumps(result), file=answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
