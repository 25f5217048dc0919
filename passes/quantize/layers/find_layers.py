"""Find the layers with constant weights in a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from onnx import NodeProto

from passes.analysis.operands import given, permutation
from passes.quantize.layers.layers import (
    FUSED_MATMUL,
    TURNED_INPUT,
    Convolution,
    Layer,
    Linear,
    MatrixLayer,
    PackedAttention,
    Recurrent,
    Table,
    WeightMatrix,
)
from passes.quantize.layers.weight_storage import float_weights
from toolkit.ir import FLOATS, Graph, Model, node as nd
from toolkit.ir.op_traits import RECURRENT
from toolkit.rewriting.match_failure import MatchFailure

LayerT_co = TypeVar("LayerT_co", bound=Layer, covariant=True)

_MIN_ROW = 8
"""Tables with shorter rows stay float: each row has a scale."""
_GATES = 4
_ATTENTION = "com.microsoft::Attention"
_ADDED, _PAST_LENGTH = 5, 6
_ATTRIBUTES = ("num_heads", "unidirectional", "scale", "mask_filter_value")


@dataclass(frozen=True, slots=True, eq=False)
class Weighted(Generic[LayerT_co]):
    """A node with weights, or the reason why it cannot be quantized."""

    graph: Graph
    node: NodeProto
    layer: LayerT_co | None
    reason: str = ""


def weighted_in(model: Model, convolutions: bool = False) -> Iterator[Weighted[Layer]]:
    """Yield linear layers, tables, LSTMs and packed attention of all graphs; Conv on request."""
    for graph in list(model.graphs()):
        for node in list(graph.nodes):
            find = _FINDERS.get(nd.qualified(node))
            if find is None or (find is _convolution and not convolutions):
                continue
            try:
                layer = find(graph, node)
            except MatchFailure as failure:
                yield Weighted(graph, node, None, str(failure))
            else:
                if layer is not None:
                    yield Weighted(graph, node, layer)


def matrices_in(model: Model) -> Iterator[Weighted[MatrixLayer]]:
    """Yield linear layers and tables; other layers come with a reason."""
    for item in weighted_in(model):
        if item.layer is None or isinstance(item.layer, MatrixLayer):
            yield Weighted(item.graph, item.node, item.layer, item.reason)
        else:
            yield Weighted(item.graph, item.node, None, item.layer.kind)


def users_of(weight: WeightMatrix) -> list[NodeProto] | None:
    """Return the users of a weight and of its transposes; None if one is a graph output."""
    found: list[NodeProto] = []
    pending = [weight.name]
    while pending:
        name = pending.pop()
        if weight.graph.is_output(name):
            return None
        for user in weight.graph.users(name):
            if nd.is_op(user, "Transpose"):
                pending.append(user.output[0])
            else:
                found.append(user)
    return found


# Each returns None for computed weights, and raises MatchFailure if the layer must stay float.


def _linear(g: Graph, node: NodeProto) -> Linear | None:
    if g.is_const(node.input[0]):
        if not g.is_const(node.input[1]):
            raise MatchFailure("a weight on the left")
        return None
    weight = _matrix(g, node.input[1], bool(nd.attr(node, "transB", 0)))
    if weight is None:
        return None
    if any(nd.attr(node, name, 0) for name in TURNED_INPUT):
        raise MatchFailure("a transposed input")
    layer = Linear(node, (weight.shape,), weight)
    if not math.isfinite(layer.alpha):
        raise MatchFailure("a factor that is not finite")
    if layer.bias and layer.beta != 1 and not g.is_const(layer.bias):
        raise MatchFailure("a bias that is computed and scaled")
    return layer


def _table(g: Graph, node: NodeProto) -> Table | None:
    tensor = g.tensor(node.input[0])
    if tensor is None or tensor.data_type not in FLOATS or g.is_const(node.input[1]):
        return None
    if nd.attr(node, "axis", 0) not in (0, -len(tensor.dims)):
        raise MatchFailure("a table that is not gathered by rows")
    weight = _matrix(g, node.input[0])
    if weight is not None and weight.shape[1] < _MIN_ROW:
        raise MatchFailure(f"rows of fewer than {_MIN_ROW} numbers")
    return None if weight is None else Table(node, (weight.shape,), weight)


def _matrix(g: Graph, name: str, turned: bool = False) -> WeightMatrix | None:
    scope = g.scope_of(name)
    if scope is None:
        return None
    tensor = scope.tensor(name)
    if tensor is None:
        producer = scope.producer(name)
        if producer is None or not nd.is_op(producer, "Transpose"):
            return None
        if permutation(scope, producer) != (1, 0) or not scope.is_const(producer.input[0]):
            return None
        return _matrix(scope, producer.input[0], not turned)
    shape = float_weights(scope, name, 2)
    return None if shape is None else WeightMatrix(scope, name, (shape[0], shape[1]), turned)


def _convolution(g: Graph, node: NodeProto) -> Convolution | None:
    shape = float_weights(g, node.input[1], 0)
    if shape is None:
        return None
    if given(node, 2) and not g.is_const(node.input[2]):
        raise MatchFailure("a bias that is computed")
    return Convolution(node, (shape,))


def _recurrent(g: Graph, node: NodeProto) -> Recurrent | None:
    """Return an LSTM; GRU and RNN lack an int8 operator."""
    if not g.is_const(given(node, 1)):
        return None
    if not nd.is_op(node, "LSTM"):
        raise MatchFailure("a recurrent layer without an int8 kernel")
    if nd.attr(node, "layout", 0):
        raise MatchFailure("a recurrent layer with the batch first, which the int8 kernel lacks")
    shapes = [float_weights(g, name, 3) for name in node.input[1:3]]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    if any(shape[1] % _GATES for shape in known):
        raise MatchFailure("weights without four equal gates")
    return Recurrent(node, tuple(known))


def _packed_attention(g: Graph, node: NodeProto) -> PackedAttention | None:
    """Return an Attention without inputs and attributes that QAttention lacks."""
    shape = float_weights(g, given(node, 1), 2)
    if shape is None:
        return None
    if given(node, _ADDED) or given(node, _PAST_LENGTH):
        raise MatchFailure("packed attention with an attention bias or a past buffer")
    others = [name for name, value in nd.attrs(node).items() if value and name not in _ATTRIBUTES]
    if others:
        raise MatchFailure(f"packed attention with {others[0]}, which the int8 kernel lacks")
    return PackedAttention(node, (shape,))


_FINDERS: Mapping[str, Callable[[Graph, NodeProto], Layer | None]] = {
    **dict.fromkeys(("MatMul", "Gemm", FUSED_MATMUL), _linear),
    "Gather": _table,
    "Conv": _convolution,
    **dict.fromkeys(RECURRENT, _recurrent),
    _ATTENTION: _packed_attention,
}
