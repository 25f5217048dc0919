"""The adapter of every ONNX operator that changed incompatibly between opset 1 and 26.

All other changes are compatible: new element types, optional inputs, outputs and attributes whose
default is the old behaviour, clarified text. `tests/passes/opset/compatible_changes.py` lists them,
and a test compares both tables with the schemas of the installed onnx, so that the next opset
cannot be overlooked.
"""

from __future__ import annotations

from collections.abc import Mapping

from passes.opset import experimental, legacy, moved_attributes as attributes, normalization, resize
from passes.opset.adapter_context import Adapter
from passes.opset.scan import scan_without_batch


def _each(names: str, adapter: Adapter) -> dict[str, Adapter]:
    return dict.fromkeys(names.split(), adapter)


ADAPTERS: Mapping[int, Mapping[str, Adapter]] = {
    2: {
        **_each("GlobalLpPool LpPool", legacy.integer_p),
        "Pad": attributes.rename("paddings", "pads"),
        "Split": legacy.split_lengths_as_attribute,
    },
    4: {"Concat": legacy.concat_axis},
    5: {
        "Reshape": attributes.in_order(
            attributes.drop("consumed_inputs"), attributes.to_inputs("shape")
        )
    },
    6: {
        **_each(
            "Abs Add BatchNormalization Ceil Clip Div Dropout Elu Exp Floor HardSigmoid "
            "InstanceNormalization LeakyRelu Log Max Mean Min Mul Neg PRelu Reciprocal Relu "
            "Sigmoid Sqrt Sub Sum Tanh",
            attributes.drop("consumed_inputs"),
        ),
        "Cast": legacy.cast_to_number,
        "Selu": legacy.selu_constants,
        "Tile": legacy.tile_repeats,
    },
    7: {
        **_each("Add And Div Equal Greater Less Mul Or Pow Sub Xor", legacy.align_broadcast),
        **_each("GRU LSTM RNN", attributes.drop("output_sequence")),
        "BatchNormalization": normalization.batch_norm_test_mode,
        "Dropout": normalization.dropout_test_mode,
        "Gemm": attributes.drop("broadcast"),
        "PRelu": legacy.prelu_slope,
        "Upsample": resize.upsample_scales,
    },
    9: {
        "BatchNormalization": normalization.batch_norm_spatial,
        "Scan": scan_without_batch,
        "Upsample": resize.upsample_scales_to_input,
    },
    10: {
        "Dropout": normalization.dropout_mask,
        "Slice": attributes.to_inputs("starts", "ends", optional=["axes"]),
        "TopK": attributes.to_inputs("k"),
        "Upsample": resize.upsample_to_resize,
    },
    11: {
        "Clip": attributes.clip_to_inputs,
        "Pad": attributes.pad_to_inputs,
        "Resize": resize.resize_sampling,
        "Scatter": attributes.rename_op("ScatterElements"),
    },
    12: {"Dropout": normalization.dropout_ratio},
    13: {
        **_each("Hardmax LogSoftmax Softmax", normalization.softmax_over_one_axis),
        **_each("ReduceSum Squeeze Unsqueeze", attributes.to_inputs(optional=["axes"])),
        "Erf": attributes.erf_of_floats,
        "Resize": resize.resize_optional_inputs,
        "Split": attributes.to_inputs(optional=["split"]),
    },
    14: {"BatchNormalization": normalization.batch_norm_training},
    16: {"RoiAlign": attributes.roi_align_corners},
    18: {
        **_each(
            "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
            "ReduceProd ReduceSumSquare",
            attributes.to_inputs(optional=["axes"]),
        ),
        "Resize": resize.resize_optional_inputs,
        "Split": attributes.split_count,
    },
    20: {
        "DFT": attributes.dft_axis_to_input,
        "GridSample": attributes.grid_sample_mode,
    },
    21: {"GroupNormalization": normalization.group_norm_per_channel},
}
"""Opset -> operator -> adapter for a node of the version before."""

NEEDS_TYPES = (
    "Add Affine And Clip Div Dropout Equal Erf Greater GroupNormalization Hardmax ImageScaler "
    "Less LogSoftmax Mul Or PRelu Pad ParametricSoftplus Pow Scale ScaledTanh Softmax Sub Tile Xor"
)
"""Operators whose adapters need ranks or element types."""

EXPERIMENTAL: Mapping[int, Mapping[str, Adapter]] = {
    9: {
        "ConstantFill": experimental.constant_fill,
        "MeanVarianceNormalization": experimental.mean_variance,
    },
    10: {
        "Affine": experimental.line("alpha", "beta"),
        "Crop": experimental.crop,
        "DynamicSlice": attributes.rename_op("Slice"),
        "ImageScaler": experimental.line("scale", "bias"),
        "ParametricSoftplus": experimental.scaled("Softplus"),
        "Scale": experimental.line("scale"),
        "ScaledTanh": experimental.scaled("Tanh"),
    },
}
"""Opset -> operators outside the standard that it can express in standard ones."""

RUNTIME_OPS = frozenset({"SimplifiedLayerNormalization"})
"""Operators outside the standard that onnxruntime runs at every opset."""


def adapters_of(version: int) -> Mapping[str, Adapter]:
    """Return the adapters, by operator, that lift a model to opset `version`."""
    return {**ADAPTERS.get(version, {}), **EXPERIMENTAL.get(version, {})}
