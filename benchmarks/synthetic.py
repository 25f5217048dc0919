"""Models written without any framework, to show how cost grows with weights and with nodes.

`write_mlp` is one graph at any weight size: the same nodes hold 200 MB or 3 GB. `write_chain` is
one deep chain of any length, with something to remove in every block.
"""

from __future__ import annotations

import math
from pathlib import Path

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
CHAIN_WIDTH = 8
CHAIN_BLOCK = 10


def mlp_inputs(width: int) -> tuple[Input, ...]:
    return (Input("x", ("batch", width)),)


def write_mlp(path: Path, width: int) -> None:
    """`MLP_LAYERS` residual layers x + gelu(x W + b); W streams into a sidecar, never in memory."""
    rng = np.random.default_rng(0)
    graph = _graph("mlp", width)
    value = "x"
    with open(path.with_name(path.name + ".data"), "wb") as sidecar:
        for layer in range(MLP_LAYERS):
            sidecar.write(b"\0" * (-sidecar.tell() % ALIGNMENT))
            offset = sidecar.tell()
            remaining = width * width
            while remaining:
                count = min(remaining, CHUNK_ELEMENTS)
                block = rng.standard_normal(count, dtype=np.float32)
                block *= 1 / math.sqrt(width)
                sidecar.write(block.data)
                remaining -= count
            weight = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[width, width])
            weight.data_location = TensorProto.EXTERNAL
            for key, text in (
                ("location", Path(sidecar.name).name),
                ("offset", str(offset)),
                ("length", str(sidecar.tell() - offset)),
            ):
                weight.external_data.add(key=key, value=text)
            graph.initializer.append(weight)
            bias = rng.standard_normal(width, dtype=np.float32)
            graph.initializer.append(numpy_helper.from_array(bias, f"b{layer}"))
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


def chain_inputs() -> tuple[Input, ...]:
    return (Input("x", ("batch", CHAIN_WIDTH)),)


def write_chain(path: Path, nodes: int) -> None:
    """`nodes` nodes one after the other; six of every ten do nothing."""
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
    model: ModelProto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    path.write_bytes(model.SerializeToString())
