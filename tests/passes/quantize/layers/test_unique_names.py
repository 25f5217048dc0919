"""Layers of separate subgraphs that make values of one name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import check, model

from passes.quantize.layers.unique_names import make_all_distinct, make_distinct
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.schemes.weight_only.quantize_weights import QuantizeWeights

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


def test_all_names_become_distinct_and_layers_are_called_the_same() -> None:
    """A plan without ranges names layers alone, and one with ranges all that is there."""
    text = branches("h = Neg (x) p = MatMul (h, v)", "h = Abs (x) p = MatMul (h, w)")
    few, all_ = model(text), model(text)
    make_distinct(few)
    make_all_distinct(all_)
    made = [[node.output[0] for node in graph.nodes] for graph in all_.graphs()]
    values = [name for names in made for name in names]
    assert len(values) == len(set(values)) == 5
    assert [g.outputs for g in few.graphs()] == [g.outputs for g in all_.graphs()]
    assert [g.nodes[0].output[0] for g in few.graphs()] == ["y", "h", "h"]
    all_.graph.verify()
    loop = """Loop (n, on, {0}) <body = l (int64 i, bool c, float[2] s) => (bool d, float[2] s)
        {{ d = Identity (c) }}>"""
    twice = f"""g (int64 n, float[2] x) => (float[2] z) <bool on = {{1}}>
        {{ y = {loop.format("x")} z = {loop.format("y")} }}"""
    subject = model(twice)
    make_all_distinct(subject)
    subject.graph.verify()
    one, other = list(subject.graphs())[1:]
    assert not {*one.inputs, *one.outputs} & {*other.inputs, *other.outputs}
    assert [body.outputs[1] for body in (one, other)] == [body.inputs[2] for body in (one, other)]
