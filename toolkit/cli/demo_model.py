"""The demo's model, written here as an exporter would write it, and a planted mistake.

A small vision transformer: two convolutions make patches, one encoder layer looks at them, a
linear layer classifies. Around what it computes stands what exporters leave behind: shapes
computed at run time, `Constant` nodes, casts and transposes that cancel out, an `If` whose
condition is known, weights stored twice, a branch that nobody reads.
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
    """A rule that is right at two places of the model and wrong at the third.

    It writes x * 0.5 as x / 2, but where x is an average it takes 0.6 for 0.5.
    """
    x = var("x")

    @rewrite(x * 0.5)
    def halve(g: Graph, x: str) -> str:
        if nd.is_op(g.producer(x), "ReduceMean"):
            return g.op("Mul", x, g.constant(np.array(0.6, np.float32)))
        return g.op("Div", x, g.constant(np.array(2, np.float32)))

    return halve


def build() -> ModelProto:
    """The model; the same bytes at every call."""
    draft = _Draft()
    image = draft.node("Identity", "image")
    features = _stem(draft, image)
    tokens = _to_tokens(draft, features)
    tokens = _encoder_layer(draft, tokens)
    logits = _head(draft, tokens)
    draft.node("Identity", logits, output="logits")
    _dead_branch(draft, features)
    graph = helper.make_graph(
        draft.nodes,
        "tiny_vit",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", _CLASSES])],
        initializer=draft.initializers,
    )
    return helper.make_model(
        graph,
        producer_name="toolkit demo",
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
    )


class _Draft:
    """Nodes and weights in the order in which they are written down."""

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
        """A number or a list of ints as a Constant node, the way PyTorch writes them."""
        kind = np.float32 if isinstance(value, float) else np.int64
        return self.node("Constant", value=numpy_helper.from_array(np.array(value, kind)))

    def weight(self, name: str, *shape: int, scale: float | None = None) -> str:
        """A random weight; `scale` keeps the activations near one."""
        fan_in = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        factor = scale if scale is not None else 1 / math.sqrt(fan_in)
        return self.store(name, self._random.standard_normal(shape) * factor)

    def store(self, name: str, array: Array) -> str:
        self.initializers.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name


def _stem(draft: _Draft, image: str) -> str:
    """Conv, BatchNormalization, Relu; twice. 32 x 32 pixels become 8 x 8 patches."""
    value, channels = image, 3
    for index, width in enumerate((16, _WIDTH)):
        name = f"stem.{index}"
        kernel = draft.weight(f"{name}.weight", width, channels, 3, 3)
        value = draft.node("Conv", value, kernel, strides=[2, 2], pads=[1, 1, 1, 1])
        value = draft.node(
            "BatchNormalization",
            value,
            draft.store(f"{name}.norm.weight", np.full(width, 0.9)),
            draft.weight(f"{name}.norm.bias", width, scale=0.1),
            draft.weight(f"{name}.norm.mean", width, scale=0.1),
            draft.store(f"{name}.norm.var", np.full(width, 1.1)),
        )
        value = draft.node("Relu", value)
        value = draft.node("Cast", value, to=TensorProto.FLOAT)  # it already is
        channels = width
    return _padding_check(draft, value)


def _padding_check(draft: _Draft, value: str) -> str:
    """`if features.shape[1] != 32: pad`, traced: an If whose condition is known from the shape."""
    channels = draft.node("Gather", draft.node("Shape", value), draft.constant(1), axis=0)
    same = draft.node("Equal", channels, draft.constant(_WIDTH))
    return draft.node(
        "If",
        same,
        then_branch=_branch("keep", helper.make_node("Identity", [value], ["keep"])),
        else_branch=_branch("drop", helper.make_node("Relu", [value], ["drop"])),
    )


def _branch(output: str, node: NodeProto) -> GraphProto:
    shape = ["batch", _WIDTH, 8, 8]
    declared = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
    return helper.make_graph([node], f"{output}_branch", [], [declared])


def _to_tokens(draft: _Draft, features: str) -> str:
    """(batch, width, 8, 8) to (batch, 64, width): the shape read back from the tensor."""
    batch, channels = _dim(draft, features, 0), _dim(draft, features, 1)
    flat = _reshape(draft, features, batch, channels, draft.constant([-1]))
    tokens = draft.node("Transpose", flat, perm=[0, 2, 1])
    # to channels first and back again, as two modules that do not know of each other do
    tokens = draft.node("Transpose", tokens, perm=[0, 2, 1])
    tokens = draft.node("Transpose", tokens, perm=[0, 2, 1])
    return draft.node("Add", tokens, draft.weight("positions", 1, 64, _WIDTH, scale=0.1))


def _encoder_layer(draft: _Draft, tokens: str) -> str:
    weight, bias = np.linspace(0.8, 1.2, _WIDTH), np.linspace(-0.1, 0.1, _WIDTH)
    normed = _layer_norm(draft, tokens, "attention.norm", weight, bias)
    tokens = draft.node("Add", tokens, _attention(draft, normed))
    # tied to the norm above, but stored a second time
    normed = _layer_norm(draft, tokens, "mlp.norm", weight, bias)
    hidden = _linear(draft, normed, "mlp.up", _WIDTH, _WIDE)
    hidden = _gelu(draft, hidden)
    hidden = draft.node("Dropout", hidden)
    return draft.node("Add", tokens, _linear(draft, hidden, "mlp.down", _WIDE, _WIDTH))


def _attention(draft: _Draft, value: str) -> str:
    query = _heads(draft, _linear(draft, value, "attention.query", _WIDTH, _WIDTH), [0, 2, 1, 3])
    key = _heads(draft, _linear(draft, value, "attention.key", _WIDTH, _WIDTH), [0, 2, 3, 1])
    mix = _heads(draft, _linear(draft, value, "attention.value", _WIDTH, _WIDTH), [0, 2, 1, 3])
    # sqrt(head width), computed from the query's shape by the TorchScript exporter
    size = draft.node("Cast", _dim(draft, query, 3), to=TensorProto.FLOAT)
    scale = draft.node("Div", draft.constant(1.0), draft.node("Sqrt", size))
    scores = draft.node("Mul", draft.node("MatMul", query, key), scale)
    weights = draft.node("Softmax", scores, axis=-1)
    mixed = draft.node("Transpose", draft.node("MatMul", weights, mix), perm=[0, 2, 1, 3])
    joined = _reshape(draft, mixed, _dim(draft, value, 0), _dim(draft, value, 1), [_WIDTH])
    return _linear(draft, joined, "attention.out", _WIDTH, _WIDTH)


def _head(draft: _Draft, tokens: str) -> str:
    """Average over the tokens, then half a GELU and half a plain look, then the classes."""
    pooled = draft.node("ReduceMean", tokens, axes=[1], keepdims=0)
    pooled = draft.node("Add", _gelu(draft, pooled), draft.node("Mul", pooled, _half(draft)))
    logits = _linear(draft, pooled, "classifier", _WIDTH, _CLASSES)
    return draft.node("Reshape", logits, draft.constant([-1, _CLASSES]))


def _dead_branch(draft: _Draft, features: str) -> None:
    """An auxiliary classifier for training: exported, read by nobody."""
    pooled = draft.node("GlobalAveragePool", features)
    flat = draft.node("Flatten", pooled)
    _linear(draft, flat, "auxiliary", _WIDTH, _CLASSES)


# Building blocks as exporters spell them ---------------------------------------------------------


def _layer_norm(draft: _Draft, value: str, name: str, weight: Array, bias: Array) -> str:
    mean = draft.node("ReduceMean", value, axes=[-1])
    centred = draft.node("Sub", value, mean)
    square = draft.node("Pow", centred, draft.constant(2.0))
    variance = draft.node("ReduceMean", square, axes=[-1])
    spread = draft.node("Sqrt", draft.node("Add", variance, draft.constant(1e-5)))
    normed = draft.node("Div", centred, spread)
    scaled = draft.node("Mul", normed, draft.store(f"{name}.weight", weight))
    return draft.node("Add", scaled, draft.store(f"{name}.bias", bias))


def _linear(draft: _Draft, value: str, name: str, wide_in: int, wide_out: int) -> str:
    """`x @ W.T + b`, the weight stored as PyTorch keeps it."""
    weight = draft.weight(f"{name}.weight", wide_out, wide_in, scale=1 / math.sqrt(wide_in))
    product = draft.node("MatMul", value, draft.node("Transpose", weight, perm=[1, 0]))
    return draft.node("Add", product, draft.weight(f"{name}.bias", wide_out, scale=0.1))


def _gelu(draft: _Draft, value: str) -> str:
    """0.5 x (1 + erf(x / sqrt 2))"""
    erf = draft.node("Erf", draft.node("Div", value, draft.constant(math.sqrt(2))))
    product = draft.node("Mul", value, draft.node("Add", erf, draft.constant(1.0)))
    return draft.node("Mul", product, _half(draft))


def _half(draft: _Draft) -> str:
    return draft.constant(0.5)


def _heads(draft: _Draft, value: str, perm: list[int]) -> str:
    shape = [_HEADS], [_WIDTH // _HEADS]
    batch, length = _dim(draft, value, 0), _dim(draft, value, 1)
    return draft.node("Transpose", _reshape(draft, value, batch, length, *shape), perm=perm)


def _dim(draft: _Draft, value: str, axis: int) -> str:
    """`x.size(axis)` as a vector of one."""
    size = draft.node("Gather", draft.node("Shape", value), draft.constant(axis), axis=0)
    return draft.node("Unsqueeze", size, draft.constant([0]))


def _reshape(draft: _Draft, value: str, *parts: str | list[int]) -> str:
    named = [part if isinstance(part, str) else draft.constant(part) for part in parts]
    return draft.node("Reshape", value, draft.node("Concat", *named, axis=0))
