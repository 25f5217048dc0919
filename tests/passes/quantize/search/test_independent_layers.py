"""Layers that no other one is bound to: what they save, and which go together."""

from __future__ import annotations

from typing import Any

import pytest

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.schemes.weight_only.quantize_weights import QuantizeWeights
from passes.quantize.search.costs import Kernels
from passes.quantize.search.independent_layers import LEAST_SAVING, independent_groups
from tests.checks import parse
from tests.passes.fuse.constants import floats, typed
from toolkit.ir.model import Model

SIGNATURE = "g (float[N, 16] x) => (float[N, 16] y)"


def found(item: Any, constants: str, nodes: str, signature: str = SIGNATURE) -> dict[str, float]:
    """Savings by the outputs that go together."""
    model = Model.from_proto(parse(typed(signature, constants, nodes, 21)))
    plan = item.make_plan(model)
    groups = independent_groups(model, plan, {}, Kernels({}))
    return {"".join(entry.output for entry in group.entries): group.saving for group in groups}


WEIGHTS = QuantizeWeights(min_elements=1)
DYNAMIC = QuantizeDynamic(min_elements=1)


def test_weight_only_layers_save_bytes() -> None:
    constants = f"{floats('v', 16, 48)}, {floats('w', 48, 16)}, {floats('u', 16, 16)}"
    nodes = "a = MatMul (x, v) b = MatMul (a, w) y = MatMul (b, u)"
    saved = found(WEIGHTS, constants, nodes)
    assert list(saved) == ["a", "b", "y"]
    assert saved["a"] == saved["b"] == 3 * saved["y"]
    assert sum(saved.values()) == pytest.approx(3 * LEAST_SAVING)


def test_the_bytes_of_a_weight_are_saved_once() -> None:
    constants = f"{floats('v', 16, 16)}, {floats('w', 16, 16)}"
    nodes = "a = MatMul (x, v) b = MatMul (a, w) y = MatMul (b, v)"
    assert found(WEIGHTS, constants, nodes) == {"ay": LEAST_SAVING, "b": LEAST_SAVING}


def test_dynamic_layers_of_one_weight_save_time_each() -> None:
    nodes = "a = MatMul (x, v) y = MatMul (a, v)"
    saved = found(DYNAMIC, floats("v", 16, 16), nodes)
    assert saved == {"a": LEAST_SAVING, "y": LEAST_SAVING}


def test_table_and_tied_layers_form_a_group() -> None:
    signature = "g (int64[N] i) => (float[N, 20] y)"
    nodes = "t = Gather (e, i) a = MatMul (t, v) y = Gemm <transB = 1> (a, e)"
    constants = f"{floats('e', 20, 16)}, {floats('v', 16, 16)}"
    for item in (DYNAMIC, WEIGHTS):
        assert list(found(item, constants, nodes, signature)) == ["ty", "a"]


def test_same_name_in_two_subgraphs_means_two_weights() -> None:
    signature = "g (bool c, float[N, 16] x) => (float[N, 16] y)"
    then = f"then_branch = t () => (float[N, 16] p) <{floats('w', 16, 16)}> {{ p = MatMul (x, w) }}"
    other = then.replace("then_branch = t", "else_branch = e").replace("p", "q")
    text = f"{signature} {{ y = If (c) <{then}, {other}> }}"
    model = Model.from_proto(parse(text))
    groups = independent_groups(model, WEIGHTS.make_plan(model), {}, Kernels({}))
    assert sorted(len(group.entries) for group in groups) == [1, 1]
