# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""onnxruntime sessions. No other module imports onnxruntime.

A session gets the small protobuf; it maps large tensors from their files, and arrays in memory are
lent to it (see `toolkit.runtime.session_weights`).
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import ModelProto, helper

from toolkit.errors import RuntimeRefused, UsageError, one_line
from toolkit.ir.model import Model
from toolkit.ir.op_traits import rounds_activations
from toolkit.runtime import MAX_IR
from toolkit.runtime.session_weights import share_weights

MOST_PACKED = 1 << 28
"""Largest weights, in bytes, that are packed if the results depend on packing."""
_LIGHT = 1 << 26
"""Largest weights, in bytes, that are packed in any case: a second copy of them is cheap."""

_FOREIGN = (
    "tensor(bfloat16)",
    *("tensor(float8e4m3fn)", "tensor(float8e4m3fnuz)"),
    *("tensor(float8e5m2)", "tensor(float8e5m2fnuz)"),
)
"""Types that the Python binding does not convert to and from numpy arrays."""


class Session:
    """One model in onnxruntime on the CPU.

    `optimize=False` runs the graph as written; True enables the runtime's load-time optimizations.
    Raises RuntimeRefused if the runtime does not load the model, and UsageError for a
    custom-operator library that does not load.
    """

    def __init__(
        self, model: Model, optimize: bool = False, custom_ops: Sequence[str] = ()
    ) -> None:
        import onnxruntime as ort

        options = _new_options()
        # Planning buffer reuse takes quadratic time: 190 s for 20,000 nodes that run in 0.03 s.
        options.enable_mem_reuse = False
        # Threads without work would spin: half of the processor time on a busy machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Prepacking copies the weights into another layout, which takes memory and time. Without it
        # and an arena, repeated int8 convolutions take up to five times as long.
        light = optimize and model.nbytes() <= _LIGHT
        if not (
            light or (model.nbytes() <= MOST_PACKED and any(map(rounds_activations, model.nodes())))
        ):
            options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = light
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._open(model, options, custom_ops)

    def _open(self, model: Model, options: Any, custom_ops: Sequence[str]) -> None:
        import onnxruntime as ort

        proto = model.to_proto()
        # Newer IR versions only add features that the runtime refuses anyway.
        proto.ir_version = min(proto.ir_version, MAX_IR)
        shared = share_weights(model, proto)
        if shared.folder is not None:
            key = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(key, str(shared.folder.resolve()))
        lend = ort.OrtValue.ortvalue_from_numpy
        self._lent = {name: lend(array) for name, array in shared.lent.items()}
        if self._lent:
            options.add_external_initializers(list(self._lent), list(self._lent.values()))
        serialized = proto.SerializeToString()
        del proto  # the runtime builds a graph of its own: free this one
        self._session = _open_session(serialized, options, custom_ops)
        interface = (*self._session.get_inputs(), *self._session.get_outputs())
        self._foreign = any(value.type in _FOREIGN for value in interface)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        """Return the outputs for one feed; raises RuntimeRefused if the runtime fails."""
        wanted = list(outputs) if outputs is not None else None
        try:
            if not self._foreign:
                return self._session.run(wanted, dict(feeds))
            lent = {name: _to_ort_value(array) for name, array in feeds.items()}
            return list(map(_from_ort_value, self._session.run_with_ort_values(wanted, lent)))
        except Exception as error:
            raise _refused(error) from error


class Deployed(Session):
    """One model with the runtime's default options, for timing.

    All optimizations are on, and weights are packed. `threads` is 0 for all cores.
    """

    def __init__(self, model: Model, threads: int = 0, custom_ops: Sequence[str] = ()) -> None:
        options = _new_options()
        options.intra_op_num_threads = threads
        self._open(model, options, custom_ops)


def packing_note(model: Model) -> str:
    """Return a note if unpacked sessions compute other results than an application, or ""."""
    if model.nbytes() <= MOST_PACKED or not any(map(rounds_activations, model.nodes())):
        return ""
    return (
        f"MatMulNBits was run in floats, since weights over {MOST_PACKED >> 20} MB are not packed "
        "here; an application computes it in int8 (accuracy_level 4)"
    )


def _new_options() -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def _open_session(serialized: bytes, options: Any, custom_ops: Sequence[str]) -> Any:
    import onnxruntime as ort

    for library in custom_ops:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # the binding raises a dozen unrelated classes
            reason = _refused(error)
            raise UsageError(f"custom-operator library '{library}': {reason}") from error
    try:
        return ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _refused(error) from error


def _to_ort_value(array: Any) -> Any:
    """Convert an array for the runtime; types of ml_dtypes are passed as plain bits."""
    from onnxruntime import OrtValue

    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    if array.dtype.isbuiltin == 1:
        return OrtValue.ortvalue_from_numpy(array)
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)


def _from_ort_value(value: Any) -> Any:
    if value.data_type() not in _FOREIGN:
        return value.numpy()
    size = value.tensor_size_in_bytes()
    bits = bytes((ctypes.c_char * size).from_address(value.data_ptr()))
    dtype = helper.tensor_dtype_to_np_dtype(value.element_type())
    return np.frombuffer(bits, dtype=dtype).reshape(value.shape())


def optimize_offline(
    proto: ModelProto,
    level: Literal["basic", "extended", "all"],
    custom_ops: Sequence[str] = (),
) -> ModelProto:
    """Return the model after onnxruntime's load-time optimizations."""
    import onnxruntime as ort

    options = _new_options()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = {
        "basic": levels.ORT_ENABLE_BASIC,
        "extended": levels.ORT_ENABLE_EXTENDED,
        "all": levels.ORT_ENABLE_ALL,
    }[level]
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        written = Path(folder) / "model.onnx"
        options.optimized_model_filepath = str(written)
        _open_session(proto.SerializeToString(), options, custom_ops)
        return ModelProto.FromString(written.read_bytes())


def _refused(error: Exception) -> RuntimeRefused:
    """Return the runtime's message in one line, without its code prefix."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", str(error))
    return RuntimeRefused(one_line(text))
