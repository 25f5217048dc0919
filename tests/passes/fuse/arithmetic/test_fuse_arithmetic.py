"""`fuse-arithmetic`: formulas become single operators, and near misses stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import printer, shape_inference

from passes.fuse.arithmetic.fuse_arithmetic import FuseArithmetic
from tests.checks import check, parse
from toolkit.ir.model import Model

FUSE = FuseArithmetic()
HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


def typed(text: str) -> str:
    """The model with the types of its values between input and output written down."""
    return printer.to_text(shape_inference.infer_shapes(parse(HEADER + text)))


def becomes(signature: str, nodes: str, after: str) -> Model:
    return check(FUSE, typed(f"{signature} {{ {nodes} }}"), f"{HEADER}{signature} {{ {after} }}")


def stays(signature: str, nodes: str) -> None:
    check(FUSE, typed(f"{signature} {{ {nodes} }}"), near_miss=True)


# -- softmax

SOFTMAX = "g (float[N,4,3] x) => (float[N,4,3] y) <int64[1] a = {1}, int64[1] b = {2}>"


def test_exponentials_over_their_sum_are_a_softmax() -> None:
    core = "e = Exp (d) s = ReduceSum (e, a) y = Div (e, s)"
    becomes(SOFTMAX, f"m = ReduceMax (x, a) d = Sub (x, m) {core}", "y = Softmax <axis = 1> (x)")
    becomes(SOFTMAX, core.replace("(d)", "(x)"), "y = Softmax <axis = 1> (x)")


@pytest.mark.parametrize(
    "nodes",
    [
        "m = ReduceMax (x, b) d = Sub (x, m) e = Exp (d) s = ReduceSum (e, a) y = Div (e, s)",
        "e = Exp (x) f = Exp (e) s = ReduceSum (f, a) y = Div (e, s)",
        "e = Exp (x) s = ReduceSum (e) y = Div (e, s)",
        "e = Exp (x) s = ReduceSum (e, a) y = Div (s, e)",
    ],
    ids=["maximum along another axis", "sum of something else", "sum of everything", "turned"],
)
def test_other_quotients_of_exponentials_stay(nodes: str) -> None:
    stays(SOFTMAX, nodes)


# -- quotients


def test_products_with_a_reciprocal_are_quotients() -> None:
    signature = "g (float[N,4] x) => (float[N,4] y) <float one = {1.0}>"
    becomes(
        signature, "e = Exp (x) r = Reciprocal (e) y = Mul (x, r)", "e = Exp (x) y = Div (x, e)"
    )
    becomes(signature, "e = Exp (x) r = Div (one, e) y = Mul (r, x)", "e = Exp (x) y = Div (x, e)")


def test_a_reciprocal_that_is_broadcast_or_shared_stays() -> None:
    stays(
        "g (float[N,4] x, float[N,1] e) => (float[N,4] y)",
        "a = Exp (e) r = Reciprocal (a) y = Mul (x, r)",
    )
    stays(
        "g (float[N,4] x) => (float[N,4] y, float[N,4] r)",
        "e = Exp (x) r = Reciprocal (e) y = Mul (x, r)",
    )


# -- reductions

REDUCED = "g (float[N,4] x) => (float[N,1] y) <int64[1] a = {1}, float n = {4.0}, float q = {0.25}>"


def test_a_sum_over_its_count_is_a_mean() -> None:
    after = "y = ReduceMean (x, a)"
    becomes(REDUCED, "s = ReduceSum (x, a) y = Div (s, n)", after)
    becomes(REDUCED, "s = ReduceSum (x, a) y = Mul (q, s)", after)


def test_a_sum_over_another_number_stays() -> None:
    stays(REDUCED.replace("{4.0}", "{3.0}"), "s = ReduceSum (x, a) y = Div (s, n)")
    stays(
        "g (float[N,M] x) => (float[N,1] y) <int64[1] a = {1}, float n = {4.0}>",
        "s = ReduceSum (x, a) y = Div (s, n)",
    )


def test_a_reduction_whose_axis_is_restored_keeps_it() -> None:
    becomes(
        REDUCED,
        "s = ReduceMax <keepdims = 0> (x, a) y = Unsqueeze (s, a)",
        "y = ReduceMax <keepdims = 1> (x, a)",
    )

    becomes(
        REDUCED.replace("float n", "int64[2] t = {0, 1}, float n"),
        "s = ReduceMax <keepdims = 0> (x, a) y = Reshape (s, t)",
        "y = ReduceMax <keepdims = 1> (x, a)",
    )


def test_a_reduction_that_gets_another_axis_stays() -> None:
    stays(
        REDUCED.replace("[N,4] x", "[4,4] x").replace("[N,1] y", "[2,2] y") + " ",
        "s = ReduceMax <keepdims = 0> (x, a) t = Constant <value = int64[2] {2, 2}> () "
        "y = Reshape (s, t)",
    )
    stays(
        "g (float[N,4] x) => (float[1,N] y) <int64[1] a = {1}, int64[1] b = {0}>",
        "s = ReduceMax <keepdims = 0> (x, a) y = Unsqueeze (s, b)",
    )


# -- one-hot

ONE_HOT = (
    "g (int64[N] i) => (float[N,2] y) <int64 d = {3}, float[2] v = {0.0, 1.0}, "
    "float[3,2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, int64[1] last = {-1}, "
    "int64[2] column = {-1, 1}, int64[3] k = {0, 1, 2}>"
)
COMPARED = "e = Equal (u, k) h = Cast <to = 1> (e) y = MatMul (h, w)"
INDICES = {"i": np.array([0, 2, 1, -1, -3, 3, 99, -4, -99])}


@pytest.mark.parametrize(
    ("nodes", "dtype"),
    [
        ("h = OneHot (i, d, v) y = MatMul (h, w)", "int64"),
        (f"u = Unsqueeze (i, last) {COMPARED}", "int64"),
        (f"u = Reshape (i, column) {COMPARED}", "int64"),
        (f"u = Reshape (i, column) {COMPARED}", "int32"),
    ],
)
def test_a_one_hot_product_is_a_gather(nodes: str, dtype: str) -> None:
    text = ONE_HOT.replace("int64[N] i", f"{dtype}[N] i").replace("int64[3] k", f"{dtype}[3] k")
    indices = {"i": INDICES["i"].astype(dtype)}
    found = check(FUSE, typed(f"{text} {{ {nodes} }}"), inputs=indices)
    kinds = [node.op_type for node in found.graph.nodes]
    assert kinds[-2:] == ["Clip", "Gather"]
    assert set(kinds[:-2]) <= {"Unsqueeze", "Reshape", "Squeeze"}


@pytest.mark.parametrize(
    ("old", "new"), [("{0.0, 1.0}", "{0.0, 2.0}"), ("{0.0, 1.0}", "{-1.0, 1.0}")]
)
def test_other_values_of_a_one_hot_stay(old: str, new: str) -> None:
    stays(ONE_HOT.replace(old, new), "h = OneHot (i, d, v) y = MatMul (h, w)")


def test_a_comparison_with_other_classes_stays() -> None:
    nodes = f"u = Unsqueeze (i, last) {COMPARED}"
    stays(ONE_HOT.replace("{0, 1, 2}", "{2, 1, 0}"), nodes)


def test_a_comparison_of_each_column_with_its_own_number_stays() -> None:
    """i of three columns: not one-hot."""
    nodes = f"u = Reshape (i, column) {COMPARED}"
    stays(ONE_HOT.replace("{-1, 1}", "{-1, 3}").replace("int64[N] i", "int64[6] i"), nodes)


# -- einsum


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhid,bhjd->bhij", ("N,2,S,4", "N,2,T,4", "N,2,S,T")),
        ("bind,bjnd->bnij", ("N,S,2,4", "N,T,2,4", "N,2,S,T")),
        ("ibnd,jbnd->bnij", ("S,N,2,4", "T,N,2,4", "N,2,S,T")),
        ("bnij,jbnd->ibnd", ("N,2,S,T", "T,N,2,4", "S,N,2,4")),
        ("ik, kj -> ij", ("S,4", "4,T", "S,T")),
    ],
)
def test_einsums_that_are_products_of_matrices(equation: str, shapes: tuple[str, ...]) -> None:
    a, b, y = shapes
    text = f"""g (float[{a}] a, float[{b}] b) => (float[{y}] y) {{
        y = Einsum <equation = "{equation}"> (a, b) }}"""
    found = check(FUSE, text)
    kinds = {node.op_type for node in found.graph.nodes}
    assert "MatMul" in kinds
    assert kinds <= {"MatMul", "Transpose"}


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bij->bij", ("N,S,4", "N,S,4", "N,S,4")),  # element by element
        ("bij,bkj->b", ("N,S,4", "N,T,4", "N")),  # rows and columns are summed
        ("...ij,...kj->...ik", ("N,S,4", "N,T,4", "N,S,T")),
        ("abij,abkij->abk", ("N,2,S,4", "N,2,T,S,4", "N,2,T")),  # two labels are summed
        ("ij,kj->ik", ("S,A", "T,B", "S,T")),  # sizes that may differ
    ],
)
def test_other_einsums_stay(equation: str, shapes: tuple[str, ...]) -> None:
    a, b, y = shapes
    text = f"""g (float[{a}] a, float[{b}] b) => (float[{y}] y) {{
        y = Einsum <equation = "{equation}"> (a, b) }}"""
    check(FUSE, text, near_miss=True, run="A" not in a)


def test_a_batch_of_one_in_an_einsum_is_repeated() -> None:
    """Five products, one operand: their sum is no mean of one."""
    text = typed("""g (float[1,3,4] a, float[5,6,4] b) => (float[1,3,6] y)
        <int64[1] axis = {0}, float one = {1}> {
        s = Einsum <equation = "bid,bjd->bij"> (a, b)
        r = ReduceSum <keepdims = 1> (s, axis) y = Mul (r, one) }""")
    found = check(FUSE, text)
    assert "ReduceMean" not in {node.op_type for node in found.graph.nodes}


LINEAR = """g (float[{x}] x) => (float[{y}] y) <float[{w}] w = {{{numbers}}}> {{
    y = Einsum <equation = "{equation}"> (x, w) }}"""


def linear(equation: str, x: str, w: str, y: str) -> str:
    count = np.prod([int(size) for size in w.split(",")])
    numbers = ", ".join(str(n) for n in range(count))
    return typed(LINEAR.format(equation=equation, x=x, w=w, y=y, numbers=numbers))


@pytest.mark.parametrize(
    ("equation", "shapes", "left"),
    [
        ("ibh,hnd->ibnd", ("S,N,4", "4,2,3", "S,N,2,3"), ["MatMul", "Reshape"]),
        ("ibnd,hnd->ibh", ("S,N,2,3", "4,2,3", "S,N,4"), ["Reshape", "MatMul"]),
        ("bnd,hdn->bh", ("N,2,3", "4,3,2", "N,4"), ["Reshape", "MatMul"]),
        ("bh,nhd->bdn", ("N,4", "2,4,3", "N,3,2"), ["MatMul", "Reshape"]),
        ("bih,hk->bik", ("N,S,4", "4,3", "N,S,3"), ["MatMul"]),
    ],
)
def test_einsums_with_a_weight_are_linear_maps(
    equation: str, shapes: tuple[str, str, str], left: list[str]
) -> None:
    found = check(FUSE, linear(equation, *shapes))
    assert [node.op_type for node in found.graph.nodes] == left


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bnd,bhnd->bh", ("2,2,3", "2,4,2,3", "2,4")),  # a weight for each of the batch
        ("nbd,hnd->bh", ("2,N,3", "4,2,3", "N,4")),  # what is summed over is apart
        ("bi,hnd->bihnd", ("N,S", "4,2,3", "N,S,4,2,3")),  # nothing is summed over
        ("bnd,hnd->hb", ("N,2,3", "4,2,3", "4,N")),  # the columns come first
        ("bnd,nd->b", ("N,2,3", "2,3", "N")),  # no columns
        ("bnd,hnd->b", ("N,2,3", "4,2,3", "N")),  # columns are summed over as well
    ],
)
def test_other_einsums_with_a_weight_stay(equation: str, shapes: tuple[str, str, str]) -> None:
    check(FUSE, linear(equation, *shapes), near_miss=True)


# -- transposes

PRODUCT = "g (float[N,3,4] a, float[N,5,4] b) => (float[N,3,5] y)"


@pytest.mark.parametrize(
    ("left", "right", "after"),
    [
        ("b", "r = Transpose <perm = [0, 2, 1]> (a)", "l = Transpose <perm = [0, 2, 1]> (b)"),
        (
            "t = Transpose <perm = [1, 0, 2]> (c) l = Transpose <perm = [1, 0, 2]> (t)",
            "r = Transpose <perm = [0, 2, 1]> (a)",
            "t = Transpose <perm = [1, 0, 2]> (c) l = Transpose <perm = [1, 2, 0]> (t)",
        ),
    ],
    ids=["one is transposed", "both are"],
)
def test_a_transposed_product_of_transposes(left: str, right: str, after: str) -> None:
    """How TensorFlow writes query . key, seen from the key."""
    signature = PRODUCT.replace("b) =>", "b, float[N,5,4] c) =>")
    name = "l" if "=" in left else left
    nodes = f"""{left if "=" in left else ""} {right} p = MatMul ({name}, r)
        y = Transpose <perm = [0, 2, 1]> (p)"""
    becomes(signature, nodes, f"{after} y = MatMul (a, l)")


def test_a_factor_before_a_transpose_stays_after_the_product() -> None:
    signature = PRODUCT + " <float[1] half = {0.5}>"
    nodes = """r = Transpose <perm = [0, 2, 1]> (a) p = MatMul (b, r) s = Mul (half, p)
        y = Transpose <perm = [0, 2, 1]> (s)"""
    after = "l = Transpose <perm = [0, 2, 1]> (b) p = MatMul (a, l) y = Mul (p, half)"
    becomes(signature, nodes, after)


@pytest.mark.parametrize(
    "nodes",
    [
        "p = MatMul (b, d) y = Transpose <perm = [0, 2, 1]> (p)",
        """l = Transpose <perm = [0, 1, 2]> (b) r = Transpose <perm = [0, 2, 1]> (a)
        p = MatMul (l, r) z = Transpose <perm = [0, 2, 1]> (p) y = Add (z, z)
        u = Exp (p)""",
        """l = Transpose <perm = [0, 1, 2]> (b) r = Transpose <perm = [0, 2, 1]> (a)
        p = MatMul (l, r) z = Transpose <perm = [2, 0, 1]> (p)
        y = Transpose <perm = [1, 0, 2]> (z)""",
    ],
    ids=["none is transposed", "the product is read", "the batch moves"],
)
def test_other_transposed_products_stay(nodes: str) -> None:
    stays(PRODUCT.replace("b) =>", "b, float[N,4,3] d) =>"), nodes)
