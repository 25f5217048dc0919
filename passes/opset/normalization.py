"""Softmax and its kin, Dropout, and the normalizations with their training modes."""

from __future__ import annotations

import numpy as np

from passes.opset.adapter_context import CannotLift, Site


def softmax_over_one_axis(site: Site) -> None:
    """Opset 13: Softmax, LogSoftmax and Hardmax work on one axis.

    Before, the input was seen as a matrix whose columns are all dimensions from `axis` on.
    """
    x, axis = site.input(0), site.attr("axis", 1)
    sizes = site.sizes(x)
    if sizes is not None and axis < 0:
        axis += len(sizes)
    if axis == -1 or (sizes is not None and axis == len(sizes) - 1):
        site.set(axis=-1)
    elif sizes is not None and all(size == 1 for size in sizes[axis + 1 :]):
        site.set(axis=axis)
    else:
        matrix = site.op("Flatten", x, axis=axis)
        site.set_inputs(matrix)
        site.set(axis=-1)
        result, name = site.hand_over()
        site.define(name, "Reshape", result, site.op("Shape", x))


def dropout_test_mode(site: Site) -> None:
    """Opset 7: inference is the mode without a mask, `is_test` is gone."""
    if not site.take("is_test", 0) and site.used_outputs(1):
        raise CannotLift("it is in training mode")


def dropout_mask(site: Site) -> None:
    """Opset 10: the mask is of booleans; who reads it had numbers of the data's type."""
    if site.used_outputs(1):
        dtype = site.types.of(site.graph, site.input(0))
        if dtype is None or not dtype.dtype:
            raise CannotLift(f"the element type of '{site.input(0)}' is unknown")
        mask, name = site.hand_over(1)
        site.define(name, "Cast", mask, to=dtype.dtype)


def dropout_ratio(site: Site) -> None:
    """Opset 12: the ratio became an input, which inference ignores; its mask became all true."""
    if site.used_outputs(1):
        raise CannotLift("its mask, which nobody defined for inference, is read")
    site.take("ratio")


def batch_norm_test_mode(site: Site) -> None:
    """Opset 7: inference is the mode with one output, `is_test` is gone."""
    if site.take("is_test", 0):
        if site.used_outputs(1):
            raise CannotLift("statistics that only training computes are read")
        site.graph.set_outputs(site.node, site.node.output[:1])


def batch_norm_spatial(site: Site) -> None:
    """Opset 9: statistics are per channel; `spatial=0`, per element, sees each as a channel."""
    if site.take("spatial", 1):
        return
    x, *statistics = site.node.input
    every = site.constant([-1], hint="flat")
    flat = [site.op("Reshape", value, every) for value in statistics]
    site.set_inputs(site.op("Flatten", x, axis=1), *flat)
    result, name = site.hand_over()
    site.define(name, "Reshape", result, site.op("Shape", x))


def batch_norm_training(site: Site) -> None:
    """Opset 14: training is an attribute; before, it was having more than one output."""
    if any(site.node.output[1:]):
        if site.used_outputs(3):
            raise CannotLift("the statistics of its batch are read")
        site.set(training_mode=1)
    site.graph.set_outputs(site.node, site.node.output[:3])


def group_norm_per_channel(site: Site) -> None:
    """Opset 21: scale and bias are per channel; they were per group."""
    x, *affine = site.node.input
    groups: int = site.attr("num_groups")
    sizes = site.sizes(x)
    channels = sizes[1] if sizes else None
    if channels == groups:
        return
    if channels is not None:
        known = [site.graph.const(value) for value in affine]
        repeated = [
            _repeat(site, value, groups, site.constant([groups, channels // groups]))
            if array is None
            else site.constant(np.repeat(array, channels // groups), array.dtype, "affine")
            for value, array in zip(affine, known, strict=True)
        ]
    else:
        count = site.constant([groups], hint="groups")
        share = site.op("Div", site.op("Shape", x, start=1, end=2), count)
        target = site.op("Concat", count, share, axis=0)
        repeated = [_repeat(site, value, groups, target) for value in affine]
    site.set_inputs(x, *repeated)


def _repeat(site: Site, value: str, groups: int, target: str) -> str:
    """Each element of a vector as often as `target`, [groups, times], says."""
    column = site.op("Reshape", value, site.constant([groups, 1], hint="column"))
    flat = site.constant([-1], hint="flat")
    return site.op("Reshape", site.op("Expand", column, target), flat)
