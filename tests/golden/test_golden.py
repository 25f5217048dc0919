"""Whole exports before and after passes, as text: its diff shows what a change does."""

from __future__ import annotations

import difflib

import pytest
from onnx import parser

from tests.golden import update
from tests.golden.text import read_model, text_of, value_names
from toolkit.ir.model import Model


@pytest.mark.parametrize("stage", update.PIPELINES)
@pytest.mark.parametrize("name", update.names())
def test_the_passes_write_the_expected_model(name: str, stage: str) -> None:
    expected = update.path_of(name, stage).read_text(encoding="utf-8").splitlines()
    found = update.optimized(name, stage).splitlines()
    difference = "\n".join(difflib.unified_diff(expected, found, "expected", "found", lineterm=""))
    if difference:
        command = f"python -m tests.golden.update {name}"
        pytest.fail(f"{difference}\n\nif this is intended: {command}", pytrace=False)


@pytest.mark.parametrize("name", update.names())
def test_an_export_reads_back_as_it_was_written(name: str) -> None:
    text = update.path_of(name, "before").read_text(encoding="utf-8")
    model = read_model(update.path_of(name, "before"))
    assert _without_comments(text_of(model)) == _without_comments(text)


def _without_comments(text: str) -> list[str]:
    return [line.partition("  #")[0] for line in text.splitlines()]


def test_new_values_are_numbered_by_their_stem() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N] x) => (float[N] y) {
            relu_3 = Relu (x) w_7_scale_9 = Neg (relu_3) relu_12 = Relu (w_7_scale_9)
            y = Add (relu_12, w_7_scale_9) }"""
    model = Model.from_proto(parser.parse_model(text))
    written = text_of(model, given={"x", "y", "relu"})
    assert "relu_2 = Relu (x)" in written
    assert "relu_3 = Relu (w_7_scale)" in written
    assert value_names(model) == {"x", "y", "relu_3", "w_7_scale_9", "relu_12"}


def test_long_weights_are_shapes_and_come_from_seeds(tmp_path) -> None:
    path = tmp_path / "model.onnxtxt"
    path.write_text("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x) => (float[N,4] y) <float[8,4] w, float[2] s = {1, 2}> {
            y = MatMul (x, w) }""")
    one, other = read_model(path), read_model(path)
    assert (one.graph.const("w") == other.graph.const("w")).all()
    assert '   float[8,4] "w"  # std' in text_of(one)
    assert '   float[2] "s" = {1.0, 2.0},' in text_of(one)
