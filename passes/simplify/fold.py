"""Compute what depends only on constants.

Exact numpy kernels do data movement and integer arithmetic, on views of the mapped weights. What is
left (convolutions, exponentials, loops over constants) is cut out as one small model and computed
by onnxruntime, so that a folded value is the one that the runtime would have computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from onnx import (
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    defs,
    helper,
    numpy_helper,
    shape_inference,
)

from passes.analysis.const_eval import evaluate
from toolkit.errors import RuntimeRefused
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.node import STANDARD_DOMAINS, inputs_of, is_op, outputs_of
from toolkit.ir.op_traits import is_random
from toolkit.ir.tensor_type import TensorType, from_proto, to_proto
from toolkit.pass_manager.protocol import Context
from toolkit.storage.weights import nbytes
from toolkit.verification.tolerance import EXACT, Tolerance

Array = NDArray[Any]

_KEPT = frozenset({"Constant", "DequantizeLinear", "Identity"})
"""Constant is one already; Identity is what stands behind a constant output; and an int8 weight
behind DequantizeLinear is stored that way on purpose."""

_NO_TENSOR = frozenset(
    {"Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SplitToSequence"}
)
_NEVER = _KEPT | _NO_TENSOR
_SMALL = 64
"""Inputs up to this many elements are shown to shape inference: shapes, axes, repeats."""

_LITTLE, _MUCH, _ONE = 1 << 12, 1 << 23, 1 << 20
"""When nobody says, results may add as much as is stored, at least and at most so many bytes, and
none of them more than the last. On the way it may be more than in the end: what is folded into the
next result does not stay."""
_SHARE, _LEAST = 64, 1 << 10
"""Where that does not do, they may add so little. The runtime computes the rest when it loads a
model, so that a larger file saves nothing."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Compute what depends only on constants."""

    name: ClassVar[str] = "fold"
    tolerance: ClassVar[Tolerance] = EXACT
    max_bytes: int | None = field(
        default=None,
        metadata={
            "help": "By how much results may make the file larger; none: by as much as the weights."
        },
    )

    def run(self, model: Model, ctx: Context) -> None:
        for graph in model.graphs():
            _cast_like_to_cast(graph)
        if self.max_bytes is not None:
            _fold(model, ctx, self.max_bytes, self.max_bytes)
            return
        start, before, whole = model.journal.position, _read_bytes(model), model.nbytes()
        _fold(model, ctx, max(whole // 4, _MUCH), _ONE)
        if _read_bytes(model) - before > min(max(whole, _LITTLE), _MUCH):
            model.journal.undo_to(start)
            _fold(model, ctx, min(max(whole // _SHARE, _LEAST), _MUCH), _ONE)


def _cast_like_to_cast(graph: Graph) -> None:
    """Rewrite CastLike as Cast where the type is known: its result may then be constant."""
    for node in graph.nodes:
        if is_op(node, "CastLike") and (dtype := graph.dtype(node.input[1])):
            graph.set_inputs(node, node.input[:1])
            graph.set_op(node, "Cast")
            graph.set_attr(node, "to", dtype)


def _read_bytes(model: Model) -> int:
    """Bytes of the stored tensors that something reads."""
    return sum(
        nbytes(tensor)
        for graph in model.graphs()
        for name, tensor in graph.initializers.items()
        if not graph.is_unused(name)
    )


def _fold(model: Model, ctx: Context, most: int, one: int) -> None:
    budget = _Budget(most, one)
    for graph in model.graphs():  # one after the other: a branch may go with its If
        while _fold_graph(graph, ctx, budget):
            pass


@dataclass(slots=True)
class _Budget:
    """How far the file may grow by all results; what one frees is for the next."""

    left: int
    one: int
    """The largest result that may add to it at all."""

    def grant(self, size: int, freed: int) -> bool:
        growth = size - freed
        if growth > 0 and (size > self.one or growth > self.left):
            return False
        self.left -= growth
        return True


@dataclass(slots=True)
class _Folding:
    """What is constant in one graph: known by value, or pending until onnxruntime ran."""

    graph: Graph
    candidates: dict[int, NodeProto] = field(default_factory=dict[int, NodeProto])
    known: dict[str, Array] = field(default_factory=dict[str, Array])
    pending: dict[int, NodeProto] = field(default_factory=dict[int, NodeProto])
    folded: dict[int, NodeProto] = field(default_factory=dict[int, NodeProto])
    unknown: set[str] = field(default_factory=set[str])
    types: dict[str, TensorType | None] = field(default_factory=dict[str, "TensorType | None"])
    freed: dict[str, int] = field(default_factory=dict[str, int])
    waited: bool = False

    def array(self, value: str) -> Array | None:
        found = self.known.get(value)
        return found if found is not None else self.graph.const(value)

    def is_constant(self, value: str) -> bool:
        return value in self.known or value in self.unknown or self.graph.is_const(value)

    def freed_by_a_reader(self, value: str) -> int:
        """One reader's share of the stored bytes that go once all readers of `value` are folded."""
        if value not in self.freed:
            self.freed[value] = self._freed(value)
        return self.freed[value]

    def _freed(self, value: str) -> int:
        readers = self.graph.users(value)
        if self.graph.scope_of(value) is not self.graph or self.graph.is_output(value):
            return 0
        if any(id(reader) not in self.candidates for reader in readers):
            return 0
        array = self.array(value)
        return 0 if array is None or array.dtype.kind in "OSU" else array.nbytes // len(readers)

    def read_by(self, node: NodeProto) -> list[str]:
        return [*inputs_of(node), *self.graph.captures_of(node)]


def _fold_graph(graph: Graph, ctx: Context, budget: _Budget) -> bool:
    """Fold what can be; whether the values that came out may tell the sizes of further ones."""
    state = _Folding(graph)
    depend_on_constants: set[str] = set()
    for node in graph.nodes:
        if _is_pure(graph, node) and all(
            value in depend_on_constants or graph.is_const(value) for value in state.read_by(node)
        ):
            state.candidates[id(node)] = node
            depend_on_constants.update(outputs_of(node))
    for node in state.candidates.values():
        if all(map(state.is_constant, state.read_by(node))):
            _try_node(state, node, budget)
    if state.pending:
        _run_pending(state, ctx)
    _write_results(state)
    return state.waited and any(id(node) in state.folded for node in state.pending.values())


def _is_pure(graph: Graph, node: NodeProto) -> bool:
    """Whether equal inputs give equal tensors, always."""
    if node.domain not in STANDARD_DOMAINS or node.op_type in _NEVER or is_random(node):
        return False
    return all(
        inner.domain in STANDARD_DOMAINS and not is_random(inner)
        for child in graph.subgraphs(node)
        for scope in child.walk()
        for inner in scope.nodes
    )


def _try_node(state: _Folding, node: NodeProto, budget: _Budget) -> None:
    graph = state.graph
    size = _result_bytes(state, node)
    freed = sum(map(state.freed_by_a_reader, dict.fromkeys(inputs_of(node)))) + node.ByteSize()
    if size is None:
        state.waited |= any(value in state.unknown for value in inputs_of(node))
        return
    if not budget.grant(size, freed):
        return
    waiting = any(value in state.unknown for value in inputs_of(node))
    results = None
    if not waiting and not graph.subgraphs(node):
        arrays = [state.array(value) if value else None for value in node.input]
        results = evaluate(node, arrays, graph.opset())
    if results is None:
        state.pending[id(node)] = node
        state.unknown.update(outputs_of(node))
        return
    state.folded[id(node)] = node
    for value, result in zip(node.output, results, strict=False):
        if value:
            state.known[value] = graph.model.weights.keep(np.asarray(result))


def _result_bytes(state: _Folding, node: NodeProto) -> int | None:
    """Bytes of all results; None when that cannot be told before computing them."""
    known = {value: state.graph.type(value) for value in outputs_of(node)}
    if any(type_ is None or type_.static is None or not type_.dtype for type_ in known.values()):
        known = _inferred_types(state, node)
    total = 0
    for value in outputs_of(node):
        type_ = state.types[value] = known.get(value)
        sizes = type_.static if type_ is not None else None
        if type_ is None or sizes is None:
            return None
        item = 16 if type_.dtype == TensorProto.STRING else _itemsize(type_.dtype)
        total += math.prod(sizes) * item
    return total


def _inferred_types(state: _Folding, node: NodeProto) -> dict[str, TensorType | None]:
    """What onnx infers for this one node, given the values of its small inputs."""
    graph = state.graph
    types: dict[str, TypeProto] = {}
    data: dict[str, TensorProto] = {}
    for value in inputs_of(node):
        array = state.array(value)
        if array is None:
            pending = state.types.get(value)
            if pending is None:
                return {}
            types[value] = to_proto(pending)
        else:
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            types[value] = to_proto(TensorType(dtype, array.shape))
            if array.size <= _SMALL and array.dtype.kind != "O":  # no shape is told by strings
                data[value] = numpy_helper.from_array(array, value)
    opset = graph.opset()
    try:
        schema = defs.get_schema(node.op_type, opset, "")
        found = shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[helper.make_opsetid("", opset)]
        )
    except (defs.SchemaError, shape_inference.InferenceError, RuntimeError, ValueError):
        return {}
    return {value: from_proto(proto) for value, proto in found.items()}


def _itemsize(dtype: int) -> int:
    return helper.tensor_dtype_to_np_dtype(dtype).itemsize


# -- what numpy has no exact kernel for


def _run_pending(state: _Folding, ctx: Context) -> None:
    """Compute all pending nodes in one session; where it refuses, node by node."""
    nodes = list(state.pending.values())
    try:
        state.known.update(_compute(state, nodes, ctx))
        state.folded.update(state.pending)
    except RuntimeRefused:
        for node in nodes:
            read = state.read_by(node)
            if any(v not in state.known and not state.graph.is_const(v) for v in read):
                continue
            try:
                state.known.update(_compute(state, [node], ctx))
                state.folded[id(node)] = node
            except RuntimeRefused as error:
                ctx.note(f"{node.op_type} left: {error}")


def _compute(state: _Folding, nodes: list[NodeProto], ctx: Context) -> dict[str, Array]:
    from toolkit.runtime.session import Session

    graph = state.graph
    made = {value for node in nodes for value in outputs_of(node)}
    inside = set(map(id, nodes))
    wanted = [
        value
        for value in made
        if graph.is_output(value) or any(id(u) not in inside for u in graph.users(value))
    ]
    wanted = sorted(wanted) or [nodes[-1].output[0]]
    proto = ModelProto(ir_version=min(graph.model.ir_version, 13))
    proto.ir_version = max(proto.ir_version, 4)
    for domain, version in graph.model.opsets.items():
        proto.opset_import.append(helper.make_opsetid(domain, version))
    proto.graph.name = "fold"
    proto.graph.node.extend(graph.snapshot(node) for node in nodes)
    read = [value for node in nodes for value in state.read_by(node)]
    for value in dict.fromkeys(v for v in read if v not in made):
        proto.graph.initializer.append(_stored(state, value))
    proto.graph.output.extend(ValueInfoProto(name=value) for value in wanted)
    session = Session(Model(proto, graph.model.weights), custom_ops=ctx.settings.custom_ops)
    results = session.run({}, wanted)
    return {
        value: result
        for value, result in zip(wanted, results, strict=True)
        if isinstance(result, np.ndarray)
    }


def _stored(state: _Folding, value: str) -> TensorProto:
    if value in state.known:
        return state.graph.model.weights.put(value, state.known[value])
    tensor = TensorProto()
    tensor.CopyFrom(state.graph.tensor(value) or TensorProto())
    tensor.name = value
    return tensor


# -- back into the graph


def _write_results(state: _Folding) -> None:
    """Replace every folded value that somebody outside still reads by a constant."""
    graph = state.graph
    for node in state.folded.values():
        for value in outputs_of(node):
            if value not in state.known:
                continue
            outside = any(id(user) not in state.folded for user in graph.users(value))
            if (outside or graph.is_output(value)) and graph.begin("fold", node):
                graph.replace(value, graph.constant(state.known[value], hint=value))
    for node in reversed(list(state.folded.values())):
        graph.prune(node)
