"""Upsample and Resize: from scale factors to sampling rules that are written out.

Up to opset 10 the position was x_resized / scale ("asymmetric"), and nearest took the pixel before
it when growing an axis and the one after it when shrinking (ONNX's own tests say so, and
onnxruntime does so).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from passes.opset.adapter_context import CannotLift, Site


def upsample_scales(site: Site) -> None:
    """Opset 7: height and width factors become one factor per axis."""
    height, width = site.take("height_scale"), site.take("width_scale")
    site.set(scales=[1.0, 1.0, height, width], mode=_mode(site))


def upsample_scales_to_input(site: Site) -> None:
    """Opset 9: the factors are an input."""
    scales = site.constant(site.take("scales"), np.float32, "scales")
    site.set_inputs(site.input(0), scales)


def upsample_to_resize(site: Site) -> None:
    """Opset 10: Upsample is called Resize."""
    site.set(mode=_mode(site))
    site.graph.set_op(site.node, "Resize")


def resize_sampling(site: Site) -> None:
    """Opset 11: the sampling is written, and a region of interest comes before the scales."""
    x, scales = site.node.input
    roi = site.constant([], np.float32, "roi")
    site.set(coordinate_transformation_mode="asymmetric")
    if site.attr("mode", "nearest") != "nearest":
        site.set_inputs(x, roi, scales)
        return
    known = site.graph.const(scales)
    if known is not None and (known >= 1).all():
        site.set(nearest_mode="floor")
    elif known is not None and (known <= 1).all():
        site.set(nearest_mode="ceil")
    else:
        x, scales = _grow_first(site, x, roi, scales)
        site.set(nearest_mode="ceil")
    site.set_inputs(x, roi, scales)


def _grow_first(site: Site, x: str, roi: str, scales: str) -> tuple[str, str]:
    """Some axes may grow and others shrink, which round differently: grow, then shrink.

    (the grown tensor, the factors left to shrink it by)
    """
    one = site.constant([1.0], np.float32, "one")
    common: dict[str, Any] = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    grown = site.op("Resize", x, roi, site.op("Max", scales, one), **common)
    return grown, site.op("Min", scales, one)


def resize_optional_inputs(site: Site) -> None:
    """Opsets 13 and 18: unused inputs are left out instead of empty; a mode of TensorFlow is gone.

    With p = (x + 0.5) / scale, which was `tf_half_pixel_for_nn`, and y = p - 0.5, `half_pixel`:
    floor(p) rounds y with halves up, and rounding p with halves down is ceil(y).
    """
    mode = site.attr("coordinate_transformation_mode", "half_pixel")
    x, roi, scales, sizes = (site.input(i) for i in range(4))
    if sizes:
        scales = ""  # was there but had to be empty
    if mode == "tf_half_pixel_for_nn":
        rounding = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}
        now = rounding.get(site.attr("nearest_mode", "round_prefer_floor"))
        if now is None or site.attr("mode", "nearest") != "nearest":
            raise CannotLift("newer opsets do not know tf_half_pixel_for_nn with this rounding")
        site.set(coordinate_transformation_mode="half_pixel", nearest_mode=now)
    site.set_inputs(x, roi if mode == "tf_crop_and_resize" else "", scales, sizes)


def _mode(site: Site) -> str:
    mode: str = site.attr("mode", "nearest")
    return "linear" if mode == "bilinear" else mode
