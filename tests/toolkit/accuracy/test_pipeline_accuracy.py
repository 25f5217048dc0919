"""The evaluator in the pipeline: for passes, for rollback, and in the proof."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.toolkit.accuracy.nets import FEEDS, W, coarse, linear, net
from toolkit import Calib, Context, Model, Pipeline, UsageError, optimize
from toolkit.quantization.plan import Plan
from toolkit.verification.tolerance import EXACT, QUANT, Tolerance


@dataclass(frozen=True)
class Coarse:
    """Round weights to a number of levels; each MatMul is a rewrite."""

    name: ClassVar[str] = "coarse"
    tolerance: ClassVar[Tolerance] = QUANT
    levels: float = 127
    hurts: str = ""
    seen: list[Any] = field(default_factory=list, compare=False)

    def run(self, model: Model, ctx: Context) -> None:
        self.seen.append(ctx)
        g = model.graph
        for node in list(g.nodes):
            if node.op_type != "MatMul" or not g.begin("coarse", node):
                continue
            w = g.const(node.input[1])
            assert w is not None
            harm = node.output[0] == self.hurts
            g.set_input(node, 1, g.constant(coarse(w, 1 if harm else self.levels), "w"))


TWO = "a = MatMul (x, w) b = Relu (a) m = MatMul (b, v) y = Sin (m)"


def two() -> Model:
    return linear(W, TWO, v=np.ascontiguousarray(W[:8, :8]))


def calib(feeds=FEEDS) -> Calib:
    return Calib(feeds)


def test_a_pass_gets_the_evaluator():
    item = Coarse()
    result = Pipeline([item], calib=calib(), prefer="size", measure=False).run(linear(W))
    (ctx,) = item.seen
    assert ctx.evaluator.real
    assert ctx.evaluator.evaluate(ctx.reference).used == 0
    assert (ctx.settings.prefer, ctx.settings.measure) == ("size", False)
    assert result.passes[0].status == "applied"
    assert result.proof.startswith("top-1 agreement 100 % (budget 97.76 %) on 64 samples")
    assert result.quality is not None
    assert result.to_json()["quality"]["ok"] is True
    assert result.to_json()["passes"][0]["quality"]["samples"] == 64


def test_without_data_synthetic_inputs_are_used():
    item = Coarse()
    result = Pipeline([item]).run(linear(W))
    assert not item.seen[0].evaluator.real
    assert "synthetic input" in result.proof


def test_samples_are_preferred_to_synthetic_inputs():
    item = Coarse()
    result = Pipeline([item], samples=FEEDS[:3]).run(linear(W))
    assert item.seen[0].evaluator.real
    assert "on 3 samples" in result.proof


def test_without_a_pass_that_quantizes_there_is_no_evaluator():
    result = optimize(linear(W), "simplify", calib=calib())
    assert result.quality is None
    assert "quality" not in result.to_json()
    assert result.notes == ["no pass made use of the calibration data"]


def test_cached_statistics_count_as_use(tmp_path):
    path = tmp_path / "samples.npz"
    np.savez(path, x=np.concatenate([feed["x"] for feed in FEEDS]))
    data = Calib(path, cache=tmp_path)
    for _ in range(2):
        scale = np.ones(16, np.float32)
        model = net("n = LayerNormalization <axis = -1> (x, g) y = MatMul (n, w)", g=scale, w=W)
        result = optimize(model, "smooth", calib=data, validate="off")
        assert result.passes[0].status == "applied"
        assert "no pass made use of the calibration data" not in result.notes


def test_only_the_failing_rewrite_is_undone():
    result = Pipeline([Coarse(hurts="m")], calib=calib()).run(two())
    (row,) = result.passes
    assert row.status == "applied"
    assert [(u.rule, u.site) for u in row.undone] == [("coarse", "m")]
    assert "SQNR" in row.undone[0].reason
    assert "budget 20.0 dB" in row.undone[0].reason


def test_a_collapsed_model_is_not_kept():
    (row,) = Pipeline([Coarse(levels=1)], calib=calib()).run(linear(W)).passes
    assert row.status == "reverted"


def test_off_keeps_the_model_and_reports_the_loss():
    result = Pipeline([Coarse(levels=1)], calib=calib(), max_drop="off").run(linear(W))
    assert result.passes[0].status == "applied"
    assert "the budget is exceeded, but off" in result.proof
    assert result.to_json()["quality"]["ok"] is False


def test_synthetic_inputs_do_not_veto_a_model_that_holds_on_real_ones():
    """Real samples are small; synthetic inputs are not, and show large errors."""

    @dataclass(frozen=True)
    class Clip(Coarse):
        name: ClassVar[str] = "clip"

        def run(self, model: Model, ctx: Context) -> None:
            g = model.graph
            (node,) = g.nodes
            if g.begin("clip", node):
                limits = [g.constant(np.array(v, np.float32), "c") for v in (-0.01, 0.01)]
                g.set_input(node, 0, g.op("Clip", "x", *limits, at=node))

    small = [{"x": 0.002 * feed["x"]} for feed in FEEDS]
    result = Pipeline([Clip()], calib=calib(small)).run(linear(W))
    assert result.passes[0].status == "applied"
    (reverted,) = Pipeline([Clip()]).run(linear(W)).passes
    assert reverted.status == "reverted"


def test_a_later_pass_answers_for_the_error_it_adds():
    @dataclass(frozen=True)
    class Wrong(Coarse):
        name: ClassVar[str] = "wrong"
        tolerance: ClassVar[Tolerance] = EXACT

    result = Pipeline([Coarse(), Wrong(levels=5)], calib=calib()).run(two())
    assert [row.status for row in result.passes] == ["applied", "reverted"]


@pytest.mark.parametrize("budget", [{"max_drop": 2}, {"metric": "best"}, {"prefer": "beauty"}])
def test_invalid_requirements_are_refused(budget):
    with pytest.raises(UsageError):
        Pipeline([Coarse()], **budget)


def test_a_users_metric_needs_real_samples():
    with pytest.raises(UsageError, match="needs real samples"):
        Pipeline([Coarse()], metric=lambda outputs: 1.0).run(linear(W))


def test_plans_are_collected():
    class Listed(Plan):
        def to_json(self) -> str:
            return '{"version": 1}'

    @dataclass(frozen=True)
    class Planned(Coarse):
        def run(self, model: Model, ctx: Context) -> None:
            super().run(model, ctx)
            ctx.report.plans.append(Listed())

    assert Pipeline([Planned()], calib=calib()).run(linear(W)).plans == ['{"version": 1}']
    assert Pipeline([Planned(levels=1)], calib=calib()).run(linear(W)).plans == []
    # of a pass that ran twice, only the last plan counts
    assert len(Pipeline([Planned(hurts="m")], calib=calib()).run(two()).plans) == 1


# A model that refuses synthetic inputs: the largest number of x is an index, minus 100.
PICKY = """
    m = ReduceMax <keepdims = 0> (x) i = Cast <to = 7> (m)
    hundred = Constant <value_int = 100> () at = Sub (i, hundred)
    zeros = Constant <value_floats = [0.0, 0.0]> () none = Gather (zeros, at)
    a = MatMul (x, w) y = Add (a, none)
"""
FITTING = [{"x": np.append(feed["x"][:, :15], [[100.5]], 1).astype(np.float32)} for feed in FEEDS]


def picky() -> Model:
    return linear(np.append(W[:15], 0 * W[15:], 0), PICKY)


def test_samples_of_a_model_that_refuses_synthetic_inputs():
    result = Pipeline([Coarse()], calib=calib(FITTING)).run(picky())
    assert result.passes[0].status == "applied"
    assert result.proof.startswith("top-1 agreement")
    assert "on 64 samples; no other inputs were run: " in result.proof
    (row,) = Pipeline([Coarse(levels=1)], calib=calib(FITTING)).run(picky()).passes
    assert row.status == "reverted"


def test_noise_is_undone_in_a_model_that_refuses_synthetic_inputs():
    @dataclass(frozen=True)
    class Wrong(Coarse):
        tolerance: ClassVar[Tolerance] = EXACT

    result = Pipeline([Coarse(), Wrong(levels=30)], calib=calib(FITTING)).run(picky())
    assert [row.status for row in result.passes] == ["applied", "reverted"]


def test_an_unevaluated_model_is_reported():
    result = Pipeline([Coarse(levels=1)]).run(picky())
    assert "the loss of accuracy by quantization is unknown: give samples" in result.proof
    assert "not known" not in Pipeline([], validate="each").run(picky()).proof
