"""Write models without a framework, to measure how cost grows with weights and with nodes.

`write_mlp` writes one graph with weights of any size (200 MB, 3 GB). `write_decoder` writes a
language model of any size: an embedding, attention and gated layers, and an output projection.
`write_chain` writes a chain of any length, with something to remove in every block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from inputs import Input
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node

OPSET = 18
IR_VERSION = 10
# External data is mapped by page: align every tensor to one.
ALIGNMENT = 4096
CHUNK_ELEMENTS = 1 << 22

MLP_LAYERS = 12
HEAD = 64
CHAIN_WIDTH = 8
CHAIN_BLOCK = 10


def mlp_inputs(width: int) -> tuple[Input, ...]:
    return (Input("x", ("batch", width)),)


def write_mlp(path: Path, width: int) -> None:
    """Write `MLP_LAYERS` residual layers x + gelu(x W + b); W is streamed to external data."""
    graph = _graph("mlp", width)
    value = "x"
    with open(path.with_name(path.name + ".data"), "wb") as file:
        weights = _Sidecar(graph, file, np.random.default_rng(0))
        for layer in range(MLP_LAYERS):
            weights.add(f"w{layer}", (width, width))
            weights.add(f"b{layer}", (width,))
            nodes, value = _mlp_layer(value, layer)
            graph.node.extend(nodes)
    for name, constant in (("sqrt2", math.sqrt(2)), ("one", 1.0), ("half", 0.5)):
        graph.initializer.append(numpy_helper.from_array(np.array(constant, np.float32), name))
    _write(graph, value, path)


def _mlp_layer(x: str, layer: int) -> tuple[list[NodeProto], str]:
    def name(text: str) -> str:
        return f"{text}{layer}"

    nodes = [
        make_node("MatMul", [x, name("w")], [name("product")]),
        make_node("Add", [name("product"), name("b")], [name("linear")]),
        make_node("Div", [name("linear"), "sqrt2"], [name("scaled")]),
        make_node("Erf", [name("scaled")], [name("erf")]),
        make_node("Add", [name("erf"), "one"], [name("shifted")]),
        make_node("Mul", [name("linear"), name("shifted")], [name("gated")]),
        make_node("Mul", [name("gated"), "half"], [name("gelu")]),
        make_node("Cast", [name("gelu")], [name("cast")], to=TensorProto.FLOAT),
        make_node("Identity", [name("cast")], [name("same")]),
        make_node("Add", [x, name("same")], [name("residual")]),
    ]
    return nodes, name("residual")


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a language model; `hidden` is a multiple of 64, the head size."""

    vocabulary: int = 32_000
    hidden: int = 2_048
    inner: int = 7_168
    layers: int = 11


def decoder_inputs(sizes: Decoder) -> tuple[Input, ...]:
    return (Input("ids", ("batch", "length"), sizes.vocabulary),)


def write_decoder(path: Path, sizes: Decoder) -> None:
    """Write layers x + attention(norm x), x + gated(norm x), and a projection to logits."""
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])
    shape = ["batch", "length", sizes.vocabulary]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)
    graph = helper.make_graph([], "decoder", [ids], [logits])
    for name, constant in (
        ("heads", np.array([0, 0, -1, HEAD])),
        ("joined", np.array([0, 0, sizes.hidden])),
        ("scale", np.array(1 / math.sqrt(HEAD), np.float32)),
        ("epsilon", np.array(1e-6, np.float32)),
        ("last", np.array([-1])),
    ):
        graph.initializer.append(numpy_helper.from_array(constant, name))
    with open(path.with_name(path.name + ".data"), "wb") as file:
        weights = _Sidecar(graph, file, np.random.default_rng(0))
        weights.add("table", (sizes.vocabulary, sizes.hidden), scale=1.0)
        graph.node.append(make_node("Gather", ["table", "ids"], ["x0"]))
        value = "x0"
        for layer in range(sizes.layers):
            for kind in "qkvo":
                weights.add(f"{kind}{layer}", (sizes.hidden, sizes.hidden))
            for kind in ("gate", "up"):
                weights.add(f"{kind}{layer}", (sizes.hidden, sizes.inner))
            weights.add(f"down{layer}", (sizes.inner, sizes.hidden))
            value = _decoder_layer(graph, value, layer)
        weights.add("projection", (sizes.hidden, sizes.vocabulary))
    _norm(graph, value, "normed")
    graph.node.append(make_node("MatMul", ["normed", "projection"], ["logits"]))
    _write_model(graph, path)


def _decoder_layer(graph: GraphProto, x: str, layer: int) -> str:
    def name(text: str) -> str:
        return f"{text}{layer}"

    _norm(graph, x, name("before"))
    for kind, order in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
        made = [name(f"{kind}_{step}") for step in ("linear", "split", "turned")]
        graph.node.extend(
            [
                make_node("MatMul", [name("before"), name(kind)], [made[0]]),
                make_node("Reshape", [made[0], "heads"], [made[1]]),
                make_node("Transpose", [made[1]], [made[2]], perm=order),
            ]
        )
    graph.node.extend(
        [
            make_node("MatMul", [name("q_turned"), name("k_turned")], [name("dot")]),
            make_node("Mul", [name("dot"), "scale"], [name("scores")]),
            make_node("Softmax", [name("scores")], [name("shares")], axis=-1),
            make_node("MatMul", [name("shares"), name("v_turned")], [name("mixed")]),
            make_node("Transpose", [name("mixed")], [name("back")], perm=(0, 2, 1, 3)),
            make_node("Reshape", [name("back"), "joined"], [name("heads_joined")]),
            make_node("MatMul", [name("heads_joined"), name("o")], [name("attended")]),
            make_node("Add", [x, name("attended")], [name("middle")]),
        ]
    )
    _norm(graph, name("middle"), name("between"))
    graph.node.extend(
        [
            make_node("MatMul", [name("between"), name("gate")], [name("gates")]),
            make_node("Sigmoid", [name("gates")], [name("sigmoid")]),
            make_node("Mul", [name("gates"), name("sigmoid")], [name("silu")]),
            make_node("MatMul", [name("between"), name("up")], [name("risen")]),
            make_node("Mul", [name("silu"), name("risen")], [name("gated")]),
            make_node("MatMul", [name("gated"), name("down")], [name("fallen")]),
            make_node("Add", [name("middle"), name("fallen")], [name("end")]),
        ]
    )
    return name("end")


def _norm(graph: GraphProto, x: str, y: str) -> None:
    """x / sqrt(mean(x^2) + epsilon)"""
    steps = [f"{y}_{step}" for step in ("square", "mean", "safe", "root")]
    graph.node.extend(
        [
            make_node("Mul", [x, x], [steps[0]]),
            make_node("ReduceMean", [steps[0], "last"], [steps[1]]),
            make_node("Add", [steps[1], "epsilon"], [steps[2]]),
            make_node("Sqrt", [steps[2]], [steps[3]]),
            make_node("Div", [x, steps[3]], [y]),
        ]
    )


def chain_inputs() -> tuple[Input, ...]:
    return (Input("x", ("batch", CHAIN_WIDTH)),)


def write_chain(path: Path, nodes: int) -> None:
    """Write a chain of `nodes` nodes, six of every ten of which are no-ops."""
    rng = np.random.default_rng(0)
    graph = _graph("chain", CHAIN_WIDTH)
    graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))
    value = "x"
    for block in range(nodes // CHAIN_BLOCK):
        for key in ("scale", "shift"):
            constant = rng.standard_normal(CHAIN_WIDTH, dtype=np.float32)
            graph.initializer.append(numpy_helper.from_array(constant, f"{key}{block}"))
        steps = [f"v{block}_{step}" for step in range(CHAIN_BLOCK)]
        graph.node.extend(
            [
                make_node("Mul", [value, f"scale{block}"], [steps[0]]),
                make_node("Add", [steps[0], f"shift{block}"], [steps[1]]),
                make_node("Tanh", [steps[1]], [steps[2]]),
                make_node("Identity", [steps[2]], [steps[3]]),
                make_node("Transpose", [steps[3]], [steps[4]], perm=[1, 0]),
                make_node("Transpose", [steps[4]], [steps[5]], perm=[1, 0]),
                make_node("Cast", [steps[5]], [steps[6]], to=TensorProto.FLOAT),
                make_node("Unsqueeze", [steps[6], "axis"], [steps[7]]),
                make_node("Squeeze", [steps[7], "axis"], [steps[8]]),
                make_node("Sin", [steps[8]], [steps[9]]),
            ]
        )
        value = steps[-1]
    _write(graph, value, path)


def _graph(name: str, width: int) -> GraphProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])
    return helper.make_graph([], name, [x], [y])


def _write(graph: GraphProto, last: str, path: Path) -> None:
    graph.node.append(make_node("Tanh", [last], ["y"]))
    _write_model(graph, path)


def _write_model(graph: GraphProto, path: Path) -> None:
    model: ModelProto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    path.write_bytes(model.SerializeToString())


@dataclass(frozen=True, slots=True)
class _Sidecar:
    """Adds random weights to a graph, streamed to a file beside the model."""

    graph: GraphProto
    file: BinaryIO
    rng: np.random.Generator

    def add(self, name: str, shape: Sequence[int], scale: float | None = None) -> None:
        """Add a weight of this shape, with a standard deviation of `scale`, or 1 / sqrt(rows)."""
        self.file.write(b"\0" * (-self.file.tell() % ALIGNMENT))
        offset = self.file.tell()
        remaining = math.prod(shape)
        while remaining:
            count = min(remaining, CHUNK_ELEMENTS)
            block = self.rng.standard_normal(count, dtype=np.float32)
            block *= scale or 1 / math.sqrt(shape[0])
            self.file.write(block.data)
            remaining -= count
        weight = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        weight.data_location = TensorProto.EXTERNAL
        for key, text in (
            ("location", Path(self.file.name).name),
            ("offset", str(offset)),
            ("length", str(self.file.tell() - offset)),
        ):
            weight.external_data.add(key=key, value=text)
        self.graph.initializer.append(weight)
