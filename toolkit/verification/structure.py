"""Structural checks of models that were loaded, and of models that a pass has changed.

`check_proto` and `check_input` find defects of a user's file (names, domains, opsets, tensors,
external data) and report them in one line. `check_output` runs onnx's own checker, with type and
shape inference, on a snapshot with typed placeholders for large tensors: it reads no weights from
disk.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import onnx
from onnx import (
    IR_VERSION,
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
)

from toolkit.errors import ModelError, one_line
from toolkit.ir import node as nd
from toolkit.ir.call_graph import calls_among, find_cycle
from toolkit.ir.graph import CycleError
from toolkit.storage.placeholders import replace_large_tensors
from toolkit.storage.weights import is_external, nbytes

if TYPE_CHECKING:
    from toolkit.ir.model import Model

_TWO_NUMBERS = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)

_KNOWN_TYPES = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
_TYPED_FIELDS = sorted({helper.tensor_dtype_to_field(dtype) for dtype in _KNOWN_TYPES})
"""The fields of a TensorProto that hold numbers or strings."""

_Operator = tuple[str, str]
"""(domain, op_type)"""

_Scopes = tuple[set[str], ...]
"""The names defined in a graph and in each graph around it."""


def check_proto(proto: ModelProto) -> None:
    """Raise ModelError, in one line, for invalid names, domains, opsets or tensors.

    It checks the protobuf: an index over it would keep only one of two equal names.
    Unknown operators pass: a runtime may have them.
    """
    if proto.ir_version > IR_VERSION:
        raise ModelError(
            f"the model has IR version {proto.ir_version}, but the installed onnx supports at "
            f"most {IR_VERSION}; update onnx, or export for an older IR version"
        )
    functions = {(nd.plain_domain(f.domain), f.name) for f in proto.functions}
    known = [f"{f.domain}::{f.name}{f.overload and ':' + f.overload}" for f in proto.functions]
    _require_distinct(known, "functions are")
    _require_no_cycle(proto.functions)
    opsets = _opsets(proto.opset_import, "the model")
    if not opsets and proto.ir_version < 3:
        opsets = {"": 1}  # before IR version 3 models did not import opsets
    if not opsets:
        raise ModelError("the model imports no operator set: 'opset_import' is empty")
    if not proto.graph.output:
        raise ModelError("the graph has no outputs")
    _check_graph(proto.graph, (), opsets, functions)
    for function in proto.functions:
        _check_function(function, functions, opsets)


def check_input(model: Model) -> None:
    """Raise ModelError for cycles and invalid external data; they need a loaded model."""
    for graph in model.graphs():
        try:
            _ = graph.nodes
        except CycleError as error:
            raise ModelError(f"the graph has a cycle through {error.args[0]}") from error
    for tensor in model.tensors():
        if is_external(tensor):
            model.weights.check(tensor)


class Level(enum.Enum):
    """The strictness of onnx's checker: some models run but fail the full check."""

    FULL = "structure, types and shapes"
    STRUCTURE = "structure"
    NAMES = "names"


def strictest_level(model: Model) -> Level:
    """Return the strictest level that the model passes; passes must keep it."""
    for level in (Level.FULL, Level.STRUCTURE):
        try:
            check_output(model, level)
        except ModelError:
            continue
        return level
    return Level.NAMES


def check_output(model: Model, level: Level = Level.FULL) -> None:
    """Raise ModelError unless the model is well-formed at this level."""
    try:
        proto = model.to_proto()
    except CycleError as error:
        raise ModelError(f"the graph has a cycle through {error.args[0]}") from error
    if level is Level.NAMES:
        check_proto(proto)
        return
    replace_large_tensors(proto)
    serialized = proto.SerializeToString()
    del proto  # the checker parses its own copy: keep only one in memory
    try:
        onnx.checker.check_model(serialized, full_check=level is Level.FULL)
    except Exception as error:  # ValidationError, InferenceError, RuntimeError
        raise ModelError(one_line(error)) from error


# -- names, domains, opsets


def _check_graph(
    graph: GraphProto,
    around: _Scopes,
    opsets: Mapping[str, int],
    functions: set[_Operator],
) -> None:
    _require_text(graph)
    inputs = [v.name for v in graph.input]
    stored = [t.name for t in graph.initializer]
    stored += [s.values.name for s in graph.sparse_initializer]
    _require_distinct(inputs, "graph inputs are")
    _require_distinct(stored, "initializers are")
    defined = set(inputs) | set(stored)
    for name in defined:
        if _is_defined(name, around):
            raise ModelError(f"'{name}' is defined in a subgraph and again around it")
    for tensor in graph.initializer:
        _check_tensor(tensor, f"initializer '{tensor.name}'")
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type.elem_type
        if kind and kind not in _KNOWN_TYPES:
            raise ModelError(f"'{value.name}' has the unknown data type {kind}")
    _define(graph.node, defined, around)
    scopes = (defined, *around)
    for node in graph.node:
        _check_node(node, scopes, opsets, functions)
    for value in graph.output:
        if not _is_defined(value.name, scopes):
            raise ModelError(f"graph output '{value.name}' is not defined")


def _check_function(
    function: FunctionProto, functions: set[_Operator], outer_opsets: Mapping[str, int]
) -> None:
    what = f"function '{function.name}'"
    opsets = _opsets(function.opset_import, what) or outer_opsets
    defined = set(function.input)
    _define(function.node, defined, ())
    for node in function.node:
        _check_node(node, (defined,), opsets, functions)
    missing = set(function.output) - defined
    if missing:
        raise ModelError(f"{what}: its output '{min(missing)}' is not defined")


def _require_no_cycle(functions: Iterable[FunctionProto]) -> None:
    names = [f"'{name}'" for _, name, _ in find_cycle(calls_among(functions))]
    if names:
        through = f" through {', '.join(names[1:])}" if names[1:] else ""
        raise ModelError(f"function {names[0]} calls itself{through}, which ONNX does not allow")


def _is_defined(name: str, scopes: _Scopes) -> bool:
    return any(name in names for names in scopes)


def _define(nodes: Iterable[NodeProto], defined: set[str], around: _Scopes) -> None:
    """Add the nodes' outputs to `defined`; raises ModelError for a name that is already visible."""
    for node in nodes:
        for name in node.output:
            if name in defined or _is_defined(name, around):
                raise ModelError(f"'{name}' is defined twice, the second time by {nd.label(node)}")
            if name:
                defined.add(name)


def _check_node(
    node: NodeProto,
    scopes: _Scopes,
    opsets: Mapping[str, int],
    functions: set[_Operator],
) -> None:
    here = scopes[0]
    for name in node.input:
        if name and name not in here and not _is_defined(name, scopes):
            raise ModelError(f"{nd.label(node)} uses '{name}', which is not defined")
    domain = nd.domain_of(node)
    if domain not in opsets and (domain, node.op_type) not in functions:
        raise ModelError(
            f"{nd.label(node)} has the domain '{domain or 'ai.onnx'}', which the model does not "
            "import"
        )
    for attribute in node.attribute:
        kind = attribute.type
        if kind == AttributeProto.TENSOR:
            _check_tensor(attribute.t, f"the tensor in {nd.label(node)}")
        elif kind == AttributeProto.GRAPH:
            _check_graph(attribute.g, scopes, opsets, functions)
        elif kind == AttributeProto.GRAPHS:
            for inner in attribute.graphs:
                _check_graph(inner, scopes, opsets, functions)


def _opsets(entries: Iterable[onnx.OperatorSetIdProto], what: str) -> dict[str, int]:
    newest = onnx.defs.onnx_opset_version()
    opsets: dict[str, int] = {}
    for entry in entries:
        domain = nd.plain_domain(entry.domain)
        name = domain or "ai.onnx"
        if opsets.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"{what} imports two versions of '{name}'")
        if entry.version < 1:
            raise ModelError(f"{what} imports opset {entry.version} of '{name}', which is unknown")
        if not domain and entry.version > newest:
            raise ModelError(
                f"{what} imports opset {entry.version}, but the installed onnx supports at most "
                f"{newest}; update onnx, or export for an older opset"
            )
    return opsets


def _require_text(graph: GraphProto) -> None:
    """Raise ModelError for names that are not UTF-8, which protobuf returns as bytes."""
    names: list[str] = []
    for value in (*graph.input, *graph.output, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        names += (value.name, *(dim.dim_param for dim in dims))
    for node in graph.node:
        names += (node.name, node.op_type, node.domain, *node.input, *node.output)
    if bytes in map(type, names):
        raise ModelError("the graph has a name that is not text; the file is damaged")


def _require_distinct(names: list[str], what: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"two {what} called '{twice}'")


# -- tensors


def _check_tensor(tensor: TensorProto, what: str) -> None:
    """Check that the data is in the field that belongs to its type and has the shape's size."""
    if tensor.data_type not in _KNOWN_TYPES:
        raise ModelError(f"{what} has the unknown data type {tensor.data_type}")
    if any(size < 0 for size in tensor.dims):
        raise ModelError(f"{what} has a negative size in its shape {list(tensor.dims)}")
    if is_external(tensor):
        return  # `check_input` checks external data
    kind = TensorProto.DataType.Name(tensor.data_type)
    filled = [name for name in _TYPED_FIELDS if len(getattr(tensor, name))]
    if tensor.HasField("raw_data"):
        filled.append("raw_data")
    if len(filled) > 1:
        raise ModelError(f"{what} holds its data twice: {filled[-1]} and {filled[0]}")
    if "raw_data" in filled:
        if tensor.data_type == TensorProto.STRING:
            raise ModelError(f"{what} holds strings, which cannot be stored as raw_data")
        unit, expected, stored = "bytes", nbytes(tensor), len(tensor.raw_data)
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        if filled and filled != [field]:
            raise ModelError(f"{what} has type {kind}, but its data is stored as {filled[0]}")
        unit, expected, stored = "numbers", _typed_length(tensor), len(getattr(tensor, field))
    if stored != expected:
        found = f"{stored} are stored" if stored else "it has no data"
        size = f"{kind}{list(tensor.dims)}, {expected} {unit}"
        raise ModelError(f"{what} is {size}, but {found}")


def _typed_length(tensor: TensorProto) -> int:
    """Return the length of the tensor's typed field; types below a byte are packed into bytes."""
    elements = math.prod(tensor.dims)
    if tensor.data_type in _TWO_NUMBERS:
        return 2 * elements
    if tensor.data_type == TensorProto.STRING:
        return elements
    return min(elements, nbytes(tensor))
