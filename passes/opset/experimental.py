"""Operators that were never in the standard, most of which onnxruntime runs below opset 10.

Old PyTorch, CoreML and Caffe2 exports hold them. Each becomes what it means in standard operators.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from passes.opset.adapter_context import CannotLift, Site

_END = np.iinfo(np.int64).max


def affine(site: Site) -> None:
    """alpha x + beta"""
    alpha, beta = site.take("alpha", 1.0), site.take("beta", 0.0)
    scaled = site.op("Mul", site.input(0), _number(site, alpha))
    _become(site, "Add", scaled, _number(site, beta))


def scale(site: Site) -> None:
    """scale x"""
    _become(site, "Mul", site.input(0), _number(site, site.take("scale", 1.0)))


def image_scaler(site: Site) -> None:
    """scale x + bias, one bias per channel of N x C x H x W"""
    factor, bias = site.take("scale", 1.0), site.take("bias", [0.0])
    scaled = site.op("Mul", site.input(0), _number(site, factor))
    per_channel = np.reshape(bias, (-1, 1, 1))
    _become(site, "Add", scaled, site.constant(per_channel, site.dtype(site.input(0)), "bias"))


def scaled_tanh(site: Site) -> None:
    """alpha tanh(beta x)"""
    alpha, beta = site.take("alpha", 1.0), site.take("beta", 1.0)
    inner = site.op("Tanh", site.op("Mul", site.input(0), _number(site, beta)))
    _become(site, "Mul", inner, _number(site, alpha))


def parametric_softplus(site: Site) -> None:
    """alpha softplus(beta x)"""
    alpha, beta = site.take("alpha", 1.0), site.take("beta", 1.0)
    inner = site.op("Softplus", site.op("Mul", site.input(0), _number(site, beta)))
    _become(site, "Mul", inner, _number(site, alpha))


def crop(site: Site) -> None:
    """Rows and columns without `border` = [left, top, right, bottom], or `scale` = [h, w] of it."""
    left, top, right, bottom = site.take("border")
    size = site.take("scale")
    ends = [top + size[0], left + size[1]] if size else [-bottom or _END, -right or _END]
    bounds = ([top, left], ends, [2, 3])
    _become(site, "Slice", site.input(0), *(site.constant(values) for values in bounds))


def dynamic_slice(site: Site) -> None:
    """Slice-10 under its first name."""
    site.graph.set_op(site.node, "Slice")


def constant_fill(site: Site) -> None:
    """`value` in a shape: the input's, or the input itself, or `shape`; then `extra_shape`."""
    source, is_shape = site.input(0), site.take("input_as_shape", 0)
    given, extra = site.take("shape", []), site.take("extra_shape")
    if not source:
        shape = site.constant(given, hint="shape")
    elif is_shape:
        shape = site.op("Cast", source, to=TensorProto.INT64)
    else:
        shape = site.op("Shape", source)
    if extra:
        shape = site.op("Concat", shape, site.constant(extra, hint="shape"), axis=0)
    filling = site.take("dtype", TensorProto.FLOAT), [1], [site.take("value", 0.0)]
    _become(site, "ConstantOfShape", shape)
    site.set(value=helper.make_tensor("value", *filling))


def mean_variance(site: Site) -> None:
    """The same name as the standard's operator of opset 9, but other statistics."""
    raise CannotLift("it is onnxruntime's operator of that name, not ONNX's")


def _number(site: Site, value: float) -> str:
    return site.constant(value, site.dtype(site.input(0)), "factor")


def _become(site: Site, op_type: str, *inputs: str) -> None:
    site.graph.set_op(site.node, op_type)
    site.set_inputs(*inputs)
