"""Static int8 in the bodies of If, Loop and Scan: the numbers, the kernels, and what stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto

from passes.quantize.apply import apply_all
from passes.quantize.means import input_means
from passes.quantize.plan import Plan
from passes.quantize.plan_json import parse_plan
from passes.quantize.static import QuantizeStatic, apply_static
from passes.quantize.static.ranges import Grid
from passes.shapes import Shapes
from tests import ort
from tests.checks import check, model, parse, text_of
from tests.passes.fuse.constants import floats, stored
from tests.passes.quantize.static.checks import ALL, Calibrated, context, normal
from toolkit.calibrate.data import Calib
from toolkit.context import Context
from toolkit.errors import UsageError
from toolkit.graph import Graph
from toolkit.model import Model
from toolkit.nodes import graphs_of
from toolkit.pipeline import Pipeline
from toolkit.quality.judge import Judge
from toolkit.quality.sensitivity import added_up, alone
from toolkit.quality.variants import quantize_by
from toolkit.registry import parse_passes
from toolkit.runtime import Session, optimize_offline

CONV = f"{floats('w', 8, 4, 3, 3)}, {floats('b', 8)}, {floats('v', 8, 8, 1, 1)}"
WIDE = f"{floats('w', 32, 32, 3, 3)}, {floats('b', 32)}, {floats('v', 32, 32, 1, 1)}"
LINEAR = f"{floats('m', 16, 16, low=-0.3, high=0.3)}, bool on = {{1}}"
YES, NO = np.array(True), np.array(False)

BRANCHES = f"""g (bool c, float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y) <{CONV}> {{
    y = If (c) <
        then_branch = t () => (float[N, 8, 8, 8] p) {{
            a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) p = Conv (r, v) }},
        else_branch = e () => (float[N, 8, 8, 8] q) {{
            q = Conv <pads = [1, 1, 1, 1]> (x, w) }}> }}"""

GROWING = f"""g (int64 n, float[N, 16] x) => (float[M, 16] y) <{LINEAR}, {floats("row", 1, 16)}> {{
    y = Loop (n, on, x) <body = l (int64 i, bool go, float[P, 16] s) => (bool d, float[Q, 16] u)
        {{ d = Identity (go) k = MatMul (s, m) u = Concat <axis = 0> (k, row) }}> }}"""


def branch_feeds(*taken: Any) -> list[dict[str, Any]]:
    return [{"c": c, "x": normal(2, 4, 8, 8, seed=seed)} for seed, c in enumerate(taken)]


def wide(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The same with layers that pay, and samples."""
    for size in ("4, 8, 8", "8, 8, 8"):
        text = text.replace(size, "32, 16, 16")
    feeds = [{**feed, "x": normal(1, 32, 16, 16)} for feed in branch_feeds(*[YES, NO] * 4)]
    return text.replace(CONV, WIDE), feeds


def loop_feeds(*steps: int) -> list[dict[str, Any]]:
    return [{"n": np.array(n), "x": normal(2, 16, seed=seed)} for seed, n in enumerate(steps)]


def quantized(text: str, feeds: list[Any], item: QuantizeStatic = ALL) -> Model:
    """The model in int8; everything that holds of every rewrite holds."""
    return check(Calibrated(item, feeds), text, atol=0.5, inputs=feeds[0])


def notes(text: str, feeds: list[Any], item: QuantizeStatic = ALL) -> str:
    ctx = Context()
    Calibrated(item, feeds).run(model(text), ctx)
    return "; ".join(ctx.notes)


def run(subject: Model, feed: Any) -> Any:
    return ort.run(subject.inlined_proto(), feed)[0]


def kernels(subject: Model) -> Counter[str]:
    """The operators that onnxruntime runs in bodies, without those that only convert or hand on."""
    loaded = optimize_offline(subject.inlined_proto(), "extended")
    left = ("QuantizeLinear", "DequantizeLinear", "Identity")
    found = (node for node in inside(loaded.graph) if node.op_type not in left)
    return Counter(node.op_type for node in found)


def inside(graph: GraphProto) -> Iterator[Any]:
    for node in graph.node:
        for body in graphs_of(node):
            yield from body.node
            yield from inside(body)


def bodies(subject: Model) -> list[Graph]:
    return list(subject.graphs())[1:]


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op_type for node in graph.nodes)


def plan_of(text: str, feeds: list[Any], item: QuantizeStatic = ALL) -> tuple[Model, Plan]:
    subject = model(text)
    return subject, item.make_plan(subject, context(subject, feeds))


def grid(plan: Plan, tensor: str) -> Grid:
    entry = plan.tensor(tensor)
    assert entry is not None
    assert entry.low is not None
    assert entry.high is not None
    return Grid.of(entry.low, entry.high, entry.dtype)


def product(x: Any, weights: Any, by: Grid, channels: bool = True) -> Any:
    """x W in integers, for weights [inputs, outputs]."""
    scale = np.abs(weights).max(0 if channels else None) / np.float32(127)
    codes = np.rint(weights / scale).astype(int)
    exact = (by.quantize(x).astype(int) - by.zero) @ codes
    return exact * (np.float64(by.scale) * scale)


# -- If


@pytest.mark.parametrize("form", ["qdq", "qop"])
@pytest.mark.parametrize("options", [{}, {"per_channel": False}, {"activations": "int8"}])
def test_a_branch_computes_what_a_flat_model_does(form: Any, options: dict[str, Any]) -> None:
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


def test_a_tensor_has_one_quantizer_and_each_body_a_dq() -> None:
    subject = quantized(BRANCHES, branch_feeds(YES, NO))
    assert ops(subject.graph) == {"QuantizeLinear": 1, "If": 1}
    then, other = bodies(subject)
    assert ops(then)["QuantizeLinear"] == 2
    assert ops(other)["QuantizeLinear"] == 1
    # one int8 copy of the weights that both read, and none in floats
    assert [array.dtype for array in large(subject.graph)] == [np.int8, np.int8]


def test_a_branch_that_never_runs_stays_float() -> None:
    feeds = branch_feeds(YES, YES)
    subject = quantized(BRANCHES, feeds)
    then, other = bodies(subject)
    assert ops(then)["QuantizeLinear"] == 2
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
    assert ops(other) == {"DequantizeLinear": 2, "MatMul": 1}
    assert "MatMul 'p' (it never ran" in notes(text, feeds)


def test_what_is_observed() -> None:
    """What is in 8 bits; of layers in bodies what they make, too."""

    class Spy:
        real = False
        names: list[str]

        def collect(self, subject: Model, observers: Any) -> Any:
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
    by = grid(plan, "x")
    k, h, o = (stored_floats(text, name) for name in "kho")
    scale = by.scale * np.abs(k).max(0) / np.float32(127)
    bias = np.rint(h / np.float64(scale)) * scale
    wanted = product(feeds[0]["x"], k, by) + bias
    np.testing.assert_allclose(run(subject, feeds[0]), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        run(subject, feeds[1]), product(feeds[1]["x"], o, by), rtol=1e-5, atol=1e-5
    )


def large(graph: Graph) -> list[Any]:
    """The weights that a graph stores."""
    arrays = [graph.const(name) for name in graph.initializers]
    return [array for array in arrays if array is not None and array.ndim > 1]


def stored_floats(text: str, name: str) -> Any:
    subject = model(text)
    found = [g.const(name) for g in subject.graphs() if name in g.initializers]
    assert len(found) == 1
    return found[0]


# -- Loop and Scan


@pytest.mark.parametrize("channels", [True, False])
def test_a_loop_whose_shape_grows(channels: bool) -> None:
    item = QuantizeStatic(per_channel=channels)
    feeds = loop_feeds(3, 1, 4)
    subject = quantized(GROWING, feeds, item)
    assert kernels(subject) == {"MatMulIntegerToFloat": 1, "Concat": 1}
    by = grid(plan_of(GROWING, feeds, item)[1], "s")
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
    scale = grid(plan, "r").scale * np.abs(k).max(1) / np.float32(127)
    bias = np.rint(b / np.float64(scale)) * scale
    for feed in feeds:
        state = feed["h"]
        wanted: list[Any] = []
        for step in feed["x"]:
            state = (product(state, m, grid(plan, "i")) - step).astype(np.float32)
            wanted.append(product(step, k.T, grid(plan, "r")) + bias)
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
    by = grid(plan_of(NESTED, feeds)[1], "s")
    m, k = stored_floats(NESTED, "m"), stored_floats(NESTED, "k")
    for feed in feeds:
        value = feed["x"]
        for step in range(int(feed["n"])):
            made = product(value, m if step % 2 else k, by)
            value = (made if step % 2 else np.tanh(made)).astype(np.float32)
        np.testing.assert_allclose(run(subject, feed), value, rtol=1e-4, atol=1e-4)
    # the state is quantized once in the loop, for both branches
    assert [ops(body)["QuantizeLinear"] for body in bodies(subject)] == [1, 0, 0]


def test_a_branch_in_a_loop_that_never_runs() -> None:
    feeds = loop_feeds(1, 1)
    assert "MatMul 'p' (it never ran on the calibration data)" in notes(NESTED, feeds)
    loop, then, other = bodies(quantized(NESTED, feeds))
    assert [ops(g)["DequantizeLinear"] for g in (loop, then, other)] == [0, 0, 2]


# -- between graphs

SHARED = f"""g (bool c, float[N, 16] x) => (float[N, 16] y, float[N, 16] z) <{LINEAR}> {{
    z = MatMul (x, m)
    y = If (c) <then_branch = t () => (float[N, 16] p) {{ h = Tanh (x) p = MatMul (h, m) }},
                else_branch = e () => (float[N, 16] q) {{ q = Neg (x) }}> }}"""


@pytest.mark.parametrize("form", ["qdq", "qop"])
def test_weights_that_body_and_main_graph_share(form: Any) -> None:
    feeds = [{"c": YES, "x": normal(3, 16)}]
    subject = quantized(SHARED, feeds, QuantizeStatic(format=form))
    assert [array.dtype for array in large(subject.graph)] == [np.int8]
    plan = plan_of(SHARED, feeds)[1]
    m = stored_floats(SHARED, "m")
    y, z = ort.run(subject.inlined_proto(), feeds[0])
    hidden = np.tanh(feeds[0]["x"])
    np.testing.assert_allclose(y, product(hidden, m, grid(plan, "h")), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(z, product(feeds[0]["x"], m, grid(plan, "x")), rtol=1e-5, atol=1e-5)


def test_weights_that_others_read_as_floats_stay_for_them() -> None:
    feeds = [{"c": YES, "x": normal(3, 16)}]
    item = QuantizeStatic(exclude=("z",))
    subject = quantized(SHARED, feeds, item)
    assert "m" in subject.graph.initializers
    _, z = ort.run(subject.inlined_proto(), feeds[0])
    np.testing.assert_allclose(z, feeds[0]["x"] @ stored_floats(SHARED, "m"), atol=1e-5)


OUTER = f"""g (bool c, float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y) <{CONV}> {{
    a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a)
    y = If (c) <then_branch = t () => (float[N, 8, 8, 8] p) {{ p = Conv (r, v) }},
                else_branch = e () => (float[N, 8, 8, 8] q) {{ q = Neg (r) }}> }}"""
INNER = "{ a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) y = Conv (r, v) }"


@pytest.mark.parametrize("form", ["qdq", "qop"])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_a_tensor_in_8_bits_that_a_body_reads(form: Any, kind: Any) -> None:
    feeds = branch_feeds(YES, NO)
    item = QuantizeStatic(format=form, activations=kind)
    subject = quantized(OUTER, feeds, item)
    assert kernels(subject) == {"QLinearConv": 1, "Neg": 1}
    flat, plan = plan_of(f"g (float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y) <{CONV}> {INNER}",
                         [{"x": feed["x"]} for feed in feeds], item)  # fmt: skip
    # what the branch makes is only seen where it runs
    made = plan_of(OUTER, feeds, item)[1].tensor("p")
    assert made is not None
    tensors = (*(t for t in plan.tensors if t.tensor != "y"), replace(made, tensor="y"))
    apply_static(flat, replace(plan, tensors=tensors), Context(), form)
    np.testing.assert_array_equal(run(subject, feeds[0]), run(flat, {"x": feeds[0]["x"]}))


def test_no_dq_is_left_that_nobody_reads() -> None:
    alone = OUTER.replace("q = Neg (r)", "q = Conv (r, v)")
    main = quantized(alone, branch_feeds(YES, NO)).graph
    (quantizer,) = (n for n in main.nodes if n.op_type == "QuantizeLinear" and n.input[0] != "x")
    assert not any(node.op_type == "DequantizeLinear" for node in main.users(quantizer.output[0]))


def test_what_combines_in_a_body_what_is_made_outside() -> None:
    text = OUTER.replace("p = Conv (r, v)", "s = Add (r, r) p = Conv (s, v)")
    subject = quantized(text, branch_feeds(YES, NO))
    assert kernels(subject) == {"QLinearAdd": 1, "QLinearConv": 1, "Neg": 1}


def test_results_that_are_outputs_of_bodies_keep_their_names() -> None:
    subject = quantized(BRANCHES, branch_feeds(YES, NO))
    assert [body.outputs for body in bodies(subject)] == [["p"], ["q"]]


def test_names_that_sibling_branches_share() -> None:
    text = f"""g (bool c, float[N, 16] x) => (float[N, 16] y) <{LINEAR}, {floats("k", 16, 16)}> {{
        y = If (c) <then_branch = t () => (float[N, 16] p) {{ h = Tanh (x) p = MatMul (h, m) }},
                    else_branch = e () => (float[N, 16] p) {{
                        h = Exp (x) p = MatMul (h, k) }}> }}"""
    feeds = [{"c": c, "x": normal(3, 16, seed=i)} for i, c in enumerate((YES, NO))]
    subject = quantized(text, feeds)
    assert kernels(subject) == {"MatMulIntegerToFloat": 2, "Tanh": 1, "Exp": 1}
    ctx = Context()
    Calibrated(ALL, feeds).run(model(text), ctx)
    (plan,) = ctx.plans
    assert len({entry.output for entry in plan.entries}) == 2
    names = [t.tensor for t in plan.tensors]
    assert len(names) == 2
    for at, (shape, name) in enumerate(((np.tanh, "m"), (np.exp, "k"))):
        hidden = shape(feeds[at]["x"])
        by = Grid.of(float(hidden.min()), float(hidden.max()))
        assert grid(plan, names[at]).scale == pytest.approx(by.scale, rel=1e-5)
        wanted = product(hidden, stored_floats(text, name), grid(plan, names[at]))
        np.testing.assert_allclose(run(subject, feeds[at]), wanted, rtol=1e-4, atol=1e-4)


def test_names_that_two_loops_share() -> None:
    loop = """Loop (n, on, {0}) <body = l (int64 i, bool go, float[N, 16] s)
        => (bool d, float[N, 16] k) {{ d = Identity (go) k = MatMul (s, m) }}>"""
    text = f"""g (int64 n, float[N, 16] x) => (float[N, 16] y) <{LINEAR}> {{
        f = {loop.format("x")} e = Exp (f) y = {loop.format("e")} }}"""
    feeds = loop_feeds(2, 3)
    subject = quantized(text, feeds)
    assert kernels(subject) == {"MatMulIntegerToFloat": 2}
    assert [len(set(body.inputs)) for body in bodies(subject)] == [3, 3]


def test_weights_that_are_integers_already_outside() -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (16, 8))
    text = f"""g (bool c, float[N, 16] x) => (float[N, 8] y)
        <{stored("k", codes, "int8")}, float s = {{0.01}}> {{
        f = DequantizeLinear (k, s)
        y = If (c) <then_branch = t () => (float[N, 8] p) {{ p = MatMul (x, f) }},
                    else_branch = e () => (float[N, 8] q) {{ a = MatMul (x, f) q = Neg (a) }}> }}"""
    feeds = [{"c": c, "x": normal(3, 16, seed=i)} for i, c in enumerate((YES, NO))]
    subject = quantized(text, feeds)
    assert kernels(subject) == {"MatMulIntegerToFloat": 2, "Neg": 1}
    assert ops(subject.graph) == {"QuantizeLinear": 1, "If": 1}
    by = grid(plan_of(text, feeds)[1], "x")
    exact = (by.quantize(feeds[0]["x"]).astype(int) - by.zero) @ codes
    np.testing.assert_allclose(run(subject, feeds[0]), exact * (by.scale * 0.01), rtol=1e-5)


# -- what the runtime must be kept from


def test_a_float_convolution_between_two() -> None:
    """Without a fence the runtime would quantize its weights by itself."""
    text = BRANCHES.replace("p = Conv (r, v)", "f = Conv (r, v) p = Conv (f, v)")
    subject = quantized(text, branch_feeds(YES, NO), QuantizeStatic(exclude=("f",)))
    assert kernels(subject) == {"QLinearConv": 3, "Conv": 1, "Sum": 1}


def test_what_moves_int8_has_a_pair_of_its_own() -> None:
    moved = "f = Conv (r, v) j = Transpose (f) p = Transpose (j)"
    text = BRANCHES.replace("p = Conv (r, v)", moved)
    item, feeds = QuantizeStatic(activations="int8"), branch_feeds(YES, NO)
    quantized(text, feeds, item)
    subject = model(text)
    Calibrated(item, feeds).run(subject, Context())
    assert list(subject.journal.places_by_rule()["carry-signed"]) == ["j", "p"]
    for feed in feeds:
        Session(subject, optimize=True).run(feed)


TURNED = "Transpose <perm = [0, 1, 3, 2]>"


@pytest.mark.parametrize(
    "moved",
    [
        "r = MaxPool <kernel_shape = [1, 1]> (a)",
        f"f = {TURNED} (a) r = {TURNED} (f)",
        f"f = Identity (a) r = {TURNED} (f)",
        f"f = {TURNED} (a) h = Identity (f) r = Cast <to = 1> (h)",
        "r = Identity (a)",
    ],
)
@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("form", ["qdq", "qop"])
def test_what_is_moved_and_read_by_a_body(moved: str, kind: Any, form: Any) -> None:
    """The runtime would put a pair behind what moves, and abort on not finding the reader."""
    text = OUTER.replace("r = Relu (a)", moved).replace("p = Conv (r, v)", "p = Abs (r)")
    feeds = branch_feeds(YES, NO)
    subject = quantized(text, feeds, QuantizeStatic(activations=kind, format=form))
    for feed in feeds:
        (found,) = Session(subject, optimize=True).run(feed)
        np.testing.assert_allclose(found, run(subject, feed), atol=1e-5)


# -- plans


def test_there_and_back(tmp_path: Path) -> None:
    feeds = branch_feeds(YES, NO)
    ctx = Context()
    first = model(BRANCHES)
    Calibrated(ALL, feeds).run(first, ctx)
    (plan,) = ctx.plans
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


def test_a_plan_of_shared_names_is_read_by_the_same_names(tmp_path: Path) -> None:
    text, feeds = wide(BRANCHES.replace(" q", " p").replace("(q", "(p"))
    for item in (QuantizeStatic(), *parse_passes("quantize:mode=static:correct_bias=false")):
        ctx = context(model(text), feeds)
        first = model(text)
        item.run(first, ctx)
        path = tmp_path / "plan.json"
        path.write_text(ctx.plans[0].to_json())
        second = model(text)
        replace(item, plan=path).run(second, context(model(text), feeds))
        assert kernels(second)["QLinearConv"] == 3
        for feed in feeds[:2]:
            np.testing.assert_array_equal(run(first, feed), run(second, feed))


def test_tensors_and_nodes_that_a_plan_cannot_have() -> None:
    subject, plan = plan_of(BRANCHES, branch_feeds(YES, NO))
    missing = replace(plan, tensors=tuple(t for t in plan.tensors if t.tensor != "r"))
    with pytest.raises(UsageError, match="Conv 'a' cannot be static: the plan has no tensor 'r'"):
        apply_static(subject, missing, Context())
    subject, plan = plan_of(BRANCHES, branch_feeds(YES, NO))
    floats_left = replace(plan, entries=tuple(replace(e, float_result=True) for e in plan.entries))
    with pytest.raises(UsageError, match="Conv 'a' cannot have a result in floats: it is in a sub"):
        apply_all(subject, floats_left, Context())


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
def test_layers_of_a_body_that_stay(nodes: str, said: str) -> None:
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
    assert "MatMul 'p' (in a subgraph inside of a Scan" in notes(text, feeds)
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
    Calibrated(item, feeds).run(subject, Context(target="onnx"))
    assert set(subject.opsets) <= {"", "com.microsoft"}
    assert all(not node.domain for node in subject.nodes())
    assert ops(bodies(subject)[0])["MatMulInteger"] == 1


# -- with all the rest


def test_biases_take_back_what_rounding_shifts() -> None:
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
    judge = Judge(subject, feeds, most=8)
    found = quantize_by(ALL, subject, lambda: context(subject, feeds))
    rows = {row.label: row.noise for row in alone(judge, found.variants, 8)}
    assert list(rows) == ["Conv a", "Conv p", "Conv q"]
    assert all(noise is not None and 0 < noise < 1e-2 for noise in rows.values())
    values = {row.label: row.noise for row in added_up(subject, found.whole, feeds, samples=2)}
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
