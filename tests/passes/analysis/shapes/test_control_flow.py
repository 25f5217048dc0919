"""Shapes: If, Loop and Scan, and the sizes that must not leave a subgraph."""

from __future__ import annotations

from typing import Any

from soundness import infer, is_anonymous, parse, shape, sound


def test_if_keeps_facts_common_to_both_branches() -> None:
    model = sound("""
        g (float[b, s] x, float[b, 3] z, bool c) => (y)
        { y, t = If(c) <
            then_branch = t () => (float[p, q] ty, float[u, v] tt)
                { ty = Relu(x)  tt = Transpose(x) },
            else_branch = e () => (float[p, q] ey, float[u, v] et)
                { ey = Relu(z)  et = Abs(x) }> }
    """)
    found = model.graph.shape("y")
    assert found is not None
    assert str(found[0]) == "b"
    assert is_anonymous(model, "y", 1)
    assert is_anonymous(model, "t", 0)


LOOP = """
    g (float[b, s] x, int64 n) => (y)
    <bool on = {{1}}, int64[1] one = {{1}}>
    {{ y, z, stack = Loop(n, on, x, x) <
        body = body (int64 i, bool c, float[p, q] a, float[r, t] d) =>
            (bool again, float[p, q] a2, float[r, t] d2, float[u, v] out)
        {{ again = Identity(c)  a2 = Relu(a)  d2 = {step}  out = Abs({out}) }}> }}
"""


def test_a_loop_keeps_invariant_shapes() -> None:
    model = sound(LOOP.format(step="Neg(d)", out="d"))
    assert shape(model) == "[b, s]"
    assert shape(model, "z") == "[b, s]"
    [body] = model.graph.subgraphs(model.graph.nodes[0])
    assert shape_in(body, "d2") == "[b, s]"
    # Without any iteration, the sizes of scan outputs are unknown.
    assert all(is_anonymous(model, "stack", axis) for axis in range(3))


def test_a_loop_that_grows_a_value_forgets_that_size_only() -> None:
    model = sound(LOOP.format(step="Concat<axis=0>(d, x)", out="a"))
    assert shape(model) == "[b, s]"
    assert is_anonymous(model, "z", 0)
    assert str((model.graph.shape("z") or ("", ""))[1]) == "s"
    [body] = model.graph.subgraphs(model.graph.nodes[0])
    before, after = (body.shape(v) for v in ("d", "d2"))
    assert before[0] != after[0]


def test_a_loop_whose_rank_changes() -> None:
    model = infer(parse(LOOP.format(step="Unsqueeze(d, one)", out="d")))
    assert shape(model, "z") == "?"
    assert shape(model) == "[b, s]"


def test_sizes_of_one_iteration_do_not_come_out() -> None:
    model = sound(
        LOOP.format(step="Neg(d)", out="d").replace(
            "out = Abs(d)", "k = NonZero(d)  out = Cast<to=1>(k)"
        )
    )
    found = model.graph.shape("stack")
    assert found is not None
    [body] = model.graph.subgraphs(model.graph.nodes[0])
    assert found[2] not in (body.shape("out") or ())


def test_trip_count_and_nested_loops() -> None:
    model = sound("""
        g (float[b, s] x) => (y)
        <int64 three = {3}, bool on = {1}>
        { y, stack = Loop(three, on, x) <
            body = body (int64 i, bool c, float[p, q] a) =>
                (bool c2, float[p, q] a3, float[k, l] out)
            { c2 = Identity(c)
              a3 = Loop(three, on, a) <
                body = inner (int64 j, bool e, float[p, q] f) => (bool e2, float[p, q] f2)
                { e2 = Identity(e)  f2 = Add(f, x) }>
              out = Identity(a3) }> }
    """)
    assert shape(model) == "[b, s]"
    assert shape(model, "stack") == "[3, b, s]"


def test_scan() -> None:
    model = sound("""
        g (float[3] start, float[s, b, 3] x) => (y) <int64[1] zero = {0}>
        { y, all = Scan(start, x) <num_scan_inputs=1, scan_output_axes=[1],
            body = body (float[p] state, float[q, r] each) => (float[p] next, float[u, v] out)
            { sum = ReduceSum<keepdims=0>(each, zero)  next = Add(state, sum)
              out = Mul(each, state) }> }
    """)
    assert shape(model) == "[3]"
    assert shape(model, "all") == "[b, s, 3]"


def shape_in(graph: Any, value: str) -> str:
    return f"[{', '.join(map(str, graph.shape(value) or ()))}]"


def test_a_broken_loop_leaves_no_guess_behind() -> None:
    """The subgraph has fewer outputs than carried values: no assumption is kept."""
    proto = parse(LOOP.format(step="Concat<axis=0>(d, x)", out="a"))
    body = proto.graph.node[0].attribute[0].g
    del body.output[2:]
    model = infer(proto)
    [inner] = model.graph.subgraphs(model.graph.nodes[0])
    assert shape(model, "z") == "?"
    assert "s" not in shape_in(inner, "d2")
