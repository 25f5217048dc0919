"""Run models in an environment that has onnxruntime and numpy alone.

Each line of standard input names a model and an .npz file: inputs as `in.NAME` and expected outputs
as `out.NAME`. Each line of standard output is the largest relative error, or why it failed.
"""

import sys
from typing import Any

import numpy as np
import onnxruntime as ort

ort.set_default_logger_severity(3)


def largest_error(model: str, data: str) -> float:
    with np.load(data) as arrays:
        feed = {key[3:]: arrays[key] for key in arrays.files if key.startswith("in.")}
        expected = {key[4:]: arrays[key] for key in arrays.files if key.startswith("out.")}
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    found: list[Any] = list(session.run(list(expected), feed))
    return max(_error(*pair) for pair in zip(found, expected.values()))  # noqa: B905


def _error(found: Any, expected: Any) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.size:
        return 0.0
    one, other = (np.asarray(array, np.float64) for array in (found, expected))
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6))


for line in sys.stdin:
    try:
        print(largest_error(*line.split()))
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split())[:300])
