"""The judge: good models pass, collapsed ones do not, and a user's metric has the last word."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import model
from tests.toolkit.accuracy.nets import FEEDS, RANDOM, W, coarse, linear, net
from toolkit.accuracy.evaluator import Judge, _affordable
from toolkit.accuracy.requirement import Demand
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
    judge = Judge(linear(W, nodes), FEEDS, real=real)
    same, good = judge.verdict(linear(W, nodes)), judge.verdict(linear(coarse(W, 127), nodes))
    assert (same.ok, same.worst.loss, same.used, same.noise) == (True, 0, 0, 0)
    assert good.ok, good.reason
    assert 0 < good.noise < 0.01
    for broken in (linear(coarse(W, 1), nodes), linear(np.zeros_like(W), nodes)):
        bad = judge.verdict(broken)
        assert not bad.ok
        assert bad.used > 1
        assert "output 'y'" in bad.reason
        assert "budget" in bad.reason


def test_a_constant_is_no_good_model_where_values_hardly_vary():
    """Values of 20 to 21: a constant has an SQNR of 36 dB."""
    before = net("m = MatMul (x, w) s = Sigmoid (m) y = Add (s, c)",
                 w=W[:, :1], c=np.full((1, 1), 20, np.float32))  # fmt: skip
    after = net("m = MatMul (x, w) s = Sigmoid (m) y = Add (s, c)",
                w=0 * W[:, :1], c=np.full((1, 1), 20, np.float32))  # fmt: skip
    found = Judge(before, FEEDS).verdict(after)
    assert not found.ok
    assert "around the mean" in found.reason


def test_nor_where_they_vary_by_a_thousandth():
    """A feature that is the same everywhere must not hide what the others say."""
    before, after = (
        net("m = MatMul (x, w) y = Add (m, c)", w=k * W[:, :1], c=np.full((1, 1), 3e3, np.float32))
        for k in (1, 0)
    )
    found = Judge(before, FEEDS).verdict(after)
    assert not found.ok
    assert "around the mean" in found.reason


@pytest.mark.parametrize("metric", [None, "sqnr", "cosine", "error"])
def test_rounding_is_no_loss(metric):
    """Not even where nothing may be lost: the same sums in another order are the same model."""
    judge = Judge(linear(W, "m = MatMul (x, w) y = Sin (m)"), FEEDS, Demand.of(0, metric))
    assert judge.verdict(linear(W * np.float32(1 + 1e-7), "m = MatMul (x, w) y = Sin (m)")).ok
    assert not judge.verdict(linear(W * np.float32(1 + 1e-4), "m = MatMul (x, w) y = Sin (m)")).ok


def test_numbers_where_the_floats_have_numbers():
    judge = Judge(linear(W), FEEDS)
    assert not judge.verdict(linear(W, "m = MatMul (x, w) l = Log (m) y = Add (m, l)")).ok


def test_another_shape_is_a_loss():
    judge = Judge(linear(W), FEEDS)
    found = judge.verdict(linear(W, "m = MatMul (x, w) y = Concat <axis = 0> (m, m)"))
    assert not found.ok


@pytest.mark.parametrize("name", ["pitch", "start_logits"])
@pytest.mark.parametrize("same", [0, 12])
def test_answers_of_different_lengths(name, same):
    """One number for each frame of a clip, or each word of a text; at first of one length."""

    def frames(w: np.ndarray) -> Model:
        listed = ", ".join(map(str, w.reshape(-1)))
        return model(f"""g (float[1, F, 16] x) => (float[1, F] {name})
            <float[16, 1] w = {{{listed}}}, int64[1] last = {{-1}}>
            {{ m = MatMul (x, w) {name} = Squeeze (m, last) }}""")

    lengths = [20] * same + [10 + at % 7 for at in range(20)]
    feeds = [{"x": RANDOM.standard_normal((1, n, 16)).astype(np.float32)} for n in lengths]
    judge = Judge(frames(W[:, :1]), feeds)
    assert judge.verdict(frames(coarse(W[:, :1], 127))).ok
    assert not judge.verdict(frames(coarse(W[:, :1], 1))).ok


@pytest.mark.parametrize("last", ["Softmax", "Sigmoid", "LpNormalization", "Identity"])
@pytest.mark.parametrize("axis", [1, 2])
def test_answers_that_are_empty(last, axis):
    """Nothing at all, as a loop of no steps has it: there is nothing to compare, or another shape.

    The scale of a channel tells groups apart, which what is empty does not have.
    """

    def answers(more: int) -> Model:
        return model(f"""g (float[4, 3, 5] x, int64[1] n) => (float[4, A, B] y)
            <int64[1] z = {{0}}, int64[1] a = {{{axis}}}, int64[1] more = {{{more}}},
             float[5] c = {{1, 1, 1000, 1000, 1000}}>
            {{ k = Add (n, more) m = Mul (x, c) s = Slice (m, z, k, a) y = {last} (s) }}""")

    feeds = [{"x": RANDOM.standard_normal((4, 3, 5)).astype(np.float32), "n": np.array([n])}
             for n in (5, 0, 5, 5)]  # fmt: skip
    judge = Judge(answers(0), feeds)
    assert judge.verdict(answers(0)).ok
    assert not judge.verdict(answers(1)).ok


def test_a_text_is_held_to_more_than_classes():
    """Logits of a reader: the same noise in its shares passes for single classes only."""

    def reader(w: np.ndarray, name: str) -> Model:
        listed = ", ".join(map(str, w.reshape(-1)))
        return model(f"""g (float[1, F, 16] x) => (float[1, F, 8] {name})
            <float[16, 8] w = {{{listed}}}, float[8] b = {{2.5, 0, 0, 0, 0, 0, 0, 0}}>
            {{ m = MatMul (x, w) {name} = Add (m, b) }}""")

    rng = np.random.default_rng(1)
    feeds = [{"x": rng.standard_normal((1, 40, 16)).astype(np.float32)} for _ in range(20)]
    w = W / 2
    judge = Judge(reader(w, "logits"), feeds)
    assert judge.kinds["logits"].kind == "text"
    assert judge.verdict(reader(coarse(w, 127), "logits")).ok
    noisy = judge.verdict(reader(coarse(w, 6), "logits"))
    assert not noisy.ok
    assert "SQNR" in noisy.reason
    close = judge.verdict(reader(coarse(w, 8), "logits"))
    assert close.ok
    assert "top-1 agreement" in close.summary()
    assert "and SQNR" in close.summary()
    made_up = Judge(reader(w, "logits"), feeds, real=False)
    assert made_up.verdict(reader(coarse(w, 6), "logits")).ok


def test_few_samples_for_screening():
    judge = Judge(linear(W), FEEDS)
    assert judge.verdict(linear(W)).samples == 64
    assert judge.verdict(linear(W), samples=4).samples == 4


def test_what_is_hopeless_is_not_looked_at_to_the_end():
    judge = Judge(linear(W), FEEDS)
    collapsed, good = linear(np.zeros_like(W)), linear(coarse(W, 127))
    assert judge.verdict(collapsed).samples == len(FEEDS)
    early = judge.verdict(collapsed, hopeless=3.0)
    assert early.samples == 4 < len(FEEDS)
    assert not early.ok
    assert judge.verdict(good, hopeless=3.0) == judge.verdict(good)


def test_what_nobody_asks_for_is_never_hopeless():
    judge = Judge(linear(W), FEEDS, Demand.of("off"))
    assert judge.verdict(linear(np.zeros_like(W)), hopeless=3.0).samples == len(FEEDS)


def test_samples_come_from_all_over_the_data():
    class Data:
        def __init__(self):
            self.read = 0

        def __iter__(self):
            for index in range(100):
                self.read += 1
                yield {"x": np.full((1, 16), index, np.float32)}

        def count(self):
            return 100

    judge = Judge(linear(W), Data(), most=10)
    firsts = [float(step.feed["x"][0, 0]) for step in judge._steps]
    assert sorted(firsts) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert sorted(firsts[:3]) == [0, 40, 80]  # and so do a few of them


def test_a_slow_model_is_known_by_fewer_answers(monkeypatch):
    clock = iter(range(0, 10000, 10))
    monkeypatch.setattr("toolkit.accuracy.evaluator.time.thread_time", lambda: float(next(clock)))
    ran = []
    run = Judge._run
    monkeypatch.setattr(Judge, "_run", lambda *a: ran.append(1) or run(*a))
    judge = Judge(linear(W), FEEDS)
    assert judge.verdict(linear(W)).samples == 16
    assert len(ran) == 4 + 16 + 16


def test_of_a_slow_model_fewer_samples_are_taken():
    assert _affordable(128, 8, 0.1) == 128
    assert _affordable(128, 8, 4) == 24
    assert _affordable(128, 8, 80) == 16
    assert _affordable(4, 8, 80) == 4


def test_outputs_that_differ_from_run_to_run_are_not_looked_at():
    judge = Judge(linear(W), FEEDS, ignored=["y"])
    assert judge.verdict(linear(0 * W)).ok


# -- recurrent state

CELL = """g (float[1, 4] x, float[1, 4] h0) => (float[1, 4] y, float[1, 4] hn)
    <float[4, 4] w = {W}> {{
    a = MatMul (h0, w) b = Add (a, x) hn = Tanh (b) y = Identity (hn) }}"""


def cell(factor: float) -> Model:
    weights = factor * np.eye(4)
    return model(CELL.replace("{W}", "{" + ", ".join(map(str, weights.reshape(-1))) + "}")
                     .replace("{{", "{").replace("}}", "}"))  # fmt: skip


def test_states_are_judged_after_several_steps():
    feeds = [
        {"x": RANDOM.standard_normal((1, 4)).astype(np.float32), "h0": np.zeros((1, 4), np.float32)}
        for _ in range(32)
    ]
    judge = Judge(cell(0.9), feeds)
    assert judge.kinds["hn"].kind == "state"
    # From a state of zeros one step is the same whatever w is: only later ones show it.
    one_step = Judge(cell(0.9), [{**feeds[0]}], most=1)
    assert one_step.verdict(cell(0.9)).samples == 4
    bad = judge.verdict(cell(-0.9))
    assert not bad.ok
    assert judge.verdict(cell(0.905)).ok


# -- what users ask


def figures(demand: Demand, levels: float = 127):
    return Judge(linear(W), FEEDS, demand).verdict(linear(coarse(W, levels)))


def test_off_lets_everything_pass_and_says_so():
    found = figures(Demand.of("off"), levels=1)
    assert found.ok
    assert not found.held
    assert "the budget does not hold, and it is switched off" in found.summary()
    assert figures(Demand.of("off")).summary().endswith("; the budget is switched off")


@pytest.mark.parametrize(
    ("metric", "measure"),
    [(None, "top1"), ("top1", "top1"), ("cosine", "cosine"), ("sqnr", "sqnr"), ("error", "error")],
)
def test_a_budget_by_a_metric(metric, measure):
    generous, strict = figures(Demand.of(0.9, metric)), figures(Demand.of(1e-9, metric), 15)
    assert {figure.measure for figure in generous.figures()} == {measure}
    assert generous.ok
    assert not strict.ok


def test_flips_are_all_counted_when_a_budget_is_given():
    floats = np.array([f["x"] @ W for f in FEEDS])
    others = np.array([f["x"] @ coarse(W, 7) for f in FEEDS])
    wanted = np.mean(floats.argmax(-1) != others.argmax(-1))
    found = figures(Demand.of(0.5), 7)
    assert found.worst is not None
    assert found.worst.loss == pytest.approx(wanted)
    assert found.worst.allowed == 0.5


def test_decibels():
    assert Demand.of("20dB").most == pytest.approx(0.01)
    assert Demand.of("30", "sqnr").most == pytest.approx(0.001)
    assert Demand.of(0.01, "sqnr").most == 0.01


@pytest.mark.parametrize(
    ("max_drop", "metric", "says"),
    [
        ("much", None, "a number"),
        (-1, None, "0 or more"),
        ("nan", None, "0 or more"),
        (5, None, "no share"),
        ("20dB", "top1", "decibels"),
        (0.1, "top2", "did you mean 'top1'"),
        (0.1, "accuracy", "module:function"),
        (0.1, "no.such.module:f", "cannot import"),
        (0.1, "json:no_such", "no object"),
    ],
)
def test_what_cannot_be_asked(max_drop, metric, says):
    with pytest.raises(UsageError, match=says):
        Demand.of(max_drop, metric)


LABELS = [int((f["x"] @ W).argmax()) for f in FEEDS]


def accuracy(outputs):
    found = [int(output["y"].argmax()) for output in outputs]
    return np.mean([a == b for a, b in zip(found, LABELS, strict=True)])


def test_a_users_metric_decides():
    judge = Judge(linear(W), FEEDS, Demand.of(0.2, accuracy))
    good, bad = judge.verdict(linear(coarse(W, 31))), judge.verdict(linear(0 * W))
    assert good.ok
    assert not bad.ok
    wanted = 1 - accuracy([{"y": np.zeros(8)} for _ in FEEDS])
    assert bad.worst.loss == pytest.approx(wanted)
    assert "accuracy" in bad.reason
    assert "of the floats 1" in bad.reason
    # Screening goes without it: it knows the labels of all samples only.
    assert judge.verdict(linear(0 * W), samples=4).samples == 4


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
def test_a_metric_that_is_none(metric, says):
    with pytest.raises(UsageError, match=says):
        Judge(linear(W), FEEDS, Demand.of(0.1, metric))


def test_json():
    data = figures(Demand()).to_json()
    assert data["ok"] is True
    assert data["samples"] == 64
    (output,) = data["outputs"]
    assert output["kind"] == "classes"
    assert [figure["measure"] for figure in output["figures"]] == ["top1", "answers", "sqnr"]
    assert "plain_loss" in output["figures"][0]


def test_answers_that_are_all_close_calls():
    """Weighed they hardly count; the share that changed is told all the same, and has a limit."""
    rng = np.random.default_rng(0)
    offsets = np.array([[10.0] * 8 + [-30.0] * 2], np.float32)
    floats, other = (
        net("m = MatMul (x, w) y = Add (m, c)", c=offsets,
            w=1e-3 * rng.standard_normal((16, 10)).astype(np.float32))
        for _ in range(2)
    )  # fmt: skip
    found = Judge(floats, FEEDS).verdict(other)
    top = found.outputs[0].figures[0]
    assert top.ok
    assert top.plain is not None
    assert top.plain > 0.2
    assert not found.ok
    assert f"top-1 agreement {100 * (1 - top.plain):.4g} %, " in top.text()
    assert "where close calls count less (budget" in top.text()
