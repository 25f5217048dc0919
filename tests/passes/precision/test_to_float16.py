"""`fp16`: float16 nodes, float32 nodes, and the Casts between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from passes.precision.to_float16 import Float16
from tests import ort as plain
from tests.checks import check, model, parse, random_feeds, text_of
from tests.passes.fuse.constants import floats, stored, typed
from toolkit.calibrate.data import CalibrationData
from toolkit.errors import UsageError
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.ir.node import attr
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes

HALF = Float16()
STORED = Float16(storage=True, min_elements=1)
CLOSE = 0.02
X_Y = "g (float[N, 16] x) => (float[N, 16] y)"


def ops(subject: Model) -> str:
    return " ".join(node.op_type for node in subject.graph.nodes)


def halved(signature: str, constants: str, nodes: str, wanted: str, **options: Any) -> Model:
    """Check that the model ends up with these operators, and computes about the same."""
    item = options.pop("item", HALF)
    options.setdefault("atol", CLOSE)
    changed = check(item, typed(signature, constants, nodes, options.pop("opset", 21)), **options)
    assert sorted(ops(changed).split()) == sorted(wanted.split()), text_of(changed)
    assert_no_double_casts(changed)
    return changed


def assert_no_double_casts(subject: Model) -> None:
    for graph in subject.graphs():
        for node in graph.nodes:
            if node.op_type == "Cast":
                scope = graph.scope_of(node.input[0])
                maker = scope.producer(node.input[0]) if scope is not None else None
                assert maker is None or maker.op_type != "Cast", text_of(subject)


def notes_of(signature: str, constants: str, nodes: str, item: Float16 = HALF) -> list[str]:
    ctx = Context()
    item.run(Model.from_proto(parse(typed(signature, constants, nodes, 21))), ctx)
    return ctx.notes


# -- computing


def test_one_cast_in_and_one_out() -> None:
    nodes = "a = MatMul (x, w) b = Add (a, c) r = Relu (b) y = MatMul (r, v)"
    constants = f"{floats('w', 16, 16)}, {floats('c', 16)}, {floats('v', 16, 16)}"
    changed = halved(X_Y, constants, nodes, "Cast MatMul Add Relu MatMul Cast")
    kinds = {t.data_type for t in changed.graph.initializers.values()}
    assert kinds == {TensorProto.FLOAT16}


def test_a_value_is_cast_once_for_all_its_users() -> None:
    signature = "g (float[N, 16] x) => (float[N, 16] y, float[N, 16] z)"
    changed = halved(signature, "", "a = Relu (x) b = Neg (x) y = Tanh (a) z = Tanh (b)",
                     "Cast Relu Neg Tanh Tanh Cast Cast")  # fmt: skip
    assert sorted(changed.graph.outputs) == ["y", "z"]


def test_an_output_that_is_also_read() -> None:
    signature = "g (float[N, 16] x) => (float[N, 16] a, float[N, 16] y)"
    changed = halved(signature, "", "a = Relu (x) y = Tanh (a)", "Cast Relu Cast Tanh Cast")
    tanh = next(n for n in changed.graph.nodes if n.op_type == "Tanh")
    assert changed.graph.dtype(tanh.input[0]) == TensorProto.FLOAT16


def test_integers_are_cast_right_away() -> None:
    signature = "g (int64[N, 16] i) => (float[N, 16] y)"
    halved(signature, "", "f = Cast <to = 1> (i) y = Relu (f)", "Cast Relu Cast")


def test_a_cast_to_integers_reads_16_bits() -> None:
    signature = "g (float[N, 16] x) => (int64[N, 16] y)"
    feeds = {"x": np.arange(32, dtype=np.float32).reshape(2, 16)}
    halved(signature, "", "r = Relu (x) y = Cast <to = 7> (r)", "Cast Relu Cast", inputs=feeds)


def test_resize_keeps_its_scales() -> None:
    signature = "g (float[1, 2, 4, 4] x) => (float[1, 2, 8, 8] y)"
    constants = "float[4] s = {1, 1, 2, 2}"
    changed = halved(signature, constants, 'y = Resize <mode = "nearest"> (x, , s)',
                     "Cast Resize Cast")  # fmt: skip
    assert changed.graph.initializers["s"].data_type == TensorProto.FLOAT


def test_a_constant_that_both_kinds_read_is_there_twice() -> None:
    nodes = "a = Add (x, c) b = CumSum (a, k) y = Add (b, c)"
    constants = f"{floats('c', 16)}, int64 k = {{0}}"
    item = Float16(keep=("b",))
    changed = halved(X_Y, constants, nodes, "Cast Add Cast CumSum Cast Add Cast", item=item)
    assert len(changed.graph.initializers) == 2


def test_data_movement_has_the_type_of_its_neighbours() -> None:
    signature = "g (float[4, 16] x) => (float[16, 4] y)"
    nodes = "a = CumSum (x, k) t = Transpose <perm = [1, 0]> (a) y = CumSum (t, k)"
    item_notes = notes_of(signature, "int64 k = {0}", nodes)
    assert any("CumSum" in note for note in item_notes)
    check(HALF, typed(signature, "int64 k = {0}", nodes, 21), near_miss=True)


def test_old_opsets_and_operators_without_16_bits() -> None:
    signature = "g (float[2, 8] x) => (int64[K, 3] y)"
    nodes = """b = Reshape (x, s) y = NonMaxSuppression (b, c)"""
    constants = "int64[3] s = {1, 4, 4}, " + floats("c", 1, 1, 4, low=0)
    check(HALF, typed(signature, constants, nodes, 21), near_miss=True)


@pytest.mark.parametrize(
    ("perm", "reader", "kept"),
    [("1, 0, 2", "MatMul (t, w)", True), ("0, 2, 1", "MatMul (w, t)", False)]
    + [("1, 0, 2", f"{reader} (t, w)", False) for reader in ("Add", "Div")],
)
def test_a_transpose_that_the_runtime_crashes_with_stays(
    perm: str, reader: str, kept: bool
) -> None:
    """By structure alone: a crash would take the tests with it."""
    nodes = f"a = Relu (x) t = Transpose <perm = [{perm}]> (a) y = {reader}"
    parts = "g (float[A, B, 8] x) => (float[C, D, E] y)", floats("w", 8, 8), nodes
    graph = check(HALF, typed(*parts, 21), run=False).graph
    (transpose,) = (node for node in graph.nodes if node.op_type == "Transpose")
    kind = TensorProto.FLOAT if kept else TensorProto.FLOAT16
    assert graph.dtype(transpose.output[0]) == kind
    assert any("crashes" in note for note in notes_of(*parts)) == kept


# -- overflow and underflow


def test_constants_that_16_bits_do_not_hold() -> None:
    for number, said in (("1e-12", "underflows"), ("1e5", "beyond 65504")):
        notes = notes_of(X_Y, f"float c = {{{number}}}", "r = Relu (x) a = Add (r, c) y = Tanh (a)")
        assert any(said in note and "Add 'a'" in note for note in notes)
    nodes = "r = Relu (x) a = Add (r, c) d = Div (r, a) y = Tanh (d)"
    wanted = "Cast Relu Cast Add Cast Div Tanh Cast"
    zeros = {"x": np.zeros((2, 16), np.float32)}
    halved(X_Y, "float c = {1e-12}", nodes, wanted, run=False)
    divides = "r = Relu (x) a = Add (r, c) q = Sqrt (a) y = Div (r, q)"
    halved(X_Y, "float c = {1e-6}", divides, "Cast Relu Add Sqrt Div Cast", inputs=zeros)


def test_an_infinite_constant_is_no_overflow() -> None:
    signature = "g (bool[16] m, float[N, 16] x) => (float[N, 16] y)"
    text = typed(signature, "float c = {-1}", "a = Where (m, x, c) y = Softmax (a)", 21)
    proto = parse(text)
    proto.graph.initializer[0].float_data[:] = [-np.inf]
    subject = Model.from_proto(proto)
    HALF.run(subject, Context())
    assert ops(subject) == "Cast Where Softmax Cast"


def test_masks_beyond_16_bits_reach_the_softmax_in_32() -> None:
    signature = "g (float[N, 16] m, float[N, 16] x) => (float[N, 16] y)"
    nodes = "a = Relu (x) b = Mul (m, c) s = Add (a, b) p = Softmax (s) y = Relu (p)"
    feeds = {"x": np.ones((2, 16), np.float32), "m": np.ones((2, 16), np.float32)}
    halved(signature, "float c = {-3.4e38}", nodes,
           "Mul Cast Relu Cast Add Softmax Cast Relu Cast", inputs=feeds)  # fmt: skip


class Samples:
    """Feeds in a list."""

    def __init__(self, feeds: list[Feed]) -> None:
        self._feeds = feeds

    def __iter__(self) -> Iterator[Feed]:
        return iter(self._feeds)

    def count(self) -> int:
        return len(self._feeds)

    def digest(self) -> str:
        return "samples"


@pytest.mark.parametrize(("size", "stays"), [(1.0, False), (1000.0, True)])
def test_data_show_which_layers_overflow(size: float, stays: bool) -> None:
    nodes = "a = MatMul (x, w) b = MatMul (a, w) y = Tanh (b)"
    text = typed(X_Y, floats("w", 16, 16, low=10, high=20), nodes, 21)
    data = CalibrationData(Samples([{"x": np.full((2, 16), size, np.float32)}]))
    subject, ctx = Model.from_proto(parse(text)), Context(calibration=data)
    HALF.run(subject, ctx)
    assert any("exceed 65504" in note for note in ctx.notes) == stays
    (found,) = plain.run(subject.inlined_proto(), {"x": np.full((2, 16), size, np.float32)})
    np.testing.assert_allclose(found, 1.0, atol=1e-3)


def test_kept_by_pattern() -> None:
    item = Float16(keep=("Tanh", "nothing*"))
    assert notes_of(X_Y, "", "a = Relu (x) y = Tanh (a)", item) == [
        "no node matches 'nothing*'", "kept in 32 bits: Tanh 'y' (excluded by keep)"]  # fmt: skip
    halved(X_Y, "", "a = Relu (x) y = Tanh (a)", "Cast Relu Cast Tanh", item=item)


# -- subgraphs


def test_branches_keep_their_outputs_and_compute_in_16_bits() -> None:
    signature = "g (bool c, float[N, 16] x) => (float[N, 16] y)"
    then = "then_branch = t () => (float[N, 16] p) { a = MatMul (h, w) p = Tanh (a) }"
    other = "else_branch = e () => (float[N, 16] q) { q = Neg (h) }"
    nodes = f"h = Relu (x) r = If (c) <{then}, {other}> y = Tanh (r)"
    text = typed(signature, floats("w", 16, 16), nodes, 21)
    for chosen in (True, False):
        feeds = {"c": np.array(chosen), "x": np.random.default_rng(0).random((3, 16), np.float32)}
        changed = check(HALF, text, atol=CLOSE, inputs=feeds)
        assert_no_double_casts(changed)
    found = [" ".join(n.op_type for n in graph.nodes) for graph in changed.graphs()]
    assert found == ["Cast Relu If Cast Tanh Cast", "MatMul Tanh Cast", "Neg Cast"]


def test_a_loop_carries_32_bits() -> None:
    signature = "g (float[4] x) => (float[4] y)"
    body = """body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t)
              { d = Identity (c) r = Relu (s) t = Add (r, k) }"""
    nodes = f"y = Loop (n, go, x) <{body}>"
    text = typed(signature, "int64 n = {3}, bool go = {1}, float[4] k = {1, 2, 3, 4}", nodes, 21)
    changed = check(HALF, text, atol=CLOSE)
    body_graph = list(changed.graphs())[1]
    assert "Cast Relu Add Cast" in " ".join(n.op_type for n in body_graph.nodes)


# -- a model's ends, storage, pipelines


def test_inputs_and_outputs_in_16_bits() -> None:
    text = typed(X_Y, floats("w", 16, 16), "a = MatMul (x, w) y = Tanh (a)", 21)
    subject = Model.from_proto(parse(text))
    Float16(io="fp16").run(subject, Context())
    subject.graph.verify()
    assert ops(subject) == "MatMul Tanh"
    feeds = {"x": np.ones((2, 16), np.float16)}
    (found,) = plain.run(subject.inlined_proto(), feeds)
    assert found.dtype == np.float16
    (wanted,) = plain.run(parse(text), {"x": np.ones((2, 16), np.float32)})
    np.testing.assert_allclose(found, wanted, atol=CLOSE)
    ctx = Context()
    Float16(io="fp16", keep=("y",)).run(Model.from_proto(parse(text)), ctx)
    assert "output 'y' stays in 32 bits, like its node" in ctx.notes


def test_storage_only() -> None:
    constants = f"{floats('w', 16, 16)}, {floats('v', 16, 16)}"
    nodes = "a = MatMul (x, w) b = MatMul (a, v) y = MatMul (b, w)"
    changed = halved(X_Y, constants, nodes, "Cast Cast MatMul MatMul MatMul", item=STORED)
    assert {t.data_type for t in changed.graph.initializers.values()} == {TensorProto.FLOAT16}
    assert all(
        attr(n, "to") == TensorProto.FLOAT for n in changed.graph.nodes if n.op_type == "Cast"
    )
    few = Float16(storage=True, min_elements=257)
    check(few, typed(X_Y, constants, nodes, 21), near_miss=True)


def test_weights_that_cannot_be_stored() -> None:
    large = np.ones((16, 16))
    large[3, 3] = 1e6
    notes = notes_of(X_Y, stored("w", large), "y = MatMul (x, w)", STORED)
    assert notes == ["weight 'w' stays in 32 bits: a constant beyond 65504"]
    small = np.full((16, 16), 1e-9)
    notes = notes_of(X_Y, stored("w", small), "y = MatMul (x, w)", STORED)
    assert notes == ["weight 'w' stays in 32 bits: a constant with too much underflow"]


def test_a_16_bit_model_stays() -> None:
    text = "g (float16[N, 16] x) => (float16[N, 16] y) { a = Relu (x) y = Tanh (a) }"
    check(HALF, text, near_miss=True)


def test_casts_from_16_bits_are_not_repeated() -> None:
    text = """g (float16[N, 16] x) => (float16[N, 16] y)
              { f = Cast <to = 1> (x) r = Relu (f) t = Tanh (r) y = Cast <to = 10> (t) }"""
    subject = model(text)
    HALF.run(subject, Context())
    assert ops(subject) in ("Relu Tanh Cast", "Relu Tanh Identity", "Relu Tanh")
    feeds = random_feeds(subject)
    np.testing.assert_allclose(
        plain.run(subject.inlined_proto(), feeds)[0], plain.run(parse(text), feeds)[0], atol=CLOSE
    )


@pytest.mark.parametrize("option", ["", ":storage=true"])
def test_in_a_pipeline_after_fusion(option: str) -> None:
    constants = f"{floats('w', 64, 64)}, {floats('b', 64)}, float half = {{0.5}}, " + (
        "float one = {1}, float root = {1.4142135}"
    )
    nodes = """a = MatMul (x, w) l = Add (a, b) d = Div (l, root) e = Erf (d) s = Add (e, one)
               m = Mul (l, s) h = Mul (m, half) y = MatMul (h, w)"""
    signature = "g (float[N, S, 64] x) => (float[N, S, 64] y)"
    subject = Model.from_proto(parse(typed(signature, constants, nodes, 17)))
    before = subject.nbytes()
    result = Pipeline(parse_passes(f"fuse,fp16{option}")).run(subject)
    assert result.passes[-1].status == "applied"
    assert subject.nbytes() < 0.55 * before


def test_bad_options() -> None:
    for option, said in (("io=half", "io=half is not valid"), ("storage=maybe", "true or false")):
        with pytest.raises(UsageError, match=said):
            parse_passes(f"fp16:{option}")
