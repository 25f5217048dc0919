"""Tables of rows in int8: Gather first, then dequantize; alone, and tied to a projection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from tests import ort as plain
from tests.checks import check
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.schemes.dynamic.checks import (
    ALL,
    LAYER,
    fused_by_runtime,
    matrices,
    quantized,
    stays,
)

IDS = "g (int64[N, S] i) => (float[N, S, 8] y)"
TABLE = "Gather Gather Cast Mul"


@pytest.mark.parametrize("axis", ["", "<axis = 0>", "<axis = -2>"])
def test_a_table(axis: str) -> None:
    changed = quantized(IDS, floats("t", 20, 8), f"y = Gather {axis} (t, i)", TABLE)
    kinds = sorted(matrices(changed).values())
    assert kinds == [TensorProto.FLOAT, TensorProto.INT8]  # [20, 1] scales


def test_a_row_is_dequantized_after_it_was_taken() -> None:
    table = np.random.default_rng(0).uniform(-1, 1, (4, 8)).astype(np.float32)
    table[1] *= 1000
    table[2] = 0
    text = typed(IDS, stored("t", table), "y = Gather (t, i)")
    changed = check(ALL, text, atol=4.0, inputs={"i": np.array([[0, 1, 2, -1]])})
    (found,) = plain.run(changed.inlined_proto(), {"i": np.array([[0, 1, 2, -1]])})
    scale = np.abs(table).max(axis=1, keepdims=True) / np.float32(127)
    error = np.abs(found[0] - table)
    assert np.all(error <= scale * 0.501)


def test_unsupported_tables_stay_float() -> None:
    by_column = "g (int64[S] i) => (float[20, S] y)"
    notes = stays(by_column, floats("t", 20, 8), "y = Gather <axis = 1> (t, i)")
    assert "not gathered by rows" in notes[0]
    deep = "g (int64[S] i) => (float[S, 2, 3] y)"
    assert "weights of rank 3, not 2" in stays(deep, floats("t", 20, 2, 3), "y = Gather (t, i)")[0]
    short = "g (int64[S] i) => (float[S, 7] y)"
    assert "fewer than 8" in stays(short, floats("t", 20, 7), "y = Gather (t, i)")[0]
    whole = "g (int64[S] i) => (int64[S] y)"
    assert stays(whole, "int64[3] t = {4, 5, 6}", "y = Gather (t, i)") == []
    fixed = "g () => (float[2, 8] y)"
    assert stays(fixed, f"{floats('t', 20, 8)}, int64[2] i = {{1, 2}}", "y = Gather (t, i)") == []
    off = QuantizeDynamic(min_elements=1, embeddings=False)
    assert "a table" in stays(IDS, floats("t", 20, 8), "y = Gather (t, i)", off)[0]


def test_table_with_float_users_stays_float() -> None:
    signature = IDS.replace(" y)", " y, float[20, 8] z)")
    notes = stays(signature, floats("t", 20, 8), "y = Gather (t, i) z = Neg (t)")
    assert "float users" in notes[0]


@pytest.mark.parametrize(
    "project",
    ["u = Transpose <perm = [1, 0]> (t) y = MatMul (h, u)", "y = Gemm <transB = 1> (h, t)"],
)
def test_a_table_that_is_tied_to_a_projection_is_stored_once(tmp_path: Path, project: str) -> None:
    signature = "g (int64[N] i) => (float[N, 20] y)"
    nodes = f"x = Gather (t, i) h = Tanh (x) {project}"
    changed = quantized(signature, floats("t", 20, 8), nodes, f"{TABLE} Tanh Transpose {LAYER}")
    kinds = sorted(matrices(changed).values())
    assert kinds == [TensorProto.FLOAT, TensorProto.INT8]
    found = sorted(fused_by_runtime(changed, tmp_path))
    assert found == sorted([*TABLE.split(), "Tanh", "DynamicQuantizeMatMul"])


def test_projection_through_a_transpose_with_one_user() -> None:
    signature = "g (float[N, 8] x) => (float[N, 20] y)"
    nodes = "u = Transpose (t) y = MatMul (x, u)"
    changed = quantized(signature, floats("t", 20, 8), nodes, LAYER)
    (tensor,) = (t for t in changed.graph.initializers.values() if len(t.dims) == 2)
    assert list(tensor.dims) == [8, 20]
