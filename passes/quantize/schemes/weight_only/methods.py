"""Choose how each layer's weights are quantized: by rounding, hqq, or gptq on samples.

gptq needs the Gram matrix X^T X of a layer's input. All of them may be larger than the weights, so
they are collected, used and released in groups that fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from passes.quantize.layers.layers import Layer, Linear, Table
from passes.quantize.schemes.weight_only.gptq import Solver
from passes.quantize.schemes.weight_only.gram import Gram
from passes.quantize.schemes.weight_only.streaming import (
    Compensated,
    HalfQuadratic,
    Method,
    Nearest,
)
from toolkit.calibrate.observers import Collect
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_GRAM_BYTES = 1 << 28
"""Bytes of Gram matrices per pass over the data."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A layer to write; `x` is its input before any other layer is written."""

    graph: Graph
    layer: Layer
    entry: Entry
    x: str


def methods_for(
    jobs: list[Job], floats: Model, ctx: Context, act_order: bool
) -> Iterator[tuple[Job, Method]]:
    """Yield the method of each job, collecting Gram matrices for some inputs at a time.

    `floats` is the model before any layer is written.
    """
    plain = [job for job in jobs if job.entry.method != "gptq" or isinstance(job.layer, Table)]
    for job in plain:
        yield job, HalfQuadratic() if job.entry.method == "hqq" else Nearest()
    by_input: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        if job.entry.method == "gptq" and isinstance(job.layer, Linear):
            by_input.setdefault((id(job.graph), job.x), []).append(job)
    for group in _groups(list(by_input.values())):
        grams = _grams(floats, [same[0] for same in group], ctx)
        for same in group:
            gram = grams.pop(same[0].x, None)
            method = _compensated(gram, same[0], act_order, ctx)
            for job in same:
                yield job, method


def _groups(inputs: list[list[Job]]) -> Iterator[list[list[Job]]]:
    """Yield groups of inputs whose Gram matrices fit into memory together."""
    group: list[list[Job]] = []
    room = _GRAM_BYTES
    for same in inputs:
        weight = same[0].layer.weight
        size = 4 * weight.shape[1 if weight.turned else 0] ** 2
        if group and size > room:
            yield group
            group, room = [], _GRAM_BYTES
        group.append(same)
        room -= size
    if group:
        yield group


def _grams(floats: Model, firsts: list[Job], ctx: Context) -> dict[str, Gram]:
    """Return the Gram matrices of the observable inputs of these jobs."""
    data = ctx.calibration
    assert data is not None
    outer = [job.x for job in firsts if job.graph.parent is None]
    if not outer:
        return {}
    # Not cached: they are larger than the weights.
    found = replace(data, cache=None).collect(floats, {name: Collect(Gram) for name in outer})
    return {name: cast(Gram, statistic) for name, statistic in found.statistics.items()}


def _compensated(gram: Gram | None, job: Job, act_order: bool, ctx: Context) -> Method:
    if gram is None or not gram.rows:
        what = "in a subgraph" if job.graph.parent is not None else "not seen in the data"
        ctx.note(f"{nd.label(job.layer.node)} is rounded to nearest: its input is {what}")
        return Nearest()
    return Compensated(Solver.of(gram.total, act_order))
