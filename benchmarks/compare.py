"""Compare a tool's result with the original model: node counts, operators, numerical agreement.

    python benchmarks/compare.py SOURCE TARGET < inputs.json

runs in a separate process (see `examine`), to keep the caller's memory small. Agreement means:
the same output names and types, integers equal, floats within `TOLERANCE` of the largest
reference value, on two random feeds of different sizes, in onnxruntime with its optimizations
off.
"""

# pyright: basic

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inputs import FED, Input, random_feed

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Examination:
    """The comparison; `nodes` counts subgraphs and calls, too, `foreign` non-standard operators."""

    nodes: int
    ops: dict[str, int]
    foreign: dict[str, int]
    agrees: bool
    error: float | None
    reason: str


def examine(source: Path, target: Path, inputs: Sequence[Input], timeout: float) -> Examination:
    """Compare the two files in a separate process."""
    command = [sys.executable, __file__, str(source), str(target)]
    text = json.dumps([asdict(i) for i in inputs])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Examination(0, {}, {}, False, None, f"comparison took more than {timeout:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Examination(0, {}, {}, False, None, lines[-1] if lines else "crashed")
    return Examination(**json.loads(done.stdout))


def census(path: Path) -> Counter[tuple[str, str]]:
    """Count nodes by (domain, operator), with subgraphs; a call counts as its function."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    total: Counter[tuple[str, str]] = Counter()
    pending: list[Iterable[onnx.NodeProto]] = [model.graph.node]
    while pending:
        for node in pending.pop():
            called = functions.get((node.domain, node.op_type, node.overload))
            if called is not None:
                pending.append(called.node)
                continue
            total["" if node.domain == "ai.onnx" else node.domain, node.op_type] += 1
            for attribute in node.attribute:
                pending.extend(g.node for g in (attribute.g, *attribute.graphs) if g.node)
    return total


def session_as_written(path: Path) -> Any:
    """Open the model in onnxruntime without graph optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def agreement(source: Path, target: Path, inputs: Sequence[Input]) -> tuple[float | None, str]:
    """Return the largest error over all feeds and outputs, and the reason of a disagreement."""
    feeds = [random_feed(inputs, sizes, seed) for seed, sizes in enumerate(FED)]
    outputs: list[list[list[Any]]] = []
    names: list[str] = []
    for path in (source, target):
        try:
            runner = session_as_written(path)
            names = names or [output.name for output in runner.get_outputs()]
            outputs.append([list(runner.run(names, feed)) for feed in feeds])
        # onnxruntime raises its own family of exceptions, and ValueError for names and shapes.
        except Exception as error:
            which = "the original" if path == source else "the result"
            return None, f"{which} does not run: {str(error).splitlines()[0]}"
    return difference(names, *outputs)


def difference(
    names: Sequence[str], wanted: Sequence[Sequence[Any]], found: Sequence[Sequence[Any]]
) -> tuple[float | None, str]:
    """Return the largest error relative to an output's scale, and the reason of a disagreement."""
    import numpy as np

    worst = 0.0
    for wants, gots in zip(wanted, found, strict=True):
        for name, want, got in zip(names, wants, gots, strict=True):
            if want.shape != got.shape or want.dtype != got.dtype:
                return None, f"{name}: {got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
            if want.dtype.kind in "iub" and not np.array_equal(want, got):
                return None, f"{name}: integers differ"
            if not np.array_equal(np.isnan(want), np.isnan(got)):
                return None, f"{name}: NaN"
            scale = max(float(np.nanmax(np.abs(want), initial=0)), 1e-6)
            difference = np.abs(want.astype(np.float64) - got.astype(np.float64))
            worst = max(worst, float(np.nanmax(difference, initial=0)) / scale)
    return worst, "" if worst <= TOLERANCE else f"error {worst:.2g} above {TOLERANCE:.0e}"


def main(source: Path, target: Path, inputs: Sequence[Input]) -> None:
    from onnx import defs

    counts = census(target)
    # By schema: onnxruntime puts operators of its own into the standard domain too.
    foreign = {
        f"{domain or 'ai.onnx'}.{op}": count
        for (domain, op), count in counts.items()
        if not defs.has(op, domain)
    }
    ops: Counter[str] = Counter()
    for (_, op), count in counts.items():
        ops[op] += count
    error, reason = agreement(source, target, inputs)
    result = Examination(counts.total(), dict(ops), foreign, not reason, error, reason)
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    described = json.load(sys.stdin)
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        [Input(i["name"], tuple(i["shape"]), i["below"]) for i in described],
    )
