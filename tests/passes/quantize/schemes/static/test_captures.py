"""Static int8 between graphs: what bodies read from around them, and names that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from passes.quantize.schemes.static.quantize_static import QuantizeStatic, apply_static
from tests import ort
from tests.checks import model
from tests.passes.fuse.constants import floats, stored
from tests.passes.quantize.schemes.static.checks import ALL, Calibrated, normal
from tests.passes.quantize.schemes.static.subgraph_checks import (
    BRANCHES,
    CONV,
    INNER,
    LINEAR,
    NO,
    OUTER,
    SHARED,
    YES,
    bodies,
    branch_feeds,
    kernels,
    large,
    loop_feeds,
    ops,
    params_of,
    plan_of,
    product,
    quantized,
    run,
    stored_floats,
)
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.qparams import QParams
from toolkit.runtime.session import Session


@pytest.mark.parametrize("form", ["qdq", "qop"])
def test_weights_that_body_and_main_graph_share(form: Any) -> None:
    feeds = [{"c": YES, "x": normal(3, 16)}]
    subject = quantized(SHARED, feeds, QuantizeStatic(format=form))
    assert [array.dtype for array in large(subject.graph)] == [np.int8]
    plan = plan_of(SHARED, feeds)[1]
    m = stored_floats(SHARED, "m")
    y, z = ort.run(subject.inlined_proto(), feeds[0])
    hidden = np.tanh(feeds[0]["x"])
    np.testing.assert_allclose(y, product(hidden, m, params_of(plan, "h")), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        z, product(feeds[0]["x"], m, params_of(plan, "x")), rtol=1e-5, atol=1e-5
    )


def test_weights_with_float_users_are_kept_for_them() -> None:
    feeds = [{"c": YES, "x": normal(3, 16)}]
    item = QuantizeStatic(exclude=("z",))
    subject = quantized(SHARED, feeds, item)
    assert "m" in subject.graph.initializers
    _, z = ort.run(subject.inlined_proto(), feeds[0])
    np.testing.assert_allclose(z, feeds[0]["x"] @ stored_floats(SHARED, "m"), atol=1e-5)


@pytest.mark.parametrize("form", ["qdq", "qop"])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_subgraph_captures_an_int8_tensor(form: Any, kind: Any) -> None:
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


def test_subgraph_combines_captured_values() -> None:
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
    (plan,) = ctx.report.plans
    assert len({entry.output for entry in plan.entries}) == 2
    names = [t.tensor for t in plan.tensors]
    assert len(names) == 2
    for at, (shape, name) in enumerate(((np.tanh, "m"), (np.exp, "k"))):
        hidden = shape(feeds[at]["x"])
        by = QParams.from_range(float(hidden.min()), float(hidden.max()))
        assert params_of(plan, names[at]).scale == pytest.approx(by.scale, rel=1e-5)
        wanted = product(hidden, stored_floats(text, name), params_of(plan, names[at]))
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
    assert ops(subject.graph) == {"If": 1}
    by = params_of(plan_of(text, feeds)[1], "x")
    exact = (by.quantize(feeds[0]["x"]).astype(int) - by.zero_point) @ codes
    np.testing.assert_allclose(run(subject, feeds[0]), exact * (by.scale * 0.01), rtol=1e-5)


# -- what the runtime must be kept from


def test_a_float_convolution_between_two() -> None:
    """Without a fence the runtime would quantize its weights by itself."""
    text = BRANCHES.replace("p = Conv (r, v)", "f = Conv (r, v) p = Conv (f, v)")
    subject = quantized(text, branch_feeds(YES, NO), QuantizeStatic(exclude=("f",)))
    assert kernels(subject) == {"QLinearConv": 3, "Conv": 1, "Sum": 1}


def test_data_movement_of_int8_has_its_own_pair() -> None:
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
        "r = Dropout (a)",
    ],
)
@pytest.mark.parametrize("reader", ["Abs (r)", "Conv (r, v)"])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("form", ["qdq", "qop"])
def test_subgraph_captures_moved_values(moved: str, reader: str, kind: Any, form: Any) -> None:
    """The runtime would put a pair behind what moves, and abort on not finding the reader.

    Where the reader is a Q, it takes it for one with the Q in front of what moves, and aborts too.
    """
    text = OUTER.replace("r = Relu (a)", moved).replace("p = Conv (r, v)", f"p = {reader}")
    feeds = branch_feeds(YES, NO)
    subject = quantized(text, feeds, QuantizeStatic(activations=kind, format=form))
    for feed in feeds:
        (found,) = Session(subject, optimize=True).run(feed)
        np.testing.assert_allclose(found, run(subject, feed), atol=1e-5)


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_data_movement_in_a_branch_that_always_runs(kind: Any) -> None:
    """The runtime makes it a part of the graph around it, where a body reads what comes out."""
    moved = f"""on = Constant <value = bool {{1}}> ()
        r = If (on) <then_branch = always () => (float[N, 8, 8, 8] f) {{ f = {TURNED} (a) }},
                     else_branch = never () => (float[N, 8, 8, 8] k) {{ k = Neg (a) }}>"""
    text = OUTER.replace("r = Relu (a)", moved).replace("p = Conv (r, v)", "p = Abs (r)")
    feeds = branch_feeds(YES, NO)
    subject = quantized(text, feeds, QuantizeStatic(activations=kind))
    for feed in feeds:
        (found,) = Session(subject, optimize=True).run(feed)
        np.testing.assert_allclose(found, run(subject, feed), atol=1e-5)
