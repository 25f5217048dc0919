"""Values of one name in separate subgraphs, made distinct.

The branches of an If, and the bodies of two Loops, may each define a value of the same name. A plan
knows a node by what it makes: by such a name it would mean all of them, whatever each one is.
"""

from __future__ import annotations

from onnx import NodeProto, ValueInfoProto

from passes.quantize.weighted import weighted_in
from toolkit.graph import Graph
from toolkit.model import Model


def make_distinct(model: Model) -> None:
    """Give what a layer makes a name that no layer of another graph has."""
    seen: set[str] = set()
    for item in weighted_in(model, convolutions=True):
        value = item.node.output[0]
        if value in seen and item.graph.begin("distinct-name", item.node):
            _rename(item.graph, item.node, value)
        else:
            seen.add(value)


def _rename(graph: Graph, node: NodeProto, old: str) -> None:
    new = graph.fresh(old)
    graph.set_outputs(node, [new if name == old else name for name in node.output])
    if graph.is_output(old):
        graph.set_interface(outputs=[_named(v, old, new) for v in graph.interface_outputs()])
    graph.replace(old, new)


def _named(value: ValueInfoProto, old: str, new: str) -> ValueInfoProto:
    if value.name != old:
        return value
    renamed = ValueInfoProto()
    renamed.CopyFrom(value)
    renamed.name = new
    return renamed
