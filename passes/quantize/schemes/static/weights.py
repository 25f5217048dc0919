"""Quantized weights and biases of static layers.

    y = s_x s_w sum (q_x - z_x)(q_w - z_w) + s_x s_w q_b,     q_b = round(b / (s_x s_w)), int32

Kernels add q_b to the sum of products, so its scale must equal s_x s_w in float32. If the weights
of a channel are tiny relative to its bias, q_b would overflow: s_w grows until q_b and the sum fit.
A channel of zero weights has a scale that resolves its bias. If the means of the layer's input are
known, the bias also compensates the mean shift of rounded weights (see `channel_means`).

Weights stored as symmetric int8 after a DequantizeLinear are kept; others are dequantized and
quantized again by blocks of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers import int8_weights
from passes.quantize.layers.channel_means import rounding_shift
from passes.quantize.layers.channel_weights import Kernel, kernel_with
from passes.quantize.layers.int8_weights import FULL_LIMIT, Unfit, limit_of
from passes.quantize.layers.layers import is_fused
from passes.quantize.layers.row_blocks import RowSource
from passes.quantize.layers.weight_storage import require_float32
from toolkit.errors import UsageError
from toolkit.ir import FLOATS, Array, Graph, node as nd
from toolkit.quantization.number_format import FORMATS, INT8, INT32, UINT8
from toolkit.quantization.plan import Entry
from toolkit.quantization.qparams import QParams, QTensor
from toolkit.rewriting.match_failure import MatchFailure

_RESOLUTION = 2**23
"""Quantization steps of the largest bias of a channel with zero weights."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeight:
    """The constant weight of a layer."""

    graph: Graph
    """The graph of the layer; the weight may be in an outer one."""
    kernel: Kernel
    source: RowSource

    @property
    def size(self) -> int:
        return math.prod(self.source.shape)

    @property
    def alpha(self) -> float:
        """The factor of a Gemm or FusedMatMul."""
        return nd.attr(self.kernel.node, "alpha", 1.0)

    @property
    def turned(self) -> bool:
        """Whether this is the weight of a FusedMatMul, stored with outputs first."""
        return is_fused(self.kernel.node) and self.kernel.axis == 0


@dataclass(frozen=True, slots=True, eq=False)
class QLayer:
    """A layer's quantized weight and bias; `is_stored`: the model has the weight already."""

    weight: QTensor
    bias: QTensor | None
    is_stored: bool = False


def weight_of(g: Graph, node: NodeProto) -> LayerWeight | None:
    """Return the constant weights of a product, or None; raise MatchFailure if they stay float."""
    source = _source(g, given(node, 1))
    if source is None:
        return None
    if not math.prod(source.shape):
        raise MatchFailure("empty weights")
    kernel = kernel_with(node, source.shape)
    if kernel is None or (kernel.is_matrix and len(source.shape) != 2):
        raise MatchFailure("weights that are not a matrix")
    bias = given(node, 2)
    if bias and floats_of(g, bias) is None:
        raise MatchFailure("a bias that is computed")
    if not kernel.reads_channels:
        raise MatchFailure("a transposed input")
    found = LayerWeight(g, kernel, source)
    if not (math.isfinite(found.alpha) and found.alpha > 0):
        raise MatchFailure("a factor that is not positive")
    if bias and _bias_of(found) is None:
        raise MatchFailure("a bias that is not one number per output")
    return found


def encode(weight: LayerWeight, entry: Entry, x_scale: float, mean: Array | None = None) -> QLayer:
    """Quantize the weight and bias of a layer by its entry. Raises Unfit.

    `mean` holds the channel means of the layer's input.
    """
    require_supported(entry, weight)
    bias = _bias_of(weight)
    if bias is not None and not np.isfinite(bias).all():
        raise Unfit("a bias that is not finite")
    limit = limit_of(entry.reduce_range)
    reused = _reusable(weight, entry, limit, bias, x_scale)
    if reused is not None:
        return QLayer(reused, _bias(weight, reused.params.scale, bias, x_scale), is_stored=True)
    if entry.symmetric:
        most = int8_weights.largest(weight.source, entry.axis) * np.float32(weight.alpha)
        scale = _scale_with_room(weight, int8_weights.scale_of(most, limit), most, bias, x_scale)
        unscaled = scale / np.float32(weight.alpha)
        found = int8_weights.quantize_by(weight.source, entry.axis, unscaled, limit)
    else:
        found = int8_weights.quantize_affine(weight.source, limit)
        scale = found.params.scale * np.float32(weight.alpha)
    found = QTensor(found.codes, replace(found.params, scale=scale))
    bias = _compensated(weight, found, bias, mean)
    if entry.symmetric and entry.weight == UINT8.name:
        found = int8_weights.unsigned(found)
    return QLayer(
        found.transposed() if weight.turned else found, _bias(weight, scale, bias, x_scale)
    )


def require_supported(entry: Entry, weight: LayerWeight) -> None:
    """Raise UsageError for a weight format without a kernel."""
    if entry.weight not in (INT8.name, UINT8.name):
        raise UsageError(f"{entry.label} cannot be static with {entry.weight} weights: they are "
                         "int8 or uint8")  # fmt: skip
    if entry.axis not in (None, weight.kernel.axis):
        raise UsageError(f"{entry.label} cannot be static with scales along axis {entry.axis}: "
                         f"its outputs are along axis {weight.kernel.axis}")  # fmt: skip
    if not entry.symmetric and (entry.weight == INT8.name or entry.axis is not None):
        raise UsageError(f"{entry.label} cannot be static with these weights: asymmetric weights "
                         "are uint8 with one scale")  # fmt: skip


def floats_of(g: Graph, name: str) -> Array | None:
    """Return a constant in floats, dequantized if necessary; None if it is not constant."""
    source = _source(g, name)
    if source is None or isinstance(source, np.ndarray):
        return source
    return source[slice(None)]


def _source(g: Graph, name: str) -> Array | QTensor | None:
    """Return constant float32 weights, plain or quantized; raise MatchFailure for other floats."""
    tensor = g.tensor(name)
    if tensor is not None:
        if tensor.data_type not in FLOATS:
            return None
        require_float32(tensor)
        return g.const(name)
    scope = g.scope_of(name)
    node = scope.producer(name) if scope is not None else None
    if scope is None or node is None or not nd.is_op(node, "DequantizeLinear"):
        return None
    return _stored(scope, node)


def _stored(g: Graph, node: NodeProto) -> QTensor | None:
    values, scale = g.const(node.input[0]), g.const(node.input[1])
    if values is None or scale is None:
        return None
    zero = g.const(node.input[2]) if given(node, 2) else np.zeros(scale.shape, values.dtype)
    if zero is None:
        return None
    fmt = FORMATS.get(str(values.dtype))
    if fmt not in (INT8, UINT8, INT32) or scale.dtype != np.float32:
        raise MatchFailure(f"weights of {values.dtype}, which are not quantized again")
    if scale.size == 1:
        return QTensor(values, QParams(scale.reshape(()), zero.reshape(()), fmt))
    if nd.attr(node, "block_size", 0) or scale.ndim != 1:
        raise MatchFailure("weights with scales per block")
    axis = nd.attr(node, "axis", 1) % values.ndim
    return QTensor(values, QParams(scale, zero, fmt, axis))


def _reusable(
    weight: LayerWeight, entry: Entry, limit: int, bias: Array | None, x_scale: float
) -> QTensor | None:
    """Return the stored codes if the layer can use them unchanged."""
    stored = weight.source
    if not isinstance(stored, QTensor) or stored.params.zero_point.any():
        return None
    params = stored.params
    if params.format != INT8 or entry.weight != INT8.name:
        return None
    if weight.alpha != 1 or weight.turned or params.axis not in (None, weight.kernel.axis):
        return None
    if limit < FULL_LIMIT and (stored.codes.max() > limit or stored.codes.min() < -limit):
        return None
    if bias is not None and np.any(
        _least_scale(weight, params.scale, bias, x_scale) > params.scale
    ):
        return None
    return stored


def _scale_with_room(
    weight: LayerWeight, scale: Array, most: Array, bias: Array | None, x_scale: float
) -> Array:
    """Return scales large enough for the bias to fit into int32."""
    if bias is None:
        return scale
    needed = _least_scale(weight, scale, bias, x_scale)
    resolving = np.maximum(_largest_bias(weight, scale, bias) / x_scale / _RESOLUTION, 2.0**-100)
    empty = (most == 0) & (_largest_bias(weight, scale, bias) > 0)
    scale = np.where(empty, resolving.astype(np.float32), scale)
    # Round up: the product of two rounded scales may be slightly too small.
    wider = np.nextafter(needed.astype(np.float32), np.float32(np.inf))
    return np.where(needed > scale, wider, scale).astype(np.float32)


def _least_scale(weight: LayerWeight, scale: Array, bias: Array, x_scale: float) -> Array:
    """Return the least weight scale with which bias and sum together fit into int32."""
    most = weight.kernel.depth * UINT8.steps * -INT8.low
    room = INT32.high - min(most, INT32.high // 2)
    return _largest_bias(weight, scale, bias) / x_scale / room


def _largest_bias(weight: LayerWeight, scale: Array, bias: Array) -> Array:
    """Return the largest |bias| that each scale applies to, in float64."""
    most = np.abs(bias.astype(np.float64))
    if not scale.ndim:
        return most.max(initial=0)
    return most.reshape(weight.kernel.groups, -1).max(axis=0)


def _compensated(
    weight: LayerWeight, found: QTensor, bias: Array | None, mean: Array | None
) -> Array | None:
    """Return the bias plus the mean shift (a W - W^) E[x]; None without both."""
    if mean is None:
        return bias
    scale, zero_point = found.params.laid_along(found.codes.ndim)
    codes = found.codes.astype(np.float32) - zero_point
    shift = rounding_shift(weight.graph, weight.kernel.node, mean, codes, scale, weight.alpha)
    if shift is None:
        return bias
    return shift.astype(np.float32) if bias is None else (bias + shift).astype(np.float32)


def _bias(weight: LayerWeight, scale: Array, bias: Array | None, x_scale: float) -> QTensor | None:
    """Quantize the bias with the product of the input's scale and the weight's."""
    if bias is None:
        return None
    spread = np.tile(scale, weight.kernel.groups) if scale.ndim else scale
    params = QParams.of(spread * np.float32(x_scale), 0, INT32, axis=0)
    return QTensor(params.quantize(bias), params)


def _bias_of(weight: LayerWeight) -> Array | None:
    """Return beta b, one number per output; None without a bias, or if it has another shape."""
    node, outputs = weight.kernel.node, weight.kernel.outputs
    name = given(node, 2)
    beta = nd.attr(node, "beta", 1.0) if nd.is_op(node, "Gemm") else 1.0
    known = floats_of(weight.graph, name) if name else None
    if known is None or known.size not in (1, outputs):
        return None
    if known.ndim and known.shape[-1] not in (1, outputs):
        return None
    vector = np.broadcast_to(known.reshape(-1), (outputs,))
    return vector * np.float32(beta)
