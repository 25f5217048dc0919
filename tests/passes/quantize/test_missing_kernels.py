"""A layer whose int8 form the runtime cannot run stays float, and that is said as such."""

from __future__ import annotations

from collections import Counter

import pytest
from onnx import parser

from passes.quantize.missing_kernels import leave_unsupported
from passes.quantize.preconditions import lower_for_qdq
from passes.quantize.quantize import Quantize
from toolkit.calibrate.data import Calib
from toolkit.feeds import make_feeds
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings
from toolkit.targets import Target, target as targets
from toolkit.targets.releases import Use, find_release


def network(opset: int = 23) -> Model:
    text = f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (float[N,8,8,8] x) => (float[N,64] y)
        <float[16,8,3,3] k = {{{", ".join(f"{(i % 13 - 6) / 7:.3f}" for i in range(1152))}}},
         float[16,64] w = {{{", ".join(f"{(i % 11 - 5) / 9:.3f}" for i in range(1024))}}}> {{
            c = Conv <pads = [1, 1, 1, 1]> (x, k) p = GlobalAveragePool (c)
            f = Flatten (p) y = MatMul (f, w) }}"""
    return Model.from_proto(parser.parse_model(text))


def quantized(model: Model, **options: object):
    calib = Calib(make_feeds(model, count=8).feeds)
    settings = Settings(calib=calib, measure=False, prefer="size", max_drop="off", **options)  # type: ignore[arg-type]
    return Pipeline([Quantize()], settings).run(model)


@pytest.fixture
def without_qdq(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runtime lack kernels for Q/DQ at every opset."""
    real = Target.obstacle

    def obstacle(self: Target, use: Use) -> str:
        return "no Q/DQ here" if use.op_type == "QuantizeLinear" else real(self, use)

    monkeypatch.setattr(Target, "obstacle", obstacle)


@pytest.mark.usefixtures("without_qdq")
def test_layers_without_kernels_stay_float_as_a_fact_about_the_runtime() -> None:
    result = quantized(network(21))
    done = next(item for item in result.passes if item.name == "quantize")
    (note,) = (note for note in done.notes if "cannot run it in int8" in note)
    assert note.startswith("left float: Conv 'c'")
    assert "no Q/DQ here" in note
    assert not any("budget" in text for text in done.notes)
    assert "QuantizeLinear" not in result.after.ops


def test_a_plan_that_runs_is_left_as_it_is() -> None:
    model, seen = network(21), []

    class Watched(Quantize):
        def make_plan(self, model: Model, ctx: Context):
            plan = super().make_plan(model, ctx)
            seen.append(leave_unsupported(self._trials(model, plan, ctx), plan) is plan)
            return plan

    calib = Calib(make_feeds(model, count=8).feeds)
    Pipeline([Watched()], Settings(calib=calib, measure=False, max_drop="off")).run(model)
    assert seen == [True]


def test_qdq_are_written_at_an_opset_for_which_the_runtime_has_them(monkeypatch) -> None:
    """1.23 loads opset 23 and has no kernel for its QuantizeLinear on float32."""
    monkeypatch.setattr(targets, "installed_release", lambda: find_release("1.23"))
    model = network(23)
    lower_for_qdq(model, Context(settings=Settings(runtime="1.23")))
    assert model.opsets[""] == 22
    model = network(23)
    lower_for_qdq(model, Context(settings=Settings(runtime="1.24")))
    assert model.opsets[""] == 22  # the installed one has to run it, too


def test_the_result_for_1_23_has_int8_convolutions() -> None:
    result = quantized(network(23), runtime="1.23")
    assert result.loads_on is not None
    assert result.loads_on.release is not None
    assert result.loads_on.release.number <= (1, 23)
    kinds = Counter(node.op_type for node in result.model.graph.nodes)
    assert kinds["QuantizeLinear"] >= 1
