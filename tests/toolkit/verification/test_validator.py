"""The validator: models that pass, models that fail, and models that cannot be checked."""

from __future__ import annotations

import json
import math
import weakref

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.checks import model, parse
from toolkit.errors import ModelError, RuntimeRefused, UsageError
from toolkit.feeds import generate
from toolkit.ir.model import Model
from toolkit.runtime.session import Session
from toolkit.verification import reference
from toolkit.verification.compare import compare
from toolkit.verification.models import verify
from toolkit.verification.reference import Reference
from toolkit.verification.tolerance import EXACT, FLOAT, QUANT, epsilon_of
from toolkit.verification.validator import Validator

CHAIN = "g (float[B,S] x) => (float[B,S] y) <float c = {{{}}}> {{ a = Mul(x, c) y = Tanh(a) }}"


def verdict(before: str, after: str, tolerance=FLOAT, deployed=False):
    return Validator(model(before)).check(model(after), tolerance, deployed)


# Tolerances and comparisons ----------------------------------------------------------------------


def test_tolerances_are_ordered():
    assert max([FLOAT, QUANT, EXACT]) is QUANT
    assert sorted([FLOAT, QUANT, EXACT]) == [EXACT, FLOAT, QUANT]


def test_half_precision_is_allowed_its_own_rounding():
    half = model("g (float16[2] x) => (float16[2] y) { y = Neg(x) }")
    assert EXACT.allowed(epsilon_of(half)) == 4 * 2**-10
    assert FLOAT.allowed(epsilon_of(half)) == 8 * 2**-10
    inside = (
        "g (float[2] x) => (float[2] y) { h = Cast<to = 10>(x) n = Neg(h) y = Cast<to = 1>(n) }"
    )
    assert epsilon_of(model(inside)) == 2**-10
    assert epsilon_of(model("g (float[2] x) => (float[2] y) { y = Neg(x) }")) == 0
    stored = """g (float[2] x) => (float[2] y) <float16[2] w = {1, 2}> {
        f = Cast<to = 1>(w) y = Mul(x, f) }"""
    assert epsilon_of(model(stored)) == 0, "half-precision weights alone do not make it coarse"


def test_numbers_are_compared_relative_to_their_scale():
    reference = np.array([100.0, 1.0])
    assert compare(reference, reference).relative == 0
    assert compare(reference, reference + 0.01).relative == pytest.approx(1e-4)
    assert compare(np.zeros(3), np.full(3, 1e-12)).relative < 1e-4
    assert compare(np.zeros(3), np.full(3, 1e-3)).relative > FLOAT.relative


def test_a_small_quantity_beside_a_large_one():
    boxes_and_scores = np.random.default_rng(0).uniform(size=(1, 50, 6)) * 600
    boxes_and_scores[..., 4:] *= 1e-5
    ruined = boxes_and_scores.copy()
    ruined[..., 4:] = 0
    assert compare(boxes_and_scores, ruined).relative > FLOAT.relative
    noisy = boxes_and_scores + 1e-6
    assert compare(boxes_and_scores, noisy).relative < FLOAT.relative


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ([1.0, math.nan], [1.0, math.nan], True),
        ([1.0, math.nan], [math.nan, 1.0], False),
        ([1.0, math.inf], [1.0, math.inf], True),
        ([1.0, math.inf], [1.0, -math.inf], False),
        ([1.0, math.inf], [1.0, 3e38], False),
        ([1.0, 2.0], [1.0, math.nan], False),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([True], [False], False),
        (["a", "b"], ["a", "c"], False),
        ([[1.0]], [1.0], False),
        ([], [], True),
    ],
)
def test_other_values_are_equal_or_not(a, b, equal):
    def array(values):
        return np.array(values, dtype=object if "a" in values else None)

    found = compare(array(a), array(b))
    assert (found.relative == 0) is equal
    assert bool(found.reason) is not equal


def test_sequences_maps_and_optionals():
    one, two = np.ones(2), np.full(2, 2.0)
    assert compare([one, two], [one, two]).relative == 0
    assert compare([one, two], [one]).relative == math.inf
    assert compare([{1: 0.5}], [{1: 0.5}]).relative == 0
    assert compare({"a": one}, {"b": one}).relative == math.inf
    assert compare(None, None).relative == 0
    assert compare(one, None).relative == math.inf


# Checks ------------------------------------------------------------------------------------------


def test_the_same_model_holds_as_written_and_as_deployed():
    validator = Validator(model(CHAIN.format(0.5)))
    assert len(validator.feeds) == 3
    assert validator.note == ""
    for deployed in (False, True):
        found = validator.check(model(CHAIN.format(0.5)), EXACT, deployed)
        assert found.ok
        assert found.error == pytest.approx(0, abs=1e-6)
    assert "3 feeds (B 1, 2, 3; S 5, 8, 16)" in validator.summary(0.0, found)


@pytest.mark.parametrize(
    ("constant", "held"),
    [(0.5 + 1e-8, EXACT), (0.500002, FLOAT), (0.501, QUANT), (0.8, None)],
)
def test_the_tolerance_classes(constant, held):
    for tolerance in (EXACT, FLOAT, QUANT):
        found = verdict(CHAIN.format(0.5), CHAIN.format(constant), tolerance)
        assert found.ok is (held is not None and not tolerance < held)
        if not found.ok:
            assert "output 'y': off by" in found.reason
            assert found.error is not None


def test_an_error_at_one_size_only_is_found():
    """The model is wrong unless the batch is 2, the first size that is tried."""
    wrong = """g (float[B,S] x) => (float[B,S] y) {
        shape = Shape(x) zero = Constant<value = int64 {0}>() two = Constant<value = int64 {2}>()
        batch = Gather(shape, zero) d = Div(batch, two) f = Cast<to = 1>(d) y = Mul(x, f) }"""
    found = verdict("g (float[B,S] x) => (float[B,S] y) { y = Identity(x) }", wrong)
    assert not found.ok


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            "g (float[B] x) => (float[B] y) { y = Neg(x) }",
            "g (float[B] z) => (float[B] y) { y = Neg(z) }",
            "the inputs are z instead of x",
        ),
        (
            "g (float[B] x) => (float[B] y, float[B] z) { y = Neg(x) z = Abs(x) }",
            "g (float[B] x) => (float[B] z, float[B] y) { y = Neg(x) z = Abs(x) }",
            "the outputs are z, y instead of y, z",
        ),
        (
            "g (float[B] x) => (float[B] y) { y = Neg(x) }",
            "g (float[2] x) => (float[2] y) { y = Neg(x) }",
            "input 'x' has a dimension fixed at 2, which was dynamic",
        ),
        (
            "g (float[B] x) => (float[B] y) { y = Neg(x) }",
            "g (float[B] x) => (double[B] y) { n = Neg(x) y = Cast<to = 11>(n) }",
            "output 'y' has another element type",
        ),
        (
            "g (float[B] x) => (float[B] y) { y = Neg(x) }",
            "g (float[B] x) => (float[B,1] y) <int64[1] a = {1}> { y = Unsqueeze(x, a) }",
            "output 'y' has rank 2 instead of 1",
        ),
        (
            "g (int64[B] x) => (int64[B] y) { y = Neg(x) }",
            "g (int64[B] x) => (int64[B] y) { y = Abs(x) }",
            "values differ",
        ),
        (
            "g (float[B] x) => (float[?] y) { y = Neg(x) }",
            "g (float[B] x) => (float[?] y) { y = Concat<axis = 0>(x, x) }",
            "shape [16] instead of [8]",
        ),
        (
            "g (float[B] x) => (float[B] y) { y = Neg(x) }",
            "g (float[B] x) => (float[B] y) { n = Neg(x) s = Sqrt(n) y = Mul(s, s) }",
            "infinities or NaNs where the reference has numbers",
        ),
    ],
)
def test_invalid_output_is_refused(before, after, reason):
    found = verdict(before, after, QUANT)
    assert not found.ok
    assert reason in found.reason


def test_an_output_may_be_declared_more_closely():
    before = "g (float[2] x) => (float[?] y) { y = Neg(x) }"
    assert verdict(before, "g (float[2] x) => (float[2] y) { y = Neg(x) }").ok


def test_a_graph_that_is_not_valid_is_not_run():
    original = model(CHAIN.format(0.5))
    validator = Validator(original)
    original.graph.set_op(original.graph.nodes[0], "And")
    found = validator.check(original, QUANT)
    assert not found.ok
    assert found.error is None
    assert found.reason.startswith("the graph is not valid")
    original.rollback()
    assert validator.check(original, EXACT).ok


def test_inputs_with_defaults_may_become_initializers():
    proto = parse(
        "g (float[2] x, float[2] c) => (float[2] y) <float[2] c = {1, 2}> { y = Add(x, c) }"
    )
    proto.ir_version = 3
    subject = Model.from_proto(proto)
    validator = Validator(subject)
    subject.free_initializers()
    assert validator.check(subject, EXACT).ok


def test_defaults_stay_inputs():
    text = "g (float[2] x, float[2] c) => (float[2] y) <float[2] c = {1, 2}> { y = Add(x, c) }"
    without = "g (float[2] x) => (float[2] y) <float[2] c = {1, 2}> { y = Add(x, c) }"
    assert "the inputs are x instead of x, c" in verdict(text, without).reason


# Models that cannot run --------------------------------------------------------------------------

UNKNOWN = """<ir_version: 10, opset_import: ["" : 21, "my.domain" : 1]>
    g (float[2] x) => (float[2] y) { a = my.domain.Foo(x) y = Neg(a) }"""


def test_a_model_that_does_not_run_is_checked_in_structure():
    original = model(UNKNOWN)
    validator = Validator(original)
    assert validator.note.startswith("not run: ")
    assert "Foo" in validator.note
    assert validator.note.endswith("structure only")
    found = validator.check(original, EXACT)
    assert (found.ok, found.error) == (True, None)
    assert validator.summary(0.0, found) == validator.note
    original.graph.set_inputs(original.graph.nodes[1], ["x", "x"])
    assert not validator.check(original, EXACT).ok


def test_no_feed_that_it_runs_on():
    text = """g (float[2,3] x) => (float[?] y) {
        shape = Constant<value = int64[1] {7}>() y = Reshape(x, shape) }"""
    validator = Validator(model(text))
    assert "Reshape" in validator.note
    assert validator.check(model(text), EXACT).ok


def test_nondeterministic_outputs_are_excluded_and_named():
    text = """g (float[B] x) => (float[B] y, float[B] z) {{
        r = RandomNormalLike(x) y = Add(x, r) z = {}(x) }}"""
    validator = Validator(model(text.format("Neg")))
    assert "'y'" in validator.note
    assert validator.check(model(text.format("Neg")), EXACT).ok
    assert not validator.check(model(text.format("Abs")), FLOAT).ok


def test_a_library_that_does_not_load(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"no library")
    with pytest.raises(UsageError, match=r"lib\.so"):
        Validator(model(CHAIN.format(0.5)), custom_ops=[str(library)])


def test_errors_of_the_runtime_on_the_original_are_allowed():
    """Every other sum lies halfway between two steps, where the fused kernel rounds differently."""

    def made(scale):
        proto = parse(f"""g (float[B,8] x) => (float[B,8] y)
            <float s = {{0.1}}, uint8 z = {{128}}, int8 n = {{0}}, float t = {{0.02}},
             float u = {{{scale}}}> {{
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
            e = DequantizeLinear(w, u, n) m = MatMul(d, e)
            o = QuantizeLinear(m, t, z) y = DequantizeLinear(o, t, z) }}""")
        weight = np.random.default_rng(0).integers(-3, 3, (8, 8)).astype(np.int8)
        proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        return Model.from_proto(proto)

    validator = Validator(made(0.1))
    assert validator.check(made(0.1), EXACT).ok
    found = validator.check(made(0.1), EXACT, deployed=True)
    assert found.ok
    assert found.error is not None
    assert found.error > FLOAT.relative
    assert "within that of the original" in found.reason
    assert not validator.check(made(0.13), FLOAT, deployed=True).ok


def test_reordering_may_cost_as_much_as_perturbed_inputs():
    """A steep model is allowed up to ten times the usual tolerance."""

    def wave(slope, offset):
        return model(f"""g (float[64] x) => (float[64] y)
            <float s = {{{slope}}}, float o = {{{offset}}}> {{
            a = Mul (x, s) b = Sin (a) y = Add (b, o) }}""")

    steep, steeper, calm = (Validator(wave(slope, 0.0)) for slope in (1e3, 1e5, 1.0))
    assert steep.check(wave(1e3, 2e-4), FLOAT).ok
    assert not steep.check(wave(1e3, 2e-4), EXACT).ok
    assert not steep.check(wave(1e3, 2e-3), FLOAT).ok
    assert not steeper.check(wave(1e5, 2e-3), FLOAT).ok
    assert not calm.check(wave(1.0, 2e-4), FLOAT).ok


# verify ------------------------------------------------------------------------------------------


def test_verify(tmp_path):
    a, b = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(parse(CHAIN.format(0.5)), a)
    onnx.save(parse(CHAIN.format(0.501)), b)
    same = verify(a, parse(CHAIN.format(0.5)))
    assert same.ok
    assert same.feeds == 3
    assert [(o.name, o.dtype, o.shape) for o in same.per_output] == [("y", "float32", (2, 8))]
    different = verify(a, Model.load(b))
    assert not different.ok
    assert different.error == different.per_output[0].max_rel > 1e-4
    assert verify(a, b, tolerance=0.1).ok
    assert json.loads(json.dumps(different.to_json(), allow_nan=False))["outputs"][0]["ok"] is False


def test_verify_models_of_other_types_and_sizes():
    a = "g (float[B,3] x) => (float[B,3] y) { y = Neg(x) }"
    half = "g (float16[B,3] x) => (float16[B,3] y) { y = Neg(x) }"
    assert verify(parse(a), parse(half), tolerance=1e-2).ok
    fixed = verify(parse(a), parse(a.replace("[B,3]", "[1,3]")))
    assert fixed.ok
    assert fixed.feeds == 1
    assert "only some of the sizes" in fixed.note
    with pytest.raises(UsageError, match="none of the input sizes"):
        verify(parse(a), parse(a.replace("[B,3]", "[7,3]")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("x", "z"), "inputs differ"),
        (("y", "z"), "outputs differ"),
        (("float[B]", "int64[B]"), "is float32 in A, int64 in B"),
        (("float[B] x", "float[B,1] x"), "rank"),
    ],
)
def test_models_that_do_not_correspond(change, reason):
    text = "g (float[B] x) => (float[B] y) { y = Neg(x) }"
    with pytest.raises(UsageError, match=reason):
        verify(parse(text), parse(text.replace(*change)))


def test_verify_needs_models_that_run():
    with pytest.raises(RuntimeRefused, match="Foo"):
        verify(parse(UNKNOWN), parse(UNKNOWN))


def test_a_feed_on_which_the_second_model_fails():
    a = "g (float[B] x) => (float[?] y) { y = Neg(x) }"
    b = """g (float[B] x) => (float[?] y) {
        shape = Constant<value = int64[1] {7}>() n = Neg(x) y = Reshape(n, shape) }"""
    found = verify(parse(a), parse(b))
    assert not found.ok
    assert "fails" in found.note
    assert found.to_json()["error"] is None


def test_sequence_outputs():
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    text = "g (float[4] x) => (float[4] y) {{ s = {}(x) y = SplitToSequence(s) }}"

    def made(op):
        proto = parse(text.format(op))
        proto.graph.output[0].type.CopyFrom(kind)
        return Model.from_proto(proto)

    validator = Validator(made("Neg"))
    assert validator.check(made("Neg"), EXACT).ok
    assert not validator.check(made("Abs"), EXACT).ok


def test_large_weights_are_not_copied(tmp_path):
    proto = parse("g (float[B,64] x) => (float[B,64] y) { y = MatMul(x, w) }")
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    original = Model.load(tmp_path / "m.onnx")
    validator = Validator(original)
    graph = original.graph
    halved = graph.constant(weight / 2)
    graph.set_input(graph.nodes[0], 1, halved)
    found = validator.check(original, FLOAT)
    assert not found.ok
    assert found.error == pytest.approx(0.5, abs=0.05)
    original.rollback()
    assert validator.check(original, EXACT, deployed=True).ok


# Weights in memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True], ids=["initializer", "default of an input"])
@pytest.mark.parametrize("optimize", [False, True])
def test_unused_large_weights_do_not_prevent_a_run(declared, optimize):
    proto = parse("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    if declared:
        proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 64]))
    session = Session(Model.from_proto(proto), optimize)
    np.testing.assert_array_equal(session.run({"x": np.ones(2, np.float32)})[0], [-1, -1])


def test_large_weights_used_only_in_a_subgraph_are_mapped():
    proto = parse("""g (bool c) => (float[64, 64] y) {
        y = If <then_branch = t () => (float[64, 64] a) { a = Identity(w) },
                else_branch = e () => (float[64, 64] b) { b = Neg(w) }> (c) }""")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    (found,) = Session(Model.from_proto(proto)).run({"c": np.array(False)})
    np.testing.assert_array_equal(found, -np.ones((64, 64)))


@pytest.mark.parametrize(
    "body",
    [
        "(float[2] x) => (float[2] y) { y = Add(x) }",
        "(float[2] x) => (float[2] y) { y = Relu <foo = 1> (x) }",
        "(float[2] x) => (float[2] y) <int64[2] w = {1, 2}> { y = Add(x, w) }",
        "(float[2] x) => (int64[2] y) { y = Relu(x) }",
    ],
)
def test_models_that_runtime_and_checker_reject_are_refused(body: str) -> None:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {body}')
    with pytest.raises(ModelError, match="invalid"):
        Validator(Model.from_proto(proto))


@pytest.mark.parametrize("op", ["NoSuchOperator", "Gelu"])
def test_an_unknown_operator_is_checked_in_structure(op: str) -> None:
    body = f"g (float[2] x) => (float[2] y) {{ y = {op}(x) }}"
    text = f'<ir_version: 8, opset_import: ["" : 17]> {body}'
    assert "structure only" in Validator(Model.from_proto(onnx.parser.parse_model(text))).note


def test_a_model_without_any_stable_output() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x) => (float[4] y) { y = RandomNormalLike(x) }
    """
    validator = Validator(Model.from_proto(onnx.parser.parse_model(text)))
    assert validator.check(Model.from_proto(onnx.parser.parse_model(text)), EXACT).ok
    assert "'y'" in validator.note


# Memory of the analysis --------------------------------------------------------------------------


def test_the_analyzed_graph_is_freed_before_a_session_opens(monkeypatch):
    seen = []
    monkeypatch.setattr(generate, "_LARGE_GRAPH", 1)
    analyzed = generate.analyzed

    def watched(original):
        graph = analyzed(original)
        seen.append(weakref.ref(graph))
        return graph

    def opened(*args, **options):
        assert [ref() for ref in seen] == [None]
        return Session(*args, **options)

    monkeypatch.setattr(generate, "analyzed", watched)
    monkeypatch.setattr(reference, "Session", opened)
    assert len(Validator(model(CHAIN.format(0.5))).feeds) == 3


def test_the_runtime_error_is_preferred_to_that_of_the_analysis(monkeypatch):
    def stumbles(*_):
        raise IndexError("an operator without its inputs")

    monkeypatch.setattr(reference, "FeedGenerator", stumbles)
    with pytest.raises(RuntimeRefused):
        Reference.of(model("g (float[2] x) => (float[2] y) { y = Unknown(x) }"))
    with pytest.raises(IndexError):
        Reference.of(model("g (float[2] x) => (float[2] y) { y = Relu(x) }"))
