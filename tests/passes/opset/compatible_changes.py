"""Changes of ONNX operators that need no adapter, reviewed one by one."""

from __future__ import annotations

from collections.abc import Mapping

COMPATIBLE: Mapping[int, str] = {
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
"""Opset -> operators that changed in it, but whose older nodes keep their meaning."""
