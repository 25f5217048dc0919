"""The computations that `toolkit tune` times in float and in int8.

Their forms are chains as in `passes.lower.candidates`: {T} are pixels or tokens, {D} channels. An
int8 form has float inputs and outputs; the runtime removes the QuantizeLinear and DequantizeLinear
between two of them, and only the ends of the chain convert. `boundary` measures a conversion: two
convolutions in float, two in int8, and all four in a row.
"""

from __future__ import annotations

from passes.lower.candidates import Computation

_IMAGE = "float[1, {D}, {side}, {side}]"
_SCALES = "float scale, uint8 zero"
_WEIGHTS = "float[{D}] ws, int8[{D}] wz"

WIDE = ((12544, 96), (3136, 16), (3136, 32), (784, 64), (784, 128), (196, 256), (49, 512))
"""Pixels and channels, as usual in networks: the more channels, the fewer pixels. The float tensor
of the first one exceeds a core's cache."""
DEPTHWISE = (
    *((12544, 16), (12544, 96), (3136, 32), (3136, 64)),
    *((784, 128), (196, 256), (196, 512), (49, 1024)),
)
AREAS = ((12544, 96), (3136, 32), (784, 128), (196, 256))
"""A subset of WIDE, since operators behind a convolution are compared with it alone."""
LINEAR = ((1, 256), (1, 1024), (8, 384), (8, 768), (32, 384), (128, 384), (128, 768))
FIRST = ((12544, 16), (12544, 32), (50176, 32))


_KEPT = ("DequantizeLinear", "QuantizeLinear", "Transpose", "com.microsoft:QLinearConv")


def _quantized(value: str) -> str:
    """Return the text that quantizes and dequantizes a value: `xd` for `x`."""
    return f"{value}q = QuantizeLinear ({value}, scale, zero)\n" + _dequantized(value)


def _dequantized(value: str) -> str:
    return f"{value}d = DequantizeLinear ({value}q, scale, zero)\n"


def _result(value: str) -> str:
    """Return the text that quantizes and dequantizes the result `value`, as `y`."""
    return _quantized(value).replace(f"{value}d =", "y =")


def _conv(kernel: int, depthwise: bool = False) -> tuple[str, str]:
    pad = kernel // 2
    group = ", group = {D}" if depthwise else ""
    how = f"kernel_shape = [{kernel}, {kernel}], pads = [{pad}, {pad}, {pad}, {pad}]{group}"
    floats = f"y = Conv <{how}> (x, w)"
    wd = "wd = DequantizeLinear <axis = 0> (wq, ws, wz)\n"
    return floats, f"{_quantized('x')}{wd}c = Conv <{how}> (xd, wd)\n{_result('c')}"


def _convolution(
    name: str, kernel: int, regimes: tuple[tuple[int, int], ...], depthwise: bool = False
) -> Computation:
    floats, int8 = _conv(kernel, depthwise)
    shape = f"[{{D}}, {'1' if depthwise else '{D}'}, {kernel}, {kernel}]"
    return Computation(
        name,
        {"float": floats, "int8": int8},
        inputs=f"{_IMAGE} x",
        weights=f"float{shape} w, int8{shape} wq, {_WEIGHTS}, {_SCALES}",
        regimes=regimes,
        kept={"int8": _KEPT},
    )


def _behind(name: str, floats: str, int8: str, island: str = "", result: str = "") -> Computation:
    """Return an operator behind a convolution, in its layout.

    The float text computes `y` of `c`, the int8 text `m` of `d`. The time of the operator is the
    difference to the convolution alone.
    """
    conv, int8_conv = _conv(1)
    first = int8_conv.replace("y =", "d =")
    forms = {
        "float": conv.replace("y =", "c =") + "\n" + floats,
        "int8": f"{first}{int8}{_result('m')}",
    }
    if island:
        forms["island"] = f"{first}{island}{_result('m')}"
    return Computation(
        name,
        forms,
        inputs=f"{_IMAGE} x, {_IMAGE} r",
        weights=f"float[{{D}}, {{D}}, 1, 1] w, int8[{{D}}, {{D}}, 1, 1] wq, {_WEIGHTS}, {_SCALES}",
        regimes=AREAS,
        stages=1 if result else 6,
        result=result,
    )


_ANY = "float[N, C, H, W] y"
_TWICE = (
    "twice = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> ()\n"
    '{} = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> ({}, , twice)\n'
)
_POOL = "<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"
_MIDDLE = (
    "sq = QuantizeLinear (s, scale, zero) sd = DequantizeLinear (sq, scale, zero) m = Mul (d, sd)\n"
)
_PAIR = (_conv(1)[0].replace("y =", "c ="), _conv(1)[0].replace("(x,", "(c,"))
_INT8_PAIR = (
    _conv(1)[1].replace("y =", "u ="),
    _conv(1)[1]
    .replace("xq", "uq2")
    .replace("xd", "ud")
    .replace("(x,", "(u,")
    .replace("wd", "wd2")
    .replace("c =", "e =")
    .replace("cq", "eq")
    .replace("(c,", "(e,"),
)

INT8_COMPUTATIONS = (
    _convolution("conv-1x1", 1, (*WIDE, (784, 32), (196, 128))),
    _convolution("conv-3x3", 3, WIDE),
    _convolution("conv-depthwise-3x3", 3, DEPTHWISE, depthwise=True),
    _convolution("conv-depthwise-5x5", 5, DEPTHWISE[1::2], depthwise=True),
    Computation(
        "conv-first",
        {
            name: text.replace("Conv <", "Conv <strides = [2, 2], ")
            for name, text in zip(("float", "int8"), _conv(3), strict=True)
        },
        inputs="float[1, 3, {side}, {side}] x",
        weights=f"float[{{D}}, 3, 3, 3] w, int8[{{D}}, 3, 3, 3] wq, {_WEIGHTS}, {_SCALES}",
        result=_ANY,
        regimes=FIRST,
        stages=1,
    ),
    Computation(
        "boundary",
        {
            "float": "\n".join(_PAIR),
            "int8": "\n".join(_INT8_PAIR),
            # Two of each: the runtime computes a single float convolution in int8.
            "mixed": _INT8_PAIR[0]
            + _INT8_PAIR[1].replace("y =", "v =")
            + _PAIR[0].replace("c =", "a =").replace("(x,", "(v,")
            + "\n"
            + _PAIR[1].replace("(c,", "(a,"),
        },
        inputs=f"{_IMAGE} x",
        weights=f"float[{{D}}, {{D}}, 1, 1] w, int8[{{D}}, {{D}}, 1, 1] wq, {_WEIGHTS}, {_SCALES}",
        regimes=AREAS,
        stages=3,
    ),
    Computation(
        "linear",
        {
            "float": "y = MatMul (x, w)",
            "dynamic": "xq, xs, xz = DynamicQuantizeLinear (x)\n"
            "m = MatMulInteger (xq, wq, xz) f = Mul (xs, ws) i = Cast <to = 1> (m) y = Mul (i, f)",
            "static": f"{_quantized('x')}wd = DequantizeLinear <axis = 1> (wq, ws, wz)\n"
            "y = MatMul (xd, wd)",
        },
        weights=f"float[{{D}}, {{D}}] w, int8[{{D}}, {{D}}] wq, {_WEIGHTS}, {_SCALES}",
        regimes=LINEAR,
        kept={"dynamic": ("com.microsoft:DynamicQuantizeMatMul",)},
    ),
    _behind("add", "y = Add (c, r)", f"{_quantized('r')}m = Add (d, rd)\n"),
    _behind("mul", "y = Mul (c, r)", f"{_quantized('r')}m = Mul (d, rd)\n"),
    _behind("sigmoid", "y = Sigmoid (c)", "m = Sigmoid (d)\n"),
    _behind(
        "silu",
        "y = com.microsoft.QuickGelu <alpha = 1.0> (c)",
        f"s = Sigmoid (d)\n{_MIDDLE}",
        "m = com.microsoft.QuickGelu <alpha = 1.0> (d)\n",
    ),
    _behind("hardswish", "y = HardSwish (c)", "m = HardSwish (d)\n"),
    _behind("leaky-relu", "y = LeakyRelu (c)", "m = LeakyRelu (d)\n"),
    _behind("max-pool", f"y = MaxPool {_POOL} (c)", f"m = MaxPool {_POOL} (d)\n"),
    _behind("average-pool", f"y = AveragePool {_POOL} (c)", f"m = AveragePool {_POOL} (d)\n"),
    _behind("once", "y = Identity (c)", "m = Identity (d)\n", result=_ANY),
    _behind(
        "global-average-pool",
        "y = GlobalAveragePool (c)",
        "m = GlobalAveragePool (d)\n",
        result=_ANY,
    ),
    _behind("resize", _TWICE.format("y", "c"), _TWICE.format("m", "d"), result=_ANY),
    Computation(
        "concat",
        {
            "float": "a = Conv (x, w) b = Conv (x, w2) y = Concat <axis = 1> (b, a)",
            "int8": f"{_quantized('x')}wd = DequantizeLinear <axis = 0> (wq, ws, wz)\n"
            "wd2 = DequantizeLinear <axis = 0> (wq2, ws, wz)\n"
            "a = Conv (xd, wd) b = Conv (xd, wd2)\n"
            f"{_quantized('a')}{_quantized('b')}c = Concat <axis = 1> (bd, ad)\n{_result('c')}",
        },
        inputs=f"{_IMAGE} x",
        weights="float[{half}, {D}, 1, 1] w, float[{half}, {D}, 1, 1] w2, "
        "int8[{half}, {D}, 1, 1] wq, int8[{half}, {D}, 1, 1] wq2, "
        f"float[{{half}}] ws, int8[{{half}}] wz, {_SCALES}",
        regimes=AREAS,
    ),
)
