"""Views in the factor algebra."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
from onnx import helper

from passes.analysis.shapes import Shapes
from passes.analysis.view_algebra import Axis, Factor, Trace, leaves, regroup, size_of
from tests import ort
from tests.checks import model
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.symbolic import symbol

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'
N, S = symbol("N"), symbol("S")


def sizes(axes: object) -> list[list[object]]:
    return [[factor.size for factor in leaves(axis)] for axis in axes]  # type: ignore[attr-defined]


def axes(*shape: object) -> list[list[Factor]]:
    return [[Factor(size)] for size in shape]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((N, S, 12), (N, S, 3, 4), [[N], [S], [3], [4]]),
        ((N * 3, S, 4), (N, 3, S, 4), [[N], [3], [S], [4]]),
        ((N, 3, S, 4), (N * 3, S, 4), [[N, 3], [S], [4]]),
        ((4, 6), (8, 3), [[4, 2], [3]]),
        ((N, 1, S), (N, S), [[N], [S]]),
        ((N, S), (1, N, 1, S, 1), [[], [N], [], [S], []]),
    ],
)
def test_regroup(before: object, after: object, groups: object) -> None:
    found = regroup(axes(*before), after)  # type: ignore[misc, arg-type]
    assert found is not None
    assert sizes(found) == groups


@pytest.mark.parametrize(
    ("before", "after"), [((N, S), (S, N)), ((4, 6), (5, 5)), ((N, 4), (N, 2)), ((0, 4), (4, 0))]
)
def test_incompatible_shapes_do_not_regroup(before: object, after: object) -> None:
    assert regroup(axes(*before), after) is None  # type: ignore[misc, arg-type]


def traced(body: str, weights: str = "") -> tuple[Trace, dict[str, list[list[object]]]]:
    subject = model(f"""{HEADER}g (float[N, S, 8] x) => (float[a, b, c, d] y)
        <int64[4] heads = {{0, 0, 2, 4}}, float two = {{2}}{weights}> {{ {body} }}""")
    Shapes(annotate=False).run(subject, Context())
    trace = Trace(subject.graph, "y")
    return trace, {source.value: sizes(source.axes) for source in trace.sources}


def test_heads_are_traced_to_tokens() -> None:
    body = "h = Reshape (x, heads) t = Transpose <perm = [0, 2, 3, 1]> (h) y = Mul (two, t)"
    trace, found = traced(body)
    assert sizes(trace.axes) == [[N], [2], [4], [S]]
    assert found["x"] == [[N], [S], [2, 4]]
    assert [source.scale for source in trace.sources] == [1.0, 2.0, 2.0, 2.0]


def test_repetitions_are_factors_that_the_source_lacks() -> None:
    body = """h = Reshape (x, heads) u = Unsqueeze (h, axis) e = Expand (u, many)
        y = Reshape (e, all)"""
    weights = """, int64[1] axis = {3}, int64[5] many = {1, 1, 1, 3, 1},
        int64[4] all = {0, 0, 6, 4}"""
    trace, found = traced(body, weights)
    assert sizes(trace.axes) == [[N], [S], [2, 3], [4]]
    assert found["x"] == [[N], [S], [2, 4]]
    assert size_of(trace.axes[2]) == 6


def test_a_trace_ends_at_an_operator_that_is_not_a_view() -> None:
    _, found = traced("r = Relu (x) y = Reshape (r, heads)")
    assert "r" in found
    assert "x" not in found


# -- random chains of views, compared with their values


def random_chain(seed: int) -> str:
    """Return a model that views x, [2, 1, 6, 4], several times."""
    dice = random.Random(seed)
    shape, value, nodes = [2, 1, 6, 4], "x", list[str]()
    stored = ["float two = {2}", "float[1] half = {0.5}"]

    def vector(sizes: Sequence[int]) -> str:
        stored.append(f"int64[{len(sizes)}] k{len(stored)} = {{{', '.join(map(str, sizes))}}}")
        return f"k{len(stored) - 1}"

    for count in range(dice.randint(3, 7)):
        kind = dice.choice(("Reshape", "Reshape", "Transpose", "Unsqueeze", "Repeat", "Scale"))
        axis = dice.randrange(len(shape))
        if kind == "Transpose":
            perm = dice.sample(range(len(shape)), len(shape))
            shape, node = [shape[a] for a in perm], f"Transpose <perm = {perm}> ({value})"
        elif kind == "Unsqueeze":
            node = f"Unsqueeze ({value}, {vector([axis])})"
            shape = [*shape[:axis], 1, *shape[axis:]]
        elif kind == "Scale":
            node = dice.choice(
                (f"Mul ({value}, two)", f"Div ({value}, half)", f"Identity ({value})")
            )
        elif kind == "Repeat" and shape[axis] == 1:
            node = f"Expand ({value}, {vector([3 if a == axis else 1 for a in range(len(shape))])})"
            shape = [3 if a == axis else size for a, size in enumerate(shape)]
        elif kind == "Repeat":
            node = f"Concat <axis = {axis}> ({value}, {value})"
            shape = [size * 2 if a == axis else size for a, size in enumerate(shape)]
        else:
            shape = regrouped(dice, prod(shape))
            node = f"Reshape ({value}, {vector(shape)})"
        value = f"v{count}"
        nodes.append(f"{value} = {node}")
    return f"""{HEADER}g (float[2, 1, 6, 4] x) => (float[P] {value}) <{", ".join(stored)}>
        {{ {" ".join(nodes)} }}"""


def regrouped(dice: random.Random, count: int) -> list[int]:
    """Return random sizes with this product."""
    shape: list[int] = []
    while count > 1:
        size = dice.choice([size for size in range(1, count + 1) if count % size == 0])
        shape.append(size)
        count //= size
    return shape or [1]


def rearranged(array: Array, source: Sequence[Axis], result: Sequence[Axis]) -> Array:
    """Return the array, whose axes have the factors `source`, with the axes `result`."""
    have = [factor for axis in source for factor in leaves(axis)]
    want = [factor for axis in result for factor in leaves(axis)]
    split = array.reshape([int(str(factor.size)) for factor in have])
    order = [have.index(factor) for factor in want if factor in have]
    moved = np.transpose(split, order)
    for place, factor in enumerate(want):
        if factor not in have:
            moved = np.repeat(np.expand_dims(moved, place), int(str(factor.size)), place)
    return moved.reshape([int(str(size_of(axis))) for axis in result])


SEEDS = range(40)


def random_trace(seed: int) -> tuple[Model, Trace]:
    subject = model(random_chain(seed))
    Shapes(annotate=False).run(subject, Context())
    return subject, Trace(subject.graph, subject.graph.outputs[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_value_is_its_source_rearranged_by_factors(seed: int) -> None:
    subject, trace = random_trace(seed)
    proto = subject.to_proto()
    names = [source.value for source in trace.sources if source.value != "x"]
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    x = np.random.default_rng(seed).normal(size=(2, 1, 6, 4)).astype(np.float32)
    values = {"x": x, **dict(zip(names, ort.run(proto, {"x": x}), strict=True))}
    for source in trace.sources:
        found = source.scale * rearranged(values[source.value], source.axes, trace.axes)
        np.testing.assert_array_equal(found, values[trace.value])


def test_many_chains_are_traced_to_their_start() -> None:
    """Sizes that do not divide each other, as 4 6 and 8 3 after a Transpose, end the others."""
    ends = [random_trace(seed)[1].sources[-1].value for seed in SEEDS]
    assert ends.count("x") >= 15
