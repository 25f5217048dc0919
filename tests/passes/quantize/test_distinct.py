"""Layers of separate subgraphs that make values of one name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import check

from passes.quantize.dynamic import QuantizeDynamic
from passes.quantize.weight_only import QuantizeWeights

WEIGHTS = ", ".join(
    f"float[16, 16] {name} = {{{', '.join(f'{v:.3f}' for v in values)}}}"
    for name, values in zip("vw", np.random.default_rng(0).standard_normal((2, 256)), strict=True)
)


def branches(then: str, other: str) -> str:
    return f"""
        g (bool c, float[16, 16] x) => (float[16, 16] y) <{WEIGHTS}>
        {{ y = If (c) <then_branch = t () => (float[16, 16] p) {{ {then} }},
                      else_branch = e () => (float[16, 16] p) {{ {other} }}> }}"""


@pytest.mark.parametrize(
    "quantize", [QuantizeDynamic(min_elements=1), QuantizeWeights(weights="int8", min_elements=1)]
)
@pytest.mark.parametrize("turned", ["then", "other"])
@pytest.mark.parametrize("taken", [True, False])
def test_one_that_must_stay_float_beside_one_of_its_name(
    quantize: Any, turned: str, taken: bool
) -> None:
    stays, goes = "p = Gemm <transA = 1> (x, v)", "p = Gemm (x, w)"
    feeds = {"c": np.array(taken), "x": np.random.default_rng(1).random((16, 16), np.float32)}
    text = branches(stays, goes) if turned == "then" else branches(goes, stays)
    changed = check(quantize, text, atol=0.3, inputs=feeds)
    left = [n.op_type for graph in changed.graphs() for n in graph.nodes]
    assert left.count("Gemm") == 1


def test_names_that_are_distinct_stay() -> None:
    text = branches("p = Neg (x)", "p = MatMul (x, w)")
    feeds = {"c": np.array(False), "x": np.ones((16, 16), np.float32)}
    changed = check(QuantizeDynamic(min_elements=1), text, atol=0.3, inputs=feeds)
    assert [graph.outputs for graph in changed.graphs()] == [["y"], ["p"], ["p"]]
