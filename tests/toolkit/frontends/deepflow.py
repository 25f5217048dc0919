"""A small framework of somebody else's: the hypothetical "DeepFlow" of the export guides.

    model = Sequential([Dense(10, 20, activation="relu"), Dense(20, 5)])
    model.export_onnx(Tensor(shape=(1, 10), dtype="float32"), opset_version=11)

Its exporter fixes the example's sizes, as careless ones do, unless a class says otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper


class Tensor:
    def __init__(self, data: Any = None, shape: Any = None, dtype: str = "float32"):
        self.data = None if data is None else np.asarray(data, dtype)
        self.shape = tuple(shape) if self.data is None else self.data.shape
        self.dtype = dtype

    def numpy(self):
        if self.data is None:
            raise ValueError("this tensor has no contents")
        return self.data


class Dense:
    def __init__(self, inputs, outputs, activation=None):
        random = np.random.default_rng(inputs * 1000 + outputs)
        self.weight = random.standard_normal((inputs, outputs)).astype(np.float32)
        self.bias = random.standard_normal((outputs,)).astype(np.float32)
        self.activation = activation

    def __call__(self, x):
        y = x @ self.weight + self.bias
        return np.maximum(y, 0) if self.activation == "relu" else y


class Sequential:
    def __init__(self, layers):
        self.layers = layers

    def __call__(self, tensor):
        value = tensor.numpy()
        for layer in self.layers:
            value = layer(value)
        return Tensor(value)

    def dims(self, example):
        return list(example.shape)

    def nodes(self, index, layer, value, result):
        made = [
            helper.make_node("MatMul", [value, f"w{index}"], [f"product{index}"]),
            helper.make_node("Add", [f"product{index}", f"b{index}"], [f"sum{index}"]),
        ]
        op = "Relu" if layer.activation == "relu" else "Identity"
        return [*made, helper.make_node(op, [f"sum{index}"], [result])]

    def export_onnx(self, example, opset_version):
        nodes, stored, value = [], [], "x"
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            result = "y" if last else f"h{index}"
            nodes += self.nodes(index, layer, value, result)
            stored += [
                numpy_helper.from_array(layer.weight, f"w{index}"),
                numpy_helper.from_array(layer.bias, f"b{index}"),
            ]
            value = result
        dims = self.dims(example)
        width = self.layers[-1].weight.shape[1]
        graph = helper.make_graph(
            nodes,
            "deepflow",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [dims[0], width])],
            stored,
        )
        opset = helper.make_opsetid("", opset_version)
        return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def mlp():
    return Sequential([Dense(10, 20, activation="relu"), Dense(20, 5)])


def build():
    """What the command line names: the model and its example."""
    return mlp(), Tensor(shape=(1, 10), dtype="float32")
