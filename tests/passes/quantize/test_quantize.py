"""`quantize`: what is chosen with and without data, the budget, plans, and bad input."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toolkit
from passes.quantize import quantize
from passes.quantize.bias_correction.correct_bias import CorrectBias, Corrections
from passes.quantize.quantize import Quantize
from passes.quantize.search.candidate_eval import Trials
from tests.checks import parse, random_feeds
from tests.passes.fuse.constants import floats, stored, typed
from toolkit.calibrate.data import Calib
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes
from toolkit.pass_manager.result import PassResult, Result
from toolkit.quantization.plan import Plan
from toolkit.runtime.cost_table import Tunable

SMALL_FIRST = ", ".join(
    (
        floats("a", 8, 3, 3, 3), floats("b", 64, 8, 3, 3), floats("c", 64, 64, 3, 3),
        floats("d", 64, 128), floats("e", 128),
    )
)  # fmt: skip
NETWORK = """
    a1 = Conv <pads = [1, 1, 1, 1]> (x, a) a2 = Relu (a1)
    b1 = Conv <pads = [1, 1, 1, 1]> (a2, b) b2 = Relu (b1)
    c1 = Conv <pads = [1, 1, 1, 1]> (b2, c) c2 = Add (c1, b2)
    p = GlobalAveragePool (c2) f = Flatten (p)
    y = Gemm (f, d, e)
"""
AUTO = Quantize()
ROWS = "g (float[N, 8192] x) => (float[N, 2] y)"
SIGNATURE = "g (float[N, 3, 16, 16] x) => (float[N, 128] y)"


def network(opset: int = 21) -> Model:
    return Model.from_proto(parse(typed(SIGNATURE, SMALL_FIRST, NETWORK, opset)))


def feeds(model: Model, count: int = 6) -> list[Mapping[str, Any]]:
    return [random_feeds(model, seed) for seed in range(count)]


def run_quantize(
    model: Model, item: Any = AUTO, data: Sequence[Mapping[str, Any]] = (), **options: Any
) -> tuple[Result, PassResult]:
    """Run it, untimed; the result, and what the pass itself says."""
    calib = Calib(list(data)) if data else None
    settings: dict[str, Any] = {"measure": False, **options}
    pipeline = Pipeline([item], calib=calib, **settings)
    result = pipeline.run(model)
    return result, next(done for done in result.passes if done.name == item.name)


def ops(model: Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.nodes)


def with_data(item: Any = AUTO, **options: Any) -> tuple[Model, PassResult]:
    subject = network()
    return subject, run_quantize(subject, item, feeds(subject), **options)[1]


# -- what is chosen


def test_without_data_linear_layers_alone_and_it_says_so() -> None:
    subject = network()
    _, done = run_quantize(subject)
    assert done.status == "applied"
    assert ops(subject)["MatMulInteger"] == 1
    assert ops(subject)["Conv"] == 3
    assert "QuantizeLinear" not in ops(subject)
    assert any("3 convolutions stay float" in n and "--calib" in n for n in done.notes)


@pytest.mark.parametrize(
    ("signature", "kind", "nodes", "reason"),
    [
        ("g (float16[N,8,6,6] x) => (y)", "float16", "y = Conv (x, w)", "weights of float16"),
        (
            "g (float[T,N,8,6,6] x, bool c) => (y)",
            "float",
            """y = Scan <num_scan_inputs = 1, body = s (r) => (o) {
                o = If (c) <then_branch = t () => (p) { p = Conv (r, w) },
                            else_branch = e () => (q) { q = Conv (r, w) }> }> (x)""",
            "in a subgraph nested in a Scan",
        ),
    ],
)
def test_samples_are_not_asked_for_where_they_would_not_help(
    signature: str, kind: str, nodes: str, reason: str
) -> None:
    weights = stored("w", np.random.default_rng(0).standard_normal((64, 8, 3, 3)), kind)
    _, done = run_quantize(Model.from_proto(parse(typed(signature, weights, nodes))))
    said = " ".join(done.notes)
    assert reason in said
    assert "--calib" not in said


def test_samples_are_asked_for_where_convolutions_are_in_branches() -> None:
    weights = stored("w", np.random.default_rng(0).standard_normal((64, 8, 3, 3)))
    nodes = """y = If (c) <then_branch = t () => (p) { p = Conv (x, w) },
                           else_branch = e () => (q) { q = Conv (x, w) }>"""
    signature = "g (float[N,8,6,6] x, bool c) => (y)"
    _, done = run_quantize(Model.from_proto(parse(typed(signature, weights, nodes))))
    assert any("2 convolutions stay float" in n and "--calib" in n for n in done.notes)


def test_with_data_convolutions_are_static() -> None:
    subject, done = with_data()
    assert done.status == "applied", done.reason
    assert ops(subject)["MatMulInteger"] == 1
    assert ops(subject)["QuantizeLinear"] > 0
    said = next(note for note in done.notes if note.startswith("in int8"))
    assert "1 dynamic Gemm" in said
    assert "static Conv" in said


@pytest.mark.parametrize(("target", "kept"), [("onnx", "LSTM"), ("ort-cpu", "DynamicQuantizeLSTM")])
def test_only_the_runtime_gets_operators_of_its_own(target: str, kept: str) -> None:
    signature = "g (float[5, N, 32] x) => (float[5, 1, N, 32] y)"
    constants = f"{floats('w', 1, 128, 32)}, {floats('r', 1, 128, 32)}"
    text = typed(signature, constants, "y = LSTM <hidden_size = 32> (x, w, r)", 21)
    subject = Model.from_proto(parse(text))
    run_quantize(subject, target=target)
    assert ops(subject) == {kept: 1}


def test_what_is_said_is_what_was_done() -> None:
    """One of the layers turns out to have weights that no scale fits."""
    weights = np.full((64, 128), 1e-6)
    weights[0] = 1e6
    constants = f"{stored('v', weights)}, {floats('w', 64, 128)}"
    signature = "g (float[N, 64] x) => (float[N, 128] y, float[N, 128] z)"
    subject = Model.from_proto(
        parse(typed(signature, constants, "y = MatMul (x, w) z = MatMul (x, v)", 21))
    )
    _, done = run_quantize(subject)
    assert "in int8: 1 dynamic MatMul" in done.notes
    assert any("'z' stays float" in note for note in done.notes)


def test_layers_that_do_not_pay_stay_float() -> None:
    """The first one, of three channels, by the table of costs."""
    result = with_data()[1]
    assert any("Conv" in n and "float is faster" in n for n in result.notes)


def test_everything_when_size_is_preferred() -> None:
    done = with_data(prefer="size")[1]
    assert any("3 static Conv" in n for n in done.notes)


def test_what_is_larger_in_int8_stays_float_when_size_is_preferred() -> None:
    """18 weights: nodes and scales take more than three quarters of them."""
    text = typed(
        "g (float[N, 1, 8, 8] x) => (float[N, 2, 6, 6] y)",
        floats("w", 2, 1, 3, 3),
        "y = Conv (x, w)",
    )
    subject = Model.from_proto(parse(text))
    result, done = run_quantize(subject, AUTO, feeds(subject), prefer="size")
    assert result.after.bytes <= result.before.bytes
    assert any("static layers stay float: in int8" in note for note in done.notes)


def test_everything_for_other_runtimes() -> None:
    subject, done = with_data(target="onnx")
    assert any("3 static Conv" in n for n in done.notes)
    assert {node.domain for node in subject.graph.nodes} <= {"", "ai.onnx"}


def test_what_is_left_when_a_group_goes_back_has_to_keep_the_budget(monkeypatch) -> None:
    """Biases of the static layers made up for the noise of the dynamic one."""

    def without_static(trials: Trials, plan: Plan) -> Plan:
        return plan.turned([e for e in plan.quantized() if e.scheme == "static"], reason="slow")

    def holds(self: Trials, plan: Plan, times: float = 1.0) -> bool:
        return any(entry.scheme == "static" for entry in plan.quantized())

    monkeypatch.setattr(quantize, "keep_what_pays", without_static)
    monkeypatch.setattr(Trials, "holds", holds)
    subject, done = with_data()
    assert any("nothing is quantized: no part of it" in note for note in done.notes)
    assert not any("undone" in note for note in done.notes)
    assert "MatMulInteger" not in ops(subject)


def test_modes() -> None:
    subject, _ = with_data(Quantize(mode="dynamic"))
    assert ops(subject)["MatMulInteger"] == 1
    assert "QuantizeLinear" not in ops(subject)
    subject, done = with_data(Quantize(mode="static"))
    assert "MatMulInteger" not in ops(subject)
    assert any("static Gemm" in n for n in done.notes)


def test_include_and_exclude() -> None:
    done = with_data(Quantize(exclude=("Gemm", "c1")))[1]
    said = next(note for note in done.notes if note.startswith("in int8"))
    assert said == "in int8: 1 static Conv"
    assert any("excluded" in note for note in done.notes)
    assert any("no node matches 'Nothing'" in n
               for n in with_data(Quantize(exclude=("Nothing",)))[1].notes)  # fmt: skip


def test_a_model_of_an_old_opset_is_lifted_first() -> None:
    subject = network(opset=11)
    _, done = run_quantize(subject, data=feeds(subject))
    assert done.status == "applied", done.reason
    assert subject.opsets[""] >= 13
    subject = network(opset=11)
    with pytest.raises(UsageError, match="needs opset 13"):
        run_quantize(subject, data=feeds(subject), opset="keep")


def test_a_model_that_stays_float_is_not_lifted_and_its_plan_can_be_edited(tmp_path: Path) -> None:
    subject = network(opset=11)
    result, done = run_quantize(subject, Quantize(exclude=("*",)), feeds(subject))
    assert done.status == "unchanged"
    assert subject.opsets[""] == 11
    (written,) = result.plans
    path = tmp_path / "plan.json"
    edited = {"output": "y", "op": "Gemm", "scheme": "dynamic", "axis": 1}
    entries = [edited if e["output"] == "y" else e for e in json.loads(written)["nodes"]]
    path.write_text(json.dumps({"version": 1, "nodes": entries}))
    assert run_quantize(subject, Quantize(plan=path))[1].rules == {"quantize-linear": 1}


def test_a_quantized_model_is_left_as_it_is() -> None:
    subject, _ = with_data()
    before = subject.to_proto().SerializeToString()
    _, again = run_quantize(subject, data=feeds(subject))
    assert again.status == "unchanged"
    assert "quantized already" in again.notes[0]
    assert subject.to_proto().SerializeToString() == before


def test_a_model_with_nothing_to_quantize() -> None:
    subject = Model.from_proto(parse("g (float[N] x) => (float[N] y) { y = Exp (x) }"))
    assert run_quantize(subject)[1].status == "unchanged"


def test_behind_fuse() -> None:
    subject = network()
    pipeline = Pipeline(parse_passes("fuse,quantize"), calib=Calib(feeds(subject)), measure=False)
    done = {result.name: result.status for result in pipeline.run(subject).passes}
    assert done["quantize"] == "applied"


def test_samples_may_be_given_as_they_are(tmp_path: Path) -> None:
    """`toolkit.optimize` takes a pass, and feeds or a path, without a wrapper for either."""
    subject = network()
    data = feeds(subject)
    np.savez(tmp_path / "samples.npz", x=np.concatenate([feed["x"] for feed in data]))
    sources: list[Any] = [data, str(tmp_path / "samples.npz"), tmp_path / "samples.npz"]
    for source in sources:
        done = toolkit.optimize(subject, AUTO, calib=source, measure=False).passes[-1]
        assert (done.name, done.status) == ("quantize", "applied")
        assert any("static Conv" in note for note in done.notes)


# -- accuracy


def test_biases_are_corrected_where_layers_are_static() -> None:
    assert with_data()[1].rules.get("correct-bias")
    assert "correct-bias" not in with_data(Quantize(correct_bias=False))[1].rules
    assert "correct-bias" not in run_quantize(network())[1].rules


def test_corrected_biases_that_break_the_budget_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(_: Corrections, model: Model, ctx: Context) -> None:
        last = [node for node in model.nodes() if node.op_type == "Add"][-1]
        model.graph.begin("correct-bias", last)
        model.graph.set_input(last, 1, model.graph.constant(np.full(128, 1e6, np.float32), "b"))

    monkeypatch.setattr(Corrections, "make", spoil)
    _, done = with_data()
    assert done.status == "applied"
    assert "biases stay: the budget does not hold with corrected ones" in done.notes


def test_biases_are_corrected_by_as_many_samples_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that holds with corrected biases is written with those with which it was tried."""
    measured = iter((3, 5))
    monkeypatch.setattr(
        "passes.quantize.bias_correction.correct_bias.affordable_samples", lambda *_: next(measured)
    )
    taken: list[int | None] = []
    monkeypatch.setattr(CorrectBias, "run", lambda item, *_: taken.append(item.samples))
    subject = network()
    ctx = Context(calibration=Calib(feeds(subject)).open(subject))
    corrections = Corrections()
    corrections.make(subject, ctx)
    corrections.make(subject, ctx)
    assert taken == [3, 3]


def test_scales_can_be_moved_first() -> None:
    done = with_data(Quantize(smooth=True))[1]
    assert done.status == "applied", done.reason


def test_weights_that_are_hard_to_quantize_are_named() -> None:
    numbers = np.full((8192, 2), 1e-3)
    numbers[0, 0] = 100.0
    text = typed(ROWS, stored("w", numbers), "y = MatMul (x, w)", 21)
    subject = Model.from_proto(parse(text))
    done = run_quantize(subject)[1]
    assert any("'w'" in note and "clip-weights" in note for note in done.notes)


# -- the plan


def test_the_plan_can_be_fed_back(tmp_path: Path) -> None:
    first = network()
    result, before = run_quantize(first, Quantize(correct_bias=False), feeds(first))
    (written,) = result.plans
    path = tmp_path / "plan.json"
    path.write_text(written)
    second = network()
    again, done = run_quantize(second, Quantize(plan=path))
    assert done.status == "applied", done.reason
    (said,) = (note for note in before.notes if note.startswith("in int8: "))
    assert said in done.notes
    assert ops(second) == ops(first)
    assert again.plans == [written]


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_a_plan_of_weights_alone_can_be_fed_back(tmp_path: Path, target: str) -> None:
    first, second = network(), network()
    item = Quantize(mode="weight_only", weights="int4")
    (written,) = run_quantize(first, item, target=target)[0].plans
    path = tmp_path / "plan.json"
    path.write_text(written)
    again, done = run_quantize(second, Quantize(plan=path), target=target)
    assert done.status == "applied", done.reason
    assert ops(second) == ops(first) != ops(network())
    assert again.plans == [written]


def test_the_plan_says_what_was_done(tmp_path: Path) -> None:
    """What could not be quantized is float in it, whoever asked for it."""
    unfit = floats("d", 64, 128).replace("{", "{inf, ", 1).rsplit(",", 1)[0] + "}"
    text = typed(SIGNATURE, SMALL_FIRST.replace(floats("d", 64, 128), unfit), NETWORK, 21)
    path = tmp_path / "plan.json"
    path.write_text('{"version": 1, "nodes": [{"output": "y", "scheme": "dynamic", "axis": 1}]}')
    result, done = run_quantize(Model.from_proto(parse(text)), Quantize(plan=path))
    assert any("stays float: it has infinite weights" in note for note in done.notes)
    assert '"scheme": "float"' in result.plans[0]


def test_a_plan_that_names_unknown_nodes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"version": 1, "nodes": [{"output": "zz", "scheme": "static"}]}')
    with pytest.raises(UsageError, match="no node"):
        run_quantize(network(), Quantize(plan=path))


# -- the budget


def test_what_the_budget_does_not_allow_goes_back() -> None:
    done = with_data(max_drop="30dB", metric="sqnr")[1]
    figures = done.quality
    assert figures is None or figures.held
    tight, _ = with_data()
    loose = ops(tight)["QuantizeLinear"]
    some, _ = with_data(max_drop="60dB", metric="sqnr")
    assert ops(some)["QuantizeLinear"] < loose


def test_a_budget_that_cannot_be_kept() -> None:
    subject, done = with_data(max_drop="120dB", metric="sqnr")
    assert done.status == "unchanged"
    assert "QuantizeLinear" not in ops(subject)
    assert any("nothing is quantized" in note for note in done.notes)


# -- timing


def test_groups_are_timed_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    def keep(trials: Any, plan: Plan) -> Plan:
        asked.append(plan)
        return plan

    monkeypatch.setattr(quantize, "keep_what_pays", keep)
    with_data()
    assert len(asked) == 1


def test_timing_for_real() -> None:
    subject = network()
    done = run_quantize(subject, data=feeds(subject), measure=True)[1]
    assert any("the speed of floats" in note for note in done.notes)


def test_no_measure_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr("toolkit.runtime.latency.latency", never)
    assert with_data()[1].status == "applied"


# -- saturation


@pytest.mark.parametrize(
    ("vnni", "option", "reduced", "says"),
    [
        (True, "auto", False, "reduce_range=true"),
        (False, "auto", True, "no VNNI"),
        (None, "auto", False, "reduce_range=true"),
        (True, "true", True, ""),
        (False, "false", False, "this one has none"),
    ],
)
def test_the_range_of_weights(
    monkeypatch: pytest.MonkeyPatch, vnni: bool | None, option: Any, reduced: bool, says: str
) -> None:
    monkeypatch.setattr(quantize, "has_vnni", lambda: vnni)
    subject, done = with_data(Quantize(reduce_range=option))
    weights = [
        value
        for name, tensor in subject.graph.initializers.items()
        if len(tensor.dims) > 1 and (value := subject.graph.const(name)) is not None
        if value.dtype == np.int8
    ]
    assert weights
    assert max(np.abs(w.astype(int)).max() for w in weights) == (64 if reduced else 127)
    if says:
        assert any(says in note for note in done.notes)


# -- options


def test_weights_alone() -> None:
    pytest.importorskip("passes.quantize.schemes.weight_only.quantize_weights")
    subject = network()
    _, done = run_quantize(subject, Quantize(mode="weight_only", weights="int4"))
    assert done.status == "applied", done.reason
    assert "QuantizeLinear" not in ops(subject)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threads": -1}, "threads=-1"),
        ({"smooth": True, "mode": "weight_only"}, "smooth"),
        ({"weights": "int4"}, "mode=weight_only"),
        ({"format": "qop", "mode": "dynamic"}, "format=qop"),
        ({"observer": "mse", "mode": "dynamic"}, "observer=mse"),
        ({"observer": "minmax", "mode": "weight_only"}, "observer=minmax"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(Quantize(), **options)


def test_static_needs_data() -> None:
    with pytest.raises(UsageError, match="calib"):
        run_quantize(network(), Quantize(mode="static"))


def test_it_can_be_tuned() -> None:
    assert isinstance(Quantize(), Tunable)
    assert Quantize().costs_in_use()[0].computations
