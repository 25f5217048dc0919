"""Layers with float inputs and outputs (dynamic, weight-only), quantized independently.

A weight that one user keeps in float is stored twice if another user quantizes it. So layers that
are quantized to save bytes form a group per weight: all users of a weight-only weight, and a table
with the layers tied to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from passes.quantize.layers.find_layers import matrices_in
from passes.quantize.layers.layers import MatrixLayer, Table, WeightMatrix
from passes.quantize.search.costs import Kernels, Sizes
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan

LEAST_SAVING = 1.0
"""The saving in microseconds of a layer with unknown times, which saves bytes at least."""


@dataclass(frozen=True, slots=True)
class IndependentGroup:
    """Entries that are quantized together or not at all, and their saving.

    The saving is in microseconds; for weight-only layers, the size relative to the average weight.
    """

    entries: tuple[Entry, ...]
    saving: float


def independent_groups(
    model: Model, plan: Plan, sizes: Sizes, kernels: Kernels
) -> tuple[IndependentGroup, ...]:
    """Return the independent entries of a plan in groups, with the shapes of one feed."""
    weights = _shared_weights(model, plan)
    numbers = {weight.key: weight.size for weight in weights.values()}
    average = sum(numbers.values()) / max(len(numbers), 1)
    groups: dict[object, list[tuple[NodeProto, Entry]]] = {}
    for node in model.nodes():
        entry = plan.find(node)
        if entry is not None and entry.scheme in ("dynamic", "weight-only"):
            weight = weights.get(id(node))
            groups.setdefault(weight.key if weight else id(node), []).append((node, entry))
    found: list[IndependentGroup] = []
    for group in groups.values():
        node, first = group[0]
        if first.scheme == "weight-only" and id(node) in weights:
            saving = LEAST_SAVING * weights[id(node)].size / max(average, 1.0)
        else:
            saving = sum(_time_saved(node, sizes, kernels) for node, _ in group)
        found.append(IndependentGroup(tuple(entry for _, entry in group), saving))
    return tuple(found)


def _shared_weights(model: Model, plan: Plan) -> dict[int, WeightMatrix]:
    """Return the weight of each node that is grouped with all other users of its weight."""
    quantized: list[tuple[MatrixLayer, Entry]] = []
    for item in matrices_in(model):
        entry = plan.find(item.node)
        if item.layer is not None and entry is not None and entry.scheme != "float":
            quantized.append((item.layer, entry))
    tables = {layer.weight.key for layer, _ in quantized if isinstance(layer, Table)}
    return {
        id(layer.node): layer.weight
        for layer, entry in quantized
        if entry.scheme == "weight-only" or layer.weight.key in tables
    }


def _time_saved(node: NodeProto, sizes: Sizes, kernels: Kernels) -> float:
    times = kernels.of(node, sizes)
    return max(LEAST_SAVING, times.saving if times is not None else 0.0)
