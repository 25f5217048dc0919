"""Choose how each layer's weights are quantized: round to nearest, hqq, or gptq.

gptq needs the Gram matrix X^T X of a layer's input. Together these may be larger than the weights:
they are collected, used and released in groups that fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, cast

from passes.quantize.layers.layers import Linear, MatrixLayer, Table
from passes.quantize.schemes.scheme_pass import PlannedLayer
from passes.quantize.schemes.weight_only.gptq import Gram, Solver
from passes.quantize.schemes.weight_only.hqq import fit_half_quadratic
from passes.quantize.schemes.weight_only.streaming import CodeMethod, Rounding
from toolkit.calibrate.observers import Collect
from toolkit.ir import Model, node as nd

Job: TypeAlias = PlannedLayer[MatrixLayer]

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_GRAM_BYTES = 1 << 28
"""The most bytes of Gram matrices to collect in one pass over the data."""


def methods_for(
    jobs: list[Job], floats: Model, ctx: Context, act_order: bool
) -> Iterator[tuple[Job, CodeMethod]]:
    """Yield the method of each job, collecting Gram matrices for some inputs at a time.

    `floats` is the unmodified model.
    """
    plain = [job for job in jobs if job.entry.method != "gptq" or isinstance(job.layer, Table)]
    for job in plain:
        yield job, Rounding(fit_half_quadratic) if job.entry.method == "hqq" else Rounding()
    by_input: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        if job.entry.method == "gptq" and isinstance(job.layer, Linear):
            by_input.setdefault((id(job.graph), job.x), []).append(job)
    for group in _groups(list(by_input.values())):
        grams = _grams(floats, [same[0] for same in group], ctx)
        for same in group:
            gram = grams.pop(same[0].x, None)
            method = _gptq(gram, same[0], act_order, ctx)
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
    """Return the Gram matrices of the inputs that are in the main graph."""
    data = ctx.calibration
    assert data is not None
    outer = [job.x for job in firsts if job.graph.parent is None]
    if not outer:
        return {}
    # Not cached: they are larger than the weights.
    found = replace(data, cache=None).collect(floats, {name: Collect(Gram) for name in outer})
    return {name: cast(Gram, statistic) for name, statistic in found.statistics.items()}


def _gptq(gram: Gram | None, job: Job, act_order: bool, ctx: Context) -> CodeMethod:
    if gram is None or not gram.rows:
        what = "in a subgraph" if job.graph.parent is not None else "missing from the data"
        ctx.note(f"{nd.label(job.layer.node)} is rounded to nearest: its input is {what}")
        return Rounding()
    return Solver.of(gram.total, act_order)
