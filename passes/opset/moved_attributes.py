"""Adapters for attributes that became inputs, were renamed or dropped, or changed their default.

`drop`, `rename`, `rename_op` and `to_inputs` make an adapter from names; `in_order` chains several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.opset.adapter_context import Adapter, AdapterContext, CannotConvert

_FLOAT_MAX = float(np.finfo(np.float32).max)


def drop(name: str) -> Adapter:
    """Drop an attribute without meaning: a hint, or a choice that is now the only one."""

    def adapt(ctx: AdapterContext) -> None:
        ctx.take(name)

    return adapt


def rename(old: str, new: str) -> Adapter:
    def adapt(ctx: AdapterContext) -> None:
        ctx.set(**{new: ctx.take(old)})

    return adapt


def rename_op(op_type: str) -> Adapter:
    def adapt(ctx: AdapterContext) -> None:
        ctx.graph.set_op(ctx.node, op_type)

    return adapt


def to_inputs(*names: str, optional: Sequence[str] = ()) -> Adapter:
    """Move integer attributes to inputs 1, 2, ...; an optional one that is absent or empty is left
    out."""

    def adapt(ctx: AdapterContext) -> None:
        values = {name: ctx.take(name, []) for name in (*names, *optional)}
        moved = [
            ctx.constant(np.atleast_1d(value), hint=name) if value or name in names else ""
            for name, value in values.items()
        ]
        ctx.set_inputs(ctx.input(0), *moved)

    return adapt


def in_order(*adapters: Adapter) -> Adapter:
    def adapt(ctx: AdapterContext) -> None:
        for adapter in adapters:
            adapter(ctx)

    return adapt


def split_count(ctx: AdapterContext) -> None:
    """Split: equal parts are requested by their number."""
    if not ctx.input(1):
        ctx.set(num_outputs=len(ctx.node.output))


def clip_to_inputs(ctx: AdapterContext) -> None:
    """Clip: the bounds are inputs; the largest float32, which bounds nothing, is left out."""
    x = ctx.input(0)
    low, high = ctx.take("min", -_FLOAT_MAX), ctx.take("max", _FLOAT_MAX)
    bounds = ["", ""]
    if low > -_FLOAT_MAX:
        bounds[0] = ctx.constant(low, ctx.dtype(x), "min")
    if high < _FLOAT_MAX:
        bounds[1] = ctx.constant(high, ctx.dtype(x), "max")
    ctx.set_inputs(x, *bounds)


def pad_to_inputs(ctx: AdapterContext) -> None:
    """Pad: the widths and the value are inputs; the value defaults to 0."""
    x, value = ctx.input(0), ctx.take("value", 0.0)
    pads = ctx.constant(ctx.take("pads"), hint="pads")
    filled = value != 0 and ctx.attr("mode", "constant") == "constant"
    ctx.set_inputs(x, pads, ctx.constant(value, ctx.dtype(x), "value") if filled else "")


def dft_axis_to_input(ctx: AdapterContext) -> None:
    """DFT: the axis is an input, and its default changed from 1 to -2."""
    axis = ctx.constant(ctx.take("axis", 1), hint="axis")
    ctx.set_inputs(ctx.input(0), ctx.input(1), axis)


def grid_sample_mode(ctx: AdapterContext) -> None:
    """GridSample: the modes lost their `bi`, since there may be more than two dimensions."""
    mode = ctx.attr("mode", "bilinear")
    ctx.set(mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def roi_align_corners(ctx: AdapterContext) -> None:
    """RoiAlign: the default now shifts positions by half a pixel; write the old default."""
    if ctx.attr("coordinate_transformation_mode") is None:
        ctx.set(coordinate_transformation_mode="output_half_pixel")


def erf_of_floats(ctx: AdapterContext) -> None:
    """Erf no longer takes integers, for which its result was never defined."""
    found = ctx.types.of(ctx.graph, ctx.input(0))
    if found is not None and found.dtype and ctx.dtype(ctx.input(0)).kind in "iu":
        raise CannotConvert("its input has integers")
