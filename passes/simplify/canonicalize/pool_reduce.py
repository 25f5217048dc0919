"""Reductions, poolings, resizes and dropouts that are no-ops."""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import dims, extra_outputs_used, given, int_operand, squeeze
from toolkit.ir import Graph, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite
from toolkit.symbolic import Dim

x = var("x")


@rewrite(op.any("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")(x, ...))
def reduce_single_elements(g: Graph, x: str, node: NodeProto) -> str | None:
    """Replace a reduction over axes of size 1 by a Squeeze (not one that takes norms or logs)."""
    shape = g.shape(x)
    axes = int_operand(g, node, "axes", 1, absent=[])
    if axes == [] and nd.attr(node, "noop_with_empty_axes", 0):
        return x
    if axes is None or shape is None:
        return None
    over = positive_axes(axes or range(len(shape)), len(shape))
    if over is None or any(shape[axis] != 1 for axis in over):
        return None
    if nd.attr(node, "keepdims", 1) or not over:
        return x
    return squeeze(g, x, over, at=node)


@rewrite(op.any("MaxPool", "AveragePool")(x))
def pool_of_one(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove a pooling with windows of one element and stride 1."""
    if extra_outputs_used(g, node) or any(nd.attr(node, "pads", ())):
        return None
    sizes = [*nd.attr(node, "kernel_shape", (0,)), *nd.attr(node, "strides", ())]
    return x if all(size == 1 for size in sizes) else None


@rewrite(op.any("GlobalAveragePool", "GlobalMaxPool")(x))
def global_pool_of_one(g: Graph, x: str) -> str | None:
    """Remove a global pooling of a single pixel."""
    shape = g.shape(x)
    return x if shape is not None and all(size == 1 for size in shape[2:]) else None


@rewrite(op.any("Resize", "Upsample")(x, ...))
def resize_to_same_size(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove a Resize with scale 1, in all modes but those that shift or crop."""
    if nd.attr(node, "coordinate_transformation_mode", "") in (
        "tf_crop_and_resize",
        "tf_half_pixel_for_nn",
    ):
        return None
    scales = given(node, 2 if nd.is_op(node, "Resize") and g.opset() >= 11 else 1)
    factors = nd.attr(node, "scales")
    if factors is None and scales:
        found = g.const(scales)
        factors = None if found is None else list(found.reshape(-1).tolist())
    if factors:
        return x if all(factor == 1 for factor in factors) else None
    sizes = dims(g, given(node, 3)) if given(node, 3) else None
    return x if sizes and sizes == _sizes_along(g, x, nd.attr(node, "axes")) else None


def _sizes_along(g: Graph, x: str, axes: list[int] | None) -> list[Dim] | None:
    shape = g.shape(x)
    if shape is None:
        return None
    chosen = positive_axes(axes if axes is not None else range(len(shape)), len(shape))
    return None if chosen is None else [shape[axis] for axis in chosen]


@rewrite(op.Dropout(x, ...))
def dropout_in_inference(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove a Dropout whose training mode is off."""
    if extra_outputs_used(g, node):
        return None
    if g.opset() < 7:
        return x if nd.attr(node, "is_test", 0) else None
    training = given(node, 2)
    if not training:
        return x
    flag = g.const(training)
    return x if flag is not None and not flag.any() else None


RULES = (
    reduce_single_elements,
    pool_of_one,
    global_pool_of_one,
    resize_to_same_size,
    dropout_in_inference,
)
