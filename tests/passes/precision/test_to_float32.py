"""`fp32`: types that are widened, Casts at inputs and outputs, and models that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper

import toolkit
from passes.precision.to_float32 import Float32
from tests import ort
from tests.checks import check, model, parse, random_feeds, text_of
from tests.passes.fuse.constants import stored, typed
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes
from toolkit.verification.tolerance import FLOAT, Tolerance

WIDE = Float32()
X_Y = "g (float16[N, 8] x) => (float16[N, 8] y)"
CLOSE = 0.01


def halves(name: str, *shape: int) -> str:
    numbers = np.random.default_rng([0, *map(ord, name)]).uniform(-1, 1, shape)
    return stored(name, numbers, "float16")


def ops(subject: Model) -> str:
    return " ".join(node.op_type for node in subject.graph.nodes)


def narrow_inside(subject: Model) -> list[str]:
    """The values of 16 bits, but for the model's own inputs and outputs."""
    ends = (*subject.graph.inputs, *subject.graph.outputs)
    found: list[str] = []
    for g in subject.graphs():
        made = [name for node in g.nodes for name in node.output]
        for name in (*g.initializers, *made, *(g.inputs if g.parent else ())):
            narrow = g.dtype(name) in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
            if narrow and (g.parent or name not in ends):
                found.append(name)
    return found


def widened(signature: str, constants: str, nodes: str, wanted: str, **options: Any) -> Model:
    """Check that the model ends up with these operators, all in 32 bits, and computes the same."""
    options.setdefault("atol", CLOSE)
    changed = check(WIDE, typed(signature, constants, nodes, options.pop("opset", 21)), **options)
    assert sorted(ops(changed).split()) == sorted(wanted.split()), text_of(changed)
    assert not narrow_inside(changed), text_of(changed)
    return changed


# -- types that are widened


def test_casts_at_the_ends_and_32_bits_between() -> None:
    constants = f"{halves('w', 8, 8)}, {halves('b', 8)}"
    nodes = "m = MatMul (x, w) a = Add (m, b) y = Relu (a)"
    changed = widened(X_Y, constants, nodes, "Cast MatMul Add Relu Cast")
    assert changed.graph.dtype("x") == changed.graph.dtype("y") == TensorProto.FLOAT16
    (w,) = (changed.graph.const(n) for n in changed.graph.initializers if n == "w")
    assert w is not None
    assert w.dtype == np.float32


def test_it_is_as_exact_as_floats_are() -> None:
    """Not rounded on the way: nearer to the mathematics than the 16 bits are."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float16[N, 8] x) => (float y) <{stored("thousand", 1000.0, "float16")}>
        {{ a = Mul (x, thousand) s = Sub (a, thousand) t = ReduceSum <keepdims = 0> (s)
           y = Cast <to = 1> (t) }}"""
    subject = model(text)
    WIDE.run(subject, Context())
    feed = {"x": np.full((1, 8), 1.0009765625, np.float16)}
    (found,) = ort.run(subject.inlined_proto(), feed)
    np.testing.assert_allclose(found, 8 * 0.9765625, rtol=1e-4)


def test_types_that_attributes_name() -> None:
    signature = "g (int64[2] s, float[2, 2] x) => (float[2, 2] y)"
    half_one = numpy_helper.from_array(np.array([0.5], np.float16))
    nodes = """c = ConstantOfShape (s) e = EyeLike <dtype = 10> (x) h = Cast <to = 10> (x)
               a = Add (c, e) b = Add (a, h) y = Cast <to = 1> (b)"""
    proto = parse(f'<ir_version: 10, opset_import: ["" : 21]> {signature} {{ {nodes} }}')
    proto.graph.node[0].attribute.append(helper.make_attribute("value", half_one))
    subject = Model.from_proto(proto)
    WIDE.run(subject, Context())
    subject.graph.verify()
    assert not any(a.i == TensorProto.FLOAT16 for n in subject.graph.nodes for a in n.attribute)
    feed = {"s": np.array([2, 2]), "x": np.array([[1, 2], [3, 4]], np.float32)}
    (found,) = ort.run(subject.inlined_proto(), feed)
    np.testing.assert_array_equal(found, feed["x"] + 0.5 + np.eye(2))


def test_constants_that_are_nodes() -> None:
    proto = parse(typed(X_Y, halves("w", 8, 8), "y = MatMul (x, w)", 21))
    (weight,) = proto.graph.initializer
    node = helper.make_node("Constant", [], ["w"], value=weight)
    proto.graph.node.insert(0, node)
    del proto.graph.initializer[:]
    subject = Model.from_proto(proto)
    WIDE.run(subject, Context())
    subject.graph.verify()
    feed = random_feeds(subject)
    (found,), (wanted,) = ort.run(subject.inlined_proto(), feed), ort.run(proto, feed)
    np.testing.assert_allclose(found, wanted, atol=CLOSE)
    assert not narrow_inside(subject)


def branches(other: str) -> str:
    nodes = f"""t = If (k) <then_branch = p () => (float16[N, 8] u) {{ u = Add (x, w) }},
        else_branch = {other}> y = Mul (t, w)"""
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float16[N, 8] x, bool k) => (float16[N, 8] y) <{halves("w", 8)}> {{ {nodes} }}"""


@pytest.mark.parametrize("k", [True, False])
def test_bodies_that_read_what_is_around_them(k: bool) -> None:
    feeds = {"x": np.ones((2, 8), np.float16), "k": np.array(k)}
    other = "q () => (float16[N, 8] o) { o = Neg (x) }"
    changed = check(WIDE, branches(other), inputs=feeds, atol=CLOSE)
    assert not narrow_inside(changed), text_of(changed)


def test_a_body_that_hands_on_what_is_around_it() -> None:
    """ONNX allows it, onnxruntime wants an Identity."""
    changed = check(WIDE, branches("q () => (float16[N, 8] x) { }"), run=False)
    (branch,) = (n for n in changed.graph.nodes if n.op_type == "If")
    _, other = changed.graph.subgraphs(branch)
    assert other.dtype(*other.outputs) == TensorProto.FLOAT


def test_a_loop_that_carries_16_bits() -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float16[8] x, int64 n) => (float16[8] y, float16[S, 8] z)
        <{halves("w", 8)}, bool yes = {{1}}> {{
        y, z = Loop (n, yes, x) <body = b (int64 i, bool c, float16[8] v)
            => (bool c2, float16[8] v2, float16[8] s)
            {{ c2 = Identity (c) v2 = Add (v, w) s = Relu (v2) }}> }}"""
    feeds = {"x": np.ones(8, np.float16), "n": np.array(3)}
    changed = check(WIDE, text, inputs=feeds, atol=CLOSE)
    assert not narrow_inside(changed), text_of(changed)


def test_functions_are_inlined_first() -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21, "f" : 1]>
        {X_Y} {{ y = f.twice (x) }}
        <domain: "f", opset_import: ["" : 21]> twice (a) => (b)
        {{ h = Cast <to = 10> (a) b = Add (h, h) }}"""
    changed = check(WIDE, text, atol=CLOSE)
    assert ops(changed) == "Cast Add Cast"
    assert not narrow_inside(changed)


# -- ends of all kinds


def test_an_output_that_is_read_and_an_input_that_is_an_output() -> None:
    signature = "g (float16[N, 8] x) => (float16[N, 8] a, float16[N, 8] y, float16[N, 8] x)"
    widened(signature, "", "a = Relu (x) y = Tanh (a)", "Cast Relu Cast Tanh Cast")


def test_a_stored_tensor_that_is_an_output() -> None:
    signature = "g (float16[N, 8] x) => (float16[N, 8] y, float16[8] w)"
    changed = widened(signature, halves("w", 8), "y = Add (x, w)", "Cast Cast Add Cast")
    assert changed.graph.initializers["w"].data_type == TensorProto.FLOAT16


def test_an_input_with_a_default() -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float16[N, 8] x, float16[8] w) => (float16[N, 8] y) <{halves("w", 8)}>
        {{ y = Add (x, w) }}"""
    changed = check(WIDE, text, atol=CLOSE, inputs={"x": np.ones((2, 8), np.float16)})
    given = {"x": np.ones((2, 8), np.float16), "w": np.full(8, 2, np.float16)}
    np.testing.assert_array_equal(ort.run(changed.inlined_proto(), given)[0], np.full((2, 8), 3))


def test_casts_that_are_there_already_are_enough() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float16[N, 8] x) => (float16[N, 8] y)
        { f = Cast <to = 1> (x) r = Relu (f) y = Cast <to = 10> (r) }"""
    check(WIDE, text, near_miss=True)


def test_inputs_and_outputs_too() -> None:
    text = typed(X_Y, halves("w", 8, 8), "m = MatMul (x, w) y = Cast <to = 10> (m)", 21)
    subject = Model.from_proto(parse(text))
    Float32(io="fp32").run(subject, Context())
    subject.graph.verify()
    feed = {"x": np.ones((2, 8), np.float32)}
    (found,) = ort.run(subject.inlined_proto(), feed)
    assert found.dtype == np.float32
    (wanted,) = ort.run(parse(text), {"x": np.ones((2, 8), np.float16)})
    np.testing.assert_allclose(found, wanted, atol=CLOSE)


# -- other types


def test_bfloat16_which_the_runtime_does_not_compute_in() -> None:
    weight = np.random.default_rng(0).uniform(-1, 1, (8, 8)).astype(bfloat16)
    proto = parse("""<ir_version: 10, opset_import: ["" : 21]>
        g (bfloat16[N, 8] x) => (float[N, 8] y) { m = MatMul (x, w) y = Cast <to = 1> (m) }""")
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    subject = Model.from_proto(proto)
    result = Pipeline(parse_passes("fp32:io=fp32"), validate="off").run(subject)
    assert result.passes[0].status == "applied"
    feed = {"x": np.ones((2, 8), np.float32)}
    (found,) = ort.run(subject.inlined_proto(), feed)
    np.testing.assert_allclose(found[0], weight.astype(np.float32).sum(0), rtol=1e-5)


@pytest.mark.parametrize("kind", ["float", "double"])
def test_other_floats_stay(kind: str) -> None:
    text = f"g ({kind}[N, 8] x) => ({kind}[N, 8] y) {{ y = Relu (x) }}"
    check(WIDE, text, near_miss=True)


def test_a_model_with_other_values_than_tensors_stays() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float16[8] x) => (seq(float16[8]) y) { y = SequenceConstruct (x) }"""
    check(WIDE, text, near_miss=True, run=False)
    ctx = Context()
    WIDE.run(model(text), ctx)
    assert ctx.notes == ["not converted: 'y' is not a tensor"]


# -- in pipelines


def test_a_model_in_16_bits_is_quantized_after_it() -> None:
    constants = f"{halves('w', 64, 128)}, {halves('v', 128, 64)}"
    signature = "g (float16[N, 64] x) => (float16[N, 64] y)"
    nodes = "a = MatMul (x, w) r = Relu (a) y = MatMul (r, v)"
    subject = Model.from_proto(parse(typed(signature, constants, nodes, 17)))
    before = subject.nbytes()
    result = toolkit.optimize(subject, "fp32,fuse,quantize", measure=False)
    assert result.passes[-1].status == "applied"
    assert ops(result.model).count("MatMulInteger") == 2
    assert result.model.nbytes() < 0.6 * before
    assert result.model.graph.dtype("y") == TensorProto.FLOAT16


def test_types_of_the_ends_are_not_changed_while_they_are_compared() -> None:
    subject = model("g (float16[N, 8] x) => (float16[N, 8] y) { y = Relu (x) }")
    with pytest.raises(UsageError, match="io=fp32 changes the types"):
        Pipeline(parse_passes("fp32:io=fp32")).run(subject)


def bfloats() -> Model:
    draw = np.random.default_rng(0)
    proto = parse("""<ir_version: 10, opset_import: ["" : 21]>
        g (bfloat16[N, 64] x) => (float[N, 64] y)
        { a = MatMul (x, w) r = Relu (a) m = MatMul (r, v) y = Cast <to = 1> (m) }""")
    for name, shape in (("w", (64, 128)), ("v", (128, 64))):
        array = draw.uniform(-1, 1, shape).astype(bfloat16)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return Model.from_proto(proto)


@pytest.mark.parametrize("validate", ["each", "final"])
def test_what_follows_is_proven_though_the_original_does_not_run(validate: Any) -> None:
    result = toolkit.optimize(bfloats(), "fp32,fuse,quantize", measure=False, validate=validate)
    assert result.passes[-1].status == "applied"
    assert result.quality is not None
    assert "compared with the result of fp32, since the original does not run: " in result.proof
    assert "bfloat16: onnxruntime has no CPU kernel" in result.proof


@dataclass(frozen=True)
class Spoil:
    name: ClassVar[str] = "spoil"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model: Model, ctx: Context) -> None:
        (relu,) = (n for n in model.graph.nodes if n.op_type == "Relu")
        if model.graph.begin("spoil", relu):
            model.graph.set_op(relu, "Abs")


def test_a_pass_after_it_that_breaks_the_model_is_undone() -> None:
    done = Pipeline([WIDE, Spoil()]).run(bfloats()).passes
    assert [result.status for result in done] == ["applied", "reverted"]
    # Without it the result cannot be compared: the original does not run.
    assert Pipeline([Spoil()]).run(bfloats()).passes[0].status == "applied"
