"""`reshape`: shape arithmetic becomes constants, unless it must stay computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import check, model, random_feeds
from onnx import parser

import toolkit
from passes.analysis.shapes import Shapes
from passes.simplify.shape_arithmetic import Reshape, expand_target, symbolic_target
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.runtime.session import Session
from toolkit.symbolic import parse


class Known:
    """Run `shapes`, then `reshape`."""

    def run(self, subject: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(subject, ctx)
        Reshape().run(subject, ctx)


def rewritten(before: str, after: str | None = None, **options: Any) -> Model:
    return check(Known(), before, after, **options)


def same_at(before: str, changed: Model, feeds: dict[str, Any]) -> None:
    """Check that the rewritten model computes the same from these feeds, too."""
    for old, new in zip(
        Session(model(before)).run(feeds), Session(changed).run(feeds), strict=True
    ):
        assert old.shape == new.shape
        np.testing.assert_array_equal(old, new)


HEADS = """
    g (float[b, s, 24] x) => (float[b, s, 4, 6] y)
    <int64 i = {0}, int64 j = {1}, int64[1] zero = {0}, int64[1] four = {4}, int64[1] six = {6}>
    { shape = Shape(x)  b0 = Gather(shape, i)  s0 = Gather(shape, j)
      b1 = Unsqueeze(b0, zero)  s1 = Unsqueeze(s0, zero)
      target = Concat<axis=0>(b1, s1, four, six)  y = Reshape(x, target) }
"""


def test_a_view_copies_the_sizes_it_keeps() -> None:
    changed = rewritten(HEADS, "t = Constant<value = int64[4] {0, 0, 4, 6}>()  y = Reshape(x, t)")
    for sizes in ((1, 1), (0, 3), (2, 0)):
        same_at(HEADS, changed, {"x": np.ones((*sizes, 24), np.float32)})


def test_a_zero_size_becomes_a_copied_size() -> None:
    before = HEADS.replace("Reshape(x, target)", "Reshape<allowzero=1>(x, target)")
    changed = rewritten(before, "t = Constant<value = int64[4] {0, 0, 4, 6}>()  y = Reshape(x, t)")
    same_at(before, changed, {"x": np.ones((0, 3, 24), np.float32)})


def test_an_inferred_size_becomes_a_number() -> None:
    before = HEADS.replace("four = {4}", "four = {-1}")
    rewritten(before, "t = Constant<value = int64[4] {0, 0, 4, 6}>()  y = Reshape(x, t)")


def test_one_symbolic_size_beside_numbers_is_inferred() -> None:
    rewritten(
        """
        g (float[b, s, 24] x) => (float[n, 24] y)
        <int64 i = {0}, int64 j = {1}, int64[1] zero = {0}, int64[1] width = {24}>
        { shape = Shape(x)  b0 = Gather(shape, i)  s0 = Gather(shape, j)  n = Mul(b0, s0)
          n1 = Unsqueeze(n, zero)  target = Concat<axis=0>(n1, width)  y = Reshape(x, target) }
        """,
        "t = Constant<value = int64[2] {-1, 24}>()  y = Reshape(x, t)",
    )


def test_a_size_next_to_a_possibly_empty_axis_stays() -> None:
    """[0, 8, -1] would fail for an empty batch; the computed target does not."""
    before = """
        g (float[b, 4, 2, s] x) => (float[b, 8, s] y)
        <int64 i = {0}, int64 j = {3}, int64[1] zero = {0}, int64[1] eight = {8}>
        { shape = Shape(x)  b0 = Gather(shape, i)  s0 = Gather(shape, j)
          b1 = Unsqueeze(b0, zero)  s1 = Unsqueeze(s0, zero)
          target = Concat<axis=0>(b1, eight, s1)  y = Reshape(x, target) }
    """
    changed = rewritten(before, near_miss=True)
    same_at(before, changed, {"x": np.ones((0, 4, 2, 3), np.float32)})


def test_two_symbolic_sizes_that_cannot_be_copied_stay() -> None:
    rewritten(
        """
        g (float[n, 8] x, float[b, s] like) => (float[b, s, 8] y)
        <int64[1] eight = {8}>
        { shape = Shape(like)  target = Concat<axis=0>(shape, eight)  y = Reshape(x, target) }
        """,
        near_miss=True,
        inputs={"x": np.ones((6, 8), np.float32), "like": np.ones((2, 3), np.float32)},
    )


@pytest.mark.parametrize(
    ("wanted", "source", "result", "strict", "numbers"),
    [
        ("b, s, 4, 6", "b, s, 24", "b, s, 4, 6", False, [0, 0, 4, 6]),
        ("b, s", "s, b", "b, s", False, None),
        ("b, -1, 6", "b, s, 6", "b, s, 6", False, [0, 0, 6]),
        ("b, -1", "b, s, 6", "b, 6*s", False, [0, -1]),
        ("b, -1", "b, s, 6", "b, 6*s", True, None),
        ("0, b", "2, b", "2, b", False, [2, 0]),
        ("0, b", "0, b", "0, b", True, [0, 0]),
        ("0, b", "2, b", "0, b", True, None),
        ("b*s, 6", "b, s, 6", "b*s, 6", False, [-1, 6]),
        ("b*s, c", "b, s, c", "b*s, c", False, None),
        ("b + 1, 6", "b + 1, 6", "b + 1, 6", False, [0, 6]),
        ("b + 1, n", "b + 1, 2, n/2", "b + 1, n", False, [0, -1]),
    ],
)
def test_symbolic_target(
    wanted: str, source: str, result: str, strict: bool, numbers: list[int] | None
) -> None:
    def dims(text: str) -> tuple[Any, ...]:
        return tuple(parse(item.strip()) for item in text.split(","))

    assert symbolic_target(dims(wanted), dims(source), dims(result), strict) == numbers


def test_expand_target() -> None:
    b, s = parse("b"), parse("s")
    assert expand_target([b, 12, s, 64], (b, 1, s, 64)) == [1, 12, 1, 1]
    assert expand_target([s], (b, s)) == [1]
    assert expand_target([b, s], (s,)) is None


def test_an_expand_target_has_only_the_repeated_sizes() -> None:
    before = """
        g (float[b, 1, s] x) => (float[b, 12, s] y)
        <int64 i = {0}, int64 j = {2}, int64[1] zero = {0}, int64[1] heads = {12}>
        { shape = Shape(x)  b0 = Gather(shape, i)  s0 = Gather(shape, j)
          b1 = Unsqueeze(b0, zero)  s1 = Unsqueeze(s0, zero)
          target = Concat<axis=0>(b1, heads, s1)  y = Expand(x, target) }
    """
    changed = rewritten(before, "t = Constant<value = int64[3] {1, 12, 1}>()  y = Expand(x, t)")
    same_at(before, changed, {"x": np.ones((0, 1, 3), np.float32)})


# -- integers


def test_known_integers_become_constants() -> None:
    rewritten(
        """
        g (float[b, 8, 6] x) => (float[b, 4, 6] y, int64[1] n)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}>
        { shape = Shape(x)  n = Slice(shape, one, two)  half = Div(n, two)
          y = Slice(x, zero, half, one) }
        """,
        """
        g (float[b, 8, 6] x) => (float[b, 4, 6] y, int64[1] n)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] eight = {8}, int64[1] half = {4}>
        { n = Identity(eight)  y = Slice(x, zero, half, one) }
        """,
    )


def test_a_known_condition_becomes_a_constant() -> None:
    changed = rewritten(
        """
        g (float[b, 8] x) => (float[b, 8] y) <int64 zero = {0}, int64 one = {1}>
        { shape = Shape(x)  n = Gather(shape, one)  some = Greater(n, zero)
          y = If(some) <then_branch = t () => (float[p, q] ty) { ty = Relu(x) },
                        else_branch = e () => (float[p, q] ey) { ey = Neg(x) }> }
        """
    )
    assert [n.op_type for n in changed.graph.nodes] == ["If"]
    assert changed.graph.const(changed.graph.nodes[0].input[0])


def test_a_condition_that_depends_on_a_size_stays() -> None:
    rewritten(
        """
        g (float[b, 8] x) => (bool y) <int64 zero = {0}>
        { shape = Shape(x)  n = Gather(shape, zero)  y = Greater(n, zero) }
        """,
        near_miss=True,
    )


def test_equal_integers_are_computed_once() -> None:
    rewritten(
        """
        g (float[b, s] x, float[s, b] z) => (float[b] y, float[b] w)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}>
        { first = Shape(x)  n = Slice(first, zero, one)  y = ConstantOfShape(n)
          second = Shape(z)  m = Slice(second, one, two)  w = ConstantOfShape(m) }
        """,
        """
        g (float[b, s] x, float[s, b] z) => (float[b] y, float[b] w)
        <int64[1] zero = {0}, int64[1] one = {1}>
        { first = Shape(x)  n = Slice(first, zero, one)  y = ConstantOfShape(n)
          w = ConstantOfShape(n) }
        """,
    )


MEASURED = """
    g (float[b, s] x, float[b, s] w) => (TYPE[n, m] y)
    <int64[1] one = {1}, int64[1] two = {2}, TYPE number = {3}>
    { z = Mul (x, w) shape = Shape (z) n = Slice (shape, one, two) target = Concat <axis = 0> (n, n)
      y = Expand (number, target) }
"""


def test_a_size_is_taken_from_an_input_not_from_a_computed_value() -> None:
    changed = rewritten(MEASURED.replace("TYPE", "float"))
    shapes = [node for node in changed.graph.nodes if node.op_type == "Shape"]
    assert [node.input[0] for node in shapes if len(node.attribute) == 2] == ["x"]
    assert all(changed.graph.is_unused(node.output[0]) for node in shapes if not node.attribute)
    narrow = MEASURED.replace("shape = Shape (z)", "wide = Shape (z) shape = Cast <to = 6> (wide)")
    narrow = narrow.replace("Concat <axis = 0> (n, n)", "Cast <to = 7> (m)")
    narrow = narrow.replace("target =", "m = Concat <axis = 0> (n, n) target =")
    changed = rewritten(narrow.replace("TYPE", "float"))
    assert "Slice" not in {
        node.op_type for node in changed.graph.nodes if not changed.graph.is_unused(node.output[0])
    }


BESIDE = """
    g (float[b, s] x, float[s, 4] w) => (float[b, 4] z, float[c] y) <float number = {3}>
    { z = MatMul (x, w) READER sizes = Shape (z) y = Expand (number, TARGET) }
"""


def test_sizes_of_values_with_other_users_come_from_inputs_and_numbers() -> None:
    """(b, 4) is the Shape of an input and a number, so z is not needed for its shape."""
    text = BESIDE.replace("float[c] y", "float[b, 4] y, float[b, 4] u").replace("TARGET", "sizes")
    changed = rewritten(text.replace("READER", "u = Exp (z)"))
    assert {node.input[0] for node in changed.graph.nodes if node.op_type == "Shape"} == {"x"}
    alone = text.replace("float[b, 4] z, ", "").replace(", float[b, 4] u", "").replace("READER", "")
    rewritten(alone, near_miss=True)


def test_a_size_of_an_input_stays() -> None:
    rewritten(MEASURED.replace("TYPE", "float").replace("Shape (z)", "Shape (x)"), near_miss=True)


def test_equal_sizes_of_other_type_or_rank_are_other_values() -> None:
    rewritten(
        """
        g (float[b] x) => (int64[1] y, int64 n, int32[1] m) <int64[1] zero = {0}>
        { y = Shape(x)  n = Size(x)  m = Cast<to=6>(y) }
        """,
        near_miss=True,
    )


def test_outputs_stay_outputs() -> None:
    changed = rewritten(
        """
        g (float[b, 3] x, float[b, 5] z) => (int64[1] y, int64[1] w, int64[1] three)
        { y = Shape<start=0, end=1>(x)  w = Shape<start=0, end=1>(z)
          three = Shape<start=1, end=2>(x) }
        """
    )
    assert changed.graph.outputs == ["y", "w", "three"]


def test_captured_values_are_replaced_in_subgraphs_too() -> None:
    changed = rewritten(
        """
        g (float[b, 8] x, bool c) => (float[m, n] y)
        <int64[1] one = {1}, int64[1] two = {2}, int64[1] rest = {-1}>
        { shape = Shape(x)  n = Slice(shape, one, two)
          y = If(c) <
            then_branch = t () => (float[p, q] ty)
                { target = Concat<axis=0>(rest, n)  ty = Reshape(x, target) },
            else_branch = e () => (float[p, q] ey)
                { inner = Shape(x)  same = Slice(inner, one, two)  half = Div(same, two)
                  target = Concat<axis=0>(rest, half)  ey = Reshape(x, target) }> }
        """
    )
    assert [n.op_type for g in changed.graphs() for n in g.nodes] == ["If", "Reshape", "Reshape"]


def test_a_loop_keeps_sizes_that_change_between_iterations() -> None:
    before = """
        g (float[2, s] x, int64 trips) => (float[m, s] y)
        <bool on = {1}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] rest = {-1}>
        { y = Loop(trips, on, x) <
            body = body (int64 i, bool c, float[p, q] a) => (bool again, float[p, q] next)
            { again = Identity(c)  rows = Shape<start=0, end=1>(a)
              target = Concat<axis=0>(rows, rest)  b = Reshape(a, target)
              next = Concat<axis=0>(b, x) }> }
    """
    changed = rewritten(before)
    for trips in (0, 1, 3):
        feeds = random_feeds(model(before)) | {"trips": np.array(trips)}
        same_at(before, changed, feeds)


def test_vetoed_rewrites_are_left_alone() -> None:
    subject = model(HEADS)
    subject.journal.veto_rule("reshape-target")
    Known().run(subject, Context())
    assert "reshape-target" not in subject.journal.places_by_rule()


def test_a_declared_name_of_an_output_is_not_trusted() -> None:
    """`N` is the size of x, and of y by declaration only: the Expand may enlarge it."""
    proto = parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N] x, float[M] w) => (float[N] z) { y = Add(x, w) s = Shape(y) z = Expand(x, s) }
        """
    )
    result = toolkit.optimize(proto)
    assert "Expand" in [n.op_type for n in result.model.graph.nodes]
