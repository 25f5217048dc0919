"""The axes that an operator carries, compared with its results for perturbed operands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, helper

from passes.analysis.axis_flow import BROADCAST, MIXED, ROWS, AxisFlow, OperandAxes, axis_flow
from passes.analysis.shapes import Shapes
from tests import ort
from tests.checks import model
from toolkit.ir import node as nd
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE, REDUCTIONS
from toolkit.pass_manager.protocol import Context

HEAD = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]> agraph (
    float[2, 3, 4, 5] x, float[1, 4, 5] z, float[2, 3, 5] rows, float[5] by_column,
    float[4, 3] a, float[3, 5] b, float[2, 3, 5, 2] tall, float[1, 5, 2] shared,
    float[2, 4, 6, 6] image, float[3, 4, 3, 3] filters, float[4, 3, 2, 2] upward,
    float[2, 3, 4] packed, float[2, 2, 3, 4] heads, float[2, 3, 2] angles,
    float[7, 2] table, int64[2, 3] index
) => (float[P] y) <
    int64[1] one = {1}, int64[1] two = {2}, int64[1] minus = {-1}, int64[2] ends = {2, 3},
    int64[3] joined = {2, 3, 20}, int64[4] split = {2, 3, 2, 10}, int64[5] wide = {2, 2, 3, 4, 5},
    int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 2}, int64[2] behind = {0, 3}, float zero = {0},
    int64[4] repeats = {1, 2, 1, 1}, int64[0] none = {}, int64[2] both = {-1, 1},
    int64[2, 2] picked = {0, 2, 1, 1}, float scale = {2}, float[3] scales = {1, 2, 3},
    float[5] gamma = {1, 2, 3, 4, 5}
>"""

CASES: dict[str, list[tuple[int, ...]]] = {
    "y = Relu (x)": [(0, 1, 2, 3)],
    "y = Transpose <perm = [0, 3, 1, 2]> (x)": [(0, 3, 1, 2)],
    "y = Transpose (rows)": [(2, 1, 0)],
    "y = Unsqueeze (x, one)": [(0, BROADCAST, 1, 2, 3)],
    "y = Unsqueeze (rows, both)": [(0, BROADCAST, 1, 2, BROADCAST)],
    "u = Unsqueeze (x, one) y = Squeeze (u, one)": [(0, 2, 3, 4)],
    "u = Unsqueeze (x, one) y = Squeeze (u)": [(0, 2, 3, 4)],
    "y = Reshape (x, joined)": [(0, 1, MIXED)],
    "y = Reshape (x, split)": [(0, 1, MIXED, MIXED)],
    "y = Flatten (x)": [(0, MIXED)],
    "y = Flatten <axis = 3> (x)": [(MIXED, 3)],
    "y = Expand (x, wide)": [(BROADCAST, 0, 1, 2, 3)],
    "y = Slice (x, one, two, minus)": [(0, 1, 2, MIXED)],
    "y = Pad (x, pads)": [(0, 1, MIXED, MIXED)],
    "y = Pad (x, behind, zero, minus)": [(0, 1, 2, MIXED)],
    "y = Tile (x, repeats)": [(0, MIXED, 2, 3)],
    "y = Gather <axis = 1> (x, picked)": [
        (0, BROADCAST, BROADCAST, 2, 3),
        (BROADCAST, 0, 1, BROADCAST, BROADCAST),
    ],
    "y = Gather (table, index)": [(BROADCAST, BROADCAST, 1), (0, 1, BROADCAST)],
    "y = Concat <axis = 2> (x, x)": [(0, 1, MIXED, 3), (0, 1, MIXED, 3)],
    "y, s = Split <axis = 3, num_outputs = 2> (x)": [(0, 1, 2, MIXED)],
    "y = ReduceMean <keepdims = 0> (x, ends)": [(0, 1)],
    "y = ReduceMax (x, one)": [(0, MIXED, 2, 3)],
    "y = ReduceSum <keepdims = 0> (x)": [()],
    "y = ReduceSum (x, none)": [(MIXED, MIXED, MIXED, MIXED)],
    "y = ReduceSum <noop_with_empty_axes = 1> (x, none)": [(0, 1, 2, 3)],
    "y = ArgMax <axis = 1> (x)": [(0, MIXED, 2, 3)],
    "y = ArgMin <axis = -1, keepdims = 0> (x)": [(0, 1, 2)],
    "y = Softmax <axis = 1> (x)": [(0, MIXED, 2, 3)],
    "y = LogSoftmax (rows)": [(0, 1, MIXED)],
    "y = Hardmax <axis = 0> (rows)": [(MIXED, 1, 2)],
    "y = Add (x, z)": [(0, 1, 2, 3), (BROADCAST, BROADCAST, 1, 2)],
    "n = Neg (x) y = PRelu (n, by_column)": [(0, 1, 2, 3), (*[BROADCAST] * 3, 0)],
    "t = Transpose <perm = [0, 1, 3, 2]> (x) y = MatMul (x, t)": [
        (0, 1, 2, BROADCAST),
        (0, 1, BROADCAST, 3),
    ],
    "y = MatMul (x, shared)": [(0, 1, 2, BROADCAST), (*[BROADCAST] * 3, 2)],
    "y = MatMul (x, tall)": [(0, 1, 2, BROADCAST), (0, 1, BROADCAST, 3)],
    "y = Gemm (a, b)": [(0, BROADCAST), (BROADCAST, 1)],
    "y = Gemm (a, b, by_column)": [(0, BROADCAST), (BROADCAST, 1), (BROADCAST, 0)],
    "t = Transpose (a) u = Transpose (b) y = Gemm <transA = 1, transB = 1> (t, u)": [
        (1, BROADCAST),
        (BROADCAST, 0),
    ],
    "y = GlobalAveragePool (x)": [(0, 1, MIXED, MIXED)],
    "y = GlobalMaxPool (x)": [(0, 1, MIXED, MIXED)],
    "y = MaxPool <kernel_shape = [2, 2]> (x)": [(0, 1, MIXED, MIXED)],
    "y = AveragePool <kernel_shape = [2, 2]> (x)": [(0, 1, MIXED, MIXED)],
    "y = Conv (image, filters)": [(0, MIXED, MIXED, MIXED)],
    "y = ConvTranspose (image, upward)": [(0, MIXED, MIXED, MIXED)],
    "y = DepthToSpace <blocksize = 2> (image)": [(0, MIXED, MIXED, MIXED)],
    "y = SpaceToDepth <blocksize = 2> (image)": [(0, MIXED, MIXED, MIXED)],
    "y = LayerNormalization (x, gamma)": [(0, 1, 2, MIXED)],
    "y = RMSNormalization <axis = -1> (x, gamma)": [(0, 1, 2, MIXED)],
    "q = QuantizeLinear (x, scale) y = DequantizeLinear (q, scale)": [(0, 1, 2, 3)],
    "y = QuantizeLinear (x, scale)": [(0, 1, 2, 3)],
    "y = QuantizeLinear <axis = 1> (x, scales)": [(0, MIXED, 2, 3)],
    "y = RotaryEmbedding (heads, angles, angles)": [
        (0, 1, 2, MIXED),
        (0, BROADCAST, 1, BROADCAST),
        (0, BROADCAST, 1, BROADCAST),
    ],
    "y = RotaryEmbedding <num_heads = 1> (packed, table, table, index)": [
        (0, 1, MIXED),
        (0, 1, BROADCAST),
    ],
    "y = com.microsoft.BiasGelu (rows, by_column)": [(0, 1, 2), (BROADCAST, BROADCAST, 0)],
    "y = com.microsoft.FastGelu (rows, by_column)": [(0, 1, 2), (BROADCAST, BROADCAST, 0)],
    "y = com.microsoft.FastGelu (rows)": [(0, 1, 2)],
    "y = com.microsoft.Gelu (rows)": [(0, 1, 2)],
    "y = com.microsoft.QuickGelu (rows)": [(0, 1, 2)],
}

OLD_SOFTMAX = """<ir_version: 7, opset_import: ["" : 12]> agraph (float[2, 3, 4, 5] x)
    => (float[P] y) { y = Softmax <axis = 2> (x) }"""

BY_TRAIT = {*ELEMENTWISE, *BROADCASTING, *REDUCTIONS}
"""Operators whose rows are tested trait by trait."""


@pytest.mark.parametrize("body", CASES)
def test_axes_are_carried_as_expected(body: str) -> None:
    subject, node, flow = _flow(f"{HEAD} {{ {body} }}")
    assert [flow.operands[slot].sources for slot in sorted(flow.operands)] == CASES[body]
    _assert_carried(subject, node, flow)


def test_every_row_has_a_case() -> None:
    nodes = [model(f"{HEAD} {{ {body} }}").graph.producer("y") for body in CASES]
    assert {nd.qualified(node) for node in nodes if node is not None} >= ROWS.keys() - BY_TRAIT


@pytest.mark.parametrize("op_type", sorted(ELEMENTWISE))
def test_elementwise_operators_carry_each_axis(op_type: str) -> None:
    kind = {"Not": "bool", "BitwiseNot": "int32"}.get(op_type, "float")
    attribute = " <to = 11>" if op_type == "Cast" else ""
    subject, node, flow = _flow(
        f"""<ir_version: 10, opset_import: ["" : 24]>
        agraph ({kind}[2, 3] x) => ({kind}[P] y) {{ y = {op_type}{attribute} (x) }}"""
    )
    assert flow == AxisFlow({0: OperandAxes((0, 1))})
    _assert_carried(subject, node, flow)


@pytest.mark.parametrize("op_type", sorted(BROADCASTING))
def test_broadcasting_operators_carry_the_axes_that_an_operand_has(op_type: str) -> None:
    kind = "bool" if op_type in ("And", "Or", "Xor") else "float"
    kind = (
        "uint8" if op_type.startswith("Bit") else "int32" if op_type in ("Equal", "Mod") else kind
    )
    attribute = {"BitShift": '<direction = "LEFT">'}.get(op_type, "")
    condition = "condition, " if op_type == "Where" else ""
    subject, node, flow = _flow(
        f"""agraph (bool[2, 3, 4] condition, {kind}[2, 1, 4] x, {kind}[3, 1] z) => ({kind}[P] y)
        {{ y = {op_type} {attribute} ({condition}x, z) }}"""
    )
    wanted = [OperandAxes((0, BROADCAST, 2)), OperandAxes((BROADCAST, 0, BROADCAST), 1)]
    if condition:
        wanted.insert(0, OperandAxes((0, 1, 2)))
    assert flow == AxisFlow(dict(enumerate(wanted)))
    _assert_carried(subject, node, flow)


@pytest.mark.parametrize("op_type", sorted(REDUCTIONS))
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions_carry_the_axes_that_they_do_not_reduce(op_type: str, keep: int) -> None:
    subject, node, flow = _flow(
        f"""<ir_version: 10, opset_import: ["" : 18]> agraph (float[2, 3, 4] x) => (float[P] y)
        <int64[1] axis = {{-2}}> {{ y = {op_type} <keepdims = {keep}> (x, axis) }}"""
    )
    assert flow == AxisFlow({0: OperandAxes((0, MIXED, 2) if keep else (0, 2))}, named=(1,))
    _assert_carried(subject, node, flow)


def test_softmax_before_opset_13_mixes_all_axes_from_its_own() -> None:
    subject, node, flow = _flow(OLD_SOFTMAX)
    assert flow == AxisFlow({0: OperandAxes((0, 1, MIXED, MIXED))})
    _assert_carried(subject, node, flow)


@pytest.mark.parametrize(
    ("before", "after", "sources"),
    [
        ("N, 6, S", "N, 2, 3, S", (0, MIXED, MIXED, 2)),
        ("2, 3, S", "6, S", (MIXED, 2)),
        ("2, 3, S", "3, 2, S", (MIXED, MIXED, 2)),
        ("1, 3, 4", "3, 4", (1, 2)),
        ("3, 1, 4", "3, 4, 1", (0, 2, BROADCAST)),
        ("1, 1, 4", "1, 4", (0, 2)),
        ("4, 4", "2, 2, 4", (MIXED, MIXED, 1)),
        ("2, 2, 4", "4, 4", (MIXED, 2)),
    ],
)
def test_a_reshape_carries_axes_in_front_of_which_as_many_entries_remain(
    before: str, after: str, sources: tuple[int, ...]
) -> None:
    target = ", ".join(
        "-1" if size == "S" else {"N": "0"}.get(size, size) for size in after.split(", ")
    )
    count = len(after.split(", "))
    subject, node, flow = _flow(
        f"""agraph (float[{before}] x) => (float[P] y) <int64[{count}] to = {{{target}}}>
        {{ y = Reshape (x, to) }}"""
    )
    assert flow.operands[0].sources == sources
    _assert_carried(subject, node, flow)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("y = Softmax <axis = -2> (x)", (2,)),
        ("y, s = Split <axis = -1, num_outputs = 2> (x)", (3,)),
        ("y = Concat <axis = -4> (x, x)", (0,)),
        ("y = Slice (x, one, two, minus)", (3,)),
        ("y = Pad (x, pads)", (2, 3)),
        ("y = Tile (x, repeats)", (1,)),
        ("y = ReduceMean <keepdims = 0> (x, ends)", (2, 3)),
        ("y = ReduceSum (x)", (0, 1, 2, 3)),
        ("y = LayerNormalization (x, gamma)", ()),
        ("y = Transpose (x)", ()),
    ],
)
def test_the_axes_that_a_node_names_count_from_the_front(body: str, named: tuple[int, ...]) -> None:
    _, _, flow = _flow(f"{HEAD} {{ {body} }}")
    assert flow.named == named


@pytest.mark.parametrize(
    ("axes", "keeps"),
    [
        (OperandAxes((0, 1)), True),
        (OperandAxes((0, MIXED)), True),
        (OperandAxes((BROADCAST, 1)), True),
        (OperandAxes((BROADCAST, BROADCAST), missing=1), True),
        (OperandAxes((1, 0)), False),
        (OperandAxes((BROADCAST, 0)), False),  # the first axis is the second of the result
        (OperandAxes((MIXED, 1)), False),
        (OperandAxes(()), False),
    ],
)
def test_keeps_first(axes: OperandAxes, keeps: bool) -> None:
    assert axes.keeps_first() == keeps


UNKNOWN = {
    "a Reshape with an unknown shape": "agraph (float[2, 3] x, int64[2] s) => (float[P, Q] y)"
    "{ y = Reshape (x, s) }",
    "a Squeeze with unknown axes": "agraph (float[1, 3] x, int64[1] s) => (float[P] y)"
    "{ y = Squeeze (x, s) }",
    "an operator without a row": "agraph (float[2, 3] x) => (int64[2, N] y) { y = NonZero (x) }",
    "an operator of another domain": "<ir_version: 10, opset_import: ['' : 21, 'mine' : 1]>"
    "agraph (float[2, 3] x) => (float[P] y) { y = mine.Relu (x) }",
    "a Reshape that may be empty": "agraph (float[0, 3] x) => (float[P, Q] y)"
    "<int64[2] s = {3, 0}> { y = Reshape <allowzero = 1> (x, s) }",
    "a Tile with unknown repeats": "agraph (float[2, 3] x, int64[2] r) => (float[P, Q] y)"
    "{ y = Tile (x, r) }",
    "a Pad with unknown pads": "agraph (float[2, 3] x, int64[4] p) => (float[P, Q] y)"
    "{ y = Pad (x, p) }",
    "a Slice with unknown axes": "agraph (float[2, 3] x, int64[1] s, int64[1] axes)"
    "=> (float[P, Q] y) { y = Slice (x, s, s, axes) }",
    "a reduction over unknown axes": "agraph (float[2, 3] x, int64[1] axes) => (float[P, Q] y)"
    "{ y = ReduceSum (x, axes) }",
    "an Add with an operand of unknown rank": "agraph (float[2, 3] x, float[] s, int64[M] to)"
    "=> (float[P, Q] y) { z = Reshape (s, to) y = Add (x, z) }",
    "an Add with attributes for broadcasting": "<ir_version: 3, opset_import: ['' : 6]>"
    "agraph (float[2, 3] x, float[2] b) => (float[P, Q] y)"
    "{ y = Add <axis = 0, broadcast = 1> (x, b) }",
    "a product with a vector": "agraph (float[2, 3] x, float[3] v) => (float[2] y)"
    "{ y = MatMul (x, v) }",
    "scales by block": "agraph (float[2, 8] x, float[2, 2] s) => (float[2, 8] y)"
    "{ q = QuantizeLinear <axis = 1, block_size = 4> (x, s)"
    "  y = DequantizeLinear <axis = 1, block_size = 4> (q, s) }",
    "a norm with a scale per head": "agraph (float[2, 3, 4] x, float[3, 1] s) => (float[P] y)"
    "{ y = LayerNormalization (x, s) }",
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_axes_that_only_the_run_determines_have_no_flow(case: str) -> None:
    subject = model(UNKNOWN[case].replace("'", '"'))
    Shapes(annotate=False).run(subject, Context())
    node = subject.graph.producer("y")
    assert node is not None
    flow = axis_flow(subject.graph, node)
    assert flow is None or set(flow.operands[0].sources) <= {MIXED}


def _flow(text: str) -> tuple[Model, NodeProto, AxisFlow]:
    """Return the model, its node that produces `y`, and the flow of this node."""
    subject = model(text)
    Shapes(annotate=False).run(subject, Context())
    node = subject.graph.producer("y")
    assert node is not None
    flow = axis_flow(subject.graph, node)
    assert flow is not None
    return subject, node, flow


# -- the same numerically


def _assert_carried(subject: Model, node: NodeProto, flow: AxisFlow) -> None:
    """Replace operands entry by entry; only the same entries of the result may change."""
    operands = _operands(subject, node)
    alone = _alone(subject, node, operands)
    plain = _run(alone, operands)
    for slot, axes in flow.operands.items():
        assert len(axes.sources) == plain.ndim
        for axis, source in enumerate(axes.sources):
            if source < 0:
                continue
            assert plain.shape[axis] == operands[slot].shape[source]
            for entry in range(plain.shape[axis]):
                changed = np.zeros(plain.shape, bool)
                for replaced in _replaced(operands[slot], source, entry):
                    result = _run(alone, {**operands, slot: replaced})
                    changed |= ~np.isclose(result, plain, rtol=0, atol=0, equal_nan=True)
                by_entry = np.moveaxis(changed, axis, 0)
                assert not np.delete(by_entry, entry, 0).any()
                assert by_entry[entry].any() or node.op_type in ("IsInf", "IsNaN")


def _operands(subject: Model, node: NodeProto) -> dict[int, Array]:
    """Return the operands of a node by slot, for random inputs of its model."""
    random = np.random.default_rng(0)
    sizes = {"N": 2, "S": 4}
    feed: dict[str, Array] = {}
    for declared in subject.graph.interface_inputs(feeds_only=True):
        tensor = declared.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in tensor.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        integers = np.resize([0, 1, 1] if kind.kind == "b" else [1, 2, 2], shape)
        made = random.uniform(1.1, 1.9, shape) if kind.kind == "f" else integers
        feed[declared.name] = made.astype(kind)
    names = {slot: name for slot, name in enumerate(node.input) if name}
    proto = subject.to_proto()
    del proto.graph.output[:]
    inner = [name for name in names.values() if name not in feed]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in inner)
    if inner:
        feed.update(zip(inner, ort.run(proto, feed), strict=True))
    return {slot: feed[name] for slot, name in names.items()}


def _alone(subject: Model, node: NodeProto, operands: dict[int, Array]) -> ModelProto:
    """Return a model of one node, with its operands as inputs."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [f"i{slot}" if name else "" for slot, name in enumerate(node.input)]
    types = {slot: helper.np_dtype_to_tensor_dtype(a.dtype) for slot, a in operands.items()}
    inputs = [
        helper.make_tensor_value_info(f"i{slot}", types[slot], array.shape)
        for slot, array in operands.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    proto = subject.to_proto()
    graph = helper.make_graph([copy], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)


def _run(alone: ModelProto, operands: dict[int, Array]) -> Array:
    result: Array = ort.run(alone, {f"i{slot}": array for slot, array in operands.items()})[0]
    return result


def _replaced(operand: Array, axis: int, entry: int) -> Iterator[Array]:
    """Yield the operand with smaller, then with larger numbers in one entry of an axis."""
    random = np.random.default_rng(1)
    kind = operand.dtype.kind
    for low in {"f": (-0.9, 2.1), "b": (0, 1)}.get(kind, (1, 2)):
        made = np.moveaxis(operand.copy(), axis, 0)
        made[entry] = random.uniform(low, low + 0.8, made[entry].shape) if kind == "f" else low
        yield np.moveaxis(made, 0, axis)
