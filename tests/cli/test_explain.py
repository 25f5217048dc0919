"""`toolkit explain`: what fused where, and what stopped the rest."""

from __future__ import annotations

import json
import sys

import onnx
import pytest

from tests.cli.models import listing, parse
from toolkit.explanation import explain_passes
from toolkit.ir.model import Model
from toolkit.pass_manager.registry import parse_passes

RULES = """
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from toolkit import FLOAT, Tolerance, op, product, rewrite, var
from toolkit.rewriting.rule import apply_rules

x, q, k, v = var("x"), var("q"), var("k"), var("v")


@rewrite(product(x, 0.5, op.Erf(product(x, 1 / sqrt(2))) + 1), opset=20)
def gelu(g, x):
    return g.op("Gelu", x)


@rewrite(op.MatMul(op.Softmax(op.MatMul(q, k), axis=-1), v), name="attention-plain", opset=23)
def attention(g, q, k, v):
    return g.op("Attention", q, g.op("Transpose", k, perm=[0, 1, 3, 2]), v, scale=1.0)


@rewrite(op.Relu(op.Relu(x)))
def relu_once(g, x):
    return g.op("Relu", x)


@dataclass(frozen=True)
class Fuse:
    \"\"\"Gelu and attention.\"\"\"

    name: ClassVar[str] = "fuse-some"
    tolerance: ClassVar[Tolerance] = FLOAT
    anchors: ClassVar = {
        "gelu": ("Erf", "0.044715 > Tanh"),
        "attention": ("Softmax > MatMul",),
    }

    def run(self, model, ctx):
        apply_rules(model, (gelu, attention), ctx)


@dataclass(frozen=True)
class Broken:
    name: ClassVar[str] = "broken"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model, ctx):
        raise RuntimeError("went wrong")
"""

MODEL = """
<ir_version: 10, opset_import: ["" : OPSET]>
g (float[2, 3] x, float[2, 3] w, float[1, 2, 3, 4] q, float[1, 2, 4, 3] k, float[1, 2, 3, 4] v)
=> (float[2, 3] good, float[2, 3] bad, float[2, 3] tanh, float[1, 2, 3, 4] att)
<float root = {1.4142135}, float one = {1}, float half = {0.5}, float off = {0.6},
 float cubic = {0.044715}>
{
    a = Div(x, root)  b = Erf(a)  c = Add(b, one)  d = Mul(x, c)  good = Mul(d, half)
    e = Div(w, root)  f = Erf(e)  h = Add(f, one)  i = Mul(w, h)  bad = Mul(i, off)
    r = Relu(x)  r2 = Relu(r)  s = Mul(r2, cubic)  tanh = Tanh(s)
    scores = MatMul(q, k)  weights = Softmax <axis = AXIS> (scores)  att = MatMul(weights, v)
}
"""


def model_text(opset: int = 23, axis: int = 2) -> str:
    return MODEL.replace("OPSET", str(opset)).replace("AXIS", str(axis))


@pytest.fixture
def rules(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return path


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(parse(model_text()), path)
    return path


@pytest.fixture
def explained(run, model, rules):
    """The report on the model as data."""

    def call(*options, passes: str = "Fuse"):
        done = run("explain", model, "--passes", f"{rules}:{passes}", "--json", "-", *options)
        assert (done.code, done.err) == (0, "")
        return json.loads(done.out)

    return call


def test_what_fused_where(explained):
    data = explained()
    assert data["fused"] == [
        {"pass": "fuse-some", "rule": "gelu", "count": 1, "places": ["good"]},
    ]


def test_what_did_not_and_why(explained):
    data = explained()
    assert [(core["op"], core["rules"]) for core in data["unfused"]] == [
        ("Erf", ["gelu"]),
        ("Tanh", ["gelu"]),
        ("Softmax", ["attention"]),
    ]
    erf, tanh, softmax = data["unfused"]
    assert erf["nearest"]["rule"] == "gelu"
    assert erf["nearest"]["root"] == "Mul 'bad'"
    assert 0 < erf["nearest"]["matched"] <= erf["nearest"]["total"]
    assert erf["reason"] == "expected constant 0.5, found 0.6"
    assert tanh["nearest"] is None
    assert "no rule" in tanh["reason"]
    assert softmax["nearest"]["rule"] == "attention-plain"
    assert softmax["nearest"]["node"] == "Softmax 'weights'"
    assert "axis" in softmax["reason"]


def test_a_core_that_fused_is_not_listed(run, tmp_path, rules):
    path = tmp_path / "other.onnx"
    onnx.save(parse(model_text(axis=-1)), path)
    done = run("explain", path, "--passes", f"{rules}:Fuse", "--json", "-")
    data = json.loads(done.out)
    assert {row["rule"] for row in data["fused"]} == {"gelu", "attention-plain"}
    assert [core["op"] for core in data["unfused"]] == ["Erf", "Tanh"]


def test_one_rule_and_its_variants(explained):
    data = explained("--rule", "attention")
    assert data["fused"] == []
    assert [core["op"] for core in data["unfused"]] == ["Softmax"]
    assert data["misses"] == []
    data = explained("--rule", "gelu")
    assert [row["rule"] for row in data["fused"]] == ["gelu"]
    assert [core["op"] for core in data["unfused"]] == ["Erf", "Tanh"]


def test_a_rule_that_is_not_there(refused, model, rules):
    says = ("no rule 'attn'", "attention", "gelu")
    refused("explain", model, "--passes", f"{rules}:Fuse", "--rule", "attn", says=says)


def test_a_rule_of_its_own_needs_no_cores(explained):
    data = explained(passes="relu_once")
    assert [(row["rule"], row["places"]) for row in data["fused"]] == [("relu-once", ["r2"])]
    assert data["unfused"] == []
    data = explained(passes="gelu")
    assert [miss["root"] for miss in data["misses"]] == ["Mul 'i'", "Mul 'bad'"]


def test_a_model_above_the_opset_limit_is_lowered_first(run, tmp_path, rules):
    path = tmp_path / "model.onnx"
    onnx.save(parse(model_text(20)), path)
    done = run("explain", path, "--passes", f"{rules}:Fuse", "--opset", "17", "--json", "-")
    assert done.code == 0, done.err
    assert "opset 20 or newer, and the model has 17" in json.loads(done.out)["unfused"][0]["reason"]


def test_rules_for_another_opset(run, tmp_path, rules):
    path = tmp_path / "old.onnx"
    onnx.save(parse(model_text(17)), path)
    passes = f"opset,{rules}:Fuse"
    kept = run("explain", path, "--passes", passes, "--opset", "keep", "--json", "-")
    data = json.loads(kept.out)
    assert data["fused"] == []
    assert len(data["unfused"]) == 4
    assert "opset 20 or newer, and the model has 17" in data["unfused"][0]["reason"]
    lifted = run("explain", path, "--passes", passes, "--opset", "20", "--json", "-")
    data = json.loads(lifted.out)
    assert [row["rule"] for row in data["fused"]] == ["gelu"]
    assert data["besides"] == {"opset": 3}


def test_the_console(run, model, rules, tmp_path):
    before = listing(tmp_path)
    done = run("explain", model, "--passes", f"simplify,{rules}:Fuse")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    words = ("gelu", "good", "unfused", "Softmax 'weights'", "attention-plain", "axis", "besides")
    for word in words:
        assert word in done.out
    assert listing(tmp_path) == before


def test_a_pass_that_fails(run, model, rules):
    done = run("explain", model, "--passes", f"{rules}:Broken,{rules}:Fuse")
    assert done.code == 0
    assert "went wrong" in done.out
    assert "unfused" in done.out


def test_nothing_to_fuse(run, tiny):
    done = run("explain", tiny, "--passes", "simplify")
    assert done.code == 0
    assert "nothing" in done.out


def test_json_file(run, model, rules, tmp_path):
    written = tmp_path / "report.json"
    done = run("explain", model, "--passes", f"{rules}:Fuse", "--json", written)
    data = json.loads(written.read_text())
    names = ["input", "nodes", "fused", "unfused", "misses", "besides", "problems", "seconds"]
    assert list(data) == names
    assert data["input"] == str(model)
    assert "unfused" in done.out


def test_bad_usage(refused, model, tiny, rules, tmp_path):
    refused("explain", tmp_path / "gone.onnx", "--passes", "fold", says="does not exist")
    refused("explain", model, "--passes", "nonsense", says="unknown pass 'nonsense'")
    refused("explain", model, "--passes", "fold", "--opset", "99", says="opset 99")
    refused("explain", model, "--passes", "fold", "--json", model, says="is the input")
    refused("explain", model, "--passes", f"{rules}:Fuse", "--json", rules, says="Python code")


def test_the_model_stays_as_it_is(rules):
    loaded = Model.from_proto(parse(model_text()))
    before = loaded.to_proto().SerializeToString(deterministic=True)
    explain_passes(loaded, parse_passes(f"{rules}:Fuse"))
    assert loaded.to_proto().SerializeToString(deterministic=True) == before


def test_each_core_has_the_miss_that_is_about_it(run, tmp_path, rules):
    """Layer after layer: what lies behind the second is behind the first as well."""
    layers = "\n".join(
        f"a{i} = Div(x{i}, root)  b{i} = Erf(a{i})  c{i} = Add(b{i}, one)  d{i} = Mul(x{i}, c{i})"
        f"  x{i + 1} = Mul(d{i}, off)"
        for i in range(3)
    )
    text = f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 3] x0) => (float[2, 3] x3)
        <float root = {{1.4142135}}, float one = {{1}}, float off = {{0.6}}> {{ {layers} }}
    """
    path = tmp_path / "layers.onnx"
    onnx.save(parse(text), path)
    done = run("explain", path, "--passes", f"{rules}:Fuse", "--json", "-")
    unfused = json.loads(done.out)["unfused"]
    roots = [core["nearest"]["root"] for core in unfused]
    assert roots == ["Mul 'x1'", "Mul 'x2'", "Mul 'x3'"]
