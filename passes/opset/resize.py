"""Adapters for Upsample and Resize: from scale factors to explicit sampling rules.

Up to opset 10 the position was x_resized / scale ("asymmetric"), and nearest took the pixel before
it when upsampling an axis and the one after it when downsampling (as in ONNX's own tests and in
onnxruntime).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from passes.opset.adapter_context import AdapterContext, CannotConvert


def upsample_scales(ctx: AdapterContext) -> None:
    """Opset 7: height and width factors become one factor per axis."""
    height, width = ctx.take("height_scale"), ctx.take("width_scale")
    ctx.set(scales=[1.0, 1.0, height, width], mode=_mode(ctx))


def upsample_scales_to_input(ctx: AdapterContext) -> None:
    """Opset 9: the scale factors are an input."""
    scales = ctx.constant(ctx.take("scales"), np.float32, "scales")
    ctx.set_inputs(ctx.input(0), scales)


def upsample_to_resize(ctx: AdapterContext) -> None:
    """Opset 10: Upsample became Resize."""
    ctx.set(mode=_mode(ctx))
    ctx.graph.set_op(ctx.node, "Resize")


def resize_sampling(ctx: AdapterContext) -> None:
    """Opset 11: the sampling rule is explicit; a region of interest precedes the scales."""
    x, scales = ctx.node.input
    roi = ctx.constant([], np.float32, "roi")
    ctx.set(coordinate_transformation_mode="asymmetric")
    if ctx.attr("mode", "nearest") != "nearest":
        ctx.set_inputs(x, roi, scales)
        return
    known = ctx.graph.const(scales)
    if known is not None and (known >= 1).all():
        ctx.set(nearest_mode="floor")
    elif known is not None and (known <= 1).all():
        ctx.set(nearest_mode="ceil")
    else:
        x, scales = _upsample_first(ctx, x, roi, scales)
        ctx.set(nearest_mode="ceil")
    ctx.set_inputs(x, roi, scales)


def _upsample_first(ctx: AdapterContext, x: str, roi: str, scales: str) -> tuple[str, str]:
    """Upsample first, since up- and downsampling round differently.

    Returns the upsampled tensor and the scales that are left for downsampling.
    """
    one = ctx.constant([1.0], np.float32, "one")
    common: dict[str, Any] = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    upsampled = ctx.op("Resize", x, roi, ctx.op("Max", scales, one), **common)
    return upsampled, ctx.op("Min", scales, one)


def resize_optional_inputs(ctx: AdapterContext) -> None:
    """Opsets 13 and 18: unused inputs are omitted instead of empty; a TensorFlow mode is gone.

    With p = (x + 0.5) / scale, formerly `tf_half_pixel_for_nn`, and y = p - 0.5, `half_pixel`:
    floor(p) rounds y with halves up, and rounding p with halves down is ceil(y).
    """
    mode = ctx.attr("coordinate_transformation_mode", "half_pixel")
    x, roi, scales, sizes = (ctx.input(i) for i in range(4))
    if sizes:
        scales = ""  # was present, but had to be empty
    if mode == "tf_half_pixel_for_nn":
        rounding = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}
        now = rounding.get(ctx.attr("nearest_mode", "round_prefer_floor"))
        if now is None or ctx.attr("mode", "nearest") != "nearest":
            raise CannotConvert("newer opsets have no tf_half_pixel_for_nn with this rounding")
        ctx.set(coordinate_transformation_mode="half_pixel", nearest_mode=now)
    ctx.set_inputs(x, roi if mode == "tf_crop_and_resize" else "", scales, sizes)


def _mode(ctx: AdapterContext) -> str:
    mode: str = ctx.attr("mode", "nearest")
    return "linear" if mode == "bilinear" else mode
