"""Traits of operators: the facts that several parts of the toolkit share, one set per trait.

Names are those of `node.qualified`: plain for ONNX's own operators, `domain::Op` for others. Keep
a set elsewhere only if it states something else: the kernels that a runtime has, or the operators
that a rewrite was written for.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from onnx import NodeProto

from toolkit.ir import node as nd


def has_trait(node: NodeProto | None, trait: Container[str]) -> bool:
    """Return whether a node's operator has a trait of this module."""
    return node is not None and nd.qualified(node) in trait


# -- operators that move data

VIEWS = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
"""Operators whose result has the elements of the first operand in the same order."""

MOVEMENT = frozenset(
    (
        *VIEWS,
        *("Compress", "DepthToSpace", "Expand", "Gather", "GatherElements", "GatherND", "Identity"),
        *("ReverseSequence", "Slice", "SpaceToDepth", "Split", "Tile", "Transpose"),
    )
)
"""Operators that only move data: each element of a result is an element of the first operand.

Concat, which joins several operands, Pad, which adds a constant, and Cast, which may round, are not
included.
"""

# -- operators that compute

RANDOM = (
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Multinomial", "Bernoulli"),
)
"""Operators that draw random numbers, seeded or not."""

COMMUTATIVE = frozenset(
    ("Add", "Mul", "And", "Or", "Xor", "Equal", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
)
"""Binary operators whose operands may be exchanged."""

COMMUTATIVE_VARIADIC = frozenset(("Max", "Min", "Sum", "Mean"))
"""Variadic operators whose operands may be permuted; with more than two, another order may round
differently."""

ELEMENTWISE = frozenset(
    (
        *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast"),
        *("Ceil", "Celu", "Clip", "Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu"),
        *("HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish"),
        *("Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign"),
        *("Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh"),
        *("ThresholdedRelu",),
    )
)
"""Operators that compute each element of the result from one element of the first operand."""

BROADCASTING = (
    COMMUTATIVE
    | COMMUTATIVE_VARIADIC
    | {"BitShift", "Div", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod", "Pow", "Sub"}
    | {"Where"}
)
"""Operators that broadcast all of their operands against each other (from opset 8 on).

PRelu is not included: its slope is broadcast to its input only.
"""

REDUCTIONS = frozenset(
    (
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
        *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    )
)

CONTROL_FLOW = ("If", "Loop", "Scan")
RECURRENT = ("GRU", "LSTM", "RNN")

LINEAR = frozenset(
    (
        *("Gemm", "MatMul", "MatMulInteger"),
        *("com.microsoft::FusedMatMul", "com.microsoft::MatMulNBits"),
    )
)
"""Matrix products."""

NORMALIZATIONS = frozenset(
    (
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization"),
        *("LayerNormalization", "LpNormalization", "RMSNormalization"),
        *("SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization"),
        *(
            "com.microsoft::SkipLayerNormalization",
            "com.microsoft::SkipSimplifiedLayerNormalization",
        ),
    )
)

# -- quantized operators, by plain name whatever their domain

INTEGER_COMPUTE = frozenset(
    (
        *("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"),
        *("QLinearMatMul", "QLinearConv", "QGemm", "QAttention", "DynamicQuantizeMatMul"),
        *("MatMulIntegerToFloat", "DynamicQuantizeLSTM", "MatMulNBits"),
    )
)
"""Operators that quantize activations or compute with quantized values."""

QUANTIZED_WEIGHTS = INTEGER_COMPUTE | {
    *("DequantizeLinear", "GatherBlockQuantized", "MatMulBnb4", "MatMulFpQ4")
}
"""Operators of `INTEGER_COMPUTE`, and those that take weights stored in fewer bits."""

# -- operators of com.microsoft, about which ONNX's schemas say nothing

PURE_CONTRIB = frozenset(
    (
        *("Attention", "BiasGelu", "BiasSplitGelu", "DequantizeBFP", "DequantizeLinear"),
        *("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "EmbedLayerNormalization"),
        *("FastGelu", "FusedConv", "FusedGemm", "FusedMatMul", "FusedMatMulActivation"),
        *("GatherBlockQuantized", "GatherND", "Gelu", "GemmFastGelu", "GroupNorm"),
        *("GroupQueryAttention", "Inverse", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger16"),
        *("MatMulIntegerToFloat", "MatMulNBits", "MaxpoolWithMask", "MultiHeadAttention"),
        *("NhwcMaxPool", "Pad", "QAttention", "QGemm", "QLinearAdd", "QLinearAveragePool"),
        *("QLinearConcat", "QLinearConv", "QLinearGlobalAveragePool", "QLinearLeakyRelu"),
        *("QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax"),
        *("QLinearWhere", "QuantizeLinear", "QuickGelu", "RelativePositionBias"),
        *("RemovePadding", "RestorePadding", "RotaryEmbedding", "SkipGroupNorm"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SparseToDenseMatMul"),
        *("Tokenizer", "TransposeMatMul", "Trilu", "Unique", "WordConvEmbedding"),
    )
)
"""Operators that are functions of their inputs and attributes."""

ONE_FLOAT_TYPE = frozenset(
    f"com.microsoft::{op}"
    for op in (
        *("FusedMatMul", "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "MatMulNBits"),
        *("MultiHeadAttention", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    )
)
"""Operators whose float operands and results all have one type."""

INDICES: Mapping[str, Mapping[int, tuple[int, int]]] = {
    "NegativeLogLikelihoodLoss": {1: (0, 1)},
    "SoftmaxCrossEntropyLoss": {1: (0, 1)},
    "RoiAlign": {2: (0, 0)},
    "ai.onnx.ml::ArrayFeatureExtractor": {1: (0, -1)},
    "com.microsoft::EmbedLayerNormalization": {0: (2, 0), 1: (4, 0)},
}
"""Operands that index another operand along a fixed axis: {operand: (indexed operand, axis)}."""

PADDING_MASKS: Mapping[str, int] = {
    "com.microsoft::Attention": 3,
    "com.microsoft::EmbedLayerNormalization": 7,
    "com.microsoft::MultiHeadAttention": 4,
}
"""The input of each operator that takes a padding mask."""

_TRAINING_MODE = 2


def is_random(node: NodeProto) -> bool:
    """Return whether two runs of the node on equal inputs may differ."""
    if nd.is_op(node, "Dropout"):
        return len(node.input) > _TRAINING_MODE and bool(node.input[_TRAINING_MODE])
    return nd.is_op(node, *RANDOM)


_INT8_ACCURACY_LEVEL = 4
"""The accuracy level of MatMulNBits at which activations are rounded to int8."""


def rounds_activations(node: NodeProto) -> bool:
    """Return whether onnxruntime rounds the activations of a product to int8 as deployed.

    It does so for MatMulNBits with packed weights, including one that it fuses itself from a
    product and a weight dequantized by blocks.
    """
    if nd.qualified(node) == "com.microsoft::MatMulNBits":
        return nd.attr(node, "accuracy_level", 0) == _INT8_ACCURACY_LEVEL
    return nd.is_op(node, "DequantizeLinear") and bool(nd.attr(node, "block_size", 0))
