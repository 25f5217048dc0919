"""Adapter for Scan-8, which ran once per batch element: a Scan over the batch takes its place."""

from __future__ import annotations

from onnx import GraphProto, NodeProto, TypeProto, ValueInfoProto, helper

from passes.opset.adapter_context import AdapterContext, CannotConvert


def scan_without_batch(ctx: AdapterContext) -> None:
    """Scan-8 (batch first, sequence second) = Scan over the batch of a Scan over the sequence."""
    lengths, *inputs = ctx.node.input
    if lengths:
        raise CannotConvert("its sequences have individual lengths")
    graph = ctx.graph
    old = graph.snapshot(ctx.node)
    count: int = ctx.attr("num_scan_inputs")
    states = len(inputs) - count
    subgraph = graph.subgraphs(ctx.node)[0]
    inner_inputs, inner_outputs = subgraph.interface_inputs(), subgraph.interface_outputs()

    element = GraphProto(name=graph.fresh("batch_element"))
    element.input.extend(_declare(ctx, v, i < states) for i, v in enumerate(inner_inputs))
    element.output.extend(_declare(ctx, v, i < states) for i, v in enumerate(inner_outputs))
    sequence = element.node.add()
    sequence.CopyFrom(old)
    _keep_attributes(sequence, "body", "num_scan_inputs")
    directions = ctx.attr("directions")
    if directions:
        sequence.attribute.append(helper.make_attribute("scan_input_directions", directions))
    sequence.name = graph.fresh(old.name or "scan")
    sequence.input[:] = [v.name for v in element.input]
    sequence.output[:] = [v.name for v in element.output]

    batch = helper.make_node("Scan", inputs, old.output, old.name)
    batch.attribute.append(helper.make_attribute("body", element))
    batch.attribute.append(helper.make_attribute("num_scan_inputs", len(inputs)))
    graph.set_outputs(ctx.node, [graph.fresh(name) for name in old.output])
    graph.insert(batch, at=ctx.node)
    graph.remove(ctx.node)


def _declare(ctx: AdapterContext, inner: ValueInfoProto, state: bool) -> ValueInfoProto:
    """Declare a value of the outer subgraph: states keep their type, sequences gain a dimension."""
    declared = ValueInfoProto(name=ctx.graph.fresh(inner.name))
    declared.type.CopyFrom(inner.type if state else _unshaped(inner.type))
    return declared


def _unshaped(type_: TypeProto) -> TypeProto:
    return helper.make_tensor_type_proto(type_.tensor_type.elem_type, None)


def _keep_attributes(node: NodeProto, *names: str) -> None:
    for index in range(len(node.attribute) - 1, -1, -1):
        if node.attribute[index].name not in names:
            del node.attribute[index]
