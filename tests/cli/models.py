"""Small models for the command line's tests, whole and broken."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
tiny (float[batch, 4] x) => (float[batch, 4] y)
<float[4, 4] w = {1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 0, 0, 4}>
{
    same = Identity(x)
    product = MatMul(same, w)
    y = Relu(product)
}
"""


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def listing(folder: Path) -> dict[str, str]:
    """Every file below `folder` and what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def with_external(location: str, offset: int = 0, length: int = 64) -> onnx.ModelProto:
    """The tiny model with its weight in a file `location`."""
    model = parse(TEXT)
    tensor = model.graph.initializer[0]
    array = numpy_helper.to_array(tensor)
    tensor.Clear()
    tensor.name, tensor.data_type = "w", TensorProto.FLOAT
    tensor.dims.extend(array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return model


def graph_with(nodes, inputs=(), initializers=(), outputs=("y",), opset=17) -> onnx.ModelProto:
    """A model that no checker has seen."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value(name, TensorProto.FLOAT, [2]) for name in inputs],
        [value(name, TensorProto.FLOAT, [2]) for name in outputs],
        initializer=initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
