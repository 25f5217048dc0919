"""Values of one name in separate subgraphs, made distinct.

The branches of an If, and the bodies of two Loops, may each define a value of the same name. A plan
knows a node by what it makes: by such a name it would mean all of them, whatever each one is. One
with ranges names all that layers read and make, and so nothing may share its name with another.
"""

from __future__ import annotations

from onnx import NodeProto, ValueInfoProto

from passes.quantize.layers.find_layers import weighted_in
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.quantization.plan import RENAMED


def make_distinct(model: Model) -> None:
    """Give what a layer makes a name that no layer of another graph has."""
    seen: set[str] = set()
    for item in weighted_in(model, convolutions=True):
        value = item.node.output[0]
        if value in seen and item.graph.begin(RENAMED, item.node):
            _rename(item.graph, value, item.node)
        else:
            seen.add(value)


def make_all_distinct(model: Model) -> None:
    """Give every value a name that no value of another graph has.

    Layers come first: they are called the same by a plan without ranges.
    """
    make_distinct(model)
    seen: set[str] = set()
    for graph in list(model.graphs()):
        for value in graph.inputs:
            if value in seen and graph.owner and graph.begin(RENAMED, graph.owner):
                _rename(graph, value)
            seen.add(value)
        for node in graph.nodes:
            for value in nd.outputs_of(node):
                if value in seen and graph.begin(RENAMED, node):
                    _rename(graph, value, node)
                seen.add(value)


def _rename(graph: Graph, old: str, maker: NodeProto | None = None) -> None:
    """Another name for what a node makes, or for what the graph is given."""
    new = graph.fresh(old)
    if maker is not None:
        graph.set_outputs(maker, [new if name == old else name for name in maker.output])
    else:
        graph.set_interface(inputs=[_named(v, old, new) for v in graph.interface_inputs()])
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
