"""The shapes of all values on one feed, by inference: nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ValueInfoProto

from passes.shapes import Shapes
from toolkit import nodes as nd
from toolkit.context import Context
from toolkit.model import Model


def sizes_on(model: Model, feed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each value that follows from the inputs' shapes.

    Of a loop whose shapes change from step to step, sizes are not known.
    """
    copy = model.copy()
    inputs: list[ValueInfoProto] = []
    for declared in copy.graph.interface_inputs():
        fixed = ValueInfoProto()
        fixed.CopyFrom(declared)
        given = getattr(feed.get(declared.name), "shape", None)
        if given is not None and fixed.type.HasField("tensor_type"):
            fixed.type.tensor_type.ClearField("shape")
            for size in given:
                fixed.type.tensor_type.shape.dim.add().dim_value = size
        inputs.append(fixed)
    copy.graph.set_interface(inputs=inputs)
    Shapes(annotate=False).run(copy, Context())
    sizes: dict[str, tuple[int, ...]] = {}
    for graph in copy.graphs():
        names = [*graph.inputs, *graph.initializers]
        names += [name for node in graph.nodes for name in nd.outputs_of(node)]
        known = ((name, graph.type(name)) for name in names)
        sizes |= {n: t.static for n, t in known if t is not None and t.static is not None}
    return sizes
