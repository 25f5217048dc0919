"""Constant folding.

Exact numpy kernels compute data movement and integer arithmetic on views of the mapped weights.
onnxruntime computes the rest (convolutions, exponentials, loops over constants) in one session, so
a folded value is bit for bit the one that the runtime would have computed.
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
from toolkit.ir import Graph, Model, TensorType, from_proto, to_proto
from toolkit.ir.node import STANDARD_DOMAINS, inputs_of, is_op, outputs_of
from toolkit.ir.op_traits import is_random
from toolkit.pass_manager.protocol import Context
from toolkit.storage.weights import nbytes
from toolkit.verification.tolerance import EXACT, Tolerance

Array = NDArray[Any]

_KEPT = frozenset({"Constant", "DequantizeLinear", "Identity"})
"""Operators that stay: Constant, an Identity that produces a constant output, and DequantizeLinear,
whose weight is stored in int8 on purpose."""

_NO_TENSOR = frozenset(
    {"Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SplitToSequence"}
)
_NEVER = _KEPT | _NO_TENSOR
_MAX_INFERENCE_INPUT = 64
"""Largest number of elements of an input that shape inference reads: shapes, axes, repeats."""

_MIN_GROWTH, _MAX_GROWTH, _MAX_RESULT = 1 << 12, 1 << 23, 1 << 20
"""Default budget in bytes: results may add as many bytes as the model stores, clamped to these two
limits, and each of them at most `_MAX_RESULT`. Intermediate results that later ones absorb may
exceed it for a while."""
_FALLBACK_SHARE, _MIN_FALLBACK = 64, 1 << 10
"""Budget of a second try if the first exceeds that: 1/64 of the stored bytes, at least 1 KB. The
runtime folds the rest when it loads the model, so a larger file saves no time."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Compute nodes whose operands are all constant."""

    name: ClassVar[str] = "fold"
    tolerance: ClassVar[Tolerance] = EXACT
    max_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Bytes by which results may enlarge the file; default: the size of the weights."
        },
    )

    def run(self, model: Model, ctx: Context) -> None:
        for graph in model.graphs():
            _cast_like_to_cast(graph)
        if self.max_bytes is not None:
            _fold(model, ctx, self.max_bytes, self.max_bytes)
            return
        start, before, whole = model.journal.position, _used_bytes(model), model.nbytes()
        _fold(model, ctx, max(whole // 4, _MAX_GROWTH), _MAX_RESULT)
        if _used_bytes(model) - before > min(max(whole, _MIN_GROWTH), _MAX_GROWTH):
            model.journal.undo_to(start)
            _fold(
                model,
                ctx,
                min(max(whole // _FALLBACK_SHARE, _MIN_FALLBACK), _MAX_GROWTH),
                _MAX_RESULT,
            )


def _cast_like_to_cast(graph: Graph) -> None:
    """Rewrite CastLike of a known type as Cast, whose result may be constant."""
    for node in graph.nodes:
        if is_op(node, "CastLike") and (dtype := graph.dtype(node.input[1])):
            graph.set_inputs(node, node.input[:1])
            graph.set_op(node, "Cast")
            graph.set_attr(node, "to", dtype)


def _used_bytes(model: Model) -> int:
    """Return the bytes of all initializers that have users."""
    return sum(
        nbytes(tensor)
        for graph in model.graphs()
        for name, tensor in graph.initializers.items()
        if not graph.is_unused(name)
    )


def _fold(model: Model, ctx: Context, most: int, one: int) -> None:
    budget = _Budget(most, one)
    for graph in model.graphs():  # lazily: folding an If removes its branches
        while _fold_graph(graph, ctx, budget):
            pass


@dataclass(slots=True)
class _Budget:
    """Bytes by which results may enlarge the file; freed bytes return to the budget."""

    left: int
    one: int
    """Largest result in bytes that may enlarge the file."""

    def grant(self, size: int, freed: int) -> bool:
        growth = size - freed
        if growth > 0 and (size > self.one or growth > self.left):
            return False
        self.left -= growth
        return True


@dataclass(slots=True)
class _Folding:
    """Constant values of one graph: computed, or pending until onnxruntime computes them."""

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

    def freed_by_user(self, value: str) -> int:
        """Return the bytes of `value`, divided by its users, if folding all of them frees it."""
        if value not in self.freed:
            self.freed[value] = self._freed(value)
        return self.freed[value]

    def _freed(self, value: str) -> int:
        users = self.graph.users(value)
        if self.graph.scope_of(value) is not self.graph or self.graph.is_output(value):
            return 0
        if any(id(user) not in self.candidates for user in users):
            return 0
        array = self.array(value)
        return 0 if array is None or array.dtype.kind in "OSU" else array.nbytes // len(users)

    def operands(self, node: NodeProto) -> list[str]:
        """Return the inputs and captured values of a node."""
        return [*inputs_of(node), *self.graph.captures_of(node)]


def _fold_graph(graph: Graph, ctx: Context, budget: _Budget) -> bool:
    """Fold the graph once; return whether computed values may reveal the sizes of more results."""
    state = _Folding(graph)
    depend_on_constants: set[str] = set()
    for node in graph.nodes:
        if _is_pure(graph, node) and all(
            value in depend_on_constants or graph.is_const(value) for value in state.operands(node)
        ):
            state.candidates[id(node)] = node
            depend_on_constants.update(outputs_of(node))
    for node in state.candidates.values():
        if all(map(state.is_constant, state.operands(node))):
            _try_node(state, node, budget)
    if state.pending:
        _run_pending(state, ctx)
    _write_results(state)
    return state.waited and any(id(node) in state.folded for node in state.pending.values())


def _is_pure(graph: Graph, node: NodeProto) -> bool:
    """Return whether the node and its subgraphs are deterministic functions of their inputs."""
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
    freed = sum(map(state.freed_by_user, dict.fromkeys(inputs_of(node)))) + node.ByteSize()
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
    """Return the bytes of all results, or None if they are unknown before computing them."""
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
    """Return the types that ONNX infers for the node from the values of its small inputs."""
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
            if (
                array.size <= _MAX_INFERENCE_INPUT and array.dtype.kind != "O"
            ):  # strings determine no shape
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


# -- nodes without an exact numpy kernel


def _run_pending(state: _Folding, ctx: Context) -> None:
    """Compute all pending nodes in one session; if the runtime refuses, one by one."""
    nodes = list(state.pending.values())
    try:
        state.known.update(_compute(state, nodes, ctx))
        state.folded.update(state.pending)
    except RuntimeRefused:
        for node in nodes:
            read = state.operands(node)
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
    read = [value for node in nodes for value in state.operands(node)]
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


# -- writing the results


def _write_results(state: _Folding) -> None:
    """Replace every folded value that has other users by a constant."""
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
