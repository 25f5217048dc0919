"""Smoothing: which factors are chosen, through what they pass, and what stays as it is."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from passes.quantize.rescale.apply import group_of
from passes.quantize.rescale.samples import ROWS as KEPT, Sample
from passes.quantize.rescale.smooth import Smooth, best_of
from tests import ort
from tests.checks import check, model
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.accuracy_checks import Fed, Feeds, in_int8, notes_of, rows, sqnr
from toolkit.calibrate.data import Calib
from toolkit.calibrate.observers import Collect
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

HALF = Smooth(alpha=0.5)
X_Y = "g (float[N, S, 8] x) => (float[N, S, 6] y)"
LARGE = rows(8, {2: 100.0})
NORM = f"{floats('s', 8, low=0.5, high=2)}, {floats('b', 8)}"
NORMED = "n = LayerNormalization <axis = -1> (x, s, b)"
LAYER = f"{NORMED} y = MatMul (n, w)"


def smoothed(
    signature: str, constants: str, nodes: str, item: Smooth = HALF, feeds: Feeds = LARGE
) -> Model:
    text = typed(signature, constants, nodes)
    return check(Fed(item, feeds), text, inputs=feeds[0], atol=1e-4)


def stays(
    signature: str, constants: str, nodes: str, item: Smooth = HALF, feeds: Feeds = LARGE
) -> None:
    text = typed(signature, constants, nodes)
    check(Fed(item, feeds), text, inputs=feeds[0], near_miss=True)


def test_the_factors() -> None:
    gain = np.array([1, 1, 40, 1, 0, 1, 2, 1.0])
    w = np.random.default_rng(0).uniform(-1, 1, (8, 6))
    w[5] = 0
    constants = f"{stored('s', gain)}, {stored('b', np.zeros(8))}, {stored('w', w)}"
    feeds = rows(8)
    changed = smoothed(X_Y, constants, LAYER, Smooth(alpha=0.7), feeds)
    norm, layer = changed.graph.nodes
    found = [changed.graph.const(name) for name in (norm.input[1], layer.input[1])]
    assert found[0] is not None
    assert found[1] is not None
    inner = model(typed(X_Y.replace("6] y", "8] n"), constants, NORMED))
    values = [ort.run(inner.inlined_proto(), feed)[0] for feed in feeds]
    x = np.abs(np.concatenate(values)).max((0, 1))
    size = np.abs(w).max(1)
    there = (x > 0) & (size > 0)
    wanted = np.where(there, np.where(there, x, 1) ** 0.7 / np.where(there, size, 1) ** 0.3, 1)
    np.testing.assert_allclose(found[0], gain / wanted, rtol=1e-4)
    np.testing.assert_allclose(found[1], w * wanted[:, None], rtol=1e-4, atol=1e-6)
    assert wanted[4] == wanted[5] == 1


@pytest.mark.parametrize(
    "norm",
    [
        "LayerNormalization <axis = -1> (x, s, b)",
        "LayerNormalization <axis = -1> (x, s)",
        "RMSNormalization <axis = -1> (x, s)",
        "SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001> (x, s)",
        "Mul (x, s)",
    ],
)
def test_norms_that_absorb_the_factor(norm: str) -> None:
    constants = f"{NORM}, {floats('w', 8, 6)}"
    changed = smoothed(X_Y, constants, f"n = {norm} y = MatMul (n, w)")
    assert len(changed.graph.nodes) == 2


def test_contrib_norms() -> None:
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'
    constants = f"{NORM}, {floats('w', 8, 6)}"
    for norm in (
        "SkipLayerNormalization (x, x, s, b)",
        "SkipSimplifiedLayerNormalization (x, x, s)",
    ):
        nodes = f"n = com.microsoft.{norm} y = MatMul (n, w)"
        text = f"{header}{X_Y} <{constants}> {{ {nodes} }}"
        check(Fed(HALF, LARGE), text, inputs=LARGE[0], atol=1e-4)


def test_queries_keys_and_values_share_their_factors() -> None:
    signature = "g (float[N, S, 8] x) => (float[N, S, 6] q, float[N, S, 6] k, float[N, S, 6] v)"
    constants = ", ".join([NORM, *(floats(name, 8, 6) for name in "cde")])
    nodes = NORMED + " q = MatMul (n, c) k = MatMul (n, d) v = MatMul (n, e)"
    changed = smoothed(signature, constants, nodes)
    assert [node.op_type for node in changed.graph.nodes].count("MatMul") == 3


@pytest.mark.parametrize("between", ["Relu", "LeakyRelu", "Identity", "Neg"])
def test_behind_another_layer(between: str) -> None:
    constants = ", ".join([floats("v", 8, 16), floats("b", 16), floats("w", 16, 6)])
    nodes = f"a = MatMul (x, v) c = Add (a, b) r = {between} (c) y = MatMul (r, w)"
    smoothed(X_Y, constants, nodes)


def test_factor_of_a_gated_layer_goes_to_the_gated_branch() -> None:
    constants = ", ".join([floats("g1", 8, 16), floats("u", 8, 16), floats("w", 16, 6)])
    nodes = """g2 = MatMul (x, g1) s = Sigmoid (g2) t = Mul (g2, s) u2 = MatMul (x, u)
        r = Mul (t, u2) y = MatMul (r, w)"""
    changed = smoothed(X_Y, constants, nodes)
    assert "g1" in changed.graph.initializers
    assert "u" not in changed.graph.initializers
    packed = f"{floats('p', 8, 32)}, {floats('w', 16, 6)}, int64[2] sizes = {{16, 16}}"
    nodes = """a = MatMul (x, p) g2, u2 = Split <axis = -1> (a, sizes) s = Sigmoid (g2)
        t = Mul (g2, s) r = Mul (t, u2) y = MatMul (r, w)"""
    smoothed(X_Y, packed, nodes)


# -- attention

QKV = ", ".join([floats("q", 8, 8), floats("k", 8, 4), floats("v", 8, 4), floats("w", 8, 6)])
PROJECT = "q1 = MatMul (x, q) k1 = MatMul (x, k) v1 = MatMul (x, v)"


def test_values_of_an_attention_with_shared_heads() -> None:
    nodes = f"""{PROJECT} a = Attention <q_num_heads = 4, kv_num_heads = 2> (q1, k1, v1)
        y = MatMul (a, w)"""
    changed = smoothed(X_Y, QKV, nodes, feeds=rows(8))
    assert "v" not in changed.graph.initializers
    assert {"q", "k"} <= set(changed.graph.initializers)


def test_values_of_an_attention_that_also_go_elsewhere() -> None:
    both = X_Y.replace(" y)", " y, float[N, S, 4] v1)")
    attend = "a = Attention <q_num_heads = 4, kv_num_heads = 2> (q1, k1, v1) y = MatMul (a, w)"
    stays(both, QKV, f"{PROJECT} {attend}", feeds=rows(8))
    cached = X_Y.replace(" y)", " y, float[N, 2, S, 2] pv)")
    attend = attend.replace("a = ", "a, pk, pv = ")
    stays(cached, QKV, f"{PROJECT} {attend}", feeds=rows(8))


def test_values_of_a_packed_projection() -> None:
    constants = ", ".join([floats("p", 8, 24), floats("b", 24), floats("w", 8, 6)])
    constants += ", int64[3] sizes = {8, 8, 8}"
    nodes = """a = MatMul (x, p) c = Add (a, b) q, k, v = Split <axis = -1> (c, sizes)
        o = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v) y = MatMul (o, w)"""
    feeds = rows(8)
    before = model(typed(X_Y, constants, nodes)).graph.const("p")
    changed = smoothed(X_Y, constants, nodes, feeds=feeds)
    after = changed.graph.const(changed.graph.nodes[0].input[1])
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(after[:, :16], before[:, :16])
    assert (after[:, 16:] != before[:, 16:]).any()


def test_an_attention_that_is_spelled_out() -> None:
    constants = ", ".join([*(floats(name, 8, 8) for name in "qkv"), floats("w", 8, 6)])
    constants += ", int64[4] split = {0, 0, 2, 4}, int64[3] join = {0, 0, 8}"
    heads = "".join(
        f"{n}1 = MatMul (x, {n}) {n}2 = Reshape ({n}1, split) "
        f"{n}3 = Transpose <perm = {perm}> ({n}2)\n"
        for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
    )
    nodes = f"""{heads} d = MatMul (q3, k3) p = Softmax (d) o = MatMul (p, v3)
        t = Transpose <perm = [0, 2, 1, 3]> (o) j = Reshape (t, join) y = MatMul (j, w)"""
    changed = smoothed(X_Y, constants, nodes, feeds=rows(8))
    assert "v" not in changed.graph.initializers
    assert "q" in changed.graph.initializers


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "GroupQueryAttention"])
def test_contrib_attention(kind: str) -> None:
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'
    attend = {
        "MultiHeadAttention": "MultiHeadAttention <num_heads = 2> (q1, k1, v1",
        "GroupQueryAttention": "GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (q1, k1, v1",
    }[kind]
    for more, free in (("", True), (", bias" if kind[0] == "M" else ", past, past", False)):
        values = "float[N, S, 4] k1, float[N, S, 4] v1" if kind[0] == "G" else ""
        values = values or "float[N, S, 8] k1, float[N, S, 8] v1"
        nodes = f"""q1 = MatMul (x, q) k1 = MatMul (x, k) v1 = MatMul (x, v)
            a = com.microsoft.{attend}{more}) y = MatMul (a, w)"""
        size = 4 if kind[0] == "G" else 8
        constants = [floats("q", 8, 8), floats("k", 8, size), floats("v", 8, size)]
        constants += [floats("w", 8, 6), floats("bias", 24), floats("past", 1, 2, 1, 2)]
        text = f"{header}{X_Y} <{', '.join(constants)}, {values}> {{ {nodes} }}"
        g = model(text).graph
        node = next(n for n in g.nodes if n.output[0] == "v1")
        assert (group_of(g, node) is not None) == free


# -- search, and what it brings


def planted() -> tuple[str, list[dict[str, Any]]]:
    """A layer behind a norm with two channels that are far larger than the others."""
    random = np.random.default_rng(3)
    gain = np.ones(64)
    gain[[5, 40]] = 60
    constants = [stored("s", gain), stored("b", np.zeros(64))]
    constants += [stored("w", random.standard_normal((64, 32)))]
    signature = "g (float[N, S, 64] x) => (float[N, S, 32] y)"
    return typed(signature, ", ".join(constants), LAYER), rows(64)


@pytest.mark.parametrize("item", [Smooth(), HALF])
def test_int8_gains_by_it(item: Smooth) -> None:
    text, feeds = planted()
    before, after = model(text), model(text)
    Fed(item, feeds).run(after, Context())
    assert sqnr(before, after, feeds) > 100
    assert sqnr(before, in_int8(after), feeds) > sqnr(before, in_int8(before), feeds) + 5


def test_the_search_takes_the_best_and_nothing_that_does_not_gain() -> None:
    text, feeds = planted()
    subject = model(text)
    group = group_of(subject.graph, subject.graph.nodes[0])
    assert group is not None
    (value,) = {sink.node.input[0] for sink in group.spread.sinks}
    found = Calib(feeds).open(subject).collect(subject, {value: Collect(Sample, (-1,))})
    samples = [cast(Sample, found.statistics[value])]
    good, better, bad = np.ones(64), np.ones(64), np.ones(64)
    good[[5, 40]], better[[5, 40]], bad[7] = 2, 8, 1e-3
    assert best_of(subject.graph, group, samples, [bad, better, good], 0.2) is better
    assert best_of(subject.graph, group, samples, [bad], 0.2) is None
    assert best_of(subject.graph, group, samples, [better], 60) is None


def test_an_inserted_product() -> None:
    signature = "g (float[N, S, 8] x) => (float[N, S, 6] y, float[N, S, 6] z)"
    constants = f"{floats('v', 8, 6)}, {floats('w', 8, 6)}"
    nodes = "y = MatMul (x, v) z = MatMul (x, w)"
    stays(signature, constants, nodes)
    changed = smoothed(signature, constants, nodes, Smooth(insert=3.0))
    assert [node.op_type for node in changed.graph.nodes] == ["Mul", "MatMul", "MatMul"]
    stays(signature, constants, nodes, Smooth(insert=60.0))


def test_behind_a_residual_only_by_an_inserted_product() -> None:
    signature = "g (float[N, S, 8] x) => (float[N, S, 8] y)"
    constants = f"{NORM}, {floats('w', 8, 8)}"
    nodes = "n = LayerNormalization <axis = -1> (x, s, b) a = MatMul (n, w) y = Add (a, n)"
    stays(signature, constants, nodes)
    gain = stored("s", [1, 1, 500, 1, 1, 1, 1, 1])
    constants = f"{gain}, {floats('b', 8)}, {floats('w', 8, 8)}"
    changed = smoothed(signature, constants, nodes, Smooth(insert=3.0))
    assert "Mul" in [node.op_type for node in changed.graph.nodes]


# -- what stays


@pytest.mark.parametrize("between", ["Gelu", "Sigmoid", "Tanh", "Softmax", "Exp"])
def test_operators_that_block_a_factor(between: str) -> None:
    nodes = f"n = LayerNormalization <axis = -1> (x, s, b) r = {between} (n) y = MatMul (r, w)"
    stays(X_Y, f"{NORM}, {floats('w', 8, 6)}", nodes)


def test_other_users_prevent_the_rewrite() -> None:
    constants = f"{NORM}, {floats('w', 8, 6)}"
    more = X_Y.replace(" y)", " y, float[N, S, 8] z)")
    stays(more, constants, f"{LAYER} z = Tanh (n)")
    stays(more.replace(" z)", " n)"), constants, LAYER)
    branch = """z = If (c) <then_branch = t () => (float[N, S, 8] p) { p = Neg (n) },
        else_branch = e () => (float[N, S, 8] q) { q = Identity (x) }>"""
    feeds = [{**feed, "c": np.array(True)} for feed in LARGE]
    captured = more.replace("x)", "x, bool c)")
    stays(captured, constants, f"{LAYER} {branch}", feeds=feeds)


def test_shape_of_the_result_may_be_used() -> None:
    more = X_Y.replace(" y)", " y, int64[3] z)")
    smoothed(more, f"{NORM}, {floats('w', 8, 6)}", f"{LAYER} z = Shape (n)")


def test_a_scale_that_is_computed_or_of_another_shape() -> None:
    signature = X_Y.replace("x)", "x, float[8] s)")
    constants = f"{floats('b', 8)}, {floats('w', 8, 6)}"
    feeds = [{**feed, "s": np.ones(8, np.float32)} for feed in LARGE]
    stays(signature, constants, LAYER, feeds=feeds)
    scalar = f"float s = {{2.0}}, {floats('w', 8, 6)}"
    stays(X_Y, scalar, "n = Mul (x, s) y = MatMul (n, w)")


def test_a_transposed_input_stays() -> None:
    signature = "g (float[5, 8] x) => (float[8, 6] y)"
    constants = f"{NORM}, {floats('w', 5, 6)}"
    nodes = "n = LayerNormalization <axis = -1> (x, s, b) y = Gemm <transA = 1> (n, w)"
    feeds = [{"x": feed["x"][0]} for feed in LARGE]
    stays(signature, constants, nodes, feeds=feeds)


def test_large_weight_with_other_users_stays() -> None:
    w = np.random.default_rng(0).standard_normal((8, 40_000))
    constants = f"{NORM}, {stored('w', w)}"
    signature = "g (float[N, S, 8] x) => (float[N, S, 40000] y, float[8, 40000] z)"
    text = typed(signature, constants, f"{LAYER} z = Neg (w)")
    check(Fed(HALF, LARGE), text, inputs=LARGE[0], near_miss=True)
    assert "has other users" in notes_of(HALF, text, LARGE)[0]


def test_half_precision_that_would_overflow_is_unchanged() -> None:
    constants = [stored("s", np.full(8, 1e-4), "float16"), stored("b", np.zeros(8), "float16")]
    constants += [stored("w", np.full((8, 6), 1e-3), "float16")]
    signature = "g (float16[N, S, 8] x) => (float16[N, S, 6] y)"
    feeds = [{"x": feed["x"].astype(np.float16)} for feed in rows(8)]
    text = typed(signature, ", ".join(constants), LAYER)
    check(Fed(HALF, feeds), text, inputs=feeds[0], atol=2e-3)


def test_without_data() -> None:
    with pytest.raises(UsageError, match="needs calibration data"):
        Smooth().run(model(typed(X_Y, f"{NORM}, {floats('w', 8, 6)}", LAYER)), Context())


@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"alpha": -0.1}, {"insert": -1.0}])
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be"):
        Smooth(**options)  # pyright: ignore[reportArgumentType]


def test_a_tensor_with_nan_is_named() -> None:
    feeds = rows(8)
    feeds[0]["x"][0, 0, 0] = 3e38
    constants = f"{stored('s', np.full(8, 3e38))}, {floats('w', 8, 6)}"
    text = typed(X_Y, constants, "n = Mul (x, s) y = MatMul (n, w)")
    assert "infinity" in notes_of(HALF, text, feeds)[0]


# -- samples


def test_samples_do_not_depend_on_the_order_and_merge_exactly() -> None:
    random = np.random.default_rng(0)
    batches = [random.standard_normal((2, 40, 6)).astype(np.float32) for _ in range(5)]
    batches.append(np.zeros((1, 500, 6), np.float32))
    whole, backwards = Sample("x", -1), Sample("x", -1)
    shards = [Sample("x", -1), Sample("x", -1)]
    for at, batch in enumerate(batches):
        whole.update(batch)
        shards[at % 2].update(batch)
        backwards.update(batches[-1 - at])
    shards[0].merge(shards[1])
    kept = Sample("x", -1)
    kept.restore(whole.state())
    for other in (backwards, shards[0], kept):
        np.testing.assert_array_equal(whole.rows, other.rows)
        np.testing.assert_array_equal(whole.high, other.high)
    assert whole.rows.shape == (KEPT, 6)
    assert (whole.rows == 0).all(axis=1).sum() <= 1
