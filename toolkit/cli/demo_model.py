"""The model of the demo, written as an exporter would write it, and a planted mistake.

A small vision transformer: two convolutions make patches, one encoder layer attends to them, a
linear layer classifies. It has the usual leftovers of exporters: shapes computed at run time,
`Constant` nodes, casts and transposes that cancel out, an `If` with a constant condition, weights
stored twice, dead code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import var
from toolkit.rewriting.rule import Rule, rewrite

Array = NDArray[Any]

_OPSET, _IR = 17, 8
_WIDTH, _WIDE, _HEADS, _CLASSES = 32, 128, 4, 10


def planted_mistake() -> Rule:
    """Return a rule that is right in two places of the model and wrong in a third.

    It replaces x * 0.5 by x / 2, but by x * 0.6 where x is an average.
    """
    x = var("x")

    @rewrite(x * 0.5)
    def halve(g: Graph, x: str) -> str:
        if nd.is_op(g.producer(x), "ReduceMean"):
            return g.op("Mul", x, g.constant(np.array(0.6, np.float32)))
        return g.op("Div", x, g.constant(np.array(2, np.float32)))

    return halve


def build() -> ModelProto:
    """Return the model, with the same bytes at every call."""
    graph = _GraphBuilder()
    image = graph.node("Identity", "image")
    features = _stem(graph, image)
    tokens = _to_tokens(graph, features)
    tokens = _encoder_layer(graph, tokens)
    logits = _head(graph, tokens)
    graph.node("Identity", logits, output="logits")
    _dead_branch(graph, features)
    proto = helper.make_graph(
        graph.nodes,
        "tiny_vit",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", _CLASSES])],
        initializer=graph.initializers,
    )
    return helper.make_model(
        proto,
        producer_name="toolkit demo",
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
    )


class _GraphBuilder:
    """The nodes and weights of a graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._random = np.random.default_rng(7)

    def node(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"/{op_type.lower()}_{len(self.nodes)}"
        name = f"node_{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def constant(self, value: Sequence[int] | int | float) -> str:
        """Add a Constant node of a number or a list of ints, as PyTorch does."""
        kind = np.float32 if isinstance(value, float) else np.int64
        return self.node("Constant", value=numpy_helper.from_array(np.array(value, kind)))

    def weight(self, name: str, *shape: int, scale: float | None = None) -> str:
        """Add a random weight; `scale` keeps the activations near one."""
        fan_in = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        factor = scale if scale is not None else 1 / math.sqrt(fan_in)
        return self.store(name, self._random.standard_normal(shape) * factor)

    def store(self, name: str, array: Array) -> str:
        self.initializers.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name


def _stem(graph: _GraphBuilder, image: str) -> str:
    """Add Conv, BatchNormalization and Relu twice: 32 x 32 pixels become 8 x 8 patches."""
    value, channels = image, 3
    for index, width in enumerate((16, _WIDTH)):
        name = f"stem.{index}"
        kernel = graph.weight(f"{name}.weight", width, channels, 3, 3)
        value = graph.node("Conv", value, kernel, strides=[2, 2], pads=[1, 1, 1, 1])
        value = graph.node(
            "BatchNormalization",
            value,
            graph.store(f"{name}.norm.weight", np.full(width, 0.9)),
            graph.weight(f"{name}.norm.bias", width, scale=0.1),
            graph.weight(f"{name}.norm.mean", width, scale=0.1),
            graph.store(f"{name}.norm.var", np.full(width, 1.1)),
        )
        value = graph.node("Relu", value)
        value = graph.node("Cast", value, to=TensorProto.FLOAT)  # it already is
        channels = width
    return _padding_check(graph, value)


def _padding_check(graph: _GraphBuilder, value: str) -> str:
    """Add a traced `if features.shape[1] != 32: pad`: an If that the shape decides."""
    channels = graph.node("Gather", graph.node("Shape", value), graph.constant(1), axis=0)
    same = graph.node("Equal", channels, graph.constant(_WIDTH))
    return graph.node(
        "If",
        same,
        then_branch=_branch("keep", helper.make_node("Identity", [value], ["keep"])),
        else_branch=_branch("drop", helper.make_node("Relu", [value], ["drop"])),
    )


def _branch(output: str, node: NodeProto) -> GraphProto:
    shape = ["batch", _WIDTH, 8, 8]
    declared = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
    return helper.make_graph([node], f"{output}_branch", [], [declared])


def _to_tokens(graph: _GraphBuilder, features: str) -> str:
    """Reshape (batch, width, 8, 8) to (batch, 64, width), with a computed shape."""
    batch, channels = _dim(graph, features, 0), _dim(graph, features, 1)
    flat = _reshape(graph, features, batch, channels, graph.constant([-1]))
    tokens = graph.node("Transpose", flat, perm=[0, 2, 1])
    # to channels first and back again, as two independent modules do
    tokens = graph.node("Transpose", tokens, perm=[0, 2, 1])
    tokens = graph.node("Transpose", tokens, perm=[0, 2, 1])
    return graph.node("Add", tokens, graph.weight("positions", 1, 64, _WIDTH, scale=0.1))


def _encoder_layer(graph: _GraphBuilder, tokens: str) -> str:
    weight, bias = np.linspace(0.8, 1.2, _WIDTH), np.linspace(-0.1, 0.1, _WIDTH)
    normed = _layer_norm(graph, tokens, "attention.norm", weight, bias)
    tokens = graph.node("Add", tokens, _attention(graph, normed))
    # tied to the norm above, but stored a second time
    normed = _layer_norm(graph, tokens, "mlp.norm", weight, bias)
    hidden = _linear(graph, normed, "mlp.up", _WIDTH, _WIDE)
    hidden = _gelu(graph, hidden)
    hidden = graph.node("Dropout", hidden)
    return graph.node("Add", tokens, _linear(graph, hidden, "mlp.down", _WIDE, _WIDTH))


def _attention(graph: _GraphBuilder, value: str) -> str:
    query = _heads(graph, _linear(graph, value, "attention.query", _WIDTH, _WIDTH), [0, 2, 1, 3])
    key = _heads(graph, _linear(graph, value, "attention.key", _WIDTH, _WIDTH), [0, 2, 3, 1])
    mix = _heads(graph, _linear(graph, value, "attention.value", _WIDTH, _WIDTH), [0, 2, 1, 3])
    # sqrt(head width), computed from the query's shape by the TorchScript exporter
    size = graph.node("Cast", _dim(graph, query, 3), to=TensorProto.FLOAT)
    scale = graph.node("Div", graph.constant(1.0), graph.node("Sqrt", size))
    scores = graph.node("Mul", graph.node("MatMul", query, key), scale)
    weights = graph.node("Softmax", scores, axis=-1)
    mixed = graph.node("Transpose", graph.node("MatMul", weights, mix), perm=[0, 2, 1, 3])
    joined = _reshape(graph, mixed, _dim(graph, value, 0), _dim(graph, value, 1), [_WIDTH])
    return _linear(graph, joined, "attention.out", _WIDTH, _WIDTH)


def _head(graph: _GraphBuilder, tokens: str) -> str:
    """Add the classifier: W (GELU(m) + m / 2) + b, where m is the mean over tokens."""
    pooled = graph.node("ReduceMean", tokens, axes=[1], keepdims=0)
    pooled = graph.node("Add", _gelu(graph, pooled), graph.node("Mul", pooled, _half(graph)))
    logits = _linear(graph, pooled, "classifier", _WIDTH, _CLASSES)
    return graph.node("Reshape", logits, graph.constant([-1, _CLASSES]))


def _dead_branch(graph: _GraphBuilder, features: str) -> None:
    """Add an auxiliary classifier, used in training only: dead code."""
    pooled = graph.node("GlobalAveragePool", features)
    flat = graph.node("Flatten", pooled)
    _linear(graph, flat, "auxiliary", _WIDTH, _CLASSES)


# Building blocks as exporters write them ---------------------------------------------------------


def _layer_norm(graph: _GraphBuilder, value: str, name: str, weight: Array, bias: Array) -> str:
    mean = graph.node("ReduceMean", value, axes=[-1])
    centred = graph.node("Sub", value, mean)
    square = graph.node("Pow", centred, graph.constant(2.0))
    variance = graph.node("ReduceMean", square, axes=[-1])
    spread = graph.node("Sqrt", graph.node("Add", variance, graph.constant(1e-5)))
    normed = graph.node("Div", centred, spread)
    scaled = graph.node("Mul", normed, graph.store(f"{name}.weight", weight))
    return graph.node("Add", scaled, graph.store(f"{name}.bias", bias))


def _linear(graph: _GraphBuilder, value: str, name: str, wide_in: int, wide_out: int) -> str:
    """Add `x @ W.T + b`, with the weight stored as PyTorch does."""
    weight = graph.weight(f"{name}.weight", wide_out, wide_in, scale=1 / math.sqrt(wide_in))
    product = graph.node("MatMul", value, graph.node("Transpose", weight, perm=[1, 0]))
    return graph.node("Add", product, graph.weight(f"{name}.bias", wide_out, scale=0.1))


def _gelu(graph: _GraphBuilder, value: str) -> str:
    """Add 0.5 x (1 + erf(x / sqrt 2))."""
    erf = graph.node("Erf", graph.node("Div", value, graph.constant(math.sqrt(2))))
    product = graph.node("Mul", value, graph.node("Add", erf, graph.constant(1.0)))
    return graph.node("Mul", product, _half(graph))


def _half(graph: _GraphBuilder) -> str:
    return graph.constant(0.5)


def _heads(graph: _GraphBuilder, value: str, perm: list[int]) -> str:
    shape = [_HEADS], [_WIDTH // _HEADS]
    batch, length = _dim(graph, value, 0), _dim(graph, value, 1)
    return graph.node("Transpose", _reshape(graph, value, batch, length, *shape), perm=perm)


def _dim(graph: _GraphBuilder, value: str, axis: int) -> str:
    """Add `x.size(axis)` as a vector of one element."""
    size = graph.node("Gather", graph.node("Shape", value), graph.constant(axis), axis=0)
    return graph.node("Unsqueeze", size, graph.constant([0]))


def _reshape(graph: _GraphBuilder, value: str, *parts: str | list[int]) -> str:
    named = [part if isinstance(part, str) else graph.constant(part) for part in parts]
    return graph.node("Reshape", value, graph.node("Concat", *named, axis=0))
