"""Structural checks of loaded models, and of models that passes produce."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.checks import model, parse
from toolkit.errors import ModelError
from toolkit.ir.model import Model
from toolkit.verification.structure import (
    Level,
    check_input,
    check_output,
    check_proto,
    strictest_level,
)

BRANCHES = """g (bool c, float[2] x) => (float[2] y) {{
    a = Neg(x)
    y = If (c) <then_branch = t () => (float[2] p) {{ {} }},
                else_branch = e () => (float[2] q) {{ q = Abs(a) }}> }}"""


def with_tensor(tensor: TensorProto) -> ModelProto:
    proto = parse("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    proto.graph.initializer.append(tensor)
    return proto


def tensor(kind: int, dims: list[int], **data) -> TensorProto:
    return TensorProto(name="w", data_type=kind, dims=dims, **data)


# Loaded models ----------------------------------------------------------------------------------


def test_two_functions_of_one_name():
    proto = parse("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    for overload in ("", "other", ""):
        function = helper.make_function(
            "own", "twin", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], []
        )
        function.overload = overload
        proto.functions.append(function)
    with pytest.raises(ModelError, match="two functions are called 'own::twin'"):
        check_proto(proto)
    del proto.functions[2]
    check_proto(proto)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("r = my.a(t)", "r = Neg(t)", "function 'a' calls itself, which"),
        ("r = my.b(t)", "r = my.c(t)", "function 'a' calls itself through 'b', 'c', which"),
        ("r = my.c(t)", "r = my.c(t)", "function '[ac]' calls itself through '[ac]', which"),
        (
            "r = If(t) <then_branch = p () => (u) { u = my.a(t) },"
            " else_branch = q () => (v) { v = Neg(t) }>",
            "r = Neg(t)",
            "function 'a' calls itself, which",
        ),
        ("r = my.b(t)", "r = Neg(t)", ""),
    ],
)
def test_functions_that_call_themselves(a: str, b: str, reason: str):
    imports = '<domain: "my", opset_import: ["" : 18, "my" : 1]>'
    proto = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18, "my" : 1]>
        main (float[N] x) => (float[N] y) {{ y = my.c(x) }}
        {imports} a (t) => (r) {{ {a} }}
        {imports} b (t) => (r) {{ {b} }}
        {imports} c (t) => (r) {{ r = my.a(t) }}
    """)
    if not reason:
        check_proto(proto)
        return
    with pytest.raises(ModelError, match=reason):
        check_proto(proto)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("g (float x) => (float y) { y = Neg(z) }", "Neg 'y' uses 'z', which is not defined"),
        ("g (float x) => (float y) { a = Neg(x) }", "graph output 'y' is not defined"),
        ("g (float x) => (float y) { y = Neg(x) y = Abs(x) }", "'y' is defined twice"),
        ("g (float x) => (float x) { x = Neg(x) }", "'x' is defined twice"),
        ("g (float x) => (float y) <float a = {1}> { a = Neg(x) y = Neg(a) }", "'a' is defined"),
        ("g (float x, float x) => (float y) { y = Neg(x) }", "two graph inputs are called 'x'"),
        ("g (float x) => (float y) { y = own.Foo(x) }", "domain 'own', which the model does not"),
        (
            '<ir_version: 8, opset_import: ["" : 999]> g (float x) => (float y) { y = Neg(x) }',
            "imports opset 999, but the installed onnx supports at most",
        ),
        (
            '<ir_version: 8, opset_import: ["own" : 1]> g (float x) => (float y) { y = Neg(x) }',
            "domain 'ai.onnx', which the model does not import",
        ),
        (BRANCHES.format("a = Neg(x) p = Neg(a)"), "'a' is defined twice"),
        (BRANCHES.format("p = Neg(b)"), "uses 'b'"),
        (BRANCHES.format("r = Neg(a)"), "output 'p' is not defined"),
        (
            """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
            g (float x) => (float y) { y = own.F(x) }
            <domain: "own", opset_import: ["" : 21]> F (i) => (o) { o = Neg(j) }""",
            "uses 'j'",
        ),
    ],
)
def test_invalid_models_are_refused(text, reason):
    with pytest.raises(ModelError) as caught:
        check_proto(parse(text))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "g (float x) => (float y) { y = Neg(a) a = Neg(x) }",  # unsorted; the index sorts them
        BRANCHES.format("p = Neg(a)"),
        BRANCHES.format("s = Neg(a) p = Neg(s)"),
        '<ir_version: 8, opset_import: ["ai.onnx" : 17]> g (float x) => (float y) { y = Neg(x) }',
        '<ir_version: 8, opset_import: ["" : 7]> g (float x) => (float y) { y = ImageScaler(x) }',
        '<ir_version: 8, opset_import: ["own" : 1]> g (float x) => (float y) { y = own.Any(x) }',
        """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float x) => (float y) { y = own.F(x) }
        <domain: "own", opset_import: ["" : 21]> F (i) => (o) { o = Neg(i) }""",
    ],
)
def test_valid_models_pass(text):
    check_input(model(text))


def test_a_name_in_both_branches():
    text = BRANCHES.format("s = Neg(a) p = Neg(s)").replace("q = Abs(a)", "s = Abs(a) q = Neg(s)")
    check_input(model(text))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (tensor(99, [1], raw_data=bytes(4)), "unknown data type 99"),
        (tensor(0, [1], raw_data=bytes(4)), "unknown data type 0"),
        (tensor(TensorProto.FLOAT, [3], raw_data=bytes(8)), "12 bytes, but 8 are stored"),
        (tensor(TensorProto.INT4, [3], raw_data=bytes(3)), "2 bytes, but 3 are stored"),
        (tensor(TensorProto.FLOAT, [-1], raw_data=bytes(4)), "negative size"),
        (tensor(TensorProto.FLOAT, [2]), "it has no data"),
        (tensor(TensorProto.FLOAT, [2], int32_data=[1, 2]), "stored as int32_data"),
        (tensor(TensorProto.FLOAT, [2], float_data=[1]), "2 numbers, but 1 are stored"),
        (tensor(TensorProto.COMPLEX64, [2], float_data=[1, 2]), "4 numbers, but 2 are stored"),
        (tensor(TensorProto.FLOAT, [1], float_data=[1], raw_data=bytes(4)), "twice"),
        (tensor(TensorProto.STRING, [1], raw_data=b"a"), "strings"),
    ],
)
def test_invalid_tensors_are_refused(bad, reason):
    with pytest.raises(ModelError) as caught:
        check_proto(with_tensor(bad))
    assert reason in str(caught.value)
    assert "initializer 'w'" in str(caught.value)


@pytest.mark.parametrize(
    "good",
    [
        tensor(TensorProto.FLOAT, [0]),
        tensor(TensorProto.FLOAT, [], float_data=[1]),
        tensor(TensorProto.FLOAT16, [2], int32_data=[1, 2]),
        tensor(TensorProto.BOOL, [2], int32_data=[0, 1]),
        tensor(TensorProto.UINT32, [2], uint64_data=[0, 1]),
        tensor(TensorProto.STRING, [2], string_data=[b"a", b""]),
        numpy_helper.from_array(np.ones((3, 5), np.complex64), "w"),
        helper.make_tensor("w", TensorProto.INT4, [3], [1, 2, 3]),
        helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [3], [1, 2, 3]),
        helper.make_tensor("w", TensorProto.BFLOAT16, [3], [1, 2, 3]),
    ],
)
def test_valid_tensors_pass(good):
    check_proto(with_tensor(good))


def test_a_bad_tensor_in_a_node():
    proto = parse("g () => (float[2] y) { y = Constant<value = float[2] {1, 2}>() }")
    proto.graph.node[0].attribute[0].t.dims[0] = 3
    with pytest.raises(ModelError, match="the tensor in Constant 'y'"):
        check_proto(proto)


def test_no_outputs_no_opsets_two_opsets_two_tensors():
    proto = parse("g (float x) => () { y = Neg(x) }")
    with pytest.raises(ModelError, match="no output"):
        check_proto(proto)
    proto = with_tensor(tensor(TensorProto.FLOAT, [0]))
    proto.opset_import.append(helper.make_opsetid("ai.onnx", 13))
    with pytest.raises(ModelError, match="two versions"):
        check_proto(proto)
    del proto.opset_import[:]
    with pytest.raises(ModelError, match="no operator set"):
        check_proto(proto)
    proto = with_tensor(tensor(TensorProto.FLOAT, [0]))
    proto.graph.initializer.append(tensor(TensorProto.FLOAT, [0]))
    with pytest.raises(ModelError, match="two initializers are called 'w'"):
        check_proto(proto)


@pytest.mark.parametrize(
    "text",
    [
        "g (float x) => (float y) { a = Neg(b) b = Neg(a) y = Add(x, a) }",
        "g (float x) => (float y) { y = Add(x, y) }",
        """g (bool c, float[2] x) => (float[2] y) {
            a = If (c) <then_branch = t () => (float[2] p) { p = Neg(b) },
                        else_branch = e () => (float[2] q) { q = Abs(x) }>
            b = Neg(a) y = Neg(b) }""",
    ],
)
def test_cycles(text):
    with pytest.raises(ModelError, match="cycle through"):
        check_input(model(text))


@pytest.mark.parametrize(
    ("location", "offset", "reason"),
    [("gone.bin", 0, "missing"), ("../w.bin", 0, "outside"), ("w.bin", 8, "past the end")],
)
def test_external_data(tmp_path, location, offset, reason):
    (tmp_path / "w.bin").write_bytes(bytes(8))
    bad = tensor(TensorProto.FLOAT, [2])
    bad.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", "8")):
        bad.external_data.add(key=key, value=value)
    (tmp_path / "inner").mkdir()
    folder = tmp_path / "inner" if location.startswith("..") else tmp_path
    (folder / "m.onnx").write_bytes(with_tensor(bad).SerializeToString())
    with pytest.raises(ModelError, match=reason):
        check_input(Model.load(folder / "m.onnx"))


# Changed models ---------------------------------------------------------------------------------


def large(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def test_large_tensors_are_not_read():
    """Initializers, a Constant, one in a branch and one in a function, all above the limit."""
    proto = parse("""<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (bool c, float[2,64] x) => (float[2,64] y) {
            m = MatMul(x, w) k = Constant<value = float[1] {0}>() n = MatMul(m, k)
            i = If (c) <then_branch = t () => (float[2,64] p) { p = MatMul(n, v) },
                        else_branch = e () => (float[2,64] q) { q = Neg(n) }>
            y = own.F(i) }
        <domain: "own", opset_import: ["" : 21]> F (i) => (o) {
            k = Constant<value = float[1] {0}>() o = MatMul(i, k) }""")
    proto.graph.initializer.append(large("w", 64, 64))
    constant = next(node for node in proto.graph.node if node.op_type == "Constant")
    constant.attribute[0].t.CopyFrom(large("", 64, 64))
    proto.functions[0].node[0].attribute[0].t.CopyFrom(large("", 64, 64))
    branch = next(node for node in proto.graph.node if node.op_type == "If").attribute[0].g
    branch.initializer.append(large("v", 64, 64))
    subject = Model.from_proto(proto)
    before = subject.to_proto().SerializeToString(deterministic=True)
    check_output(subject)
    assert strictest_level(subject) is Level.FULL
    assert subject.to_proto().SerializeToString(deterministic=True) == before


def test_large_tensors_keep_their_types():
    proto = parse("g (float[2,32] x) => (float[2,64] y) { y = MatMul(x, w) }")
    proto.graph.initializer.append(large("w", 64, 64))
    with pytest.raises(ModelError, match="Incompatible dimensions"):
        check_output(Model.from_proto(proto))


def test_initializers_that_are_inputs_too():
    proto = parse("g (float[64,64] w) => (float[64,64] y) { y = Neg(w) }")
    proto.graph.initializer.append(large("w", 64, 64))
    proto.ir_version = 3
    check_output(Model.from_proto(proto))


def test_a_wrong_edit_is_found():
    subject = model("g (float[2] x) => (float[2] y) { a = Neg(x) y = Abs(a) }")
    check_output(subject)
    node = subject.graph.nodes[0]
    subject.graph.set_op(node, "And")
    with pytest.raises(ModelError):
        check_output(subject)
    subject.rollback()
    check_output(subject)
    subject.graph.set_inputs(node, ["y"])
    with pytest.raises(ModelError, match="cycle"):
        check_output(subject)


def test_a_model_keeps_the_level_that_the_original_passes():
    """A wrong declaration fails the full check; the structure is still checked."""
    proto = parse("g (float[2] x) => (float[3] y) { y = Neg(x) }")
    subject = Model.from_proto(proto)
    assert strictest_level(subject) is Level.STRUCTURE
    check_output(subject, Level.STRUCTURE)
    subject.graph.set_attr(subject.graph.nodes[0], "nonsense", 1)
    with pytest.raises(ModelError):
        check_output(subject, Level.STRUCTURE)
    check_output(subject, Level.NAMES)
    assert strictest_level(subject) is Level.NAMES


def test_messages_are_one_line():
    subject = model("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    subject.graph.set_inputs(subject.graph.nodes[0], ["x", "x", "x"])
    with pytest.raises(ModelError) as caught:
        check_output(subject)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


def test_names_that_are_not_text():
    whole = parse("g (float[batch] x) => (float[batch] y) { y = Neg(x) }").SerializeToString()
    damaged = onnx.ModelProto.FromString(whole.replace(b"batch", b"bat\xff\xfe"))
    with pytest.raises(ModelError, match="not text"):
        check_proto(damaged)
