"""Detect int8 sums that saturate on x86 processors without VNNI.

These processors add pairs of uint8 * int8 products in 16 bits, which saturates if

    255 (w1 + w2) > 32767   or   255 (w1 + w2) < -32768

for two adjacent weights of a sum: inputs 2k and 2k + 1 of a matrix, channels 2k and 2k + 1 of a
convolution. Weights in the reduced range -64..64 never saturate.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from toolkit.ir import Array, Graph, Model, node as nd
from toolkit.quantization.number_format import UINT8

_SUMS = np.iinfo(np.int16)
_MOST, _LEAST = _SUMS.max // UINT8.high, -(-_SUMS.min // UINT8.high)
"""The largest and least sum of two weights without saturation."""
_VNNI = ("avx512_vnni", "avx_vnni", "avx512vnni", "avxvnni")
_X86 = ("x86_64", "amd64", "i386", "i686")
_BLOCK = 1 << 22
"""Weights per block."""

_SLOTS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (1,)),
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention"), (1,)),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm"), (3,)),
    "DynamicQuantizeLSTM": (1, 2),
}
"""The slot of the weights of each integer operator."""


def has_vnni(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = "") -> bool | None:
    """Whether this processor adds int8 products in 32 bits; None if that is unknown."""
    if (machine or platform.machine()).lower() not in _X86:
        return None
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if flags is None:
        return None
    return any(flag in flags.group(1).split() for flag in _VNNI)


def saturating(model: Model) -> list[str]:
    """Return the labels of the layers whose sums can saturate without VNNI."""
    found: list[str] = []
    for graph in model.graphs():
        for node in graph.nodes:
            rows = (part for w in _weights(graph, node) for part in _as_rows(node, w))
            if any(map(overflows, rows)):
                found.append(nd.label(node))
    return found


def overflows(rows: Array) -> bool:
    """Whether two adjacent weights of a row are too large together."""
    even = rows[:, 0 : rows.shape[1] // 2 * 2 : 2].astype(np.int16)
    pairs = even + rows[:, 1::2]
    return bool(pairs.size) and bool(pairs.max() > _MOST or pairs.min() < _LEAST)


def _weights(g: Graph, node: NodeProto) -> list[Array]:
    """Return the int8 weights of a layer."""
    names = [given(node, slot) for slot in _SLOTS.get(node.op_type, ())]
    producer = g.producer(given(node, 1)) if nd.is_op(node, "Conv", "Gemm", "MatMul") else None
    if producer is not None and nd.is_op(producer, "DequantizeLinear"):
        names.append(producer.input[0])
    found = [_int8_constant(g, name) for name in names]
    return [weight for weight in found if weight is not None]


def _int8_constant(g: Graph, name: str) -> Array | None:
    """Return a constant of int8, also one that is transposed at run time."""
    producer = g.producer(name)
    if producer is not None and nd.is_op(producer, "Transpose"):
        turned = _int8_constant(g, producer.input[0])
        return None if turned is None or turned.ndim != 2 else np.swapaxes(turned, 0, 1)
    tensor = g.tensor(name)
    if tensor is None or tensor.data_type != TensorProto.INT8 or len(tensor.dims) < 2:
        return None
    return g.const(name)


def _as_rows(node: NodeProto, weight: Array) -> Iterator[Array]:
    """Yield blocks of the weights with one row per output, in the order of summation."""
    if node.op_type in ("Conv", "ConvInteger", "QLinearConv"):
        rows = np.moveaxis(weight, 1, -1)
        rows = rows.reshape(rows.shape[0], -1)
    else:
        rows = weight if nd.attr(node, "transB", 0) else np.swapaxes(weight, -1, -2)
        rows = rows.reshape(-1, rows.shape[-1]) if rows.ndim > 2 else rows
    step = max(1, _BLOCK // max(rows.shape[1], 1))
    return (rows[start : start + step] for start in range(0, rows.shape[0], step))
