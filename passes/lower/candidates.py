"""The computations that lowering has candidates for, in ONNX's text format.

A candidate computes `y` from an `x` of the same shape, and can thus be applied repeatedly. The
first one is the usual form, to which costs are relative. {T}, {D} and {H} are tokens, width, and
heads of size 64; {half} is half the width, {side} the height and width of an image. The names of
inputs and weights determine their contents, see `measure.contents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOKENS = "float[1, {T}, {D}]"
HIDDEN = ((8, 768), (128, 384), (128, 768))
"""Pairs of tokens and width between the blocks of a transformer."""
INNER = ((8, 3072), (128, 1536), (128, 3072))
"""Pairs within its feed-forward part."""
LENGTHS = ((8, 768), (32, 768), (128, 768), (512, 768))
"""Pairs of attention."""
PROMPTS = LENGTHS[2:]
"""Sizes at which the quadratic part dominates; at shorter lengths it takes microseconds."""
IMAGE = ((196, 64), (784, 64))
"""Pairs of pixels and channels of a convolution."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A computation, its candidates, and the inputs and sizes to measure them with."""

    name: str
    candidates: Mapping[str, str]
    inputs: str = f"{TOKENS} x"
    weights: str = ""
    regimes: tuple[tuple[int, int], ...] = HIDDEN
    """Pairs of tokens and width."""
    stages: int = 6
    """The applications of a candidate per timed run."""
    positive: bool = False
    """Whether `x` must be positive."""
    result: str = ""
    """The type of `y` if it differs from that of `x`; `stages` is 1 then."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The operators of a candidate after load-time optimization, unless the runtime undoes it."""


def _number(name: str, value: float) -> str:
    return f"{name} = Constant <value_float = {value:f}> ()\n"


_NORM = "y = LayerNormalization <axis = -1> (s, w, b)"
_TANH = 'approximate = "tanh"'
_HEADS = "q_num_heads = {H}, kv_num_heads = {H}"
_SPLIT_HEADS = (
    "sh = Constant <value_ints = [0, 0, {H}, 64]> ()\n"
    "back = Constant <value_ints = [0, 0, {D}]> ()\n"
    "q0 = Reshape (x, sh) q = Transpose <perm = [0, 2, 1, 3]> (q0)\n"
    "k0 = Reshape (k, sh) kt = Transpose <perm = [0, 2, 3, 1]> (k0)\n"
    "v0 = Reshape (v, sh) v1 = Transpose <perm = [0, 2, 1, 3]> (v0)\n"
    "dot = MatMul (q, kt)\n" + _number("scale", 0.125) + "scaled = Mul (dot, scale)\n"
)
_JOIN_HEADS = "o = MatMul (p, v1) ot = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape (ot, back)"
_QKV = f"{TOKENS} x, {TOKENS} k, {TOKENS} v"
_CONV = "kernel_shape = [3, 3], pads = [1, 1, 1, 1]"

COMPUTATIONS = (
    Computation(
        "residual-layernorm",
        {"add": f"s = Add (x, r) {_NORM}", "sum": f"s = Sum (x, r) {_NORM}"},
        inputs=f"{TOKENS} x, {TOKENS} r",
        weights="float[{D}] w, float[{D}] b",
        kept={"sum": ("LayerNormalization", "Sum")},
    ),
    Computation(
        "bias-gelu",
        {"add": "s = Add (x, b) y = Gelu (s)", "sum": "s = Sum (x, b) y = Gelu (s)"},
        weights="float[{D}] b",
        regimes=INNER,
        kept={"sum": ("Gelu", "Sum")},
    ),
    Computation(
        "bias-gelu-tanh",
        {
            "add": f"s = Add (x, b) y = Gelu <{_TANH}> (s)",
            "sum": f"s = Sum (x, b) y = Gelu <{_TANH}> (s)",
        },
        weights="float[{D}] b",
        regimes=INNER,
        kept={"sum": ("Gelu", "Sum")},
    ),
    Computation(
        "quick-gelu",
        {
            "mul": _number("k", 1.702) + "z = Mul (x, k) s = Sigmoid (z) y = Mul (x, s)",
            "silu": _number("k", 1.702)
            + _number("back", 1 / 1.702)
            + "z = Mul (x, k) s = Sigmoid (z) q = Mul (z, s) y = Mul (q, back)",
        },
        regimes=INNER,
        kept={"silu": ("Mul", "com.microsoft:QuickGelu")},
    ),
    Computation(
        "masked-attention",
        {
            "attention": f"y = Attention <{_HEADS}> (x, k, v, mask_lowest)",
            "finite": f"y = Attention <{_HEADS}> (x, k, v, mask_finite)",
        },
        inputs=f"{_QKV}, float[1, 1, {{T}}, {{T}}] mask_lowest, "
        "float[1, 1, {T}, {T}] mask_finite",
        regimes=LENGTHS,
        stages=2,
    ),
    Computation(
        "capped-attention",
        {
            "attention": f"y = Attention <{_HEADS}, softcap = 50.0> (x, k, v, mask_lowest)",
            "decomposed": f"{_SPLIT_HEADS}"
            + _number("inside", 1 / 50)
            + _number("cap", 50)
            + "inner = Mul (scaled, inside) bent = Tanh (inner) capped = Mul (bent, cap)\n"
            f"masked = Add (capped, mask_lowest) p = Softmax <axis = -1> (masked) {_JOIN_HEADS}",
        },
        inputs=_QKV + ", float[1, 1, {T}, {T}] mask_lowest",
        regimes=PROMPTS,
        stages=2,
    ),
    Computation(
        "prelu",
        {
            "prelu": "y = PRelu (x, slope)",
            "max": "m = Mul (x, slope) y = Max (x, m)",
        },
        weights="float[{D}] slope",
    ),
    Computation(
        "prelu-any",
        {
            "prelu": "y = PRelu (x, slope)",
            "relu": _number("zero", 0)
            + "r = Relu (x) n = Min (x, zero) m = Mul (n, slope) y = Add (r, m)",
        },
        weights="float[{D}] slope",
    ),
    Computation(
        "prelu-scalar",
        {"prelu": "y = PRelu (x, quarter)", "leaky-relu": "y = LeakyRelu <alpha = 0.25> (x)"},
        weights="float[1] quarter",
    ),
    Computation(
        "conv-prelu",
        {
            "prelu": f"c = Conv <{_CONV}> (x, w, b) y = PRelu (c, slope)",
            "max": f"c = Conv <{_CONV}> (x, w, b) m = Mul (c, slope) y = Max (c, m)",
        },
        inputs="float[1, {D}, {side}, {side}] x",
        weights="float[{D}, {D}, 3, 3] w, float[{D}] b, float[{D}, 1, 1] slope",
        regimes=IMAGE,
        stages=2,
    ),
    Computation(
        "mish",
        {
            "mish": "y = Mish (x)",
            "rational": _number("two", 2)
            + _number("most", 20)
            + "c = Min (x, most) e = Exp (c) e2 = Add (e, two) n = Mul (e, e2)\n"
            "d = Add (n, two) q = Div (n, d) y = Mul (x, q)",
        },
    ),
    Computation(
        "softplus",
        {
            "softplus": "y = Softplus (x)",
            "exp": _number("one", 1) + "a = Abs (x) n = Neg (a) e = Exp (n) p = Add (e, one)\n"
            "l = Log (p) r = Relu (x) y = Add (r, l)",
        },
    ),
    Computation(
        "elu",
        {
            "elu": "y = Elu (x)",
            "exp": _number("zero", 0)
            + _number("one", 1)
            + "n = Min (x, zero) e = Exp (n) m = Sub (e, one) y = Max (x, m)",
        },
    ),
    *(
        Computation(
            f"pow{exponent:g}",
            {"pow": _number("e", exponent) + "y = Pow (x, e)", name: nodes},
            stages=2,
            positive=True,
        )
        for exponent, name, nodes in (
            (2, "mul", "y = Mul (x, x)"),
            (3, "mul", "s = Mul (x, x) y = Mul (s, x)"),
            (4, "mul", "s = Mul (x, x) y = Mul (s, s)"),
            (0.5, "sqrt", "y = Sqrt (x)"),
            (-1, "reciprocal", "y = Reciprocal (x)"),
            (-0.5, "sqrt", "s = Sqrt (x) y = Reciprocal (s)"),
        )
    ),
    Computation(
        "half-split",
        {
            "gather": "a = Gather <axis = -1> (x, range_low)\n"
            "b = Gather <axis = -1> (x, range_high)\n"
            "y = Concat <axis = -1> (b, a)",
            "slice": "zero = Constant <value_ints = [0]> ()\n"
            "half = Constant <value_ints = [{half}]> ()\n"
            "end = Constant <value_ints = [{D}]> () last = Constant <value_ints = [-1]> ()\n"
            "a = Slice (x, zero, half, last) b = Slice (x, half, end, last)\n"
            "y = Concat <axis = -1> (b, a)",
        },
        weights="int64[{half}] range_low, int64[{half}] range_high",
    ),
)
