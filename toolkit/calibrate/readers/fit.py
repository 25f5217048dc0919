"""What the model takes, and making a raw feed fit it.

Conversions: between floating-point types, between integers (booleans among them) when every value
fits, and from integers to floats that hold every value exactly. Those are taken as they are, with a
word: whether 0..255 should become 0..1 is not ours to guess. Floats never become integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from toolkit.calibrate.statistics import Array, is_float
from toolkit.errors import UsageError
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType, dtype_name

_ALL_INTEGERS = 2.0**53
"""Up to here 64-bit floats have all integers."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a model: those that must be fed, and all that may be."""

    required: tuple[str, ...]
    types: Mapping[str, TensorType | None]
    notes: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, model: Model) -> Inputs:
        graph = model.graph
        return cls(tuple(graph.feeds), {name: graph.type(name) for name in graph.inputs})

    def fit(self, raw: Mapping[str, Any], what: str) -> Feed:
        """The feed with every array in its input's type; UsageError when one does not fit."""
        missing = next((name for name in self.required if name not in raw), None)
        if missing is not None:
            listed = ", ".join(f"{name} {describe(self.types[name])}" for name in self.required)
            raise UsageError(f"{what} lacks input '{missing}'; the model takes: {listed}")
        for name in raw:
            if name not in self.types:
                note_once(self.notes, f"'{name}' is no input of the model: it was ignored")
        feed: Feed = {}
        for name, value in raw.items():
            if name not in self.types:
                continue
            feed[name] = fit_array(value, name, self.types[name], what)
            kind = getattr(value, "dtype", None)
            if kind is not None and kind.kind in "iub" and is_float(feed[name]):
                note = f"'{name}' holds {kind}: its numbers are taken as they are, not scaled"
                note_once(self.notes, note)
        if feed and not any(np.size(value) for value in feed.values()):
            raise UsageError(f"{what} is empty: no input has an element")
        return feed


def fit_array(value: Any, name: str, declared: TensorType | None, what: str) -> Any:
    """The array in the type that the model declares for the input `name`."""
    if declared is None:
        return value  # a sequence or a map: the runtime judges it
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"{what}: '{name}' is no array: {error}") from error
    where = f"{what}: '{name}'"
    _require_shape(array.shape, where, declared)
    converted = _convert(array, where, declared)
    if is_float(converted) and not bool(np.isfinite(converted.astype(np.float32)).all()):
        finite = is_float(array) and bool(np.isfinite(array.astype(np.float64)).all())
        problem = f"does not fit into {dtype_name(declared.dtype)}" if finite else "has NaN or Inf"
        raise UsageError(f"{where} {problem}; remove that sample")
    return converted


def describe(declared: TensorType | None) -> str:
    """`float32[batch, 3, 224, 224]`."""
    if declared is None:
        return "(no tensor)"
    if declared.shape is None:
        return dtype_name(declared.dtype)
    return f"{dtype_name(declared.dtype)}[{', '.join(map(str, declared.shape))}]"


def note_once(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _require_shape(shape: tuple[int, ...], where: str, declared: TensorType) -> None:
    if shape and not shape[0]:  # along other axes, as a cache before the first token, it may be 0
        raise UsageError(f"{where} is empty: it has shape {list(shape)}")
    if declared.shape is None:
        return
    if len(shape) != len(declared.shape):
        problem = f"has rank {len(shape)}"
    elif any(isinstance(d, int) and d != s for d, s in zip(declared.shape, shape, strict=True)):
        problem = f"has shape {list(shape)}"
    else:
        return
    raise UsageError(f"{where} {problem}; the model takes {describe(declared)}")


def _convert(array: Array, where: str, declared: TensorType) -> Array:
    if declared.dtype == TensorProto.STRING and array.dtype.kind in "OSU":
        return array.astype(object)
    wanted: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(declared.dtype))
    if array.dtype == wanted:
        return array
    target = np.empty(0, wanted)
    if is_float(array) and is_float(target):
        with np.errstate(over="ignore"):  # what overflows is found by the caller
            return array.astype(wanted)
    if array.dtype.kind in "iub" and wanted.kind in "iub":
        converted = array.astype(wanted)
        if bool((converted.astype(array.dtype) == array).all()) and bool(
            ((converted < 0) == (array < 0)).all()
        ):
            return converted
        raise UsageError(f"{where} is {array.dtype} with values that {wanted} cannot hold")
    if array.dtype.kind in "iub" and is_float(target):
        with np.errstate(over="ignore"):
            converted = array.astype(wanted)
        exact = converted.astype(np.float64) == array.astype(np.float64)
        if bool(exact.all()) and bool((np.abs(array.astype(np.float64)) <= _ALL_INTEGERS).all()):
            return converted
        raise UsageError(
            f"{where} is {array.dtype} with values that {wanted} does not hold exactly"
        )
    raise UsageError(f"{where} is {array.dtype}; the model takes {describe(declared)}")
