"""Functions: those of a model, which adapters edit as models, and those that define operators."""

from __future__ import annotations

from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

from passes.opset.adapter_context import AdapterContext
from passes.opset.relabel import schema_at
from passes.simplify.inline import inline_call
from toolkit.ir import Graph, Model, node as nd, to_proto


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


def expand(context: AdapterContext, version: int) -> list[tuple[Graph, NodeProto]] | None:
    """Replace an operator that is new in an opset by the function body that defines it.

    Returns the nodes of the body, which belong to that opset; None without a body.
    """
    graph, node = context.graph, context.node
    schema: Any = schema_at(node.op_type, version)
    if schema is None or schema.since_version != version:
        return None
    present = {attribute.name for attribute in node.attribute}
    every = [a.default_value for n, a in schema.attributes.items() if n not in present]
    defaults = [default for default in every if default.name]
    written = graph.snapshot(node)
    written.attribute.extend(defaults)
    function = _function_body(context, schema, version, written)
    if function is None:
        return None
    function.attribute_proto.extend(defaults)
    base = import_version(function) or version
    for inner in function.node:
        old, new = schema_at(inner.op_type, base), schema_at(inner.op_type, version)
        if old is None or new is None or old.since_version != new.since_version:
            return None
    del function.opset_import[:]
    return [(graph, made) for made in inline_call(graph, node, function)]


def _function_body(
    context: AdapterContext, schema: Any, version: int, node: NodeProto
) -> FunctionProto | None:
    """Return the newest function body up to an opset; None without one."""
    usable = [v for v in schema.function_opset_versions if v <= version]
    if usable:
        return FunctionProto.FromString(schema.get_function_with_opset_version(max(usable)))
    usable = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    found = [context.types.of(context.graph, value) for value in node.input if value]
    kinds = [to_proto(t).SerializeToString() for t in found if t is not None and t.dtype]
    if not usable or len(kinds) < len(node.input):  # onnx crashes without all types
        return None
    body = schema.get_context_dependent_function_with_opset_version(
        max(usable), node.SerializeToString(), kinds
    )
    return FunctionProto.FromString(body) if body else None
