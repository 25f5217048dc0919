"""Fixed dimensions and frozen inputs, proven against the model without them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import toolkit
from tests import ort
from tests.checks import parse
from toolkit import EXACT, FLOAT, Calib, Model, UsageError
from toolkit.pass_manager.specialize import specialize
from toolkit.verification.reference import Reference
from toolkit.verification.validator import Validator

SHARED = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, seq, 4] x, int64[batch, seq] mask, float[2, batch, 4] state)
    => (float[batch, total] y, float[2, batch, 4] s) <int64[1] axis = {2}> {
    m = Cast <to = 1> (mask)
    z = ReduceSum <keepdims = 0> (x, axis)
    shape = Shape (mask)
    like = ConstantOfShape (shape)
    y0 = Mul (z, m)
    y = Add (y0, like)
    s = Neg (state)
}"""

RECURRENT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, samples] input, float[1, batch, 2] state, int64 sr)
    => (float[batch, n] output, float[1, batch, 2] stateN)
    <int64 wide = {16000}, int64[1] first = {0}, int64[1] second = {1}> {
    is_wide = Equal (sr, wide)
    output, stateN = If (is_wide) <
        then_branch = t () => (float[batch, n1] o1, float[1, batch, 2] n2) {
            rate = Cast <to = 1> (sr)
            o0 = Div (input, rate)
            o1 = Relu (o0)
            n2 = Tanh (state)
        },
        else_branch = e () => (float[batch, n3] o2, float[1, batch, 2] n4) {
            dims = Shape (input)
            length = Gather (dims, second)
            long = Greater (length, first)
            o2 = If (long) <
                then_branch = t2 () => (float[batch, n5] a) { a = Neg (input) },
                else_branch = e2 () => (float[batch, n6] b) { b = Abs (input) }>
            n4 = Identity (state)
        }>
}"""


def declared(model: Model, outputs: bool = False) -> dict[str, list[Any]]:
    values = model.graph.interface_outputs() if outputs else model.graph.interface_inputs()
    return {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values
    }


def specialized(text: str, fix: Any = (), freeze: Any = ()) -> Model:
    model = Model.from_proto(parse(text))
    specialize(model, dict(fix), dict(freeze))
    model.graph.verify()
    return model


def optimized(text: str, passes: str = "simplify", **options: Any) -> toolkit.Result:
    return toolkit.optimize(parse(text), passes, **options)


def operators(model: Model) -> Counter[str]:
    return Counter(node.op_type for node in model.nodes())


# -- fix


def test_a_dimension_is_fixed_in_every_input_and_output() -> None:
    result = optimized(SHARED, fix={"batch": 1})
    assert declared(result.model) == {"x": [1, "seq", 4], "mask": [1, "seq"], "state": [2, 1, 4]}
    assert declared(result.model, outputs=True) == {"y": [1, "total"], "s": [2, 1, 4]}
    assert "specialized to batch=1" in result.proof
    assert "batch" not in result.proof.split("specialized")[0], "it is not free any more"
    assert "seq" in result.proof.split("specialized")[0]


def test_sizes_of_outputs_that_follow_are_declared() -> None:
    result = optimized(SHARED, fix={"batch": 2, "x:1": 5})
    assert declared(result.model, outputs=True)["y"] == [2, 5]
    assert "Shape" not in operators(result.model)


def test_formulas_of_a_fixed_dimension_become_numbers() -> None:
    proto = parse(SHARED.replace("state)", "state, float[total] u)", 1))
    proto.graph.input[3].type.tensor_type.shape.dim[0].dim_param = "2*seq + past"
    model = Model.from_proto(proto)
    specialize(model, {"seq": 3}, {})
    assert declared(model)["u"] == ["past + 6"]
    with pytest.raises(UsageError, match=r"this dimension is past \+ 6; fix past instead"):
        specialize(model, {"u:0": 7}, {})


def test_axes_without_a_name_are_fixed_one_by_one() -> None:
    text = SHARED.replace("batch", "?")
    found = declared(specialized(text, {"x:0": 1, "mask:-2": 1}))
    assert found == {"x": [1, "seq", 4], "mask": [1, "seq"], "state": [2, 0, 4]}


def test_an_input_with_a_colon_in_its_name() -> None:
    text = "g (float[N] x) => (float[N] y) { y = Neg (x) }"
    proto = parse(text)
    proto.graph.input[0].name = proto.graph.node[0].input[0] = "x:0"
    model = Model.from_proto(proto)
    specialize(model, {"x:0:0": 3}, {})
    assert declared(model) == {"x:0": [3]}


def test_types_in_subgraphs_are_fixed_too() -> None:
    model = specialized(RECURRENT, {"batch": 3})
    inner = [g.interface_outputs()[0] for g in model.graphs() if g.parent is not None]
    assert {v.type.tensor_type.shape.dim[0].dim_value for v in inner} == {3}


def test_a_size_that_the_model_has_already_is_accepted() -> None:
    assert declared(specialized(SHARED, {"x:2": 4}))["x"] == ["batch", "seq", 4]


# -- freeze


def test_a_frozen_input_decides_the_control_flow() -> None:
    original = parse(RECURRENT)
    result = optimized(RECURRENT, freeze={"sr": 16000})
    assert result.model.graph.inputs == ["input", "state"]
    assert operators(result.model) == {"Div": 1, "Relu": 1, "Tanh": 1}
    feed = {
        "input": np.ones((2, 5), np.float32),
        "state": np.ones((1, 2, 2), np.float32),
    }
    wanted = ort.run(original, {**feed, "sr": np.array(16000)})
    for old, new in zip(wanted, ort.run(result.model.inlined_proto(), feed), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_other_value_takes_the_other_branch() -> None:
    result = optimized(RECURRENT, freeze={"sr": "8000"}, fix={"samples": 256})
    assert operators(result.model) == {"Neg": 1, "Identity": 1}


def test_control_flow_that_the_choices_leave_open_stays() -> None:
    assert operators(optimized(RECURRENT, fix={"batch": 1}).model)["If"] == 2


def test_the_reference_is_the_original_model() -> None:
    """A wrong specialization fails: the frozen value is not the one that was asked for."""
    original = Model.from_proto(parse(RECURRENT))
    model = specialized(RECURRENT, freeze={"sr": 16000})
    reference = Reference.of(model, original=original)
    model.frozen["sr"] = np.array(8000)
    other = Reference.of(model, original=original)
    first, second = reference.feeds.runs[0], other.feeds.runs[0]
    assert set(first.feed) == {"input", "state"}
    assert not np.array_equal(first.outputs[1], second.outputs[1])


def test_an_optional_input_gives_up_its_default() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N] x, float k) => (float[N] y) <float k = {2}> { y = Mul (x, k) }"""
    model = specialized(text, freeze={"k": 3})
    assert model.graph.inputs == ["x"]
    assert model.graph.const("k") == 3


def test_before_ir_version_4_the_initializer_stays_an_input() -> None:
    text = """<ir_version: 3, opset_import: ["" : 8]>
        g (float[N, 2] x, float[2] w, float k) => (float[N, 2] y) <float[2] w = {1, 2}>
        { a = Mul (x, w) y = Add (a, k) }"""
    result = optimized(text, freeze={"k": 3}, fix={"N": 2})
    assert result.model.graph.feeds == ["x"]
    got = ort.run(result.model.inlined_proto(), {"x": np.ones((2, 2), np.float32)})
    np.testing.assert_array_equal(got[0], [[4, 5], [4, 5]])
    with pytest.raises(UsageError, match="no input 'w'"):
        optimized(text, freeze={"w": [1, 2]})


def test_an_array_fixes_the_dimensions_in_its_shape() -> None:
    result = optimized(SHARED, freeze={"mask": np.ones((2, 3), np.int64)})
    assert declared(result.model) == {"x": [2, 3, 4], "state": [2, 2, 4]}


def test_a_frozen_input_that_is_an_output() -> None:
    text = "g (float[N] x, float[2] k) => (float[N] y, float[2] k) { y = Neg (x) }"
    assert specialized(text, freeze={"k": [1, 2]}).graph.outputs == ["y", "k"]


def test_a_model_whose_inputs_are_all_frozen() -> None:
    text = "g (float[N] x) => (float[N] y) { y = Neg (x) }"
    result = optimized(text, freeze={"x": [1, 2]})
    assert result.model.graph.inputs == []
    np.testing.assert_array_equal(ort.run(result.model.inlined_proto(), {})[0], [-1, -2])


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("int64", 5, 5),
        ("int64[1]", "5", [5]),
        ("int32[2]", "1, 2", [1, 2]),
        ("float[2]", "[0.5,2]", [0.5, 2]),
        ("float", 3, 3),
        ("bool", "true", True),
        ("string", "en", "en"),
        ("string[2]", '["a", "b"]', ["a", "b"]),
        ("float16", 1.5, 1.5),
    ],
)
def test_values_take_the_type_of_the_input(kind: str, value: Any, wanted: Any) -> None:
    text = f"g (float[N] x, {kind} k) => (float[N] y) {{ z = Identity (k) y = Neg (x) }}"
    model = specialized(text, freeze={"k": value})
    found = model.graph.const("k")
    assert found is not None
    assert np.array_equal(found, np.array(wanted, found.dtype))


# -- samples


def recurrent_sample(**more: Any) -> dict[str, Any]:
    feed = {"input": np.ones((2, 4), np.float32), "state": np.ones((1, 2, 2), np.float32)}
    return {**feed, **more}


@pytest.mark.parametrize("more", [{}, {"sr": np.array(16000)}])
def test_samples_may_contain_the_frozen_input(more: dict[str, Any]) -> None:
    result = optimized(RECURRENT, freeze={"sr": 16000}, samples=[recurrent_sample(**more)])
    assert "4 feeds" in result.proof


def test_samples_with_another_value_or_size_are_refused() -> None:
    other = recurrent_sample(sr=np.array(8000))
    with pytest.raises(UsageError, match="'sr' differs from its frozen value"):
        optimized(RECURRENT, freeze={"sr": 16000}, samples=[other])
    with pytest.raises(UsageError, match=r"'input' has shape \[2, 4\]"):
        optimized(RECURRENT, fix={"samples": 5}, samples=[recurrent_sample(sr=np.array(1))])


LINEAR = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, 4] x, int64 sr) => (float[batch, 4] y) <float[4, 4] w = {1, 0, 0, 0, 0, 2, 0, 0,
0, 0, 3, 0, 0, 0, 0, 4}> { r = Cast <to = 1> (sr) a = MatMul (x, w) y = Mul (a, r) }"""


@pytest.mark.parametrize("kind", ["dicts", "npz"])
def test_calibration_data_may_contain_the_frozen_input(kind: str, tmp_path: Any) -> None:
    rows = np.ones((3, 4), np.float32)
    path = tmp_path / "calib.npz"

    def source(rate: int) -> Any:
        if kind == "dicts":
            return [{"x": rows, "sr": np.array(rate)}]
        np.savez(path, x=rows, sr=np.full(3, rate))
        return str(path)

    passes = "quantize-static:min_elements=1"
    result = optimized(LINEAR, passes, freeze={"sr": 2}, calib=Calib(source(2)))
    assert not result.notes
    with pytest.raises(UsageError, match="'sr' differs from its frozen value"):
        optimized(LINEAR, passes, freeze={"sr": 2}, calib=Calib(source(3)))


# -- bad input


@pytest.mark.parametrize(
    ("fix", "freeze", "reason"),
    [
        ({"bach": 1}, {}, r"no dimension 'bach': did you mean 'batch'\? its inputs are x float32"),
        ({"total": 1}, {}, "no dimension 'total'"),
        ({"y:0": 1}, {}, "no input 'y'"),
        ({"x:3": 1}, {}, r"fix x:3: 'x' is float32\[batch, seq, 4\]"),
        ({"x:b": 1}, {}, "'b' is not an axis"),
        ({"x:2": 5}, {}, "this dimension is 4 in the model"),
        ({"batch": 0}, {}, "a size is an integer, 1 or more"),
        ({"batch": "two"}, {}, "a size is an integer, 1 or more"),
        ({"batch": 1.5}, {}, "a size is an integer, 1 or more"),
        ({"batch": True}, {}, "a size is an integer, 1 or more"),
        ({"batch": 1, "x:0": 2}, {}, "'batch' is given two sizes, 1 and 2"),
        ({"mask:0": 1}, {"mask": [[1]]}, "'mask' is frozen, which fixes its shape"),
        ({"batch": 1}, {"mask": [[1], [1]]}, r"has shape \[2, 1\]; the model takes int64\[1, seq"),
        ({}, {"msk": 1}, "no input 'msk': did you mean 'mask'"),
        ({}, {"mask": 1}, "has rank 0"),
        ({}, {"mask": [[0.5]]}, "is float64; the model takes int64"),
        ({}, {"mask": "yes"}, "is 'yes'; the model takes int64"),
        ({}, {"mask": [[1], [1, 2]]}, "is not an array"),
        ({}, {"mask": None}, "is None; the model takes int64"),
        ({}, {"mask": {"a": 1}}, "the model takes int64"),
    ],
)
def test_a_choice_that_does_not_fit_the_model(fix: Any, freeze: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as raised:
        specialized(SHARED, fix, freeze)
    assert "\n" not in str(raised.value)


def test_inputs_without_a_shape_or_a_tensor() -> None:
    text = "g (float[] x, seq(float[N]) s) => (float[] y) { y = Neg (x) }"
    proto: ModelProto = parse(text)
    with pytest.raises(UsageError, match="freeze: input 's' is not a tensor"):
        specialize(Model.from_proto(proto), {}, {"s": [1]})
    with pytest.raises(UsageError, match="input 's' declares no shape"):
        specialize(Model.from_proto(proto), {"s:0": 1}, {})


def test_a_model_that_fails_at_that_size() -> None:
    text = """g (float[N, 4] x) => (float[M, 3] y) <int64[2] rows = {-1, 3}>
        { y = Reshape (x, rows) }"""
    assert optimized(text, fix={"N": 3}).passes
    with pytest.raises(UsageError, match=r"the model (does not run|is not valid) with N=2"):
        optimized(text, fix={"N": 2})


def test_a_model_that_fails_at_that_value() -> None:
    text = """g (float[N, 4] x, int64 at) => (float[N] y) { y = Gather <axis = 1> (x, at) }"""
    assert optimized(text, freeze={"at": 3}).passes
    with pytest.raises(UsageError, match="the model does not run with at=7 "):
        optimized(text, freeze={"at": 7})


def test_a_model_that_does_not_run_at_all_is_specialized_by_structure() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]>
        g (float[N, 4] x, float k) => (float[N, 4] y) { a = custom.Op (x) y = Mul (a, k) }"""
    result = optimized(text, fix={"N": 2}, freeze={"k": 1})
    assert "structure only" in result.proof
    assert declared(result.model) == {"x": [2, 4]}


def test_a_decoder_that_is_fixed_at_one_token_is_proven_at_several_cache_sizes() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, sequence_length, 4] x, float[batch, total_sequence_length] mask,
           float[batch, past_sequence_length, 4] past)
        => (float[batch, total_sequence_length, 4] y) <int64[1] axis = {2}> {
            all = Concat <axis = 1> (past, x)
            m = Unsqueeze (mask, axis)
            y = Mul (all, m)
        }"""
    result = optimized(text, fix={"sequence_length": 1})
    assert "total_sequence_length" in result.proof
    assert "structure only" not in result.proof


TWO_RATES = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, samples] x, int64 sr) => (float[a, b] y)
<int64 wide = {3}, float[3, 1] w = {1, 2, 3}, float[2, 1] n = {1, 2}> {
    is_wide = Equal (sr, wide)
    y = If (is_wide) <
        then_branch = t () => (float[a1, b1] p) { p = MatMul (x, w) },
        else_branch = e () => (float[a2, b2] q) { q = MatMul (x, n) }>
}"""


@pytest.mark.parametrize("validate", ["each", "final", "off"])
def test_a_branch_that_is_never_taken_may_not_fit_the_size(validate: str) -> None:
    result = optimized(
        TWO_RATES, "cleanup", fix={"samples": 3}, freeze={"sr": 3}, validate=validate
    )
    assert operators(result.model) == {"MatMul": 1}
    with pytest.raises(UsageError, match="the model is not valid with samples=3, sr=2"):
        optimized(TWO_RATES, fix={"samples": 3}, freeze={"sr": 2}, validate=validate)
    with pytest.raises(UsageError, match="the model is not valid with samples=3"):
        optimized(TWO_RATES, fix={"samples": 3}, validate=validate)


def test_a_rewrite_that_breaks_the_model_is_found_against_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while control flow is removed, before the first verification."""
    from passes.simplify.control_flow import branches

    monkeypatch.setattr(branches, "known_flag", lambda *_: False)
    with pytest.raises(toolkit.NotProven, match="the result, specialized, differs"):
        optimized(RECURRENT, freeze={"sr": 16000})


def test_the_original_as_deployed_is_not_the_specialized_model() -> None:
    """A wrong model is not excused by the error of the original in optimized runs."""
    original = Model.from_proto(parse(RECURRENT))
    model = specialized(RECURRENT, freeze={"sr": 16000})
    validator = Validator(model, unspecialized=original)
    wrong = specialized(RECURRENT, freeze={"sr": 8000})
    assert validator.check(model, EXACT, deployed=True).ok
    assert not validator.check(wrong, EXACT, deployed=True).ok
    assert not validator.check(wrong, FLOAT).ok


@pytest.mark.parametrize("size", [10**20, 2**63 - 1, 2**62, 5 * 10**6])
def test_a_size_that_no_input_can_have_is_refused(size: int) -> None:
    subject = parse("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
    with pytest.raises(UsageError, match=r"is an integer, 1 or more|would exceed 32 MB"):
        toolkit.optimize(subject, "cse", fix={"N": size})


@pytest.mark.parametrize("options", [{"fix": {5: 2}}, {"fix": [("N", 2)]}, {"freeze": {3: 1}}])
def test_choices_are_dicts_by_name(options: dict[str, Any]) -> None:
    subject = parse("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
    with pytest.raises(UsageError, match="give a dict by name"):
        toolkit.optimize(subject, "cse", **options)


def test_a_frozen_value_beyond_its_type_is_refused() -> None:
    subject = parse("g (float s) => (float y) { y = Relu (s) }")
    with pytest.raises(UsageError, match="exceeds the range of float32"):
        toolkit.optimize(subject, "cse", freeze={"s": 1e300})
