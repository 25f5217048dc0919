"""Reasons against quantizing a model."""

from __future__ import annotations

import pytest

from passes.quantize.preconditions import lift, may_not_lift, quantized_already, too_old
from tests.checks import model, written
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.settings import OpsetLimit, Settings


def at(opset: int, node: str = "y = Relu (x)") -> Model:
    return model(f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g (float[2, 3] x) => (float[2, 3] y) {{ {node} }}""")


def test_a_model_below_the_opset_is_too_old() -> None:
    assert too_old(at(10), "int8", 13) == "int8 needs opset 13, and the model has 10"
    assert too_old(at(13), "int8", 13) == ""


@pytest.mark.parametrize(
    ("opset", "limit", "allowed"),
    [(10, None, True), (10, 13, True), (10, 12, False), (10, "keep", False), (13, "keep", True)],
)
def test_the_opset_of_the_user_limits_the_lift(
    opset: int, limit: OpsetLimit, allowed: bool
) -> None:
    subject, ctx = at(opset), Context(Settings(opset=limit))
    reason = "" if allowed else f"int8 needs opset 13, but the model must stay at {opset}"
    assert may_not_lift(subject, ctx, "int8", 13) == reason
    assert lift(subject, ctx, "int8", 13) == reason
    assert subject.opsets[""] == (13 if allowed else opset)


def test_a_lift_that_ends_too_early_is_undone() -> None:
    """Erf of integers exists up to opset 12, and Clip is converted at 11."""
    subject = at(
        9, "a = Clip <min = 0.5> (x) i = Cast <to = 6> (a) e = Erf (i) y = Cast <to = 1> (e)"
    )
    before = written(subject)
    reason = lift(subject, Context(), "int8", 13)
    assert reason == "int8 needs opset 13, and the model cannot be lifted"
    assert (written(subject), len(subject.journal)) == (before, 0)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("y = Relu (x)", ""),
        (
            "q, s, z = DynamicQuantizeLinear (x) y = DequantizeLinear (q, s, z)",
            "the model is quantized already: it has DynamicQuantizeLinear 'q'",
        ),
        (
            "k = Constant <value = uint8[2, 3] {1, 2, 3, 4, 5, 6}> ()"
            "s = Constant <value = float {0.5}> () d = DequantizeLinear (k, s) y = Add (x, d)",
            "",  # weights alone
        ),
    ],
)
def test_activations_in_integers_are_quantized_already(node: str, reason: str) -> None:
    assert quantized_already(at(13, node)) == reason


def test_nodes_of_subgraphs_count() -> None:
    branch = "q, s, z = DynamicQuantizeLinear (x) a = DequantizeLinear (q, s, z)"
    subject = at(
        13,
        f"""c = Constant <value = bool {{1}}> () y = If (c) <
            then_branch = t () => (a) {{ {branch} }}, else_branch = e () => (b) {{ b = Neg (x) }}
        >""",
    )
    assert "DynamicQuantizeLinear" in quantized_already(subject)
