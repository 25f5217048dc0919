"""ONNX's conformance cases as shipped in the onnx package, in the forms that passes see them in."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.case.model import collect_testcases as collect_model_cases
from onnx.backend.test.case.node import collect_testcases as collect_node_cases

from tests.ort import run
from toolkit.runtime import MAX_IR, MAX_OPSET


@dataclass(frozen=True)
class Case:
    """One model with its inputs and the outputs that ONNX expects."""

    name: str
    model: ModelProto
    inputs: Sequence[Any]
    expected: Sequence[Any]
    rtol: float
    atol: float


@functools.cache
def cases() -> dict[str, Case]:
    """Every case by name: generated ones, and the models stored on disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generated = [*collect_node_cases(None), *collect_model_cases()]
    found: dict[str, Case] = {}
    for case in generated:
        if case.model is None:
            continue  # `real` models would be downloaded
        for index, (inputs, expected) in enumerate(case.data_sets or ()):
            name = case.name if not index else f"{case.name}-{index}"
            found[name] = Case(name, case.model, inputs, expected, case.rtol, case.atol)
    root = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for kind in ("pytorch-operator", "pytorch-converted", "simple"):
        for folder in sorted((root / kind).iterdir()):
            found.setdefault(folder.name, _stored_case(folder))
    return found


def _stored_case(folder: Path) -> Case:
    model = onnx.load(folder / "model.onnx")
    data = folder / "test_data_set_0"

    def tensors(kind: str) -> list[np.ndarray]:
        count = len(list(data.glob(f"{kind}_*.pb")))
        files = (data / f"{kind}_{i}.pb" for i in range(count))
        return [numpy_helper.to_array(TensorProto.FromString(f.read_bytes())) for f in files]

    try:
        inputs, expected = tensors("input"), tensors("output")
    except Exception:  # sequences are stored as another message; the model itself is generated too
        inputs, expected = [], []
    return Case(folder.name, model, inputs, expected, 1e-3, 1e-7)


def loadable(model: ModelProto) -> ModelProto:
    """The same model under the newest opset and IR that onnxruntime loads.

    Where the operator means something else there, the case's expected output tells.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = min(copy.ir_version, MAX_IR)
    for entry in copy.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = min(entry.version, MAX_OPSET)
    return copy


def feeds(model: ModelProto, inputs: Sequence[Any]) -> dict[str, Any]:
    stored = {t.name for t in model.graph.initializer}
    names = [v.name for v in model.graph.input if v.name not in stored]
    arrays = (np.asarray(v) if isinstance(v, np.generic) else v for v in inputs)
    return dict(zip(names, arrays, strict=False))


def variants(model: ModelProto, fed: dict[str, Any]) -> Iterator[tuple[str, ModelProto, dict]]:
    """The model as it is, with its shape-like inputs stored, and with all inputs stored.

    Single-operator cases feed everything; in real models shapes, axes and weights are constants.
    """
    yield "as is", model, fed
    shapes = [n for i, (n, v) in enumerate(fed.items()) if i and _is_integer(v)]
    if shapes:
        yield "shapes stored", *_stored(model, fed, shapes)
    everything = [n for n, v in fed.items() if isinstance(v, np.ndarray)]
    if everything and len(everything) == len(fed):
        yield "all stored", *_stored(model, fed, everything)


def _is_integer(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in (np.int64, np.int32, np.bool_)


def _stored(
    model: ModelProto, fed: dict[str, Any], names: Sequence[str]
) -> tuple[ModelProto, dict[str, Any]]:
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = max(copy.ir_version, 4)
    kept = [v for v in copy.graph.input if v.name not in names]
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    for name in names:
        copy.graph.initializer.append(numpy_helper.from_array(fed[name], name))
    return copy, {n: v for n, v in fed.items() if n not in names}


def agree(results: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float) -> bool:
    try:
        for result, wanted in zip(results, expected, strict=True):
            _assert_close(result, wanted, rtol, atol)
    except AssertionError:
        return False
    return True


def _assert_close(result: Any, wanted: Any, rtol: float, atol: float) -> None:
    if isinstance(wanted, (list, tuple)):
        assert len(result) == len(wanted)
        for one, other in zip(result, wanted, strict=True):
            _assert_close(one, other, rtol, atol)
    elif isinstance(wanted, dict):
        assert result == wanted
    elif wanted is None or result is None:
        assert result is None
        assert wanted is None
    else:
        result, wanted = np.asarray(result), np.asarray(wanted)
        assert result.shape == wanted.shape
        if wanted.dtype.kind in "OSU":
            assert result.astype(str).tolist() == wanted.astype(str).tolist()
        elif wanted.dtype.kind in "fc":
            np.testing.assert_allclose(result, wanted, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(
                np.asarray(result, np.float64), np.asarray(wanted, np.float64)
            )


def reason_to_skip(case: Case) -> str:
    """Why the original does not count: "refused" or "disagrees", and the details; or nothing."""
    model = loadable(case.model)
    try:
        original = run(model, feeds(model, case.inputs))
    except Exception as error:  # the binding raises a dozen unrelated classes
        return f"refused: {str(error)[:120]}"
    if case.expected and not agree(original, case.expected, case.rtol, case.atol):
        return "disagrees with the expected output"
    return ""
