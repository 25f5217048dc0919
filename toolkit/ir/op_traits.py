"""Facts about ONNX's own operators that several parts of the toolkit share."""

from __future__ import annotations

from onnx import NodeProto

from toolkit.ir import node as nd

RANDOM = (
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Multinomial", "Bernoulli"),
)
"""Operators that draw random numbers, seeded or not."""

COMMUTATIVE = frozenset(
    ("Add", "Mul", "And", "Or", "Xor", "Equal", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
)
"""Operators of two operands that come in any order."""

COMMUTATIVE_VARIADIC = frozenset(("Max", "Min", "Sum", "Mean"))
"""Operators of any number of operands in any order; with more than two, another order may round
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
"""Operators that work on each element of their first input by itself."""

BROADCASTING = (
    COMMUTATIVE
    | COMMUTATIVE_VARIADIC
    | {
        *(
            "BitShift",
            "Div",
            "Greater",
            "GreaterOrEqual",
            "Less",
            "LessOrEqual",
            "Mod",
            "Pow",
            "Sub",
        ),
        "Where",
    }
)
"""Operators that broadcast all of their operands against each other (from opset 8 on).

PRelu is none of them: its slope is broadcast to its input only.
"""

REDUCTIONS = frozenset(
    (
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
        *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    )
)

_TRAINING_MODE = 2


def is_random(node: NodeProto) -> bool:
    """Whether two runs of the node on equal inputs may differ."""
    if nd.is_op(node, "Dropout"):
        return len(node.input) > _TRAINING_MODE and bool(node.input[_TRAINING_MODE])
    return nd.is_op(node, *RANDOM)
