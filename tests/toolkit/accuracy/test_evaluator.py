"""The evaluator: good models pass, collapsed ones fail, and a user's metric takes precedence."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import model
from tests.toolkit.accuracy.nets import FEEDS, RANDOM, W, coarse, linear, net
from toolkit.accuracy.evaluator import Evaluator, _affordable
from toolkit.accuracy.requirement import Requirement
from toolkit.calibrate.data import Calib
from toolkit.calibrate.observers import MinMax
from toolkit.errors import UsageError
from toolkit.ir.model import Model


@pytest.mark.parametrize(
    "nodes",
    [
        "y = MatMul (x, w)",  # classes
        "m = MatMul (x, w) y = LpNormalization (m)",  # embedding
        "m = MatMul (x, w) y = Sigmoid (m)",  # scores
        "m = MatMul (x, w) y = Sin (m)",  # regression
    ],
)
@pytest.mark.parametrize("real", [True, False])
def test_int8_passes_and_a_collapsed_model_does_not(nodes, real):
    evaluator = Evaluator(linear(W, nodes), FEEDS, real=real)
    same, good = (
        evaluator.evaluate(linear(W, nodes)),
        evaluator.evaluate(linear(coarse(W, 127), nodes)),
    )
    assert (same.ok, same.worst.loss, same.used, same.noise) == (True, 0, 0, 0)
    assert good.ok, good.reason
    assert 0 < good.noise < 0.01
    for broken in (linear(coarse(W, 1), nodes), linear(np.zeros_like(W), nodes)):
        bad = evaluator.evaluate(broken)
        assert not bad.ok
        assert bad.used > 1
        assert "output 'y'" in bad.reason
        assert "budget" in bad.reason


def test_a_constant_fails_if_values_hardly_vary():
    """On values from 20 to 21 a constant has an SQNR of 36 dB."""
    before = net("m = MatMul (x, w) s = Sigmoid (m) y = Add (s, c)",
                 w=W[:, :1], c=np.full((1, 1), 20, np.float32))  # fmt: skip
    after = net("m = MatMul (x, w) s = Sigmoid (m) y = Add (s, c)",
                w=0 * W[:, :1], c=np.full((1, 1), 20, np.float32))  # fmt: skip
    found = Evaluator(before, FEEDS).evaluate(after)
    assert not found.ok
    assert "around the mean" in found.reason


def test_a_constant_channel_does_not_hide_the_others():
    """A constant feature must not hide the others."""
    before, after = (
        net("m = MatMul (x, w) y = Add (m, c)", w=k * W[:, :1], c=np.full((1, 1), 3e3, np.float32))
        for k in (1, 0)
    )
    found = Evaluator(before, FEEDS).evaluate(after)
    assert not found.ok
    assert "around the mean" in found.reason


@pytest.mark.parametrize("metric", [None, "sqnr", "cosine", "error"])
def test_rounding_is_no_loss(metric):
    """Even with a budget of zero, a different summation order is allowed."""
    evaluator = Evaluator(
        linear(W, "m = MatMul (x, w) y = Sin (m)"), FEEDS, Requirement.of(0, metric)
    )
    assert evaluator.evaluate(linear(W * np.float32(1 + 1e-7), "m = MatMul (x, w) y = Sin (m)")).ok
    assert not evaluator.evaluate(
        linear(W * np.float32(1 + 1e-4), "m = MatMul (x, w) y = Sin (m)")
    ).ok


def test_nans_where_the_float_model_is_finite_fail():
    evaluator = Evaluator(linear(W), FEEDS)
    assert not evaluator.evaluate(linear(W, "m = MatMul (x, w) l = Log (m) y = Add (m, l)")).ok


def test_another_shape_is_a_loss():
    evaluator = Evaluator(linear(W), FEEDS)
    found = evaluator.evaluate(linear(W, "m = MatMul (x, w) y = Concat <axis = 0> (m, m)"))
    assert not found.ok


@pytest.mark.parametrize("name", ["pitch", "start_logits"])
@pytest.mark.parametrize("same", [0, 12])
def test_outputs_of_different_lengths(name, same):
    """One number per frame of a clip or word of a text; the first ones have one length."""

    def frames(w: np.ndarray) -> Model:
        listed = ", ".join(map(str, w.reshape(-1)))
        return model(f"""g (float[1, F, 16] x) => (float[1, F] {name})
            <float[16, 1] w = {{{listed}}}, int64[1] last = {{-1}}>
            {{ m = MatMul (x, w) {name} = Squeeze (m, last) }}""")

    lengths = [20] * same + [10 + at % 7 for at in range(20)]
    feeds = [{"x": RANDOM.standard_normal((1, n, 16)).astype(np.float32)} for n in lengths]
    evaluator = Evaluator(frames(W[:, :1]), feeds)
    assert evaluator.evaluate(frames(coarse(W[:, :1], 127))).ok
    assert not evaluator.evaluate(frames(coarse(W[:, :1], 1))).ok


@pytest.mark.parametrize("last", ["Softmax", "Sigmoid", "LpNormalization", "Identity"])
@pytest.mark.parametrize("axis", [1, 2])
def test_empty_outputs(last, axis):
    """Empty outputs, as of a loop without iterations, are equal or have another shape.

    The scale of a channel tells groups apart, which what is empty does not have.
    """

    def answers(more: int) -> Model:
        return model(f"""g (float[4, 3, 5] x, int64[1] n) => (float[4, A, B] y)
            <int64[1] z = {{0}}, int64[1] a = {{{axis}}}, int64[1] more = {{{more}}},
             float[5] c = {{1, 1, 1000, 1000, 1000}}>
            {{ k = Add (n, more) m = Mul (x, c) s = Slice (m, z, k, a) y = {last} (s) }}""")

    feeds = [{"x": RANDOM.standard_normal((4, 3, 5)).astype(np.float32), "n": np.array([n])}
             for n in (5, 0, 5, 5)]  # fmt: skip
    evaluator = Evaluator(answers(0), feeds)
    assert evaluator.evaluate(answers(0)).ok
    assert not evaluator.evaluate(answers(1)).ok


def test_a_text_has_a_stricter_budget_than_classes():
    """Logits of text recognition: the same noise passes for independent classes only."""

    def reader(w: np.ndarray, name: str) -> Model:
        listed = ", ".join(map(str, w.reshape(-1)))
        return model(f"""g (float[1, F, 16] x) => (float[1, F, 8] {name})
            <float[16, 8] w = {{{listed}}}, float[8] b = {{2.5, 0, 0, 0, 0, 0, 0, 0}}>
            {{ m = MatMul (x, w) {name} = Add (m, b) }}""")

    rng = np.random.default_rng(1)
    feeds = [{"x": rng.standard_normal((1, 40, 16)).astype(np.float32)} for _ in range(20)]
    w = W / 2
    evaluator = Evaluator(reader(w, "logits"), feeds)
    assert evaluator.kinds["logits"].kind == "text"
    assert evaluator.evaluate(reader(coarse(w, 127), "logits")).ok
    noisy = evaluator.evaluate(reader(coarse(w, 6), "logits"))
    assert not noisy.ok
    assert "SQNR" in noisy.reason
    close = evaluator.evaluate(reader(coarse(w, 8), "logits"))
    assert close.ok
    assert "top-1 agreement" in close.summary()
    assert "and SQNR" in close.summary()
    made_up = Evaluator(reader(w, "logits"), feeds, real=False)
    assert made_up.evaluate(reader(coarse(w, 6), "logits")).ok


def test_few_samples_for_screening():
    evaluator = Evaluator(linear(W), FEEDS)
    assert evaluator.evaluate(linear(W)).samples == 64
    assert evaluator.evaluate(linear(W), samples=4).samples == 4


def test_evaluation_stops_far_above_the_budget():
    evaluator = Evaluator(linear(W), FEEDS)
    collapsed, good = linear(np.zeros_like(W)), linear(coarse(W, 127))
    assert evaluator.evaluate(collapsed).samples == len(FEEDS)
    early = evaluator.evaluate(collapsed, stop_above=3.0)
    assert early.samples == 4 < len(FEEDS)
    assert not early.ok
    assert evaluator.evaluate(good, stop_above=3.0) == evaluator.evaluate(good)


def test_evaluation_stops_far_below_the_budget():
    evaluator = Evaluator(linear(W), FEEDS)
    good, near = linear(coarse(W, 127)), linear(coarse(W, 12))
    assert evaluator.evaluate(good, stop_below=0.5).samples == 16
    found = evaluator.evaluate(near, stop_below=0.01)
    assert found.samples == len(FEEDS)


def test_deployed_model_runs_again_only_after_an_edit():
    evaluator = Evaluator(linear(W), FEEDS)
    subject = linear(coarse(W, 127))
    first = evaluator.evaluate(subject, deployed=True)
    assert evaluator.evaluate(subject, deployed=True) is first
    subject.commit()
    assert evaluator.evaluate(subject, deployed=True) is first
    subject.graph.op("Identity", "x")
    assert evaluator.evaluate(subject, deployed=True) is not first


def test_outputs_of_a_calibration_sweep_are_not_computed_again():
    other = linear(coarse(W, 127))
    expected = Evaluator(linear(W), FEEDS).evaluate(other)
    data = Calib(FEEDS).open(linear(W))
    evaluator = Evaluator(linear(W), data.feeds)
    found = data.collect(linear(W), {"x": MinMax()}, recorder=evaluator)
    assert list(found.statistics) == ["x"]
    assert evaluator.awaited == []
    assert evaluator.evaluate(other) == expected


def test_outputs_of_another_model_are_not_recorded():
    other = linear(coarse(W, 127))
    data = Calib(FEEDS).open(linear(W))
    evaluator = Evaluator(linear(W), data.feeds)
    data.collect(other, {"x": MinMax()}, recorder=evaluator)
    assert evaluator.awaited == ["y"]
    assert evaluator.evaluate(other) == Evaluator(linear(W), FEEDS).evaluate(other)


def test_evaluation_without_a_budget_does_not_stop():
    evaluator = Evaluator(linear(W), FEEDS, Requirement.of("off"))
    assert evaluator.evaluate(linear(np.zeros_like(W)), stop_above=3.0).samples == len(FEEDS)


def test_samples_are_spread_over_the_data():
    class Data:
        def __init__(self):
            self.read = 0

        def __iter__(self):
            for index in range(100):
                self.read += 1
                yield {"x": np.full((1, 16), index, np.float32)}

        def count(self):
            return 100

    evaluator = Evaluator(linear(W), Data(), most=10)
    firsts = [float(step.feed["x"][0, 0]) for step in evaluator._ordered()]
    assert sorted(firsts) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert sorted(firsts[:3]) == [0, 40, 80]  # and so are the first few


def test_a_slow_model_is_evaluated_on_fewer_samples(monkeypatch):
    clock = iter(range(0, 10000, 10))
    monkeypatch.setattr("toolkit.accuracy.evaluator.time.thread_time", lambda: float(next(clock)))
    ran = []
    run = Evaluator._run
    monkeypatch.setattr(Evaluator, "_run", lambda *a: ran.append(1) or run(*a))
    evaluator = Evaluator(linear(W), FEEDS)
    assert evaluator.evaluate(linear(W)).samples == 16
    assert len(ran) == 4 + 16 + 16


def test_slow_models_get_fewer_samples():
    assert _affordable(128, 8, 0.1) == 128
    assert _affordable(128, 8, 4) == 24
    assert _affordable(128, 8, 80) == 16
    assert _affordable(4, 8, 80) == 4


def test_nondeterministic_outputs_are_not_compared():
    evaluator = Evaluator(linear(W), FEEDS, ignored=["y"])
    assert evaluator.evaluate(linear(0 * W)).ok


# -- recurrent state

CELL = """g (float[1, 4] x, float[1, 4] h0) => (float[1, 4] y, float[1, 4] hn)
    <float[4, 4] w = {W}> {{
    a = MatMul (h0, w) b = Add (a, x) hn = Tanh (b) y = Identity (hn) }}"""


def cell(factor: float) -> Model:
    weights = factor * np.eye(4)
    return model(CELL.replace("{W}", "{" + ", ".join(map(str, weights.reshape(-1))) + "}")
                     .replace("{{", "{").replace("}}", "}"))  # fmt: skip


def test_states_are_compared_after_several_steps():
    feeds = [
        {"x": RANDOM.standard_normal((1, 4)).astype(np.float32), "h0": np.zeros((1, 4), np.float32)}
        for _ in range(32)
    ]
    evaluator = Evaluator(cell(0.9), feeds)
    assert evaluator.kinds["hn"].kind == "state"
    # From a zero state the first step does not depend on w: only later steps do.
    one_step = Evaluator(cell(0.9), [{**feeds[0]}], most=1)
    assert one_step.evaluate(cell(0.9)).samples == 4
    bad = evaluator.evaluate(cell(-0.9))
    assert not bad.ok
    assert evaluator.evaluate(cell(0.905)).ok


# -- requirements of users


def figures(requirement: Requirement, levels: float = 127):
    return Evaluator(linear(W), FEEDS, requirement).evaluate(linear(coarse(W, levels)))


def test_off_accepts_everything_and_reports_it():
    found = figures(Requirement.of("off"), levels=1)
    assert found.ok
    assert not found.held
    assert "the budget is exceeded, but off" in found.summary()
    assert figures(Requirement.of("off")).summary().endswith("; the budget is off")


@pytest.mark.parametrize(
    ("metric", "measure"),
    [(None, "top1"), ("top1", "top1"), ("cosine", "cosine"), ("sqnr", "sqnr"), ("error", "error")],
)
def test_a_budget_by_a_metric(metric, measure):
    generous, strict = (
        figures(Requirement.of(0.9, metric)),
        figures(Requirement.of(1e-9, metric), 15),
    )
    assert {figure.measure for figure in generous.figures()} == {measure}
    assert generous.ok
    assert not strict.ok


def test_flips_are_all_counted_when_a_budget_is_given():
    floats = np.array([f["x"] @ W for f in FEEDS])
    others = np.array([f["x"] @ coarse(W, 7) for f in FEEDS])
    wanted = np.mean(floats.argmax(-1) != others.argmax(-1))
    found = figures(Requirement.of(0.5), 7)
    assert found.worst is not None
    assert found.worst.loss == pytest.approx(wanted)
    assert found.worst.allowed == 0.5


def test_decibels():
    assert Requirement.of("20dB").most == pytest.approx(0.01)
    assert Requirement.of("30", "sqnr").most == pytest.approx(0.001)
    assert Requirement.of(0.01, "sqnr").most == 0.01


@pytest.mark.parametrize(
    ("max_drop", "metric", "says"),
    [
        ("much", None, "a number"),
        (-1, None, "0 or more"),
        ("nan", None, "0 or more"),
        (5, None, "not a fraction"),
        ("20dB", "top1", "decibels"),
        (0.1, "top2", "did you mean 'top1'"),
        (0.1, "accuracy", "module:function"),
        (0.1, "no.such.module:f", "cannot import"),
        (0.1, "json:no_such", "no object"),
    ],
)
def test_invalid_requirements_are_refused(max_drop, metric, says):
    with pytest.raises(UsageError, match=says):
        Requirement.of(max_drop, metric)


LABELS = [int((f["x"] @ W).argmax()) for f in FEEDS]


def accuracy(outputs):
    found = [int(output["y"].argmax()) for output in outputs]
    return float(np.mean([a == b for a, b in zip(found, LABELS, strict=True)]))


def test_a_users_metric_decides():
    evaluator = Evaluator(linear(W), FEEDS, Requirement.of(0.2, accuracy))
    good, bad = evaluator.evaluate(linear(coarse(W, 31))), evaluator.evaluate(linear(0 * W))
    assert good.ok
    assert not bad.ok
    wanted = 1 - accuracy([{"y": np.zeros(8)} for _ in FEEDS])
    assert bad.worst.loss == pytest.approx(wanted)
    assert "accuracy" in bad.reason
    assert "float model 1" in bad.reason
    # Screening skips it: it has the labels of all samples only.
    assert evaluator.evaluate(linear(0 * W), samples=4).samples == 4


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda outputs: None, "returns NoneType; it must be a number"),
        (lambda outputs: "good", "returns str"),
        (lambda outputs: [1, 2], "returns list"),
        (lambda outputs: float("nan"), "is nan for the float model"),
        (lambda outputs: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_an_invalid_metric_is_refused(metric, says):
    with pytest.raises(UsageError, match=says):
        Evaluator(linear(W), FEEDS, Requirement.of(0.1, metric))


def test_json():
    data = figures(Requirement()).to_json()
    assert data["ok"] is True
    assert data["samples"] == 64
    (output,) = data["outputs"]
    assert output["kind"] == "classes"
    assert [figure["measure"] for figure in output["figures"]] == ["top1", "answers", "sqnr"]
    assert "plain_loss" in output["figures"][0]


def test_flips_whose_margins_are_all_small():
    """Weighted they hardly count; the unweighted fraction is reported and has its own limit."""
    rng = np.random.default_rng(0)
    offsets = np.array([[10.0] * 8 + [-30.0] * 2], np.float32)
    floats, other = (
        net("m = MatMul (x, w) y = Add (m, c)", c=offsets,
            w=1e-3 * rng.standard_normal((16, 10)).astype(np.float32))
        for _ in range(2)
    )  # fmt: skip
    found = Evaluator(floats, FEEDS).evaluate(other)
    top = found.outputs[0].figures[0]
    assert top.ok
    assert top.plain is not None
    assert top.plain > 0.2
    assert not found.ok
    assert f"top-1 agreement {100 * (1 - top.plain):.4g} %, " in top.text()
    assert "weighted by margin (budget" in top.text()
