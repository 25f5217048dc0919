"""Static int8 in the bodies of If, Loop and Scan: the numbers, the kernels, and what stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from passes.quantize.schemes.static.quantize_static import QuantizeStatic, apply_static
from tests import ort
from tests.checks import check, model, parse, text_of
from tests.passes.fuse.constants import floats, stored
from tests.passes.quantize.schemes.static.checks import ALL, Calibrated, context, normal
from tests.passes.quantize.schemes.static.subgraph_checks import (
    BRANCHES,
    CONV,
    GROWING,
    INNER,
    LINEAR,
    NO,
    SHARED,
    YES,
    bodies,
    branch_feeds,
    kernels,
    large,
    loop_feeds,
    notes,
    ops,
    params_of,
    plan_of,
    product,
    quantized,
    run,
    stored_floats,
)
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.qparams import QParams
from toolkit.settings import Settings

# -- If


@pytest.mark.parametrize("form", ["qdq", "qop"])
@pytest.mark.parametrize("options", [{}, {"per_channel": False}, {"activations": "int8"}])
def test_branch_computes_the_same_as_a_flat_model(form: Any, options: dict[str, Any]) -> None:
    item = QuantizeStatic(format=form, **options)
    feeds = branch_feeds(YES, NO, YES, NO)
    subject = quantized(BRANCHES, feeds, item)
    assert kernels(subject) == {"QLinearConv": 3}
    constants = f"g (float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y) <{CONV}>"
    first = """{ a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) y = Conv (r, v) }"""
    second = "{ y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    # x is seen by both branches, what a branch makes only where it runs
    whole = [{"x": feed["x"]} for feed in feeds]
    for taken, nodes in ((0, first), (1, second)):
        flat, plan = plan_of(f"{constants} {nodes}", whole[taken::2], item)
        widest = plan_of(f"{constants} {nodes}", whole, item)[1].tensor("x")
        assert widest is not None
        tensors = tuple(widest if t.tensor == "x" else t for t in plan.tensors)
        apply_static(flat, replace(plan, tensors=tensors), Context(), form)
        for feed in feeds[taken::2]:
            np.testing.assert_array_equal(run(subject, feed), run(flat, {"x": feed["x"]}))


def test_each_body_has_pairs_of_its_own() -> None:
    subject = quantized(BRANCHES, branch_feeds(YES, NO))
    assert ops(subject.graph) == {"If": 1}
    then, other = bodies(subject)
    assert ops(then)["QuantizeLinear"] == 3
    assert ops(other)["QuantizeLinear"] == 2
    # one int8 copy of the weights that both read, and none in floats
    assert [array.dtype for array in large(subject.graph)] == [np.int8, np.int8]


def test_a_branch_that_never_runs_stays_float() -> None:
    feeds = branch_feeds(YES, YES)
    subject = quantized(BRANCHES, feeds)
    then, other = bodies(subject)
    assert ops(then)["QuantizeLinear"] == 3
    assert ops(other) == {"Conv": 1}
    assert kernels(subject) == {"QLinearConv": 2, "Conv": 1}
    assert "Conv 'q' (it never ran on the calibration data)" in notes(BRANCHES, feeds)
    np.testing.assert_allclose(
        run(subject, {**feeds[0], "c": NO}), run(model(BRANCHES), {**feeds[0], "c": NO}), atol=1e-5
    )


def test_a_layer_that_never_runs_on_a_tensor_that_is_known() -> None:
    """A linear layer makes floats: the range of what it reads, seen outside, would do."""
    text = f"""g (bool c, float[N, 16] x) => (float[N, 16] y) <{LINEAR}> {{
        y = If (c) <then_branch = t () => (float[N, 16] p) {{ p = MatMul (x, m) }},
                    else_branch = e () => (float[N, 16] q) {{ q = MatMul (x, m) }}> }}"""
    feeds = [{"c": NO, "x": normal(2, 16)}]
    then, other = bodies(quantized(text, feeds))
    assert ops(then) == {"MatMul": 1}
    assert ops(other) == {"QuantizeLinear": 1, "DequantizeLinear": 2, "MatMul": 1}
    assert "MatMul 'p' (it never ran" in notes(text, feeds)


def test_observed_tensors() -> None:
    """What is in 8 bits; of layers in bodies what they make, too."""

    class Spy:
        real = False
        names: list[str]

        def collect(self, subject: Model, observers: Any, recorder: Any = None) -> Any:
            self.names = list(observers)
            data = context(subject, [{"x": normal(2, 4, 8, 8), "c": YES}]).calibration
            assert data is not None
            return data.collect(subject, observers)

    spy: Any = Spy()
    flat = f"g (float[N, 4, 8, 8] x, bool c) => (float[N, 8, 8, 8] y) <{CONV}> {INNER}"
    ALL.make_plan(model(flat), Context(calibration=spy))
    assert spy.names == ["x", "r", "y"]
    ALL.make_plan(model(BRANCHES), Context(calibration=spy))
    assert spy.names == ["x", "r", "p", "q", "a"]


def test_bias_of_the_body_and_weights_of_the_graph_around() -> None:
    text = f"""g (bool c, float[N, 16] x) => (float[N, 8] y) <{floats("k", 16, 8)}> {{
        y = If (c) <then_branch = t () => (float[N, 8] p) <{floats("h", 8, low=3, high=5)}>
                        {{ p = Gemm (x, k, h) }},
                    else_branch = e () => (float[N, 8] q) <{floats("o", 16, 8)}>
                        {{ q = Gemm (x, o) }}> }}"""
    feeds = [{"c": c, "x": normal(3, 16, seed=i)} for i, c in enumerate((YES, NO))]
    subject = quantized(text, feeds)
    assert kernels(subject) == {"QGemm": 2}
    plan = plan_of(text, feeds)[1]
    by = params_of(plan, "x")
    k, h, o = (stored_floats(text, name) for name in "kho")
    scale = by.scale * np.abs(k).max(0) / np.float32(127)
    bias = np.rint(h / np.float64(scale)) * scale
    wanted = product(feeds[0]["x"], k, by) + bias
    np.testing.assert_allclose(run(subject, feeds[0]), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        run(subject, feeds[1]), product(feeds[1]["x"], o, by), rtol=1e-5, atol=1e-5
    )


# -- Loop and Scan


@pytest.mark.parametrize("channels", [True, False])
def test_a_loop_whose_shape_grows(channels: bool) -> None:
    item = QuantizeStatic(per_channel=channels)
    feeds = loop_feeds(3, 1, 4)
    subject = quantized(GROWING, feeds, item)
    assert kernels(subject) == {"MatMulIntegerToFloat": 1, "Concat": 1}
    by = params_of(plan_of(GROWING, feeds, item)[1], "s")
    weights, row = stored_floats(GROWING, "m"), stored_floats(GROWING, "row")
    for feed in feeds:
        value = feed["x"]
        for _ in range(int(feed["n"])):
            made = product(value, weights, by, channels).astype(np.float32)
            value = np.concatenate([made, row])
        found = run(subject, feed)
        assert found.shape == (2 + feed["n"], 16)
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5)


def test_the_range_is_that_of_all_steps() -> None:
    feeds = loop_feeds(1, 4)
    entry = plan_of(GROWING, feeds)[1].tensor("s")
    assert entry is not None
    m, row = stored_floats(GROWING, "m"), stored_floats(GROWING, "row")
    seen: list[float] = []
    for feed in feeds:
        value = feed["x"]
        for _ in range(int(feed["n"])):
            seen += [float(value.min()), float(value.max())]
            value = np.concatenate([value @ m, row])
    assert entry.low == pytest.approx(min(seen), rel=1e-5)
    assert entry.high == pytest.approx(max(seen), rel=1e-5)


def test_a_loop_without_steps_stays_float() -> None:
    feeds = loop_feeds(0, 0)
    assert "MatMul 'k' (it never ran on the calibration data)" in notes(GROWING, feeds)
    check(Calibrated(ALL, feeds), GROWING, near_miss=True, inputs=feeds[0])


def test_a_scan() -> None:
    text = f"""g (float[N, 16] h, float[T, N, 16] x) => (float[N, 16] f, float[T, N, 8] y)
        <{LINEAR}, {floats("k", 8, 16)}, {floats("b", 8)}> {{
        f, y = Scan <num_scan_inputs = 1, body = s (float[N, 16] i, float[N, 16] r)
            => (float[N, 16] o, float[N, 8] z) {{
                a = MatMul (i, m) o = Sub (a, r) z = Gemm <transB = 1> (r, k, b) }}> (h, x) }}"""
    feeds = [{"h": normal(2, 16), "x": normal(3, 2, 16, seed=s)} for s in (1, 2)]
    subject = quantized(text, feeds)
    assert kernels(subject) == {"MatMulIntegerToFloat": 1, "Sub": 1, "QGemm": 1}
    plan = plan_of(text, feeds)[1]
    m, k, b = (stored_floats(text, name) for name in "mkb")
    scale = params_of(plan, "r").scale * np.abs(k).max(1) / np.float32(127)
    bias = np.rint(b / np.float64(scale)) * scale
    for feed in feeds:
        state = feed["h"]
        wanted: list[Any] = []
        for step in feed["x"]:
            state = (product(state, m, params_of(plan, "i")) - step).astype(np.float32)
            wanted.append(product(step, k.T, params_of(plan, "r")) + bias)
        final, made = ort.run(subject.inlined_proto(), feed)
        np.testing.assert_allclose(final, state, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)


NESTED = f"""g (int64 n, float[N, 16] x) => (float[N, 16] y)
    <{LINEAR}, {floats("k", 16, 16)}, int64 two = {{2}}> {{
    y = Loop (n, on, x) <body = l (int64 i, bool go, float[N, 16] s) => (bool d, float[N, 16] u) {{
        d = Identity (go) odd = Mod (i, two) is = Cast <to = 9> (odd)
        u = If (is) <then_branch = t () => (float[N, 16] p) {{ p = MatMul (s, m) }},
                     else_branch = e () => (float[N, 16] q) {{
                         j = MatMul (s, k) q = Tanh (j) }}> }}> }}"""


def test_a_branch_in_a_loop() -> None:
    feeds = loop_feeds(4, 2)
    subject = quantized(NESTED, feeds)
    assert kernels(subject) == {"MatMulIntegerToFloat": 2, "Tanh": 1, "Mod": 1, "Cast": 1, "If": 1}
    by = params_of(plan_of(NESTED, feeds)[1], "s")
    m, k = stored_floats(NESTED, "m"), stored_floats(NESTED, "k")
    for feed in feeds:
        value = feed["x"]
        for step in range(int(feed["n"])):
            made = product(value, m if step % 2 else k, by)
            value = (made if step % 2 else np.tanh(made)).astype(np.float32)
        np.testing.assert_allclose(run(subject, feed), value, rtol=1e-4, atol=1e-4)
    assert [ops(body)["QuantizeLinear"] for body in bodies(subject)] == [0, 1, 1]


def test_behind_a_loop_in_a_scan() -> None:
    """The runtime does not know the rank of what a Loop gives, and wants that of what it scans."""
    text = f"""g (float[T, N, 16] x) => (float[T, N, 16] y) <{LINEAR}, int64 two = {{2}}> {{
        y = Scan <num_scan_inputs = 1, body = s (float[N, 16] r) => (float[N, 16] z) {{
            h = Loop (two, on, r) <body = l (int64 i, bool go, float[?, 16] v)
                => (bool so, float[?, 16] w) {{ so = Identity (go) w = Tanh (v) }}>
            z = MatMul (h, m) }}> (x) }}"""
    feeds = [{"x": normal(3, 2, 16)}]
    subject = quantized(text, feeds)
    assert kernels(subject) == {"Loop": 1, "Tanh": 1, "MatMulIntegerToFloat": 1}
    hidden = np.tanh(np.tanh(feeds[0]["x"]))
    by = QParams.from_range(float(hidden.min()), float(hidden.max()))
    wanted = product(hidden, stored_floats(text, "m"), by)
    np.testing.assert_allclose(run(subject, feeds[0]), wanted, rtol=1e-4, atol=1e-4)


def test_a_branch_in_a_loop_that_never_runs() -> None:
    feeds = loop_feeds(1, 1)
    assert "MatMul 'p' (it never ran on the calibration data)" in notes(NESTED, feeds)
    loop, then, other = bodies(quantized(NESTED, feeds))
    assert [ops(g)["DequantizeLinear"] for g in (loop, then, other)] == [0, 0, 2]


# -- what stays


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("p = MatMul (x, m16)", "weights of float16"),
        ("k = Neg (m) p = MatMul (x, k)", "a product of two activations"),
        ("p = Gemm <transA = 1> (x, m)", "a transposed input"),
        ("k = Log (z) j = Mul (x, k) p = MatMul (j, m)", "holds infinity"),
    ],
)
def test_layers_of_a_subgraph_that_stay_float(nodes: str, said: str) -> None:
    kind, x = ("float16", "h") if "m16" in nodes else ("float", "x")
    halves = stored("m16", normal(16, 16), "float16")
    nodes = nodes.replace("(x", f"({x}")
    text = f"""g (bool c, float[16, 16] x, float16[16, 16] h) => ({kind}[16, 16] y)
        <{LINEAR}, {halves}, float[1] z = {{0}}> {{
        y = If (c) <then_branch = t () => ({kind}[16, 16] p) {{ {nodes} }},
                    else_branch = e () => ({kind}[16, 16] q) {{ q = Neg ({x}) }}> }}"""
    feeds = [{"c": YES, "x": normal(16, 16), "h": normal(16, 16).astype(np.float16)}]
    assert said in notes(text, feeds)
    check(Calibrated(ALL, feeds), text, near_miss=True, inputs=feeds[0])


def test_a_branch_in_a_scan_stays() -> None:
    text = f"""g (bool c, float[T, 2, 16] x) => (float[T, 2, 16] y) <{LINEAR}> {{
        y = Scan <num_scan_inputs = 1, body = s (float[2, 16] r) => (float[2, 16] z) {{
            z = If (c) <then_branch = t () => (float[2, 16] p) {{ p = MatMul (r, m) }},
                        else_branch = e () => (float[2, 16] q) {{ q = Neg (r) }}> }}> (x) }}"""
    feeds = [{"c": YES, "x": normal(3, 2, 16)}]
    assert "MatMul 'p' (in a subgraph nested in a Scan" in notes(text, feeds)
    check(Calibrated(ALL, feeds), text, near_miss=True, inputs=feeds[0])


def test_a_body_that_is_quantized_already() -> None:
    feeds = branch_feeds(YES, NO)
    subject = quantized(BRANCHES, feeds)
    before = text_of(subject)
    ctx = Context()
    Calibrated(ALL, feeds).run(subject, ctx)
    assert "quantized already" in ctx.notes[0]
    assert text_of(subject) == before


def test_an_older_opset_is_lifted() -> None:
    feeds = branch_feeds(YES, NO)
    subject = Model.from_proto(parse(f'<ir_version: 8, opset_import: ["" : 12]>\n{BRANCHES}'))
    Calibrated(ALL, feeds).run(subject, Context())
    assert subject.opsets[""] == 13
    assert kernels(subject) == {"QLinearConv": 3}


def test_only_standard_operators_for_other_runtimes() -> None:
    item = QuantizeStatic(format="qop")
    feeds = [{"c": YES, "x": normal(3, 16)}]
    subject = model(SHARED)
    Calibrated(item, feeds).run(subject, Context(Settings(target="onnx")))
    assert set(subject.opsets) <= {"", "com.microsoft"}
    assert all(not node.domain for node in subject.nodes())
    assert ops(bodies(subject)[0])["MatMulInteger"] == 1
