"""Plans with layers in bodies, and all that works by a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.quantize.apply_plan import apply_all
from passes.quantize.layers.channel_means import input_means
from passes.quantize.schemes.static.quantize_static import QuantizeStatic, apply_static
from tests.checks import model, text_of
from tests.passes.fuse.constants import floats
from tests.passes.quantize.schemes.static.checks import ALL, Calibrated, context, normal
from tests.passes.quantize.schemes.static.subgraph_checks import (
    BRANCHES,
    LINEAR,
    NO,
    OUTER,
    YES,
    bodies,
    branch_feeds,
    kernels,
    loop_feeds,
    ops,
    plan_of,
    run,
    stored_floats,
    wide,
)
from toolkit.accuracy.ablation import quantize_by
from toolkit.accuracy.evaluator import Evaluator
from toolkit.accuracy.sensitivity import layer_noise, value_noise
from toolkit.calibrate.data import Calib
from toolkit.errors import UsageError
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes
from toolkit.quantization.plan import Plan
from toolkit.quantization.plan_json import parse_plan


def test_there_and_back(tmp_path: Path) -> None:
    feeds = branch_feeds(YES, NO)
    ctx = Context()
    first = model(BRANCHES)
    Calibrated(ALL, feeds).run(first, ctx)
    (plan,) = ctx.report.plans
    assert {e.output: e.scheme for e in plan.entries} == dict.fromkeys("apq", "static")
    assert {t.tensor for t in plan.tensors} == {"x", "r", "p", "q"}
    assert parse_plan(plan.to_json()) == plan
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    second = model(BRANCHES)
    QuantizeStatic(plan=path).run(second, Context())  # without data
    assert text_of(second) == text_of(first)
    path.write_text(plan.turned(["q"]).to_json())
    third = model(BRANCHES)
    QuantizeStatic(plan=path).run(third, Context())
    then, other = bodies(third)
    assert ops(then) == ops(bodies(first)[0])
    assert ops(other) == {"Conv": 1}
    np.testing.assert_array_equal(run(third, feeds[0]), run(first, feeds[0]))


def test_plan_with_renamed_values_applies_to_the_same_values(tmp_path: Path) -> None:
    text, feeds = wide(BRANCHES.replace(" q", " p").replace("(q", "(p"))
    items: list[Any] = [QuantizeStatic(), *parse_passes("quantize:mode=static:correct_bias=false")]
    for item in items:
        ctx = context(model(text), feeds)
        first = model(text)
        item.run(first, ctx)
        path = tmp_path / "plan.json"
        path.write_text(ctx.report.plans[0].to_json())
        second = model(text)
        replace(item, plan=path).run(second, context(model(text), feeds))
        assert kernels(second)["QLinearConv"] == 3
        for feed in feeds[:2]:
            np.testing.assert_array_equal(run(first, feed), run(second, feed))


@pytest.mark.parametrize("item", parse_passes("quantize,quantize-static"))
def test_a_plan_of_nothing_changes_no_names(item: Any, tmp_path: Path) -> None:
    text = BRANCHES.replace(" q", " p").replace("(q", "(p")
    path = tmp_path / "plan.json"
    path.write_text(Plan().to_json())
    subject = model(text)
    replace(item, plan=path).run(subject, Context())
    assert not len(subject.journal)


def test_plan_for_layers_after_a_loop_in_a_scan(tmp_path: Path) -> None:
    """Means are those of what is observed there: ranks have to be known for that."""
    weights = f"{floats('w', 32, 32, 3, 3)}, {floats('b', 32)}, int64 two = {{2}}, bool on = {{1}}"
    text = f"""g (float[T, N, 32, 16, 16] x) => (float[T, N, 32, 16, 16] y) <{weights}> {{
        y = Scan <num_scan_inputs = 1,
            body = s (float[N, 32, 16, 16] r) => (float[N, 32, 16, 16] z) {{
            h = Loop (two, on, r) <body = l (int64 i, bool go, float[?, 32, 16, 16] v)
                => (bool so, float[?, 32, 16, 16] u) {{ so = Identity (go) u = Tanh (v) }}>
            z = Conv <pads = [1, 1, 1, 1]> (h, w, b) }}> (x) }}"""
    feeds = [{"x": normal(2, 1, 32, 16, 16)}]
    item: Any = parse_passes("quantize:mode=static")[0]
    ctx, first, second = context(model(text), feeds), model(text), model(text)
    item.run(first, ctx)
    path = tmp_path / "plan.json"
    path.write_text(ctx.report.plans[0].to_json())
    replace(item, plan=path).run(second, context(model(text), feeds))
    assert kernels(second)["QLinearConv"] == 1
    np.testing.assert_array_equal(run(first, feeds[0]), run(second, feeds[0]))


def test_tensors_and_nodes_that_a_plan_cannot_have() -> None:
    subject, plan = plan_of(BRANCHES, branch_feeds(YES, NO))
    missing = replace(plan, tensors=tuple(t for t in plan.tensors if t.tensor != "r"))
    with pytest.raises(UsageError, match="Conv 'a' cannot be static: the plan has no tensor 'r'"):
        apply_static(subject, missing, Context())
    subject, plan = plan_of(BRANCHES, branch_feeds(YES, NO))
    floats_left = replace(plan, entries=tuple(replace(e, float_result=True) for e in plan.entries))
    with pytest.raises(UsageError, match="Conv 'a' cannot have a float result: it is in a sub"):
        apply_all(subject, floats_left, Context())


# -- with all the rest


def test_biases_compensate_the_shift_of_rounding() -> None:
    """By the means of what a layer reads, in all steps."""
    text = f"""g (int64 n, float[N, 16] x) => (float[M, 16] y) <{LINEAR}, {floats("b", 16)}> {{
        y = Loop (n, on, x) <body = l (int64 i, bool go, float[P, 16] s) => (bool d, float[Q, 16] u)
            {{ d = Identity (go)
               k = Gemm (s, m, b) r = Relu (k) u = Concat <axis = 0> (r, x) }}> }}"""
    feeds = loop_feeds(2, 3)
    subject, plan = plan_of(text, feeds)
    means = input_means(subject, plan, context(subject, feeds))
    m, b = stored_floats(text, "m"), stored_floats(text, "b")
    rows: list[Any] = []
    for feed in feeds:
        value = feed["x"]
        for _ in range(int(feed["n"])):
            rows.append(value)
            value = np.concatenate([np.maximum(value @ m + b, 0), feed["x"]])
    mean = np.concatenate(rows).mean(0)
    assert list(means) == ["s"]
    np.testing.assert_allclose(means["s"], mean, rtol=1e-5, atol=1e-6)
    apply_static(subject, plan, Context(), "qdq", means)
    (body,) = bodies(subject)
    (layer,) = (node for node in body.nodes if node.op_type == "Gemm")
    maker = body.producer(layer.input[2])
    assert maker is not None
    codes, scale = body.const(maker.input[0]), body.const(maker.input[1])
    assert codes is not None
    assert scale is not None
    steps = np.abs(m).max(0) / np.float32(127)
    shift = mean @ (m - np.rint(m / steps) * steps)
    np.testing.assert_allclose(codes * scale, b + shift, atol=float(scale.max()))
    assert np.abs(shift).max() > 2 * scale.max()


def test_silu_between_layers_of_a_body_is_one_operator() -> None:
    between = "f = Conv (r, v) h = Sigmoid (f) j = Mul (h, f) p = Conv (j, v)"
    subject, plan = plan_of(BRANCHES.replace("p = Conv (r, v)", between), branch_feeds(YES, NO))
    Shapes(annotate=False).run(subject, Context())
    apply_all(subject, plan.turned(["h", "j"]), Context())
    assert ops(bodies(subject)[0])["QuickGelu"] == 1
    assert kernels(subject) == {"QLinearConv": 4, "QuickGelu": 1}


def test_each_layer_of_a_body_alone() -> None:
    text, feeds = wide(BRANCHES)
    subject = model(text)
    evaluator = Evaluator(subject, feeds, most=8)
    found = quantize_by(ALL, subject, lambda: context(subject, feeds))
    rows = {row.label: row.noise for row in layer_noise(evaluator, found.variants, 8)}
    assert list(rows) == ["Conv a", "Conv p", "Conv q"]
    assert all(noise is not None and 0 < noise < 1e-2 for noise in rows.values())
    values = {row.label: row.noise for row in value_noise(subject, found.whole, feeds, samples=2)}
    assert {"p", "q", "y"} <= set(values)
    assert all(0 < (values[name] or 0) < 1e-2 for name in ("p", "q", "y"))


@pytest.mark.parametrize(
    "passes",
    [
        "quantize",
        "quantize:mode=static",
        "quantize:format=qop",
        "smooth,equalize,clip-weights,quantize-static,correct-bias",
        "quantize:mode=static:smooth=true",
    ],
)
@pytest.mark.parametrize(("text", "count"), [(BRANCHES, 3), (OUTER, 1)], ids=["all", "outer"])
@pytest.mark.parametrize("prefer", ["speed", "size"])
def test_pipelines(passes: str, text: str, count: int, prefer: Any) -> None:
    text, feeds = wide(text)
    subject = model(text)
    pipeline = Pipeline(parse_passes(passes), calib=Calib(feeds), measure=False, prefer=prefer)
    result = pipeline.run(subject)
    assert [done.status for done in result.passes][-1] != "reverted"
    assert kernels(subject)["QLinearConv"] == count
    for feed in feeds[:2]:
        wanted = run(model(text), feed)
        assert np.square(run(subject, feed) - wanted).sum() < 1e-3 * np.square(wanted).sum()
