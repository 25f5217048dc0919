"""Dynamic convolutions: only for those who ask, and exact in their integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from passes.quantize.layers.saturation import saturating
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from tests import ort
from tests.checks import check, model, parse, random_feeds
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.schemes.dynamic.checks import ALL, stays
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

FORCED = QuantizeDynamic(min_elements=1, convolutions=True)
IMAGE = "g (float[N, 4, 8, 8] x) => (float[N, 6, H, W] y)"
WEIGHTS = f"{floats('w', 6, 2, 3, 3)}, {floats('b', 6)}"
NODE = "y = Conv <group = 2, pads = [1, 1, 1, 1], strides = [2, 1]> (x, w, b)"
LAYER = ["Add", "Cast", "ConvInteger", "DynamicQuantizeLinear", "Mul", "Mul"]


def written(text: str, item: Any = FORCED) -> Model:
    subject = model(text)
    item.run(subject, Context())
    return subject


def operators(subject: Model) -> list[str]:
    return sorted(node.op_type for node in subject.graph.nodes)


def test_it_is_left_alone_unless_asked_for() -> None:
    assert stays(IMAGE, WEIGHTS, NODE, ALL) == []


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize(
    ("signature", "constants", "node"),
    [
        (IMAGE, WEIGHTS, NODE),
        (IMAGE, f"{floats('w', 6, 4, 1, 3)}", "y = Conv <auto_pad = \"SAME_UPPER\"> (x, w)"),
        ("g (float[N, 4, 9] x) => (float[N, 6, L] y)", f"{floats('w', 6, 4, 3)}",
         "y = Conv <dilations = [2]> (x, w)"),
        ("g (float[N, 4, 5, 5, 5] x) => (float[N, 6, A, B, C] y)",
         f"{floats('w', 6, 4, 2, 2, 2)}, {floats('b', 6)}", "y = Conv (x, w, b)"),
    ],
)  # fmt: skip
def test_it_computes_about_the_same(
    signature: str, constants: str, node: str, axis: int | None
) -> None:
    item = QuantizeDynamic(min_elements=1, convolutions=True, per_channel=axis == 0)
    changed = check(item, typed(signature, constants, node), atol=0.1)
    assert [op for op in LAYER if op != "Add" or "b)" in node] == operators(changed)
    assert set(changed.graph.initializers).isdisjoint({"w", "b"})


def test_the_integers_are_exact() -> None:
    """As sums of products in floats, which hold them all; zeros are around the image."""
    subject = written(typed(IMAGE, WEIGHTS, NODE))
    (node,) = (n for n in subject.graph.nodes if n.op_type == "ConvInteger")
    names = (node.input[0], node.input[2], node.output[0])
    x, zero, sums = ort.run(_with_outputs(subject, *names), random_feeds(subject))
    weights = subject.graph.const(node.input[1])
    assert weights is not None
    signature = "g (float[N, 4, 8, 8] x, float[6, 2, 3, 3] w) => (float[N, 6, H, W] y)"
    plain = parse(typed(signature, "", NODE.replace(", b", "")))
    around = x.astype(np.float32) - int(zero)
    np.testing.assert_array_equal(
        sums, ort.run(plain, {"x": around, "w": weights.astype(np.float32)})[0]
    )


def _with_outputs(subject: Model, *names: str) -> Any:
    proto = subject.inlined_proto()
    del proto.graph.output[:]
    for name in names:
        proto.graph.output.add().name = name
    return proto


def test_layers_that_share(tmp_path: Path) -> None:
    """One quantizer for one input, one weight for all that read it; a plan tells it too."""
    nodes = "a = Conv (x, w) c = Conv (x, w, b) y = Add (a, c)"
    constants = f"{floats('w', 6, 4, 3, 3)}, {floats('b', 6)}"
    text = typed(IMAGE, constants, nodes)
    subject, ctx = model(text), Context()
    FORCED.run(subject, ctx)
    assert operators(subject).count("DynamicQuantizeLinear") == 1
    kinds = [tensor.data_type for tensor in subject.graph.initializers.values()]
    assert kinds.count(TensorProto.INT8) == 1
    path = tmp_path / "plan.json"
    path.write_text(ctx.report.plans[0].to_json())
    again = written(text, QuantizeDynamic(plan=path))
    assert again.inlined_proto() == subject.inlined_proto()


@pytest.mark.parametrize("reduce_range", [False, True])
def test_a_reduced_range(reduce_range: bool) -> None:
    item = QuantizeDynamic(min_elements=1, convolutions=True, reduce_range=reduce_range)
    subject = written(
        typed(IMAGE, floats("w", 6, 4, 3, 3, low=0.5, high=1.0), "y = Conv (x, w)"), item
    )
    assert bool(saturating(subject)) is not reduce_range


def test_unsupported_patterns_stay() -> None:
    computed = "g (float[N, 4, 8, 8] x, float[6] b) => (float[N, 6, 6, 6] y)"
    weights = floats("w", 6, 4, 3, 3)
    assert "bias that is computed" in stays(computed, weights, "y = Conv (x, w, b)", FORCED)[0]
    given = "g (float[N, 4, 8, 8] x, float[6, 4, 3, 3] w) => (float[N, 6, 6, 6] y)"
    assert stays(given, "", "y = Conv (x, w)", FORCED) == []
