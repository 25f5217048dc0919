"""`opset` as a pass: the opset reached, nodes that stop it, and ONNX's own old models."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser
from onnx.backend.test import loader

import toolkit
from passes.opset import adapter_table
from passes.opset.opset import Opset
from tests.passes.opset.lifting import assert_same, check_structure, lift, model_of
from toolkit.errors import RuntimeRefused, UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.runtime import MAX_OPSET
from toolkit.runtime.session import Session
from toolkit.settings import OpsetLimit, Settings


def test_nodes_in_branches() -> None:
    text = """(bool c, float[2,3] x) => (float[2,3] y) {
        y = If (c) <
            then_branch = t () => (float[2,3] p) { p = Clip <min = 0.0> (x) },
            else_branch = e () => (float[2,3] p) { q = ReduceSum <axes = [1]> (x) p = Mul (x, q) }
        > }"""
    proto = model_of(10, text)
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    model, notes = lift(proto, 23)
    check_structure(model, 23)
    assert notes == ["adapted to opset 23: 1 Clip, 1 ReduceSum"]
    for choice in (True, False):
        feeds = {"c": np.array(choice), "x": x}
        expected = Session(Model.from_proto(proto)).run(feeds)
        assert_same(expected, Session(model).run(feeds))


def test_initializers_stop_being_inputs() -> None:
    text = "(float[2] x, float[2] w) => (float[2] y) <float[2] w = {1.0, 2.0}> { y = Add (x, w) }"
    model, _ = lift(model_of(7, text, ir=3), 23)
    assert model.graph.inputs == ["x"]
    assert model.ir_version == 11


# -- where it ends

STUCK = {
    "unknown": (9, 9, "y = GRUUnit (x)", "is not an ONNX operator"),
    "training": (
        9,
        13,
        "y, m, v, a, b = BatchNormalization (x, s, s, s, s) z = Add (a, a)",
        "statistics of its batch",
    ),
    "integer_erf": (9, 12, "i = Cast <to = 6> (x) e = Erf (i) y = Cast <to = 1> (e)", "integers"),
    "tensorflow": (
        11,
        12,
        'y = Resize <mode = "linear", coordinate_transformation_mode = "tf_half_pixel_for_nn">'
        " (x, r, t)",
        "tf_half_pixel_for_nn",
    ),
    "no_kernel": (10, 21, "y = RandomNormalLike (x)", "no kernel from opset 22 on"),
}


@pytest.mark.parametrize("name", STUCK)
def test_stops_where_a_node_cannot_go_on(name: str) -> None:
    opset, reached, body, reason = STUCK[name]
    text = f"""(float[4,2] x) => (float[a,b] y)
        <float[2] s = {{1.0, 2.0}}, float[0] r = {{}}, float[2] t = {{2.0, 2.0}}>
        {{ u = Clip <min = 0.5> (x) {body} w = Unsqueeze <axes = [0]> (u) }}"""
    if opset >= 11:
        text = text.replace("Clip <min = 0.5> (x)", "Neg (x)")
    if "z = " in body:
        text = text.replace("(float[a,b] y)", "(float[a,b] y, float[2] z)")
    proto = model_of(opset, text)
    model, notes = lift(proto, 23)
    assert model.opsets[""] == reached
    model.graph.verify()
    assert notes[0].startswith(f"stays at opset {reached}, not 23: ")
    assert reason in notes[0]
    if reached == opset:
        assert not len(model.journal)
    else:
        onnx.checker.check_model(model.inlined_proto(), full_check=True)


def test_missing_kernels_do_not_stop_a_model_for_others() -> None:
    text = "(float[4,2] x) => (float[4,2] y) { y = RandomNormalLike (x) }"
    model, notes = lift(model_of(10, text), 23, target="onnx")
    assert (model.opsets[""], notes) == (23, [])


def test_a_version_that_did_not_hold_ends_the_lift() -> None:
    text = "(float[2,3] x) => (float[2,3] y) { a = ReduceSum <axes = [1]> (x) y = Mul (a, x) }"
    model = Model.from_proto(model_of(9, text))
    model.journal.veto_rule("opset-13")
    Opset().run(model, Context())
    assert model.opsets[""] == 12
    assert [r.rule for r in model.journal.rewrites] == ["opset-10", "opset-11", "opset-12"]


def test_a_wrong_adapter_costs_only_its_version_and_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(adapter_table.ADAPTERS[13], "Softmax", lambda site: site.set(axis=0))
    text = "(float[2,3] x) => (float[2,3] y) { a = Clip <max = 0.5> (x) y = Softmax (a) }"
    model = Model.from_proto(model_of(9, text))
    result = Pipeline([Opset()]).run(model)
    assert model.opsets[""] == 12
    assert [undone.rule for undone in result.passes[0].undone] == ["opset-13"]


def test_each_version_is_one_rewrite_and_every_prefix_runs() -> None:
    text = """(float[2,3] x) => (float[a,b] y) {
        a = ReduceSum <axes = [1]> (x) b = Mul (a, x) c = Clip <max = 0.5> (b)
        d = ReduceMean <axes = [0]> (c) y = Softmax (d) }"""
    proto = model_of(9, text)
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    expected = Session(Model.from_proto(proto)).run({"x": x})
    model, _ = lift(proto, 23)
    journal = model.journal
    starts = [r.start for r in journal.rewrites]
    assert len(starts) == 23 - 9
    for index, end in enumerate([*starts[1:], len(journal)]):
        journal.seek(end)
        assert model.opsets[""] == 10 + index
        assert_same(expected, Session(model).run({"x": x}))


@pytest.mark.parametrize("to", [0, MAX_OPSET + 1])
def test_opsets_that_onnxruntime_does_not_load(to: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        Opset(to=to)


# -- the limit of a whole run

OLD = "(float[2,3] x) => (float[2,3] y) { a = Clip <max = 0.5> (x) y = Softmax (a) }"


@pytest.mark.parametrize(
    ("limit", "reached"), [(None, 23), (13, 13), (23, 23), (26, 23), (9, 9), (5, 9), ("keep", 9)]
)
def test_the_limit_bounds_the_default(limit: OpsetLimit, reached: int) -> None:
    model, ctx = Model.from_proto(model_of(9, OLD)), Context(Settings(opset=limit))
    Opset().run(model, ctx)
    assert model.opsets[""] == reached


@pytest.mark.parametrize("limit", [13, "keep"])
def test_an_opset_of_its_own_goes_beyond_the_limit(limit: OpsetLimit) -> None:
    model, ctx = Model.from_proto(model_of(9, OLD)), Context(Settings(opset=limit))
    Opset(to=20).run(model, ctx)
    assert model.opsets[""] == 20


def test_a_model_above_the_limit_stays_where_it_is() -> None:
    text = "(float[2,3] x) => (float[2,3] y) { y = Softmax (x) }"
    model = Model.from_proto(model_of(21, text))
    Opset().run(model, Context(Settings(opset=17)))
    assert model.opsets[""] == 21
    assert not len(model.journal)


# -- functions

FUNCTION = """<ir_version: 8, opset_import: ["" : 15, "local" : 1]>
    g (float[2,3] x) => (float[2,1] y) {{ a = Relu (x) y = local.Total {call} (a) }}
    <opset_import: ["" : 15], domain: "local">
    Total {parameters} (x) => (y) {{ m = ReduceMean <{attributes}> (x) y = Mul (m, m) }}"""


def test_function_bodies_rise_with_the_model() -> None:
    text = FUNCTION.format(call="", parameters="", attributes="axes = [1]")
    proto = parser.parse_model(text)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    model, notes = lift(proto, 23)
    check_structure(model, 23)
    assert notes == ["adapted to opset 23: 1 ReduceMean"]
    assert [e.version for e in model.functions[0].opset_import] == [23]
    assert_same(Session(Model.from_proto(proto)).run(feeds), Session(model).run(feeds))
    model.journal.rollback()
    assert list(model.functions) == list(proto.functions)


def test_function_with_attributes_of_its_caller() -> None:
    text = FUNCTION.format(
        call="<over = [1]>", parameters="<over>", attributes="axes: ints = @over"
    )
    model, notes = lift(parser.parse_model(text), 23)
    assert model.opsets[""] == 17
    assert [e.version for e in model.functions[0].opset_import] == [17]
    assert "inline functions first" in notes[0]


# -- ONNX's own tests


def stored(kind: str) -> list:
    folders = (
        (case, Path(case.model_dir or "nowhere")) for case in loader.load_model_tests(kind=kind)
    )
    return [case for case, folder in folders if (folder / "model.onnx").exists()]


def read_tensor(path: Path, declared: onnx.ValueInfoProto):
    raw = path.read_bytes()
    if declared.type.WhichOneof("value") == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(raw))
    return numpy_helper.to_array(TensorProto.FromString(raw))


@pytest.mark.parametrize("kind", ["simple", "pytorch-operator", "pytorch-converted"])
def test_old_models_of_onnx(kind: str) -> None:
    """Models of opsets 6 to 12 as ONNX ships them, with their inputs and expected outputs."""
    lifted = 0
    for case in stored(kind):
        folder = Path(case.model_dir)
        proto = onnx.load(folder / "model.onnx")
        if "" not in {e.domain for e in proto.opset_import}:
            continue
        data = folder / "test_data_set_0"
        values = sorted(data.glob("input_*.pb"), key=lambda p: int(re.findall(r"\d+", p.stem)[0]))
        weights = {t.name for t in proto.graph.initializer}
        declared = [v for v in proto.graph.input if v.name not in weights]
        inputs = zip(declared, values, strict=True)
        feeds = {v.name: read_tensor(path, v) for v, path in inputs}
        expected = [
            read_tensor(data / f"output_{i}.pb", v) for i, v in enumerate(proto.graph.output)
        ]
        relative = 1e-3
        with contextlib.suppress(RuntimeRefused):  # else what ONNX expects has to do
            expected, relative = Session(Model.from_proto(proto)).run(feeds), 1e-6
        for to in (13, 18, 23, 26):
            model, notes = lift(proto, to)
            assert not any("stays at" in note for note in notes), (case.name, notes)
            try:
                actual = Session(model).run(feeds)
            except RuntimeRefused:
                assert relative == 1e-3, case.name  # the original did run
                continue
            assert_same(list(expected), actual, relative)
            lifted += 1
    assert lifted > {"simple": 50, "pytorch-operator": 100, "pytorch-converted": 250}[kind]


def test_a_kernel_that_adds_up_in_another_order_is_no_obstacle() -> None:
    """onnxruntime's AveragePool of opset 19 is another one than that of opset 11."""
    text = """(float[1,3,128,128] x) => (float[1,3,1,1] y) {
        y = AveragePool <kernel_shape = [128, 128]> (x) }"""
    found = toolkit.optimize(model_of(11, text), "opset")
    assert found.model.opsets[""] == 23
    assert not found.passes[0].undone
