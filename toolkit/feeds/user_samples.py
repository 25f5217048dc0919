"""The user's own inputs: one feed for each .npz file, checked against what the model declares."""

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
from toolkit.ir.tensor_type import dtype_name

Feed = dict[str, Any]
"""One set of inputs: an array (or a list of arrays, for a sequence) by input name."""

Sample = str | os.PathLike[str] | Mapping[str, Any]
"""A feed, or the .npz file that holds one."""


def read_sample(sample: Sample, graph: Graph) -> Feed:
    """The feed in `sample`; raises UsageError, in one line, when it does not fit the model."""
    if isinstance(sample, Mapping):
        given, what = sample, "the sample"
    else:
        given, what = _load(Path(sample)), f"sample '{os.fspath(sample)}'"
    wanted, optional = graph.feeds, set(graph.inputs)
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in optional]
    if missing or unknown:
        problem = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}', which is no input"
        listed = ", ".join(f"{name} {_describe(graph, name)}" for name in wanted)
        raise UsageError(f"{what} {problem}; the model takes: {listed}")
    return {name: _fit(value, graph, name, what) for name, value in given.items()}


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
        raise UsageError(f"sample '{path}' is no .npz file of plain arrays") from error


def _fit(value: Any, graph: Graph, name: str, what: str) -> Any:
    declared = graph.type(name)
    if declared is None:
        return value  # a sequence or a map: the runtime judges it
    array = np.asarray(value)
    expected: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(declared.dtype)
    if declared.dtype == TensorProto.STRING and array.dtype.kind in "OSU":
        array = array.astype(object)
    problem = ""
    if array.dtype != expected:
        problem = f"is {array.dtype}"
    elif declared.shape is not None:
        sizes = zip(declared.shape, array.shape, strict=False)
        if array.ndim != len(declared.shape) or any(
            isinstance(d, int) and d != s for d, s in sizes
        ):
            problem = f"has shape {list(array.shape)}"
    if problem:
        raise UsageError(f"{what}: '{name}' {problem}; the model takes {_describe(graph, name)}")
    return array


def _describe(graph: Graph, name: str) -> str:
    declared = graph.type(name)
    if declared is None:
        return "(no tensor)"
    if declared.shape is None:
        return dtype_name(declared.dtype)
    return f"{dtype_name(declared.dtype)}[{', '.join(map(str, declared.shape))}]"
