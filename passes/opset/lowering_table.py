"""The adapters to the opset before, of operators that cannot simply be relabelled.

A node that uses nothing its operator gained in an opset is relabelled (see `relabel`), after the
adapter of `LOWERING` has brought it to the older form, if there is one. Those cost nothing at run
time. `DECOMPOSITIONS` write an operator out; what they lack, ONNX's own function bodies may have.
"""

from __future__ import annotations

from collections.abc import Mapping

from passes.opset import decompositions as parts, inputs_to_attributes as older
from passes.opset.adapter_context import Adapter
from passes.opset.attention import attention

LOWEST = 9
"""The oldest opset that models are lowered to."""


def _each(names: str, adapter: Adapter) -> dict[str, Adapter]:
    return dict.fromkeys(names.split(), adapter)


LOWERING: Mapping[int, Mapping[str, Adapter]] = {
    23: {
        "DequantizeLinear": older.dequantized_type,
        "QuantizeLinear": older.quantize_precision,
    },
    21: {"QuantizeLinear": older.quantize_type},
    20: {"DFT": older.dft_axis, "GridSample": older.grid_sample_mode},
    19: _each("Cast CastLike QuantizeLinear", older.cast_saturate),
    18: {
        **_each(
            "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
            "ReduceProd ReduceSumSquare",
            older.reduce_axes,
        ),
        "Pad": older.pad_all_axes,
        "Resize": older.resize_all_axes,
        "Split": older.split_parts,
    },
    16: {"RoiAlign": older.roi_align_corners},
    15: {"CastLike": older.cast_like, "Shape": older.shape_bounds},
    14: {"Reshape": older.reshape_zeros},
    13: {
        **_each("DequantizeLinear QuantizeLinear", older.per_tensor),
        **_each("Hardmax LogSoftmax Softmax", older.softmax_from_axis),
        **_each("Squeeze Unsqueeze", older.to_attributes("axes")),
        "ReduceSum": older.reduce_axes,
        "Resize": older.resize_empty_inputs,
        "Split": older.to_attributes("split"),
    },
    12: {"Constant": older.constant_tensor, "Dropout": older.dropout_attributes},
    11: {
        **_each(
            "ArgMax ArgMin Compress Concat Flatten Hardmax LogSoftmax ReduceL1 ReduceL2 "
            "ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
            "ReduceSumSquare Softmax Split Squeeze TopK Unsqueeze",
            older.nonnegative_axes,
        ),
        **_each("Gather OneHot", older.nonnegative_indices),
        "Clip": older.clip_attributes,
        "Gemm": older.gemm_bias,
        "Pad": older.pad_attributes,
        "Resize": older.resize_factors,
        "ScatterElements": older.scatter,
        "Slice": older.nonnegative_slice_axes,
    },
    10: {
        "Dropout": older.dropout_mask,
        "Resize": older.resize_to_upsample,
        "Slice": older.slice_bounds,
        "TopK": older.top_k,
    },
}
"""Opset -> operator -> exact adapter to the opset before."""

DECOMPOSITIONS: Mapping[int, Mapping[str, Adapter]] = {
    24: {"Swish": parts.swish},
    23: {
        "Attention": attention,
        "DequantizeLinear": parts.dequantize_to,
        "RMSNormalization": parts.rms_norm,
        "RotaryEmbedding": parts.rotary_embedding,
    },
    21: {"DequantizeLinear": parts.dequantize_wide, "GroupNormalization": parts.group_norm},
    20: {"Gelu": parts.gelu},
    19: _each("DequantizeLinear QuantizeLinear", parts.quantize_half),
    18: {
        "GroupNormalization": parts.group_norm_by_groups,
        "Mish": parts.mish,
        "Split": parts.split_at_run_time,
    },
    17: {"LayerNormalization": parts.layer_norm},
    14: {
        "HardSwish": parts.hard_swish,
        "Reshape": parts.reshape_nonempty,
        "Trilu": parts.trilu,
    },
    13: {
        **_each("Hardmax LogSoftmax Softmax", parts.along_last_axis),
        "DequantizeLinear": parts.dequantize_channels,
    },
    12: _each("Max Min", parts.integer_extremum),
    11: {"Gather": parts.wrapped_indices},
}
"""Opset -> operator -> the operator in those of the opset before."""
