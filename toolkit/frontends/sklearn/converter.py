# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Convert models by skl2onnx, and fix what keeps the graphs from running."""

from __future__ import annotations

import importlib
import locale
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, helper

from toolkit.errors import summarize
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import ExportFailed
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.signature import rename_values
from toolkit.frontends.sklearn.input_columns import Array, FloatType, installed
from toolkit.ir.model import Model

_DEFAULT_LOCALE, _PORTABLE_LOCALE = "en_US.UTF-8", "C.UTF-8"
_ML_OPSET = 3
"""The newest opset of ai.onnx.ml that all of skl2onnx's converters support."""


def convert(
    model: Any,
    feed: Feed,
    dynamic: Axes,
    request: Request,
    scratch: Path,
    kind: FloatType,
) -> Path:
    """Write the graph of a model that computes in floats of this type."""
    skl2onnx = installed("skl2onnx")
    types: Any = importlib.import_module("skl2onnx.common.data_types")
    number = types.DoubleTensorType if np.dtype(kind).itemsize == 8 else types.FloatTensorType

    def declared(name: str, value: Array) -> Any:
        shape = [None if 0 in dynamic.get(name, {}) else value.shape[0], *value.shape[1:]]
        if value.dtype.kind == "U":
            return types.StringTensorType(shape)
        return types.BooleanTensorType(shape) if value.dtype.kind == "b" else number(shape)

    newest = int(skl2onnx.__max_supported_opset__)
    opset = {"": min(request.opset or newest, newest), "ai.onnx.ml": _ML_OPSET}
    request.progress(f"exporting with skl2onnx, {np.dtype(kind).name}")
    try:
        inputs = [(name, declared(name, value)) for name, value in feed.items()]
        made = _converted(skl2onnx, model, inputs, opset)
    except Exception as error:  # converters may raise anything
        raise ExportFailed("skl2onnx", summarize(error)) from error
    _unpack_sequences(made.graph)
    _use_installed_locale(made.graph)
    path = scratch / f"model-{np.dtype(kind).name}.onnx"
    Model.from_proto(made).save(path)
    return path


def _converted(skl2onnx: Any, model: Any, inputs: Any, opset: Mapping[str, int]) -> Any:
    base: Any = importlib.import_module("sklearn.base")
    plain = {id(model): {"zipmap": False}}  # probabilities as a tensor, not as a list of maps
    with _python_attributes():
        if base.is_classifier(model):
            try:
                return skl2onnx.convert_sklearn(
                    model, initial_types=inputs, target_opset=opset, options=plain
                )
            except NameError:  # converters that never emit maps lack the option
                pass
        return skl2onnx.convert_sklearn(model, initial_types=inputs, target_opset=opset)


def _unpack_sequences(graph: GraphProto) -> None:
    """Replace outputs that are lists of tensors, one per target, by the tensors."""
    for value in [each for each in graph.output if each.type.HasField("sequence_type")]:
        producer = next((n for n in graph.node if value.name in n.output), None)
        if producer is None or producer.op_type != "SequenceConstruct":
            continue
        kind = value.type.sequence_type.elem_type.tensor_type.elem_type
        names = {old: f"{value.name}_{place}" for place, old in enumerate(producer.input)}
        graph.output.remove(value)
        graph.node.remove(producer)
        rename_values(graph, names)
        graph.output.extend(
            helper.make_tensor_value_info(name, kind, [None, None]) for name in names.values()
        )


def _use_installed_locale(graph: GraphProto) -> None:
    """Replace the locale of StringNormalizer, without which onnxruntime fails, if not installed.

    Both locales lowercase letters alike.
    """
    for node in graph.node:
        if node.op_type != "StringNormalizer":
            continue
        named = next((each for each in node.attribute if each.name == "locale"), None)
        if not _is_installed(named.s.decode() if named is not None else _DEFAULT_LOCALE):
            if named is not None:
                node.attribute.remove(named)
            node.attribute.append(helper.make_attribute("locale", _PORTABLE_LOCALE))


def _is_installed(name: str) -> bool:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except locale.Error:
        return False
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    return True


@contextmanager
def _python_attributes() -> Generator[None]:
    """Convert numpy scalars in attributes to Python numbers, as onnx requires.

    skl2onnx 1.20 passes numpy scalars for histogram-based gradient boosting.
    """
    container: Any = importlib.import_module("skl2onnx.common._container")
    make_node = container.make_node

    def patched(*args: Any, **attributes: Any) -> Any:
        for name, value in attributes.items():
            if isinstance(value, (list, tuple, np.ndarray)):
                attributes[name] = [_number(v) for v in value]
        return make_node(*args, **attributes)

    container.make_node = patched
    try:
        yield
    finally:
        container.make_node = make_node


def _number(value: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    return int(plain) if isinstance(plain, bool) else plain
