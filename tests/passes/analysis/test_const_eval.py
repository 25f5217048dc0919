"""Every kernel against onnxruntime, bit for bit, on random shapes, attributes, types and opsets."""

from __future__ import annotations

import subprocess
import sys
import warnings
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from passes.analysis.const_eval import KERNELS, evaluate

OPSETS = (7, 9, 11, 13, 18, 21)
CASES = 24

INTS = [np.int32, np.int64]
ALL_INTS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float32, np.float64]
MOVED = [*FLOATS, np.int64, np.int32, np.uint8, np.bool_, np.float16]


class Refused(Exception):
    """onnxruntime refuses the case."""


def make_node(op, inputs, outputs=1, **attrs):
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    attrs = {key: value for key, value in attrs.items() if value is not None}
    return helper.make_node(op, names, [f"y{i}" for i in range(outputs)], **attrs)


def run_ort(node, inputs, opset):
    feeds = {name: x for name, x in zip(node.input, inputs, strict=True) if name}
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in feeds.items()
        ],
        [ValueInfoProto(name=name) for name in node.output],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return session.run(None, feeds)
    except Exception as error:
        raise Refused(str(error)) from error


def same_bits(ours, theirs):
    assert isinstance(ours, np.ndarray)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if ours.dtype.kind == "f":
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        ours, theirs = (np.where(np.isnan(x), np.ones_like(x), x) for x in (ours, theirs))
    if ours.dtype.kind == "O":
        assert ours.tolist() == theirs.tolist()
    else:
        assert ours.tobytes() == theirs.tobytes()


def check(op, inputs, opset, outputs=1, **attrs):
    """Return whether kernel and runtime both computed it; their results must be equal."""
    inputs = [x if x is None else np.asarray(x) for x in inputs]
    node = make_node(op, inputs, outputs, **attrs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = evaluate(node, inputs, opset)
    if ours is None:
        return False
    try:
        theirs = run_ort(node, inputs, opset)
    except Refused as refused:
        # A missing runtime kernel is no evidence; a complaint about the data is.
        if "NOT_IMPLEMENTED" in str(refused) or "Type Error" in str(refused):
            return False
        raise AssertionError(f"{op}-{opset} {inputs} {attrs}\nour result: {ours}") from refused
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        try:
            same_bits(mine, other)
        except AssertionError as error:
            raise AssertionError(f"{op}-{opset} {inputs} {attrs}\n{mine}\n{other}") from error
    return True


# --- random arguments ----------------------------------------------------------------------------


def shape(rng, low=0, high=4, smallest=0):
    """Return a random shape, sometimes with an empty dimension."""
    sizes = rng.integers(1, 5, rng.integers(low, high + 1))
    if smallest == 0 and sizes.size and rng.random() < 0.15:
        sizes[rng.integers(sizes.size)] = 0
    return tuple(int(size) for size in sizes)


def values(rng, size, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, size), bool)
    if dtype.kind == "f":
        wild = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4)
        return np.asarray(np.where(rng.random(size) < 0.1, np.round(wild), wild), dtype)
    if rng.random() < 0.2:  # wraps when computed with
        limits = np.iinfo(dtype)
        return np.asarray(rng.integers(limits.min, limits.max, size, dtype, endpoint=True))
    return np.asarray(rng.integers(0 if dtype.kind == "u" else -9, 10, size), dtype)


def moved(rng, low=0, high=4, smallest=0):
    return values(rng, shape(rng, low, high, smallest), rng.choice(MOVED))


def ints(numbers, rng=None):
    return np.array(numbers, np.int32 if rng is not None and rng.random() < 0.3 else np.int64)


def signed_axis(rng, rank, opset=21):
    axis = int(rng.integers(rank))
    return axis - rank if opset >= 11 and rng.random() < 0.4 else axis


def signed_axes(rng, rank, count=None, opset=21):
    count = int(rng.integers(1, rank + 1)) if count is None else count
    axes = rng.permutation(rank)[:count]
    return [int(axis) - (rank if opset >= 11 and rng.random() < 0.4 else 0) for axis in axes]


def axes_argument(x, axes, opset, input_since, **attrs):
    """Return axes as an input or as an attribute."""
    if opset >= input_since:
        return [x, *([] if axes is None else [ints(axes)])], attrs
    return [x], {"axes": axes, **attrs}


def broadcastable(rng, count, dtypes):
    dtype = rng.choice(dtypes)
    full = shape(rng)
    arrays = []
    for _ in range(count):
        part = full[rng.integers(len(full) + 1) :] if rng.random() < 0.4 else full
        part = tuple(1 if rng.random() < 0.2 else size for size in part)
        arrays.append(values(rng, part, dtype))
    return arrays


# --- one generator for each operator: inputs, attributes, number of outputs --------------------


def identity(rng, opset):
    return [moved(rng)], {}


def reshape(rng, opset):
    x = moved(rng)
    sizes = list(x.shape)
    if rng.random() < 0.5:
        sizes = [x.size] if rng.random() < 0.5 else [1, x.size, 1]
    for i in range(len(sizes)):
        if i < x.ndim and sizes[i] == x.shape[i] and rng.random() < 0.3:
            sizes[i] = 0
    if sizes and rng.random() < 0.5:
        sizes[rng.integers(len(sizes))] = -1
    allowzero = int(rng.random() < 0.3) if opset >= 14 else None
    return [x, ints(sizes)], {"allowzero": allowzero}


def transpose(rng, opset):
    x = moved(rng)
    perm = [int(i) for i in rng.permutation(x.ndim)]
    return [x], {"perm": perm if rng.random() < 0.8 and x.ndim else None}


def squeeze(rng, opset):
    x = moved(rng, 1)
    ones = [i for i, size in enumerate(x.shape) if size == 1]
    axes = None
    if ones and rng.random() < 0.7:
        axes = [int(i) - (x.ndim if rng.random() < 0.4 and opset >= 11 else 0) for i in ones[:2]]
    return axes_argument(x, axes, opset, 13)


def unsqueeze(rng, opset):
    x = moved(rng, 0, 3)
    count = int(rng.integers(1, 3))
    return axes_argument(x, signed_axes(rng, x.ndim + count, count, opset), opset, 13)


def flatten(rng, opset):
    x = moved(rng, 1)
    low = -x.ndim if opset >= 11 else 0
    return [x], {"axis": None if rng.random() < 0.2 else int(rng.integers(low, x.ndim + 1))}


def concat(rng, opset):
    size, dtype = shape(rng, 1), rng.choice(MOVED)
    axis = signed_axis(rng, len(size), opset)
    arrays = []
    for _ in range(rng.integers(1, 4)):
        part = list(size)
        part[axis] = int(rng.integers(0, 4))
        arrays.append(values(rng, part, dtype))
    return arrays, {"axis": axis}


def split(rng, opset):
    count = int(rng.integers(1, 4))
    x = moved(rng, 1)
    axis = signed_axis(rng, x.ndim, opset)
    if rng.random() < 0.6:
        cuts = np.sort(rng.integers(0, x.shape[axis] + 1, count - 1))
        sizes = np.diff([0, *cuts, x.shape[axis]]).tolist()
        if opset >= 13:
            return [x, ints(sizes)], {"axis": axis}, count
        return [x], {"axis": axis, "split": sizes}, count
    return [x], {"axis": axis, "num_outputs": count if opset >= 18 else None}, count


def slice_(rng, opset):
    x = moved(rng, 1)
    axes = signed_axes(rng, x.ndim, None, opset)
    edges = [-(2**63), -(2**31), 2**31 - 1, 2**63 - 1, *range(-6, 7)]
    starts = [int(rng.choice(edges)) for _ in axes]
    ends = [int(rng.choice(edges)) for _ in axes]
    if rng.random() < 0.3:
        axes, starts, ends = None, starts[: len(axes)], ends[: len(axes)]
    if opset < 10:
        return [x], {"starts": starts, "ends": ends, "axes": axes}
    steps = [int(rng.choice([-3, -2, -1, 1, 2, 3])) for _ in starts]
    optional = None if axes is None else ints(axes)
    return [x, ints(starts), ints(ends), optional, ints(steps)], {}


def gather(rng, opset):
    x = moved(rng, 1, smallest=1)
    axis = signed_axis(rng, x.ndim, opset)
    low = -x.shape[axis] if opset >= 11 else 0
    indices = rng.integers(low, x.shape[axis], shape(rng, 0, 2))
    return [x, ints(indices, rng)], {"axis": axis}


def expand(rng, opset):
    x = moved(rng)
    sizes = [1 if rng.random() < 0.3 else n for n in x.shape]
    sizes = [n if n != 1 or rng.random() < 0.5 else int(rng.integers(0, 4)) for n in sizes]
    sizes = [
        m if n == 1 else n if m not in (1, n) else m for m, n in zip(sizes, x.shape, strict=True)
    ]
    return [x, ints([*shape(rng, 0, 1), *sizes])], {}


def shape_(rng, opset):
    if opset < 15:
        return [moved(rng)], {}
    start, end = (None if rng.random() < 0.3 else int(rng.integers(-6, 6)) for _ in range(2))
    return [moved(rng)], {"start": start, "end": end}


def constant_of_shape(rng, opset):
    value = numpy_helper.from_array(values(rng, (1,), rng.choice([*FLOATS, *ALL_INTS, np.bool_])))
    return [ints(shape(rng))], {"value": value if rng.random() < 0.8 else None}


def range_(rng, opset):
    dtype = rng.choice([np.int16, np.int32, np.int64])
    numbers = (*rng.integers(-20, 20, 2), rng.choice([-7, -2, -1, 1, 2, 3, 7]))
    return [np.array(number, dtype) for number in numbers], {}


def where(rng, opset):
    x, y, z = broadcastable(rng, 3, [np.float32, np.int32, np.int64, np.uint8, np.float64])
    return [values(rng, z.shape, np.bool_), x, y], {}


def arithmetic(rng, opset):
    return broadcastable(rng, 2, [*INTS, *FLOATS]), {}


def ordered(rng, opset):
    return broadcastable(rng, 2, FLOATS if opset < 9 else [*ALL_INTS, *FLOATS, np.float16]), {}


def equal(rng, opset):
    dtypes = [*INTS, np.bool_] if opset < 11 else [*ALL_INTS, *FLOATS, np.float16, np.bool_]
    return broadcastable(rng, 2, dtypes), {}


def boolean(rng, opset):
    return broadcastable(rng, 2, [np.bool_]), {}


def division(rng, opset):
    x, y = broadcastable(rng, 2, [*INTS, *FLOATS])
    if y.dtype.kind == "i" and rng.random() < 0.9:
        y = np.where(y == 0, y.dtype.type(3), y)
    return [x, y], {}


def signed(rng, opset):
    return [values(rng, shape(rng), rng.choice([*FLOATS, *INTS, np.int8]))], {}


def unary(rng, opset):
    return [values(rng, shape(rng), rng.choice(FLOATS))], {}


def one_boolean(rng, opset):
    return [values(rng, shape(rng), np.bool_)], {}


def cast(rng, opset):
    types = [*ALL_INTS, *FLOATS, np.bool_, np.float16]
    to = helper.np_dtype_to_tensor_dtype(np.dtype(rng.choice(types)))
    return [values(rng, shape(rng), rng.choice(types))], {"to": to}


def cast_like(rng, opset):
    x = values(rng, shape(rng), rng.choice([*ALL_INTS, *FLOATS]))
    return [x, values(rng, (1,), rng.choice([*ALL_INTS, *FLOATS]))], {}


GENERATORS = {
    "Identity": (1, identity),
    "Reshape": (5, reshape),
    "Squeeze": (1, squeeze),
    "Unsqueeze": (1, unsqueeze),
    "Flatten": (1, flatten),
    "Transpose": (1, transpose),
    "Shape": (1, shape_),
    "Size": (1, identity),
    "Concat": (4, concat),
    "Expand": (8, expand),
    "ConstantOfShape": (9, constant_of_shape),
    "Range": (11, range_),
    "Split": (2, split),
    "Slice": (1, slice_),
    "Gather": (1, gather),
    "Where": (9, where),
    "Add": (7, arithmetic),
    "Sub": (7, arithmetic),
    "Mul": (7, arithmetic),
    "Div": (7, division),
    "Neg": (6, signed),
    "Abs": (6, signed),
    "Sqrt": (6, unary),
    "Floor": (6, unary),
    "Ceil": (6, unary),
    "Equal": (7, equal),
    "Less": (7, ordered),
    "LessOrEqual": (12, ordered),
    "Greater": (7, ordered),
    "GreaterOrEqual": (12, ordered),
    "And": (7, boolean),
    "Or": (7, boolean),
    "Not": (1, one_boolean),
    "Cast": (6, cast),
    "CastLike": (15, cast_like),
}


@pytest.mark.parametrize(
    ("op", "opset"),
    [(op, opset) for op, (since, _) in GENERATORS.items() for opset in OPSETS if opset >= since],
)
def test_agrees_with_onnxruntime(op, opset):
    rng = np.random.default_rng(zlib.crc32(f"{op}-{opset}".encode()))
    compared = 0
    for _ in range(CASES):
        inputs, attrs, *outputs = GENERATORS[op][1](rng, opset)
        compared += check(op, inputs, opset, *outputs, **attrs)
    assert compared >= CASES // 4, f"only {compared} of {CASES} cases were compared"


def test_every_kernel_is_compared():
    assert set(KERNELS) == set(GENERATORS)


# --- values at the edges -----------------------------------------------------------------------


def any_bits(rng, dtype, count=2000):
    """Random bit patterns: subnormals, infinities and NaN among the floats."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    x = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    if dtype.kind == "f":
        x = np.concatenate(
            [x, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, 1, 65504], dtype)]
        )
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Less", "GreaterOrEqual", "Equal"])
def test_any_two_floats(op, dtype):
    rng = np.random.default_rng(0)
    x, y = any_bits(rng, dtype), rng.permutation(any_bits(rng, dtype))
    assert check(op, [x, y], 21)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["Neg", "Abs", "Sqrt", "Floor", "Ceil"])
def test_any_float(op, dtype):
    assert check(op, [any_bits(np.random.default_rng(0), dtype)], 21)


@pytest.mark.parametrize("to", [*ALL_INTS, *FLOATS, np.bool_, np.float16])
@pytest.mark.parametrize("dtype", [*ALL_INTS, *FLOATS, np.bool_, np.float16])
def test_any_cast(dtype, to):
    rng = np.random.default_rng(0)
    x, to = any_bits(rng, dtype), np.dtype(to)
    if x.dtype.kind == "f" and to.kind in "iu":  # defined inside the range only
        limits = np.iinfo(to)
        with np.errstate(all="ignore"):
            x = np.concatenate(
                [rng.uniform(-300, 300, 500), rng.uniform(limits.min, limits.max, 500)]
            )
            x = x.astype(dtype)
            x = x[np.isfinite(x) & (x >= limits.min) & (x < limits.max)]
    elif to == np.float16 and x.dtype == np.float32:
        x = x[~np.isnan(x)]
    elif to == np.float16:  # the way of rounding is not said
        x = np.arange(100).astype(dtype)
    assert check("Cast", [x], 21, to=helper.np_dtype_to_tensor_dtype(to))


def test_cast_to_bfloat16_rounds_to_even():
    x = any_bits(np.random.default_rng(0), np.float32)
    x = x[~np.isnan(x)]
    there, back = TensorProto.BFLOAT16, TensorProto.FLOAT
    [half] = evaluate(make_node("Cast", [x], to=there), [x], 21) or []
    assert half.dtype == ml_dtypes.bfloat16
    [ours] = evaluate(make_node("Cast", [half], to=back), [half], 21) or []
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=there),
        helper.make_node("Cast", ["half"], ["y"], to=back),
    ]
    value = helper.make_tensor_value_info("x", back, x.shape)
    graph = helper.make_graph(nodes, "two", [value], [ValueInfoProto(name="y")])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    same_bits(ours, session.run(None, {"x": x})[0])


@pytest.mark.parametrize(
    ("x", "to"),
    [
        (np.array([1e10], np.float32), TensorProto.INT32),
        (np.array([np.nan], np.float32), TensorProto.INT64),
        (np.array([-1.0], np.float32), TensorProto.UINT8),
        (np.array([2.0**63], np.float64), TensorProto.INT64),
        (np.array([1.0001], np.float64), TensorProto.FLOAT16),
        (np.array([4097], np.int64), TensorProto.FLOAT16),
        (np.array([1.0], np.float32), TensorProto.FLOAT8E4M3FN),
        (np.array([1.0], np.float32), TensorProto.INT4),
        (np.array([1.0], np.float32), TensorProto.STRING),
        (np.array(["1"], object), TensorProto.FLOAT),
        (np.array([1.0], np.float32), 9999),
    ],
)
def test_uncertain_casts_are_left_to_the_runtime(x, to):
    assert evaluate(make_node("Cast", [x], to=to), [x], 21) is None


HALF = np.array([1.0, 2.0], np.float16)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "opset"),
    [
        ("Add", [HALF, HALF], {}, 21),
        ("Sqrt", [HALF.astype(ml_dtypes.bfloat16)], {}, 21),
        ("Add", [np.ones(2, np.float32), np.ones(1, np.float32)], {"broadcast": 1}, 6),
        ("Add", [np.ones(2, np.float32), np.ones(2, np.int64)], {}, 21),
        ("Div", [ints([1]), ints([0])], {}, 21),
        ("Div", [ints([-(2**63)]), ints([-1])], {}, 21),
        ("Equal", [np.array(["a"], object), np.array(["a"], object)], {}, 21),
        ("Gather", [ints([1, 2]), ints([2])], {}, 21),
        ("Reshape", [ints([1, 2]), ints([3, -1])], {}, 21),
        ("Reshape", [ints([1, 2]), ints([-1, -1])], {}, 21),
        ("Reshape", [ints([1, 2]), ints([1, 1, 0])], {}, 21),
        ("Squeeze", [ints([1, 2])], {"axes": [0]}, 11),
        ("Concat", [ints([1, 2])], {}, 21),
        ("Range", [ints(0), ints(1), ints(0)], {}, 21),
        ("Range", [np.float32(0), np.float32(1), np.float32(0.1)], {}, 21),
        ("Conv", [ints([1]), ints([1])], {}, 21),
    ],
)
def test_uncertain_or_malformed_cases_have_no_kernel(op, inputs, attrs, opset):
    assert evaluate(make_node(op, inputs, **attrs), inputs, opset) is None


def test_other_domains_and_attribute_references_are_none():
    x = ints([1, 2])
    node = make_node("Identity", [x])
    node.domain = "com.microsoft"
    assert evaluate(node, [x], 21) is None
    node = make_node("Flatten", [x], axis=0)
    node.attribute[0].ref_attr_name = "axis"
    assert evaluate(node, [x], 21) is None


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_never_raises(op):
    """Malformed nodes give None or a result, never an exception or a warning."""
    rng = np.random.default_rng(zlib.crc32(op.encode()))
    names = "axis axes perm to k dtype value pads split starts ends mode batch_dims shape keepdims"
    nonsense: list[Any] = [0, 1, -7, 99, 1.5, "text", [], [0], [0, 0], [5, -9], ["a"]]
    nonsense.append(numpy_helper.from_array(np.ones(2, np.float32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(150):
            inputs: list[Any] = [
                None if rng.random() < 0.1 else moved(rng) if rng.random() < 0.5 else
                ints(rng.integers(-3, 4, shape(rng, 0, 2)))
                for _ in range(rng.integers(0, 5))
            ]  # fmt: skip
            attrs = {name: nonsense[rng.integers(len(nonsense))] for name in names.split()}
            attrs = {name: value for name, value in attrs.items() if rng.random() < 0.2}
            node = make_node(op, inputs, int(rng.integers(0, 3)))
            for name, value in attrs.items():
                kind: dict[str, Any] = {"attr_type": 7} if value == [] else {}
                node.attribute.append(helper.make_attribute(name, value, **kind))
            result = evaluate(node, inputs, int(rng.choice(OPSETS)))
            assert result is None or all(isinstance(y, np.ndarray) for y in result)


# --- every type, views, scalars ----------------------------------------------------------------

SMALL_TYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4]
MOVEMENT = "Identity Reshape Squeeze Unsqueeze Flatten Transpose Concat Expand Split Slice"
MOVEMENT += " Gather Where"
MOVING = {"Where": (1, 2)}


@pytest.mark.parametrize("dtype", SMALL_TYPES)
@pytest.mark.parametrize("op", MOVEMENT.split())
def test_movement_of_small_types_moves_their_bits(op, dtype):
    rng = np.random.default_rng(0)
    bits = np.uint16 if np.dtype(dtype).itemsize == 2 else np.uint8
    done = 0
    for _ in range(CASES):
        inputs: list[Any]
        inputs, attrs, *outputs = GENERATORS[op][1](rng, 21)
        raw, small = list(inputs), list(inputs)
        for i in range(len(inputs)) if op == "Concat" else MOVING.get(op, (0,)):
            if i < len(inputs) and inputs[i] is not None:
                raw[i] = np.asarray(rng.integers(0, 8, inputs[i].shape), bits)
                small[i] = raw[i].view(dtype)
        node = make_node(op, inputs, *outputs, **attrs)
        expected, found = evaluate(node, raw, 21), evaluate(node, small, 21)
        assert (found is None) == (expected is None)
        for mine, other in zip(found or [], expected or [], strict=True):
            assert mine.dtype == dtype
            np.testing.assert_array_equal(mine.view(bits), other)
            done += 1
    assert done >= CASES // 3


def test_strings_move():
    x = np.array([["a", "bcd"], ["", "e"]], object)
    assert check("Transpose", [x], 21)
    assert check("Gather", [x, ints(1)], 21, axis=1)
    assert not check("Gather", [x, ints(1)], 21, axis=0)  # where onnxruntime loses strings
    assert check("Concat", [x, x], 21, axis=1)
    assert check("Reshape", [x, ints([-1])], 21)
    [scalar] = evaluate(make_node("Gather", [x[0], ints(1)]), [x[0], ints(1)], 21) or []
    assert (scalar.shape, scalar.dtype, scalar[()]) == ((), np.dtype(object), "bcd")


def test_scalars_stay_arrays():
    for op in ("Add", "Mul", "Equal"):
        assert check(op, [ints(3), ints(4)], 21)
    assert check("Gather", [ints([3, 4]), ints(1)], 21)
    assert check("Squeeze", [ints([3])], 21)
    assert check("Reshape", [ints([3]), ints([])], 21)
    assert check("Where", [np.array(True), ints(1), ints(2)], 21)


@pytest.mark.parametrize(
    ("op", "others", "attrs"),
    [
        ("Identity", [], {}),
        ("Reshape", [ints([-1, 2])], {}),
        ("Transpose", [], {}),
        ("Unsqueeze", [ints([0])], {}),
        ("Flatten", [], {}),
        ("Slice", [ints([1]), ints([9]), ints([0]), ints([2])], {}),
        ("Split", [], {"num_outputs": 1}),
        ("Gather", [ints(1)], {"axis": 1}),
        ("Expand", [ints([7, 4, 4])], {}),
    ],
)
def test_movement_answers_with_views(op, others, attrs):
    x = np.zeros((4, 4), np.float32)
    [y] = evaluate(make_node(op, [x, *others], **attrs), [x, *others], 21) or []
    assert np.shares_memory(x, y)


def test_expanding_costs_no_memory():
    sizes = ints([1 << 20, 1 << 20])
    [y] = evaluate(make_node("ConstantOfShape", [sizes]), [sizes], 21) or []
    assert y.shape == (1 << 20, 1 << 20)
    assert y.strides == (0, 0)


def test_imports_are_light():
    code = "import sys, passes; assert not {'numpy', 'onnx'} & set(sys.modules);"
    code += "import passes.analysis.const_eval;"
    code += "assert not {'onnxruntime', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
