"""Make value names unique across subgraphs.

Several subgraphs may define values of one name. A plan identifies a node by its output, and such a
name would match a node in each of them. A plan with ranges refers to all inputs and outputs of
layers, which must be unique as well.
"""

from __future__ import annotations

from onnx import NodeProto, ValueInfoProto

from passes.quantize.layers.find_layers import weighted_in
from toolkit.ir import Graph, Model, node as nd
from toolkit.quantization.plan import RENAMED


def make_distinct(model: Model) -> None:
    """Rename outputs of layers whose name occurs in several graphs."""
    seen: set[str] = set()
    for item in weighted_in(model, convolutions=True):
        value = item.node.output[0]
        if value in seen and item.graph.begin(RENAMED, item.node):
            _rename(item.graph, value, item.node)
        else:
            seen.add(value)


def make_all_distinct(model: Model) -> None:
    """Rename values until no name occurs in two graphs.

    Outputs of layers come first: plans with and without ranges then use the same names.
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


def _rename(graph: Graph, old: str, producer: NodeProto | None = None) -> None:
    """Rename the output of a node, or an input of the graph."""
    new = graph.fresh(old)
    if producer is not None:
        graph.set_outputs(producer, [new if name == old else name for name in producer.output])
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
