"""Convert raw feeds to the types of a model's inputs.

Floats are converted to other floating-point types, integers (and booleans) to other integer types
that hold every value, and to floats that hold every value exactly. Integers are not scaled: whether
0..255 should become 0..1 is not known. Floats are never converted to integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from toolkit.calibrate.statistics import Array, is_float
from toolkit.errors import UsageError
from toolkit.feeds.user_samples import Feed, describe, require_shape, without_frozen
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType, dtype_name

_LARGEST_INTEGER = 2.0**53
"""64-bit floats hold all integers up to this one."""


class Inputs:
    """The inputs of a model, and remarks on the feeds converted to their types."""

    def __init__(self, model: Model) -> None:
        self.required = model.graph.feeds
        self.types = {name: model.graph.type(name) for name in model.graph.inputs}
        self._frozen = model.frozen
        self.notes: list[str] = []

    def fit(self, raw: Mapping[str, Any], what: str) -> Feed:
        """Convert every array to its input's type; raises UsageError if one does not fit."""
        raw = without_frozen(raw, self._frozen, what)
        missing = next((name for name in self.required if name not in raw), None)
        if missing is not None:
            listed = ", ".join(f"{name} {describe(self.types[name])}" for name in self.required)
            raise UsageError(f"{what} lacks input '{missing}'; the model takes: {listed}")
        feed: Feed = {}
        for name, value in raw.items():
            if name not in self.types:
                self._note(f"'{name}' is not an input of the model and was ignored")
                continue
            feed[name] = _fit_array(value, self.types[name], f"{what}: '{name}'")
            dtype = getattr(value, "dtype", None)
            if dtype is not None and dtype.kind in "iub" and is_float(feed[name]):
                self._note(f"'{name}' holds {dtype}: its numbers are not scaled")
        if feed and not any(np.size(value) for value in feed.values()):
            raise UsageError(f"{what} is empty: all inputs have zero elements")
        return feed

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _fit_array(value: Any, declared: TensorType | None, where: str) -> Any:
    """Convert an array to the declared type."""
    if declared is None:
        return value  # a sequence or a map: the runtime checks it
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"{where} is not an array: {error}") from error
    if array.shape and not array.shape[0]:  # other axes may be empty, as in the first KV cache
        raise UsageError(f"{where} is empty: it has shape {list(array.shape)}")
    require_shape(array.shape, declared, where)
    converted = convert(array, declared, where)
    if is_float(converted) and not bool(np.isfinite(converted.astype(np.float32)).all()):
        finite = is_float(array) and bool(np.isfinite(array.astype(np.float64)).all())
        problem = f"does not fit into {dtype_name(declared.dtype)}" if finite else "has NaN or Inf"
        raise UsageError(f"{where} {problem}; remove that sample")
    return converted


def convert(array: Array, declared: TensorType, where: str) -> Array:
    """Convert an array to an element type; raises UsageError if values change."""
    if declared.dtype == TensorProto.STRING and array.dtype.kind in "OSU":
        return array.astype(object)
    wanted: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(declared.dtype))
    if array.dtype == wanted:
        return array
    to_float = is_float(np.empty(0, wanted))
    integers = array.dtype.kind in "iub"
    if not (integers and (to_float or wanted.kind in "iub")) and not (is_float(array) and to_float):
        raise UsageError(f"{where} is {array.dtype}; the model takes {describe(declared)}")
    with np.errstate(over="ignore"):  # the caller reports overflow of floats
        converted = array.astype(wanted)
    if not integers:
        return converted
    if to_float:
        same = converted.astype(np.float64) == array.astype(np.float64)
        same &= np.abs(array.astype(np.float64)) <= _LARGEST_INTEGER
    else:
        same = (converted.astype(array.dtype) == array) & ((converted < 0) == (array < 0))
    if not bool(same.all()):
        holds = "does not hold exactly" if to_float else "cannot hold"
        raise UsageError(f"{where} is {array.dtype} with values that {wanted} {holds}")
    return converted
