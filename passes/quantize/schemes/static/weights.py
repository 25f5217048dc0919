"""Weights and biases of a static layer.

    y = s_x s_w sum (q_x - z_x)(q_w - z_w) + s_x s_w q_b,     q_b = round(b / (s_x s_w)), int32

The kernels add q_b to the sum of products, so its scale is the product of the other two, to the
last bit of a 32-bit float. A channel whose weights are tiny beside its bias has a q_b that does not
fit: its s_w is widened until it does, with room for the sum. A channel of zeros has no scale that
its weights would tell: it gets one that resolves its bias. Where the means of the layer's input are
known, b has what rounding the weights shifts taken from it (see `means`).

Weights that are stored as integers behind a DequantizeLinear stay as they are where they are
symmetric int8; other ones are read through it, some rows at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers import int8_weights as arithmetic
from passes.quantize.layers.channel_means import rounding_shift
from passes.quantize.layers.int8_weights import FULL, Quantized, Unfit, limit_of
from passes.quantize.layers.layers import TURNED_INPUT, is_fused
from passes.quantize.layers.row_blocks import Rows
from passes.quantize.layers.weight_storage import require_float32
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import Miss

_MOST = 2**31 - 1
_RESOLUTION = 2**23
"""Steps that the bias of a channel without weights has."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Weights as integers behind a DequantizeLinear."""

    node: NodeProto
    values: Array
    scale: Array
    zero: Array
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return np.dtype(np.float32)

    def __getitem__(self, rows: slice) -> Array:
        scale, zero = (self._along(a, rows) for a in (self.scale, self.zero.astype(np.float32)))
        return (self.values[rows].astype(np.float32) - zero) * scale

    def _along(self, numbers: Array, rows: slice) -> Array:
        if self.axis is None or not numbers.ndim:
            return numbers
        shaped = numbers.reshape([-1 if i == self.axis else 1 for i in range(self.values.ndim)])
        return shaped[rows] if self.axis == 0 else shaped


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """The constant that a layer multiplies with; `axis` is that of its outputs.

    `graph` is the layer's, which may read its weights from a graph around it. Each index of the
    axis serves `groups` outputs (those of a grouped ConvTranspose), and an output is a sum of
    `depth` products. `alpha` is the factor of a Gemm or a FusedMatMul, and one that is `turned` by
    the latter has its outputs first.
    """

    graph: Graph
    name: str
    source: Rows
    axis: int
    depth: int
    groups: int = 1
    alpha: float = 1.0
    turned: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.source.shape)

    @property
    def outputs(self) -> int:
        return self.source.shape[self.axis] * self.groups


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A layer's weights and bias as integers; `values` is None for those that stay as stored."""

    values: Array | None
    scale: Array
    zero: int
    bias: Array | None
    bias_scale: Array


def weight_of(g: Graph, node: NodeProto) -> Weight | None:
    """The constant weights of a product; None when it has none, Miss for what must stay float."""
    name = given(node, 1)
    source = _source(g, name)
    if source is None:
        return None
    rank = len(source.shape)
    if not math.prod(source.shape):
        raise Miss("no weights at all")
    if (nd.is_op(node, "MatMul", "Gemm") or is_fused(node)) and rank != 2:
        raise Miss("weights that are no matrix")
    bias = given(node, 2)
    if bias and floats_of(g, bias) is None:
        raise Miss("a bias that is computed")
    axis, groups = 1, 1
    if nd.is_op(node, "Conv"):
        axis = 0
    elif nd.is_op(node, "ConvTranspose"):
        groups = nd.attr(node, "group", 1)
    elif any(nd.attr(node, turn, 0) for turn in TURNED_INPUT):
        raise Miss("a transposed input")
    elif nd.attr(node, "transB", 0):
        axis = 0
    alpha = nd.attr(node, "alpha", 1.0)
    if not (math.isfinite(alpha) and alpha > 0):
        raise Miss("a factor that is not above zero")
    depth = math.prod(source.shape) // source.shape[axis] // groups
    turned = is_fused(node) and axis == 0
    found = Weight(g, name, source, axis, depth, groups, alpha, turned)
    if bias and _bias_of(g, node, found.outputs) is None:
        raise Miss("a bias that is not one number for each output")
    return found


def encode(
    weight: Weight, node: NodeProto, entry: Entry, x_scale: float, mean: Array | None = None
) -> Coded:
    """Weights and bias as the entry wants them. Raises Unfit for what cannot be quantized.

    `mean` is that of each channel of the layer's input.
    """
    require_supported(entry, weight)
    bias = _bias_of(weight.graph, node, weight.outputs)
    if bias is not None and not np.isfinite(bias).all():
        raise Unfit("a bias that is not finite")
    limit = limit_of(entry.reduce_range)
    kept = _kept(weight, entry, limit, bias, x_scale)
    if kept is not None:
        return _coded(weight, kept.scale.reshape(-1) if kept.scale.ndim else kept.scale, 0, None,
                      bias, x_scale)  # fmt: skip
    if not entry.symmetric:
        lopsided = arithmetic.quantize_lopsided(weight.source, limit)
        scale = lopsided.scale * np.float32(weight.alpha)
        bias = _moved(weight, node, lopsided, scale, bias, mean)
        return _coded(weight, scale, lopsided.zero, lopsided.values, bias, x_scale)
    most = arithmetic.largest(weight.source, entry.axis) * np.float32(weight.alpha)
    scale = _with_room(weight, arithmetic.scale_of(most, limit), most, bias, x_scale)
    signed = arithmetic.quantize_by(
        weight.source, entry.axis, scale / np.float32(weight.alpha), limit
    )
    bias = _moved(weight, node, signed, scale, bias, mean)
    found = signed if entry.weight == "int8" else arithmetic.unsigned(signed)
    return _coded(weight, scale, found.zero, found.values, bias, x_scale)


def require_supported(entry: Entry, weight: Weight) -> None:
    """UsageError for weights that no kernel takes."""
    if entry.weight not in ("int8", "uint8"):
        raise UsageError(f"{entry.label} cannot be static with {entry.weight} weights: they are "
                         "int8 or uint8")  # fmt: skip
    if entry.axis not in (None, weight.axis):
        raise UsageError(f"{entry.label} cannot be static with scales along axis {entry.axis}: "
                         f"its outputs are along axis {weight.axis}")  # fmt: skip
    if not entry.symmetric and (entry.weight == "int8" or entry.axis is not None):
        raise UsageError(f"{entry.label} cannot be static with these weights: those that are not "
                         "symmetric are uint8, with one scale")  # fmt: skip


def floats_of(g: Graph, name: str) -> Array | None:
    """A small constant, as it is or through a DequantizeLinear; None for anything else."""
    source = _source(g, name)
    if source is None or isinstance(source, np.ndarray):
        return source
    return source[slice(None)]


def _source(g: Graph, name: str) -> Array | Stored | None:
    """Constant floats, as they are or behind a DequantizeLinear; Miss for those not of 32 bits."""
    tensor = g.tensor(name)
    if tensor is not None:
        if tensor.data_type not in FLOATS:
            return None
        require_float32(tensor)
        return g.const(name)
    scope = g.scope_of(name)
    node = scope.producer(name) if scope is not None else None
    return (
        _stored(scope, node) if scope is not None and nd.is_op(node, "DequantizeLinear") else None
    )


def _stored(g: Graph, node: NodeProto | None) -> Stored | None:
    assert node is not None
    values, scale = g.const(node.input[0]), g.const(node.input[1])
    if values is None or scale is None:
        return None
    zero = np.zeros(scale.shape, values.dtype)
    if given(node, 2):
        known = g.const(node.input[2])
        if known is None:
            return None
        zero = known
    if str(values.dtype) not in ("int8", "uint8", "int32") or scale.dtype != np.float32:
        raise Miss(f"weights of {values.dtype}, and only bytes are quantized again")
    if scale.size == 1:
        return Stored(node, values, scale.reshape(()), zero.reshape(()), None)
    if nd.attr(node, "block_size", 0) or scale.ndim != 1:
        raise Miss("weights with scales for blocks")
    return Stored(node, values, scale, zero, nd.attr(node, "axis", 1) % values.ndim)


def _kept(
    weight: Weight, entry: Entry, limit: int, bias: Array | None, x_scale: float
) -> Stored | None:
    """The stored integers, when they serve as they are."""
    stored = weight.source
    if not isinstance(stored, Stored) or stored.values.dtype != np.int8 or stored.zero.any():
        return None
    if entry.weight != "int8" or weight.alpha != 1 or stored.axis not in (None, weight.axis):
        return None
    if weight.turned:
        return None
    if limit < FULL and (stored.values.max() > limit or stored.values.min() < -limit):
        return None
    if bias is not None and np.any(_needed(weight, stored.scale, bias, x_scale) > stored.scale):
        return None
    return stored


def _with_room(
    weight: Weight, scale: Array, most: Array, bias: Array | None, x_scale: float
) -> Array:
    """Scales by which the bias fits, too; where there are no weights, the bias alone tells."""
    if bias is None:
        return scale
    needed = _needed(weight, scale, bias, x_scale)
    resolving = np.maximum(_by_scale(weight, scale, bias) / x_scale / _RESOLUTION, 2.0**-100)
    empty = (most == 0) & (_by_scale(weight, scale, bias) > 0)
    scale = np.where(empty, resolving.astype(np.float32), scale)
    # One step up: the product of two rounded scales may be a little less than asked for.
    wider = np.nextafter(needed.astype(np.float32), np.float32(np.inf))
    return np.where(needed > scale, wider, scale).astype(np.float32)


def _needed(weight: Weight, scale: Array, bias: Array, x_scale: float) -> Array:
    """The least weight scale by which bias and sum together fit into 32 bits."""
    room = _MOST - min(weight.depth * 255 * 128, _MOST // 2)
    return _by_scale(weight, scale, bias) / x_scale / room


def _by_scale(weight: Weight, scale: Array, bias: Array) -> Array:
    """The largest bias that each scale serves, in doubles."""
    most = np.abs(bias.astype(np.float64))
    if not scale.ndim:
        return most.max(initial=0)
    return most.reshape(weight.groups, -1).max(axis=0)


def _moved(
    weight: Weight,
    node: NodeProto,
    found: Quantized,
    scale: Array,
    bias: Array | None,
    mean: Array | None,
) -> Array | None:
    """The bias without what rounding shifts on average; one of its own where there was none."""
    if mean is None:
        return bias
    codes = found.values.astype(np.float32) - np.float32(found.zero)
    along = scale.reshape([-1 if i == weight.axis else 1 for i in range(codes.ndim)])
    shift = rounding_shift(
        weight.graph, node, mean, codes, along if scale.ndim else scale, weight.alpha
    )
    if shift is None:
        return bias
    return shift.astype(np.float32) if bias is None else (bias + shift).astype(np.float32)


def _coded(
    weight: Weight,
    scale: Array,
    zero: int,
    values: Array | None,
    bias: Array | None,
    x_scale: float,
) -> Coded:
    spread = np.tile(scale, weight.groups) if scale.ndim else scale
    product = np.asarray(spread * np.float32(x_scale), np.float32)
    if bias is None:
        return Coded(values, scale, zero, None, product)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.nan_to_num(np.rint(bias.astype(np.float64) / product))
    return Coded(values, scale, zero, np.clip(steps, -_MOST, _MOST).astype(np.int32), product)


def _bias_of(g: Graph, node: NodeProto, outputs: int) -> Array | None:
    """beta b, one number for each output; None without one, or when it is not so."""
    name = given(node, 2)
    beta = nd.attr(node, "beta", 1.0) if nd.is_op(node, "Gemm") else 1.0
    known = floats_of(g, name) if name else None
    if known is None or known.size not in (1, outputs):
        return None
    if known.ndim and known.shape[-1] not in (1, outputs):
        return None
    vector = np.broadcast_to(known.reshape(-1), (outputs,))
    return vector * np.float32(beta)
