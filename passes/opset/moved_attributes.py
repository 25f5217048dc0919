"""Attributes that became inputs, were renamed, or whose default changed; operators renamed."""

from __future__ import annotations

import numpy as np

from passes.opset.adapter_context import CannotLift, Site

_FLOAT_MAX = float(np.finfo(np.float32).max)


def pads_renamed(site: Site) -> None:
    """Pad: `paddings` is called `pads`."""
    site.set(pads=site.take("paddings"))


def shape_to_input(site: Site) -> None:
    """Reshape: the shape is an input."""
    site.take("consumed_inputs")
    site.set_inputs(site.input(0), site.constant(site.take("shape", []), hint="shape"))


def axes_to_input(site: Site) -> None:
    """Squeeze, Unsqueeze and the reductions: the axes are an input; none means all of them."""
    axes = site.take("axes")
    if axes:
        site.set_inputs(site.input(0), site.constant(axes, hint="axes"))


def split_to_input(site: Site) -> None:
    """Split: the lengths are an input."""
    lengths = site.take("split")
    if lengths:
        site.set_inputs(site.input(0), site.constant(lengths, hint="split"))


def split_count(site: Site) -> None:
    """Split: equal parts are asked for by their number."""
    if not site.input(1):
        site.set(num_outputs=len(site.node.output))


def slice_to_inputs(site: Site) -> None:
    """Slice: starts, ends and axes are inputs."""
    starts, ends, axes = site.take("starts"), site.take("ends"), site.take("axes")
    bounds = [site.constant(starts, hint="starts"), site.constant(ends, hint="ends")]
    if axes:
        bounds.append(site.constant(axes, hint="axes"))
    site.set_inputs(site.input(0), *bounds)


def topk_to_input(site: Site) -> None:
    """TopK: k is an input."""
    site.set_inputs(site.input(0), site.constant([site.take("k")], hint="k"))


def clip_to_inputs(site: Site) -> None:
    """Clip: the bounds are inputs; the widest float32, which bounds nothing, is left out."""
    x = site.input(0)
    low, high = site.take("min", -_FLOAT_MAX), site.take("max", _FLOAT_MAX)
    bounds = ["", ""]
    if low > -_FLOAT_MAX:
        bounds[0] = site.constant(low, site.dtype(x), "min")
    if high < _FLOAT_MAX:
        bounds[1] = site.constant(high, site.dtype(x), "max")
    site.set_inputs(x, *bounds)


def pad_to_inputs(site: Site) -> None:
    """Pad: the widths and the value are inputs; 0 is the value's default."""
    x, value = site.input(0), site.take("value", 0.0)
    pads = site.constant(site.take("pads"), hint="pads")
    filled = value != 0 and site.attr("mode", "constant") == "constant"
    site.set_inputs(x, pads, site.constant(value, site.dtype(x), "value") if filled else "")


def dft_axis_to_input(site: Site) -> None:
    """DFT: the axis is an input, and its default changed from 1 to -2."""
    axis = site.constant(site.take("axis", 1), hint="axis")
    site.set_inputs(site.input(0), site.input(1), axis)


def grid_sample_mode(site: Site) -> None:
    """GridSample: the modes lost their `bi`, since there may be more than two dimensions."""
    mode = site.attr("mode", "bilinear")
    site.set(mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def roi_align_corners(site: Site) -> None:
    """RoiAlign: by default, positions are shifted by half a pixel from now on."""
    if site.attr("coordinate_transformation_mode") is None:
        site.set(coordinate_transformation_mode="output_half_pixel")


def scatter_elements(site: Site) -> None:
    """Scatter is called ScatterElements."""
    site.graph.set_op(site.node, "ScatterElements")


def erf_of_floats(site: Site) -> None:
    """Erf of integers, which nobody defined, is gone."""
    found = site.types.of(site.graph, site.input(0))
    if found is not None and found.dtype and site.dtype(site.input(0)).kind in "iu":
        raise CannotLift("its input is of integers")
