"""Shapes: broadcasting, shape arithmetic, declarations that lie, and odd graphs."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper
from soundness import contents, infer, is_anonymous, parse, shape, sound

from toolkit.storage.weights import Weights
from toolkit.symbolic import Expr

# -- broadcasting


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("b, 1, s", "1, 4, s", "[b, 4, s]"),
        ("b, s", "1", "[b, s]"),
        ("b, s", "5", "[b, 5]"),
        ("s", "b, 1", "[b, s]"),
        ("b, s", "b, s", "[b, s]"),
        ("0, s", "1, s", "[0, s]"),
    ],
)
def test_broadcasting(left: str, right: str, result: str) -> None:
    sizes = [{"b": 2, "s": 5}, {"b": 1, "s": 5}, {"b": 3, "s": 1}]
    model = sound(f"g (float[{left}] x, float[{right}] z) => (y) {{ y = Add(x, z) }}", sizes=sizes)
    assert shape(model) == result


def test_different_symbols_broadcast_to_neither() -> None:
    model = sound(
        "g (float[b] x, float[s] z) => (y) { y = Add(x, z) }",
        sizes=[{"b": 1, "s": 4}, {"b": 4, "s": 1}, {"b": 3, "s": 3}],
    )
    assert is_anonymous(model, "y", 0)


def test_a_size_that_is_never_one_decides_a_broadcast() -> None:
    text = """
        g (float[b, 1] x, float[s] z) => (y)
        { p = Concat<axis=0>(z, z)  y = Add(x, p)  t = Mul(z, y) }
    """
    model = sound(text, sizes=[{"b": 2, "s": 1}])
    assert shape(model) == "[b, 2*s]"


def test_a_table_cut_to_the_length_broadcasts_to_the_length() -> None:
    model = sound("""
        g (float[s, 4] x, float[512, 4] table) => (y)
        <int64[1] zero = {0}, int64 first = {0}>
        { all = Shape(x)  n = Gather(all, first)  end = Unsqueeze(n, zero)
          rows = Slice(table, zero, end, zero)  y = Add(x, rows) }
    """)
    assert shape(model, "rows") == "[min(512, s), 4]"
    assert shape(model) == "[s, 4]"


# -- contents: shape arithmetic


def test_a_view_of_the_torchscript_exporter() -> None:
    model = sound("""
        g (float[b, s, 24] x) => (y)
        <int64 i = {0}, int64 j = {1}, int64[1] zero = {0}, int64[1] heads = {4},
         int64[1] width = {6}, int64[1] rest = {-1}>
        { shape = Shape(x)  b0 = Gather(shape, i)  s0 = Gather(shape, j)
          b1 = Unsqueeze(b0, zero)  s1 = Unsqueeze(s0, zero)
          target = Concat<axis=0>(b1, s1, heads, width)
          split = Reshape(x, target)
          turned = Transpose<perm=[0, 2, 1, 3]>(split)
          both = Mul(b1, s1)
          flat = Concat<axis=0>(both, rest)
          y = Reshape(turned, flat) }
    """)
    assert contents(model, "target") == "[b, s, 4, 6]"
    assert shape(model, "turned") == "[b, 4, s, 6]"
    assert contents(model, "flat") == "[b*s, -1]"
    assert shape(model) == "[b*s, 24]"


def test_arithmetic_on_sizes() -> None:
    model = sound("""
        g (float[b, s, 8] x) => (y)
        <int64[1] two = {2}, int64[1] three = {3}, int64[1] minus = {-1}, int64[1] stop = {-9},
         int64[1] first = {0}>
        { all = Shape(x)  s = Shape<start=1, end=2>(x)  n = Size(x)
          half = Div(s, two)  odd = Mod(s, two)  twice = Mul(s, two)  back = Div(twice, two)
          more = Sub(s, three)  low = Min(s, three)  high = Max(more, three)
          negative = Neg(s)  size = Abs(negative)  third = Div(more, three)
          product = ReduceProd<keepdims=0>(all)  total = ReduceSum<keepdims=1>(all)
          same = Equal(s, minus)  pick = Where(same, two, s)
          narrow = Cast<to=6>(all)  wide = Cast<to=7>(narrow)
          backwards = Slice(wide, minus, stop, first, minus)
          y = Identity(all) }
    """)
    wanted = {
        "all": "[b, s, 8]",
        "n": "[8*b*s]",
        "half": "[floor(s/2)]",
        "odd": "[mod(s, 2)]",
        "back": "[s]",
        "more": "[s - 3]",
        "low": "[min(3, s)]",
        "high": "[max(3, s - 3)]",
        "size": "[s]",
        "product": "[8*b*s]",
        "total": "[b + s + 8]",
        "same": "[0]",
        "pick": "[s]",
        "wide": "[b, s, 8]",
        "backwards": "[8, s, b]",
        "y": "[b, s, 8]",
    }
    assert {value: contents(model, value) for value in wanted} == wanted
    # (s - 3)/3 truncates towards zero, which has no symbolic form.
    assert contents(model, "third") == "?"


def test_an_unknown_integer_keeps_its_identity() -> None:
    model = sound(
        """
        g (int64 n, float[b, 6] x) => (y)
        <int64[1] zero = {0}, int64[1] six = {6}, int64 one = {1}, int64 start = {0}>
        { next = Add(n, one)  back = Sub(next, one)  v = Unsqueeze(back, zero)
          u = Unsqueeze(n, zero)  a = Concat<axis=0>(u, six)  c = Concat<axis=0>(v, six)
          r = Range(start, n, one)  y = Identity(r) }
        """
    )
    assert contents(model, "a") == contents(model, "c")
    assert contents(model, "a").startswith("[?")


def test_overflowing_integers_are_unknown() -> None:
    model = infer(
        parse(
            """
            g (float[b] x) => (y) <int64[1] big = {9223372036854775807}, int64[1] one = {1}>
            { y = Add(big, one)  z = Cast<to=6>(big) }
            """
        )
    )
    assert contents(model, "y") == contents(model, "z") == "?"


# -- Reshape


@pytest.mark.parametrize(
    ("source", "target", "attributes", "result"),
    [
        ("b, s, 24", "0, 0, 4, 6", "", "[b, s, 4, 6]"),
        ("b, s, 24", "0, -1, 4, 6", "", "[b, s, 4, 6]"),
        ("b, s, 24", "-1, 24", "", "[b*s, 24]"),
        ("b, s, 24", "-1, 12", "", "[2*b*s, 12]"),
        ("b, s, 24", "24, -1", "", "[24, b*s]"),
        ("b, 24", "0, 4, -1", "<allowzero=0>", "[b, 4, 6]"),
        ("0, 3", "0, 7", "<allowzero=1>", "[0, 7]"),
        ("2, 3, 4", "-1", "", "[24]"),
    ],
)
def test_reshape(source: str, target: str, attributes: str, result: str) -> None:
    text = f"""
        g (float[{source}] x) => (y) <int64[{target.count(",") + 1}] t = {{{target}}}>
        {{ y = Reshape{attributes}(x, t) }}
    """
    assert shape(sound(text)) == result


def test_reshape_to_an_unknown_target_infers_rank_and_forced_sizes() -> None:
    model = infer(
        parse(
            """
            g (float[b, s] x, int64[3] t, int64 n) => (y)
            <int64[1] zero = {0}, int64[1] four = {4}>
            { y = Reshape(x, t)  v = Unsqueeze(n, zero)  u = Concat<axis=0>(v, four)
              z = Reshape(x, u) }
            """
        )
    )
    assert len(model.graph.shape("y") or ()) == 3
    assert shape(model, "z") == "[floor(b*s/4), 4]"


# -- Slice, Split, Concat


@pytest.mark.parametrize(
    ("start", "end", "step", "result"),
    [
        (0, 2**63 - 1, 1, "[s]"),
        (0, 2**31 - 1, 1, "[s]"),
        (1, 2**63 - 1, 1, "[max(0, s - 1)]"),
        (0, -1, 1, "[max(0, s - 1)]"),
        (-1, 2**63 - 1, 1, "[min(1, s)]"),
        (-3, -1, 1, None),
        (0, 3, 1, "[min(3, s)]"),
        (0, 2**63 - 1, 2, "[floor((s + 1)/2)]"),
        (-1, -(2**63), -1, "[s]"),
        (3, 0, -1, None),
        (2, -2, 1, "[max(0, s - 4)]"),
    ],
)
def test_slices_of_a_symbolic_size(start: int, end: int, step: int, result: str | None) -> None:
    text = f"""
        g (float[s] x) => (y)
        <int64[1] start = {{{start}}}, int64[1] end = {{{end}}}, int64[1] axis = {{0}},
         int64[1] step = {{{step}}}>
        {{ y = Slice(x, start, end, axis, step) }}
    """
    model = sound(text, sizes=[{"s": n} for n in (0, 1, 2, 3, 4, 5, 9)])
    if result is not None:
        assert shape(model) == result


def test_slice_bounds_follow_onnx_and_not_python() -> None:
    """A start before the front is clamped; runtimes disagree on an infinite end."""
    model = sound(
        f"""
        g (float[1] x, float[3, 1] z) => (y)
        <int64[1] start = {{-9}}, int64[1] end = {{-9}}, int64[1] axis = {{0}},
         int64[1] step = {{-1}}, int64[1] infinite = {{{2**63 - 1}}}>
        {{ y = Slice(x, start, end, axis, step)  w = Slice(z, step, infinite, axis, step) }}
        """
    )
    assert shape(model) == "[1]"
    assert is_anonymous(model, "w", 0)


def test_pieces_and_joins() -> None:
    model = sound("""
        g (float[b, s, 6] x, float[b, 2, 6] z, int64[b, 2] index) => (y)
        <int64[6] pads = {0, 1, 0, 0, 2, -1}, int64[3] times = {1, 3, 2}, int64[2] parts = {2, 4}>
        { c = Concat<axis=1>(x, z, x)  p = Pad(x, pads)  t = Tile(x, times)
          l, r = Split<axis=2>(x, parts)  e, f = Split<axis=-1>(x)
          g = Gather<axis=1>(z, index)  q = GatherElements<axis=1>(index, index)
          y = Identity(c) }
    """)
    assert shape(model) == "[b, 2*s + 2, 6]"
    assert shape(model, "p") == "[b, s + 3, 5]"
    assert shape(model, "t") == "[b, 3*s, 12]"
    assert [shape(model, v) for v in "lref"] == [
        "[b, s, 2]",
        "[b, s, 4]",
        "[b, s, 3]",
        "[b, s, 3]",
    ]
    assert shape(model, "g") == "[b, b, 2, 6]"


def test_uneven_split() -> None:
    model = sound("g (float[7] x) => (a) { a, c, d = Split<num_outputs=3>(x) }", opset=18)
    assert [shape(model, v) for v in "acd"] == ["[3]", "[3]", "[1]"]


def test_squeeze_without_axes_of_a_dynamic_shape_has_no_rank() -> None:
    model = sound("g (float[b, 1, 3] x, float[1, 3, 1] z) => (y) { y = Squeeze(x) w = Squeeze(z) }")
    assert shape(model) == "?"
    assert shape(model, "w") == "[3]"


def test_expand_and_range_and_friends() -> None:
    model = sound("""
        g (float[b, 1, 3] x, float[h, w] z) => (y)
        <int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] at = {0}, int64[1] four = {4},
         int64 five = {5}, float[2] onoff = {0, 1}>
        { s = Shape(z)  n = Gather(s, zero)  r = Range(one, n, two)
          h = Unsqueeze(n, at)  t = Concat<axis=0>(h, four, four)  zeros = ConstantOfShape(h)
          u = Unsqueeze(h, at)  y = Identity(r)  k = NonZero(z)  o = OneHot(k, five, onoff) }
    """)
    assert shape(model) == "[floor(h/2)]"
    assert shape(model, "zeros") == "[h]"
    assert shape(model, "k").startswith("[2, ?")
    assert shape(model, "o").endswith(", 5]")


def test_a_float_range_up_to_a_size() -> None:
    """TensorFlow exports the positions of a causal mask like this."""
    text = """
        g (float[h, w] z, float limit) => (y)
        <int64 one = {1}, float zero = {0}, float step = {1}>
        { s = Shape(z)  n = Gather(s, one)  f = Cast<to=1>(n)  y = Range(zero, f, step) }
    """
    assert shape(sound(text)) == "[w]"
    assert shape(sound(text.replace("step = {1}", "step = {2}"))) != "[w]"
    assert shape(sound(text.replace("zero = {0}", "zero = {1}"))) != "[w]"
    assert shape(sound(text.replace("(zero, f,", "(zero, limit,"))) != "[w]"


# -- declared types


def test_stale_declarations_give_way() -> None:
    """The batch was made dynamic at the input only."""
    model = infer(
        parse(
            """
            g (float[batch, 8] x) => (float[1, 8] y)
            <float[1, 8] r, float[1, 4] c, float[1, 4] d>
            { r = Relu(x)  c = custom.Unknown(r)  d = Relu(c)  y = Abs(x) }
            """
        )
    )
    assert shape(model, "r") == "[batch, 8]"
    assert shape(model, "y") == "[batch, 8]"
    # The declaration of the unknown operator's result is just as stale.
    assert shape(model, "c") == shape(model, "d") == "?"
    assert model.graph.dtype("d") == TensorProto.FLOAT


def test_of_consistent_declarations_numbers_fill_the_gaps() -> None:
    model = infer(
        parse(
            """
            g (float[batch, 8] x) => (float[batch, 4] y) <float[batch, 4] c>
            { c = custom.Unknown(x)  y = Relu(c) }
            """
        )
    )
    rows, columns = model.graph.shape("y") or (0, 0)
    assert columns == 4
    assert isinstance(rows, Expr)
    assert rows.anonymous  # `batch` may be there by habit, and nodes would be dropped by it


def test_a_wrong_name_at_an_output_is_not_believed() -> None:
    model = infer(
        parse(
            """
            g (float[n] x) => (float[n] y, float[n] z)
            { y = Concat<axis=0>(x, x)  z = custom.Unknown(x) }
            """
        )
    )
    assert shape(model) == "[2*n]"
    assert shape(model, "z") == "?"


def test_declared_names_of_outputs_are_not_trusted() -> None:
    proto = parse("g (float[a, c] x, float[d] z) => (y) { y = Transpose(x) w = Add(x, z) }")
    for declared in proto.graph.input:
        for dim in declared.type.tensor_type.shape.dim:
            dim.dim_param = "?"
    model = infer(proto)
    first, second = model.graph.shape("y") or ("", "")
    assert first != second


def test_a_default_value_does_not_fix_the_shape_of_an_input() -> None:
    proto = parse("g (float[n] x, float[m] z) => (y) { y = Neg(z) }")
    proto.graph.initializer.append(helper.make_tensor("z", TensorProto.FLOAT, [3], [1, 2, 3]))
    assert shape(infer(proto)) == "[m]"
    proto.ir_version = 3  # then, every initializer had to be an input, and none could be fed
    assert shape(infer(proto)) == "[3]"


# -- odd graphs


@pytest.mark.parametrize(
    "node",
    [
        "y = Transpose<perm=[0]>(x)",
        "y = Concat<axis=7>(x, x)",
        "y = Reshape(x)",
        "y = Gather<axis=9>(x, i)",
        "y = Conv(x, x)",
        "y = Squeeze<axes=[5]>(x)",
        'y = Einsum<equation="abc,->">(x)',
        "y = Div(i, zero)",
        "y = Split<axis=1>(x)",
        "y = Cast(x)",
        "y = Slice(x, i, i, i, zero)",
        "y = Unsqueeze(x, many)",
        "y = MatMul(x, zero)",
        "y = DepthToSpace<blocksize=0>(x)",
        "y = Range(i, i, zero)",
        "y = Pad(x, i)",
        "y = MaxPool(x)",
    ],
)
def test_odd_nodes_are_passed_over(node: str) -> None:
    text = f"""
        g (float[b, s] x) => (y)
        <int64[1] i = {{3}}, int64 zero = {{0}}, int64[3] many = {{9, 9, 9}}>
        {{ {node}  z = Relu(x) }}
    """
    model = infer(parse(text))
    assert shape(model, "z") == "[b, s]"


def test_custom_domains_and_functions_are_passed_over() -> None:
    model = infer(
        parse(
            """
            <ir_version: 10, opset_import: ["" : 17, "local" : 1]>
            g (float[b] x) => (y) { t = local.Relu(x)  y = Neg(t) }
            <domain: "local", opset_import: ["" : 17]>
            Relu (a) => (c) { c = Concat<axis=0>(a, a) }
            """
        )
    )
    assert shape(model) == "?"


def test_sequences() -> None:
    model = sound("""
        g (float[b, s] x, float[b, 3] z) => (y)
        <int64 zero = {0}>
        { list = SequenceConstruct(x, z)  y = SequenceAt(list, zero)
          n = SequenceLength(list) }
    """)
    assert str((model.graph.shape("y") or ("",))[0]) == "b"
    assert is_anonymous(model, "y", 1)


def test_linear_and_idempotent_on_a_long_chain() -> None:
    nodes = [
        helper.make_node("Relu" if i % 3 else "Add", [f"v{i}"] * (1 if i % 3 else 2), [f"v{i + 1}"])
        for i in range(3000)
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("v0", TensorProto.FLOAT, ["b", 8])],
        [helper.make_tensor_value_info("v3000", TensorProto.FLOAT, ["b", 8])],
    )
    model = infer(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert shape(model, "v3000") == "[b, 8]"


def test_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    array = Weights.array
    monkeypatch.setattr(Weights, "array", lambda self, t: read.append(t.name) or array(self, t))
    infer(
        parse(
            """
            g (float[b, 4] x) => (y) <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] t = {-1}>
            { m = MatMul(x, w)  y = Reshape(m, t) }
            """
        )
    )
    assert set(read) == {"t"}
