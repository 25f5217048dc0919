"""Plans of static layers: made, printed, edited, merged and applied again without data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime import InferenceSession

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic, apply_dynamic
from passes.quantize.schemes.static.quantize_static import QuantizeStatic, apply_static
from tests.checks import random_feeds, written
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.schemes.static.checks import (
    IMAGE,
    Calibrated,
    deployed,
    operators,
    outputs,
    planned,
)
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Entry, Plan, TensorEntry, as_applied
from toolkit.quantization.plan_json import parse_plan

CONSTANTS = f"{floats('w', 8, 4, 3, 3)}, {floats('v', 8, 8, 1, 1)}, {floats('b', 8)}"
NODES = """[first] a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) [second] c = Conv (r, v)
           [sum] s = Add (c, r) p = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (s)
           [third] y = Conv (p, v)"""
TEXT = typed(IMAGE, CONSTANTS, NODES, 21)


def applied(subject: Model, plan: Plan, form: Any = "qdq") -> Model:
    copy = subject.copy()
    apply_static(copy, plan, Context(), form)
    return copy


def test_plan_fields() -> None:
    _, plan = planned(TEXT)
    assert [(e.op, e.axis, e.tied) for e in plan.entries] == [
        ("Conv", 0, False),
        ("Conv", 0, False),
        ("Add", None, False),
        ("MaxPool", None, True),
        ("Conv", 0, False),
    ]
    assert [t.tensor for t in plan.tensors] == ["x", "r", "c", "s", "p", "y"]
    behind = plan.tensor("r")
    assert behind is not None
    assert behind.low == 0
    assert behind.high is not None


def test_applied_plan_keeps_unchanged_nodes() -> None:
    """Both operands of the product are stored in 8 bits by what makes them."""
    signature = "g (float[N, 4, 8, 8] x) => (float[N, 8, 8, 8] y)"
    nodes = """[first] a = Conv <pads = [1, 1, 1, 1]> (x, w, b)
               t = Transpose <perm = [0, 1, 3, 2]> (a) [both] y = MatMul (a, t)"""
    item = QuantizeStatic(products=True)
    subject, plan = planned(typed(signature, CONSTANTS, nodes, 21), item)
    apply_static(subject, plan, Context())
    assert [e.scheme for e in plan.entries] == ["static"] * 3
    assert as_applied(subject, plan) == plan
    lone = replace(plan, entries=(*plan.entries, Entry(output="n", op="Conv", scheme="static")))
    assert [e.scheme for e in as_applied(subject, lone).entries][3:] == ["float"]


def test_the_range_of_a_softmax_is_all_that_it_can_give() -> None:
    """The runtime's kernel overflows where a step is less than 1 / 256."""
    nodes = """[first] a = Conv <pads = [1, 1, 1, 1]> (x, w, b) s = Softmax <axis = 1> (a)
               [last] y = Conv (s, v)"""
    item = QuantizeStatic(ops=("Conv", "Softmax"))
    subject, plan = planned(typed(IMAGE, CONSTANTS, nodes, 21), item)
    found = plan.tensor("s")
    assert found is not None
    assert (found.low, found.high) == (0, 255 / 256)
    fed = random_feeds(subject)
    (wanted,) = outputs(subject, fed)
    for form in ("qdq", "qop"):
        made = applied(subject, plan, form).inlined_proto()
        (given,) = InferenceSession(made.SerializeToString()).run(None, fed)
        assert np.abs(given - wanted).max() < 0.1


def test_there_and_back() -> None:
    _, plan = planned(TEXT)
    assert parse_plan(plan.to_json()) == plan
    lines = json.loads(plan.to_json())
    assert lines["nodes"][0] == {
        "node": "first",
        "output": "a",
        "op": "Conv",
        "scheme": "static",
        "axis": 0,
    }
    assert list(lines["tensors"][0]) == ["tensor", "low", "high"]


def test_a_plan_is_applied_without_data(tmp_path: Path) -> None:
    subject, plan = planned(TEXT)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    QuantizeStatic(plan=path).run(by_file := subject.copy(), Context())
    Calibrated().run(by_pass := subject.copy(), Context())
    assert written(by_file) == written(by_pass)


def test_node_set_to_float_takes_its_dependents_along() -> None:
    subject, plan = planned(TEXT)
    kernels = ["QLinearConv", "QLinearConv", "QLinearAdd", "MaxPool", "QLinearConv"]
    assert deployed(applied(subject, plan)) == kernels
    without = plan.turned(["second"], reason="harmful")
    assert without.entries[1].reason == "harmful"
    changed = applied(subject, without)
    assert operators(changed)["QuantizeLinear"] == 4
    # The Sum keeps the pool from reading bytes.
    kernels = ["Add", "Conv", "MaxPool", "QLinearConv", "QLinearConv", "Sum"]
    assert sorted(deployed(changed)) == kernels
    assert plan.turned(["second"]).turned([plan.entries[1]], "static") == plan
    with pytest.raises(UsageError, match="the plan has no node 'fourth'"):
        plan.turned(["fourth"])
    nothing = applied(subject, plan.turned(plan.entries))
    assert written(nothing) == written(subject)


def test_a_node_is_a_rewrite_that_can_be_vetoed() -> None:
    subject, plan = planned(TEXT)
    apply_static(subject, plan, Context())
    assert subject.journal.places_by_rule() == {"quantize-static": ["a", "c", "s", "p", "y"]}
    culprit = subject.journal.rewrites[1]
    subject.rollback()
    subject.journal.veto(culprit)
    apply_static(subject, plan, Context())
    subject.graph.verify()
    assert deployed(subject).count("QLinearConv") == 2


def test_tied_tensors_have_one_scale() -> None:
    subject, plan = planned(TEXT)
    quantizers = [n for n in applied(subject, plan).graph.nodes if n.op_type == "QuantizeLinear"]
    by_input = {n.input[0]: n.input[1] for n in quantizers}
    assert by_input["s"] == by_input["p"]
    assert len(set(by_input.values())) == len(by_input) - 1


def test_a_scale_that_a_user_sets() -> None:
    subject, plan = planned(TEXT)
    mine = tuple(
        TensorEntry("x", scale=0.125, zero=77) if t.tensor == "x" else t for t in plan.tensors
    )
    changed = applied(subject, replace(plan, tensors=mine))
    (first,) = (n for n in changed.graph.nodes if n.input[0] == "x")
    assert changed.graph.const(first.input[1]) == 0.125
    assert changed.graph.const(first.input[2]) == 77


def test_static_and_dynamic_layers_in_one_plan() -> None:
    nodes = f"""{NODES.replace("y = Conv", "z = Conv")} f = GlobalAveragePool (z)
                h = Flatten (f) y = MatMul (h, m)"""
    signature = "g (float[N, 4, 8, 8] x) => (float[N, 8] y)"
    text = typed(signature, f"{CONSTANTS}, {floats('m', 8, 8)}", nodes, 21)
    subject, convs = planned(text, QuantizeStatic(exclude=("MatMul",)))
    linear = QuantizeDynamic(min_elements=1).make_plan(subject)
    both = convs.merged(linear)
    assert parse_plan(both.to_json()) == both
    schemes = {e.output: e.scheme for e in both.entries}
    assert (schemes["y"], schemes["a"]) == ("dynamic", "static")
    assert linear.merged(convs).entries[0].scheme == "dynamic"
    for order in ((apply_dynamic, apply_static), (apply_static, apply_dynamic)):
        copy = subject.copy()
        for apply in order:
            apply(copy, both, Context())
        copy.graph.verify()
        assert deployed(copy).count("QLinearConv") == 3
        assert "DynamicQuantizeMatMul" in deployed(copy)


# -- what cannot be


def changed_entry(plan: Plan, index: int, **how: Any) -> Plan:
    entries = list(plan.entries)
    entries[index] = replace(entries[index], **how)
    return replace(plan, entries=tuple(entries))


@pytest.mark.parametrize(
    ("index", "how", "said"),
    [
        (0, {"axis": 1}, "Conv 'first' cannot be static with scales along axis 1"),
        (0, {"weight": "int4"}, "with int4 weights"),
        (3, {"tied": False}, "MaxPool 'p' cannot be static unless it is tied"),
        (0, {"output": "q", "node": "first"}, "Conv 'first' cannot be static: it is not in"),
    ],
)
def test_entries_that_cannot_be(index: int, how: dict[str, Any], said: str) -> None:
    subject, plan = planned(TEXT)
    with pytest.raises(UsageError) as raised:
        applied(subject, changed_entry(plan, index, **how))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tensors_that_cannot_be() -> None:
    subject, plan = planned(TEXT)
    with pytest.raises(UsageError, match="Conv 'second' cannot be static: the plan has no tensor"):
        applied(subject, replace(plan, tensors=tuple(t for t in plan.tensors if t.tensor != "c")))
    mixed = tuple(replace(t, dtype="int8") if t.tensor == "c" else t for t in plan.tensors)
    with pytest.raises(UsageError, match="its tensors are int8 and uint8"):
        applied(subject, replace(plan, tensors=mixed))
    unknown = replace(plan, tensors=(*plan.tensors, TensorEntry("q", low=0, high=1)))
    with pytest.raises(UsageError, match="the model has no tensor 'q'"):
        unknown.require_known(subject)


def test_a_node_without_a_kernel() -> None:
    text = typed(IMAGE, CONSTANTS, f"{NODES} [last] t = Exp (a)", 21)
    subject, plan = planned(text)
    asked = replace(plan, entries=(*plan.entries, Entry(node="last", op="Exp", scheme="static")))
    with pytest.raises(UsageError, match="Exp 'last' cannot be static: it has no int8 kernel"):
        applied(subject, asked)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ("3", "tensor 0 is not an object"),
        ('{"low": 0, "high": 1}', "give its name"),
        ('{"tensor": "x"}', "give either 'low' and 'high'"),
        ('{"tensor": "x", "low": 0}', "give either 'low' and 'high'"),
        ('{"tensor": "x", "low": 0, "high": 1, "scale": 1, "zero": 0}', "give either"),
        ('{"tensor": "x", "low": 2, "high": 1}', "low 2 is above high 1"),
        ('{"tensor": "x", "low": "a", "high": 1}', "low 'a' is not a number"),
        ('{"tensor": "x", "low": NaN, "high": 1}', "low nan is not a number"),
        ('{"tensor": "x", "scale": 0, "zero": 0}', "scale 0 is not a positive"),
        ('{"tensor": "x", "scale": 1, "zero": 256}', "zero 256 is not in 0..255"),
        ('{"tensor": "x", "scale": 1, "zero": 1.5}', "zero 1.5 is not an integer"),
        ('{"tensor": "x", "dtype": "int16", "low": 0, "high": 1}', "'int16' is none of uint8"),
        ('{"tensor": "x", "low": 0, "high": 1, "tied": "y"}', "'tied' is none of tensor"),
    ],
)
def test_invalid_tensor_entries_are_errors(tensor: str, said: str) -> None:
    text = f'{{"version": 1, "nodes": [], "tensors": [{tensor}]}}'
    with pytest.raises(UsageError) as raised:
        parse_plan(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="'color' is none of version, nodes, tensors"):
        parse_plan('{"version": 1, "nodes": [], "color": []}')
