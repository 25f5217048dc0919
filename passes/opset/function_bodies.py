"""Wrap model-local functions as models, which adapters can edit."""

from __future__ import annotations

from onnx import FunctionProto, ModelProto, ValueInfoProto

from toolkit.ir import node as nd
from toolkit.ir.model import Model


class FunctionModel:
    """A function as a model; its types are unknown and attributes may be references."""

    def __init__(self, function: FunctionProto, owner: Model) -> None:
        self._function = function
        proto = ModelProto(ir_version=max(owner.ir_version, 4))
        proto.opset_import.extend(function.opset_import)
        proto.graph.name = function.name
        proto.graph.node.extend(function.node)
        proto.graph.input.extend(ValueInfoProto(name=name) for name in function.input)
        proto.graph.output.extend(ValueInfoProto(name=name) for name in function.output)
        self.model = Model(proto, owner.weights)

    def to_function(self) -> FunctionProto:
        """Return the function with the edited nodes; new initializers become Constant nodes."""
        written = self.model.to_proto()
        function = FunctionProto()
        function.CopyFrom(self._function)
        function.ClearField("node")
        function.ClearField("opset_import")
        function.opset_import.extend(written.opset_import)
        for tensor in written.graph.initializer:
            function.node.append(nd.make_node("Constant", [], [tensor.name], {"value": tensor}))
        function.node.extend(written.graph.node)
        return function


def import_version(function: FunctionProto) -> int:
    """Return the standard opset that a function imports; 0 for none."""
    versions = (e.version for e in function.opset_import if e.domain in nd.STANDARD_DOMAINS)
    return next(versions, 0)
