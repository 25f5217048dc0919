"""The shapes of all values on one feed, inferred without running the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ValueInfoProto

from passes.analysis.shapes import Shapes
from toolkit.ir import Model, node as nd
from toolkit.pass_manager.protocol import Context


def sizes_on(model: Model, feed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the static shapes that follow from the shapes of the inputs.

    Values whose shape changes between loop iterations are missing, and so are names that occur with
    different shapes in several subgraphs.
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
    found: dict[str, set[tuple[int, ...] | None]] = {}
    for graph in copy.graphs():
        names = [*graph.inputs, *graph.initializers]
        names += [name for node in graph.nodes for name in nd.outputs_of(node)]
        for name in names:
            known = graph.type(name)
            found.setdefault(name, set()).add(known.static if known is not None else None)
    single = ((name, next(iter(sizes))) for name, sizes in found.items() if len(sizes) == 1)
    return {name: size for name, size in single if size is not None}
