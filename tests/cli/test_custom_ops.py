"""`--custom-ops` with a library that is real: the operators of onnxruntime-extensions."""

from __future__ import annotations

import json

import onnx
import pytest

from tests.cli.models import parse

extensions = pytest.importorskip("onnxruntime_extensions")

TEXT = """
<ir_version: 10, opset_import: ["": 18, "ai.onnx.contrib": 1]>
g (float[N,3] x) => (float[M,P] y)
<float[3,3] w = {2,0,0, 0,4,0, 0,0,5}, float one = {1}>
{
    same = Identity(w)  inverse = ai.onnx.contrib.Inverse(same)  a = MatMul(x, inverse)
    positive, negative = ai.onnx.contrib.NegPos(a)
    b = Mul(positive, one)  c = Identity(negative)  y = Sub(b, c)
}
"""

WRONG_RULE = """
import numpy as np
from toolkit import op, rewrite, var

x = var("x")


@rewrite(op.Identity(x))
def off_by_some(g, x):
    return g.op("Mul", x, g.constant(np.array(1.5, np.float32)))
"""


@pytest.fixture
def library():
    return extensions.get_library_path()


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "custom.onnx"
    onnx.save(parse(TEXT), path)
    return path


def test_the_numbers_are_proven(run, tmp_path, custom, library):
    done = run("optimize", custom, "--custom-ops", library, "--json", "-")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["output"]["ops"] == {
        "ai.onnx.contrib::Inverse": 1,
        "MatMul": 1,
        "ai.onnx.contrib::NegPos": 1,
        "Sub": 1,
    }
    assert report["proof"].endswith("on 3 feeds (N 1, 2, 3)")
    assert all(p["error"] == 0 for p in report["passes"] if p["status"] == "applied")
    written = tmp_path / "custom.opt.onnx"
    assert run("verify", custom, written, "--custom-ops", library).code == 0
    inspected = run("inspect", written, "--custom-ops", library).out
    assert "onnxruntime on this machine loads it" in inspected


def test_a_wrong_rewrite_beside_custom_operators_is_undone(run, tmp_path, custom, library):
    rules = tmp_path / "rules.py"
    rules.write_text(WRONG_RULE)
    passes = f"{rules}:off_by_some"
    done = run("optimize", custom, "--passes", passes, "--custom-ops", library, "--json", "-")
    assert done.code == 0, done.err
    (outcome,) = json.loads(done.out)["passes"]
    assert outcome["status"] == "reverted"
    assert {u["site"] for u in outcome["undone"]} >= {"same"}


def test_without_the_library_only_the_structure_is_checked(run, custom):
    done = run("optimize", custom, "--json", "-")
    assert done.code == 0
    assert json.loads(done.out)["proof"].endswith("structure only")
