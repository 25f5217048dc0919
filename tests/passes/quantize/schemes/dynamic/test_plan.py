"""Dynamic int8 by a plan, and in a pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic, apply_dynamic
from tests.checks import parse
from tests.passes.fuse.constants import floats, stored
from tests.passes.quantize.schemes.dynamic.checks import ALL, LAYER
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Entry, Plan

TWO = "g (float[N, 16] x) => (float[N, 16] y)"
TWO_NODES = "[first] a = MatMul (x, v) t = Tanh (a) [second] y = MatMul (t, w)"
TWO_WEIGHTS = f"{floats('v', 16, 16)}, {floats('w', 16, 16)}"


def two() -> Model:
    return Model.from_proto(parse(f"{TWO} <{TWO_WEIGHTS}> {{ {TWO_NODES} }}"))


def test_a_plan_that_was_printed_edited_and_fed_back(tmp_path: Path) -> None:
    plan = ALL.make_plan(two())
    assert [entry.scheme for entry in plan.entries] == ["dynamic", "dynamic"]
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json().replace("dynamic", "float", 1))
    subject = two()
    QuantizeDynamic(plan=path).run(subject, Context())
    found = [node.op_type for node in subject.graph.nodes]
    assert sorted(found) == sorted(f"MatMul Tanh {LAYER}".split())
    assert found[0] == "MatMul"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Entry(output="t", op="Tanh"), "it is not a linear layer, table, LSTM, attention or Conv"),
        (Entry(output="y", op="MatMul", axis=0), "symmetric int8, axis 1 or none"),
        (Entry(output="y", op="MatMul", axis=1, weight="uint8"), "symmetric int8"),
        (Entry(output="y", op="MatMul", axis=1, symmetric=False), "symmetric int8"),
    ],
)
def test_unsupported_plan_entries_are_errors(entry: Entry, said: str) -> None:
    subject = two()
    asked = Entry(entry.node, entry.output, entry.op, "dynamic", entry.weight, entry.symmetric,
                  axis=entry.axis)  # fmt: skip
    with pytest.raises(UsageError) as raised:
        apply_dynamic(subject, Plan((asked,)), Context())
    assert said in str(raised.value)
    assert not len(subject.journal)


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(Plan((Entry(node="third", scheme="dynamic"),)).to_json())
    with pytest.raises(UsageError, match="the model has no node 'third'"):
        QuantizeDynamic(plan=path).run(two(), Context())
    with pytest.raises(UsageError, match=r"none\.json' does not exist; --plan FILE writes one"):
        QuantizeDynamic(plan=tmp_path / "none.json").run(two(), Context())
    with pytest.raises(UsageError, match=r"cannot be read: Is a directory$"):
        QuantizeDynamic(plan=tmp_path).run(two(), Context())
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not JSON"):
        QuantizeDynamic(plan=path).run(two(), Context())


# -- in a pipeline


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_only_standard_operators_are_written(target: str) -> None:
    subject = two()
    result = Pipeline([ALL], target=target).run(subject)
    assert result.passes[0].status == "applied"
    assert all(not node.domain for node in subject.graph.nodes)
    assert result.passes[0].rules == {"quantize-linear": 2}


def test_a_layer_that_does_not_hold_costs_itself_alone() -> None:
    """The first layer's sum cancels: int8 cannot tell the small difference that is the output."""
    weights = np.full((16, 16), 1.0)
    weights[1::2] = -1.0 + 1e-4
    constants = f"{stored('v', weights)}, {floats('w', 16, 16)}"
    signature = "g (float[N, 1] c) => (float[N, 16] y, float[N, 16] z)"
    nodes = """x = Expand (c, s) e = Concat <axis = 1> (x, x) a = MatMul (e, v) y = Mul (a, k)
               h = Concat <axis = 1> (c, c, c, c, c, c, c, c, c, c, c, c, c, c, c, c)
               z = MatMul (h, w)"""
    text = f"{signature} <{constants}, int64[2] s = {{1, 8}}, float k = {{1e4}}> {{ {nodes} }}"
    result = Pipeline([ALL]).run(Model.from_proto(parse(text)))
    (outcome,) = result.passes
    assert outcome.status == "applied"
    assert not outcome.undone
    assert any("back to float to keep the budget: MatMul 'a'" in note for note in outcome.notes)
    assert outcome.rules == {"quantize-linear": 1}
