# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""onnxruntime, and the only module that imports it: a model run as it stands.

The session gets the small protobuf; it maps large tensors from the files that they are in, and
arrays in memory are lent to it (see `toolkit.runtime.session_weights`).
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
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.runtime import MAX_IR
from toolkit.runtime.session_weights import supply

MOST_PACKED = 1 << 28
"""Bytes of weights that a session may copy where it computes other numbers without it."""
_LIGHT = 1 << 26
"""Bytes of weights of which a second copy does not count."""
_IN_INT8 = 4
"""The accuracy level of MatMulNBits at which activations are rounded to int8."""

_FOREIGN = (
    "tensor(bfloat16)",
    *("tensor(float8e4m3fn)", "tensor(float8e4m3fnuz)"),
    *("tensor(float8e5m2)", "tensor(float8e5m2fnuz)"),
)
"""Types that the Python binding does not take or give as numpy arrays."""


class Session:
    """One model in onnxruntime on the CPU.

    `optimize=False` runs the graph as written; True is how it will be deployed, with everything
    that the runtime does at load time. A custom-operator library that does not load is a usage
    error.
    """

    def __init__(
        self, model: Model, optimize: bool = False, custom_ops: Sequence[str] = ()
    ) -> None:
        import onnxruntime as ort

        options = _new_options()
        # Its planner for shared buffers is quadratic: 190 s for 20,000 nodes, which run in 0.03 s.
        options.enable_mem_reuse = False
        # Prepacking copies the weights into another layout: memory and time for one run. Int8
        # convolutions of many runs take up to five times as long without it and an arena.
        light = optimize and model.nbytes() <= _LIGHT
        if not (light or (model.nbytes() <= MOST_PACKED and _computes_as_packed(model))):
            options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = light
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._open(model, options, custom_ops)

    def _open(self, model: Model, options: Any, custom_ops: Sequence[str]) -> None:
        import onnxruntime as ort

        proto = model.to_proto()
        # Newer IR versions only add what it refuses anyway.
        proto.ir_version = min(proto.ir_version, MAX_IR)
        supplied = supply(model, proto)
        if supplied.folder is not None:
            folder = str(supplied.folder.resolve())
            key = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(key, folder)
        lend = ort.OrtValue.ortvalue_from_numpy
        self._lent = {name: lend(array) for name, array in supplied.lent.items()}
        if self._lent:
            options.add_external_initializers(list(self._lent), list(self._lent.values()))
        serialized = proto.SerializeToString()
        del proto  # the runtime makes a graph of its own, and two are enough
        _register(custom_ops, options)
        try:
            self._session: Any = ort.InferenceSession(
                serialized, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the binding raises a dozen unrelated classes
            raise _refused(error) from error
        interface = (*self._session.get_inputs(), *self._session.get_outputs())
        self._foreign = any(value.type in _FOREIGN for value in interface)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        """The outputs for one feed; raises RuntimeRefused when the runtime will not."""
        wanted = list(outputs) if outputs is not None else None
        try:
            if not self._foreign:
                return self._session.run(wanted, dict(feeds))
            lent = {name: _to_ort_value(array) for name, array in feeds.items()}
            return list(map(_from_ort_value, self._session.run_with_ort_values(wanted, lent)))
        except Exception as error:
            raise _refused(error) from error


class Deployed(Session):
    """One model as an application has it: the runtime's own defaults, on so many threads.

    For timing: all of its optimizations are on, and weights are copied into the kernels' layout.
    `threads` 0 are all cores.
    """

    def __init__(self, model: Model, threads: int = 0, custom_ops: Sequence[str] = ()) -> None:
        options = _new_options()
        options.intra_op_num_threads = threads
        self._open(model, options, custom_ops)


def said_of_packing(model: Model) -> str:
    """What sessions do not compute as an application would, in words; blank for nothing."""
    if model.nbytes() <= MOST_PACKED or not _computes_as_packed(model):
        return ""
    return (
        f"MatMulNBits was run in floats, since weights over {MOST_PACKED >> 20} MB are not packed "
        "here; an application computes it in int8 (accuracy_level 4)"
    )


def _computes_as_packed(model: Model) -> bool:
    """Whether there are operators that compute in int8 with packed weights, else in floats.

    The runtime makes a MatMulNBits of a product with weights that are dequantized by blocks.
    """
    nodes = (node for graph in model.graphs() for node in graph.nodes)
    return any(
        nd.attr(node, "accuracy_level", 0) == _IN_INT8
        if node.op_type == "MatMulNBits"
        else nd.is_op(node, "DequantizeLinear") and nd.attr(node, "block_size", 0)
        for node in nodes
    )


def _new_options() -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def _register(libraries: Sequence[str], options: Any) -> None:
    for library in libraries:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # as below: of the binding's own kinds
            reason = _refused(error)
            raise UsageError(f"custom-operator library '{library}': {reason}") from error


def _to_ort_value(array: Any) -> Any:
    """The array for the runtime; formats that numpy does not know go in as plain bits."""
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
    """The model as onnxruntime would run it after its own load-time optimizations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = {
        "basic": levels.ORT_ENABLE_BASIC,
        "extended": levels.ORT_ENABLE_EXTENDED,
        "all": levels.ORT_ENABLE_ALL,
    }[level]
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        written = Path(folder) / "model.onnx"
        options.optimized_model_filepath = str(written)
        _register(custom_ops, options)
        try:
            ort.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            return ModelProto.FromString(written.read_bytes())
        except Exception as error:  # the binding raises a dozen unrelated classes
            raise _refused(error) from error


def _refused(error: Exception) -> RuntimeRefused:
    """The runtime's message in one line, without its code prefix."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", str(error))
    return RuntimeRefused(one_line(text))
