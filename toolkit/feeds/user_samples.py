"""The user's own samples: feeds, or .npz files of one feed each, checked against the model."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from toolkit.errors import UsageError
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import TensorType, dtype_name

Feed = dict[str, Any]
"""The inputs of one run by name: an array each, or a list of arrays for a sequence."""

Sample = str | os.PathLike[str] | Mapping[str, Any]
"""A feed, or the .npz file that holds one."""


def read_sample(sample: Sample, graph: Graph) -> Feed:
    """Return the feed in `sample`; raises UsageError, in one line, if it does not fit the model."""
    if isinstance(sample, Mapping):
        given, what = dict(sample), "the sample"
    else:
        given, what = _load(Path(sample)), f"sample '{os.fspath(sample)}'"
    given = without_frozen(given, graph.model.frozen, what)
    missing = [name for name in graph.feeds if name not in given]
    unknown = [name for name in given if name not in graph.inputs]
    if missing or unknown:
        problem = (
            f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}', which is not an input"
        )
        listed = ", ".join(f"{name} {describe(graph.type(name))}" for name in graph.feeds)
        raise UsageError(f"{what} {problem}; the model takes: {listed}")
    return {
        name: _checked(value, graph.type(name), f"{what}: '{name}'")
        for name, value in given.items()
    }


def without_frozen(given: Mapping[str, Any], frozen: Feed, what: str = "the feed") -> Feed:
    """Return a sample without frozen inputs; raises UsageError if it contradicts one."""
    for name, value in frozen.items():
        if name in given and not np.array_equal(given[name], value):
            raise UsageError(f"{what}: '{name}' differs from its frozen value")
    return {name: value for name, value in given.items() if name not in frozen}


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"sample '{path}' does not exist")
    try:
        loaded: Any = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise UsageError(f"sample '{path}' is a single array; save it with numpy.savez")
        with loaded:
            names: list[str] = loaded.files
            return {name: loaded[name] for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"sample '{path}' is not an .npz file of plain arrays") from error


def _checked(value: Any, declared: TensorType | None, where: str) -> Any:
    if declared is None:
        return value  # a sequence or a map: the runtime checks it
    array = np.asarray(value)
    if declared.dtype == TensorProto.STRING and array.dtype.kind in "OSU":
        array = array.astype(object)
    if array.dtype != helper.tensor_dtype_to_np_dtype(declared.dtype):
        raise UsageError(f"{where} is {array.dtype}; the model takes {describe(declared)}")
    require_shape(array.shape, declared, where)
    return array


def require_shape(shape: tuple[int, ...], declared: TensorType, where: str) -> None:
    """Raise UsageError if an input of this shape does not fit its declared type."""
    if declared.shape is None:
        return
    if len(shape) != len(declared.shape):
        problem = f"has rank {len(shape)}"
    elif any(isinstance(d, int) and d != s for d, s in zip(declared.shape, shape, strict=True)):
        problem = f"has shape {list(shape)}"
    else:
        return
    raise UsageError(f"{where} {problem}; the model takes {describe(declared)}")


def describe(declared: TensorType | None) -> str:
    """Return the type of an input as `float32[batch, 3, 224, 224]`."""
    if declared is None:
        return "(no tensor)"
    if declared.shape is None:
        return dtype_name(declared.dtype)
    return f"{dtype_name(declared.dtype)}[{', '.join(map(str, declared.shape))}]"
