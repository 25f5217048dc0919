"""Every change of an ONNX operator from opset 1 to 26: harmless, or with the adapter it needs.

A change is harmless when a node that was valid before means the same afterwards: new element types,
new optional inputs, outputs and attributes whose default is the old behaviour, clarified text. The
tests compare this table with the schemas of the installed onnx, so that a change cannot be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from passes.opset import experimental, legacy, resize
from passes.opset import moved_attributes as moved
from passes.opset import normalization as normalize
from passes.opset.adapter_context import Site
from passes.opset.scan import scan_without_batch

Adapter = Callable[[Site], None]


def _each(names: str, adapter: Adapter) -> dict[str, Adapter]:
    return dict.fromkeys(names.split(), adapter)


ADAPTERS: Mapping[int, Mapping[str, Adapter]] = {
    2: {
        **_each("GlobalLpPool LpPool", legacy.integer_p),
        "Pad": moved.pads_renamed,
        "Split": legacy.split_lengths_as_attribute,
    },
    4: {"Concat": legacy.concat_axis},
    5: {"Reshape": moved.shape_to_input},
    6: {
        **_each(
            "Abs Add BatchNormalization Ceil Clip Div Dropout Elu Exp Floor HardSigmoid "
            "InstanceNormalization LeakyRelu Log Max Mean Min Mul Neg PRelu Reciprocal Relu "
            "Sigmoid Sqrt Sub Sum Tanh",
            legacy.drop_consumed_inputs,
        ),
        "Cast": legacy.cast_to_number,
        "Selu": legacy.selu_constants,
        "Tile": legacy.tile_repeats,
    },
    7: {
        **_each("Add And Div Equal Greater Less Mul Or Pow Sub Xor", legacy.align_broadcast),
        **_each("GRU LSTM RNN", legacy.drop_output_sequence),
        "BatchNormalization": normalize.batch_norm_test_mode,
        "Dropout": normalize.dropout_test_mode,
        "Gemm": legacy.drop_broadcast,
        "PRelu": legacy.prelu_slope,
        "Upsample": resize.upsample_scales,
    },
    9: {
        "BatchNormalization": normalize.batch_norm_spatial,
        "Scan": scan_without_batch,
        "Upsample": resize.upsample_scales_to_input,
    },
    10: {
        "Dropout": normalize.dropout_mask,
        "Slice": moved.slice_to_inputs,
        "TopK": moved.topk_to_input,
        "Upsample": resize.upsample_to_resize,
    },
    11: {
        "Clip": moved.clip_to_inputs,
        "Pad": moved.pad_to_inputs,
        "Resize": resize.resize_sampling,
        "Scatter": moved.scatter_elements,
    },
    12: {"Dropout": normalize.dropout_ratio},
    13: {
        **_each("Hardmax LogSoftmax Softmax", normalize.softmax_over_one_axis),
        **_each("ReduceSum Squeeze Unsqueeze", moved.axes_to_input),
        "Erf": moved.erf_of_floats,
        "Resize": resize.resize_optional_inputs,
        "Split": moved.split_to_input,
    },
    14: {"BatchNormalization": normalize.batch_norm_training},
    16: {"RoiAlign": moved.roi_align_corners},
    18: {
        **_each(
            "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
            "ReduceProd ReduceSumSquare",
            moved.axes_to_input,
        ),
        "Resize": resize.resize_optional_inputs,
        "Split": moved.split_count,
    },
    20: {"DFT": moved.dft_axis_to_input, "GridSample": moved.grid_sample_mode},
    21: {"GroupNormalization": normalize.group_norm_per_channel},
}
"""Opset -> operator -> what rewrites a node of the version before."""

NEEDS_TYPES = (
    "Add Affine And Clip Div Dropout Equal Erf Greater GroupNormalization Hardmax ImageScaler "
    "Less LogSoftmax Mul Or PRelu Pad ParametricSoftplus Pow Scale ScaledTanh Softmax Sub Tile Xor"
)
"""Operators whose adapters look at ranks or element types."""

HARMLESS: Mapping[int, str] = {
    3: "GRU",
    6: "Gemm",
    7: "AveragePool",
    8: "Max MaxPool Mean Min Sum",
    9: "Cast Constant Flatten Gemm Greater Less MatMul PRelu",
    10: "AveragePool MaxPool",
    11: (
        "ArgMax ArgMin AveragePool Compress Concat Constant Conv ConvTranspose DepthToSpace "
        "Equal Flatten Gather Gemm Hardmax If LogSoftmax Loop LpPool MaxPool MaxUnpool "
        "NonMaxSuppression OneHot ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax "
        "ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Scan Slice Softmax Split "
        "Squeeze TopK Unsqueeze"
    ),
    12: "ArgMax ArgMin Clip Constant GatherND Max MaxPool Min Pow ReduceMax ReduceMin",
    13: (
        "Abs Add ArgMax ArgMin Cast Ceil Clip Concat Constant DepthToSpace DequantizeLinear "
        "Div Dropout Equal Exp Expand Flatten Floor Gather GatherElements GatherND Gemm "
        "Greater Identity If IsNaN LRN Less Log Loop MatMul Max Mean "
        "MeanVarianceNormalization Min Mod Mul Neg NegativeLogLikelihoodLoss NonZero Pad Pow "
        "QuantizeLinear Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax "
        "ReduceMean ReduceMin ReduceProd ReduceSumSquare Relu Reshape ScatterElements "
        "ScatterND Shape Sigmoid Sign Size Slice SoftmaxCrossEntropyLoss SpaceToDepth Sqrt "
        "Sub Sum Tanh Tile Transpose"
    ),
    14: "Add CumSum Div GRU Identity LSTM Mul RNN Relu Reshape Sub",
    15: "BatchNormalization Pow Shape",
    16: (
        "GreaterOrEqual Identity If LeakyRelu LessOrEqual Loop PRelu Scan ScatterElements "
        "ScatterND Where"
    ),
    18: "LpPool OptionalGetElement OptionalHasElement Pad ScatterElements ScatterND",
    19: (
        "AveragePool Cast CastLike Constant DequantizeLinear Equal Identity If Loop Pad "
        "QuantizeLinear Reshape Resize Scan Shape Size"
    ),
    20: "ConstantOfShape IsInf IsNaN ReduceMax ReduceMin",
    21: (
        "Cast CastLike Constant ConstantOfShape DequantizeLinear Flatten Identity If Loop Pad "
        "QLinearMatMul QuantizeLinear Reshape Scan Shape Size Squeeze Transpose Unsqueeze"
    ),
    22: (
        "Acos Acosh Asin Asinh Atan Atanh AveragePool Bernoulli Conv ConvTranspose Cos Cosh "
        "DeformConv Det Dropout Elu EyeLike GRU GlobalAveragePool GlobalLpPool GlobalMaxPool "
        "GridSample HardSigmoid HardSwish InstanceNormalization LSTM LpNormalization LpPool "
        "MaxPool MaxRoiPool MaxUnpool Mish Multinomial NegativeLogLikelihoodLoss RNN "
        "RandomNormal RandomNormalLike RandomUniform RandomUniformLike RoiAlign Round Selu "
        "Sin Sinh Softplus Softsign Tan ThresholdedRelu"
    ),
    23: (
        "Cast CastLike Constant ConstantOfShape DequantizeLinear Flatten Identity If Loop Pad "
        "QuantizeLinear Reshape Scan Shape Size Squeeze Transpose Unsqueeze"
    ),
    24: (
        "Attention Cast CastLike Constant ConstantOfShape DequantizeLinear Flatten Identity "
        "If Loop Pad QuantizeLinear Reshape Scan Shape Size SplitToSequence Squeeze TopK "
        "Transpose Unsqueeze"
    ),
    25: (
        "Attention Cast CastLike Constant ConstantOfShape DequantizeLinear Flatten Identity "
        "If Loop Pad QuantizeLinear Reshape Scan Shape Size Squeeze Transpose Unsqueeze"
    ),
}
"""Opset -> operators that changed in it, whose older nodes are valid as they stand."""

EXPERIMENTAL: Mapping[int, Mapping[str, Adapter]] = {
    9: {
        "ConstantFill": experimental.constant_fill,
        "MeanVarianceNormalization": experimental.mean_variance,
    },
    10: {
        "Affine": experimental.affine,
        "Crop": experimental.crop,
        "DynamicSlice": experimental.dynamic_slice,
        "ImageScaler": experimental.image_scaler,
        "ParametricSoftplus": experimental.parametric_softplus,
        "Scale": experimental.scale,
        "ScaledTanh": experimental.scaled_tanh,
    },
}
"""Operators outside the standard, and the opset that gave them a standard spelling."""

RUNTIME_OPS = frozenset({"SimplifiedLayerNormalization"})
"""Operators outside the standard that onnxruntime runs at every opset."""

NO_KERNEL: Mapping[int, str] = {
    22: (
        "Bernoulli GlobalLpPool MaxRoiPool Multinomial RandomNormal RandomNormalLike "
        "RandomUniform RandomUniformLike RoiAlign"
    ),
    25: "Swish",
}
"""Opset -> operators that onnxruntime (1.31) runs on the CPU below it, but not from it on."""


def adapters_of(version: int) -> Mapping[str, Adapter]:
    """What rewrites nodes, by operator, when a model moves to opset `version`."""
    return {**ADAPTERS.get(version, {}), **EXPERIMENTAL.get(version, {})}
