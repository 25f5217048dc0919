"""Calibration, budgets and plans on the command line, and what is wrong with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

RANDOM = np.random.default_rng(0)


DYNAMIC = ("--passes", "quantize-dynamic:min_elements=16")


def test_quantizing_by_samples(run, net, samples, tmp_path):
    report = tmp_path / "report.json"
    done = run("optimize", net, *DYNAMIC, "--calib", samples, "--json", report)
    assert done.code == 0, done.err
    assert "top-1 agreement" in done.out
    assert "on 40 samples" in " ".join(done.out.split())
    assert "'label' is not an input of the model and was ignored" in done.out
    data = json.loads(report.read_text())
    assert data["notes"] == ["'label' is not an input of the model and was ignored"]
    assert data["quality"]["real"] is True
    assert data["quality"]["outputs"][0]["kind"] == "classes"


def test_at_most_so_many_samples(run, net, samples):
    done = run("optimize", net, *DYNAMIC, "--calib", samples, "--calib-samples", 7)
    assert "on 7 samples" in done.out


def test_samples_from_a_function(run, net, code):
    done = run("optimize", net, *DYNAMIC, "--calib", f"{code}:feeds")
    assert "on 5 samples" in done.out, done.err


def test_random_samples_are_told_from_real_ones(run, net):
    done = run("optimize", net, *DYNAMIC, "--calib", "random")
    assert "synthetic input" in done.out
    assert "say little" in done.out


def test_data_that_nobody_needs(run, net, samples):
    done = run("optimize", net, "--calib", samples)
    assert done.code == 0
    assert "no pass made use of the calibration data" in done.out


def test_a_plan_is_written_and_followed(run, net, samples, tmp_path):
    plan, other = tmp_path / "plan.json", tmp_path / "other.onnx"
    assert run("optimize", net, *DYNAMIC, "--calib", samples, "--plan", plan).code == 0
    schemes = {entry["node"]: entry["scheme"] for entry in json.loads(plan.read_text())["nodes"]}
    assert schemes == {"first": "dynamic", "last": "dynamic"}
    plan.write_text(plan.read_text().replace("dynamic", "float", 1))
    assert run("optimize", net, "--passes", f"quantize-dynamic:plan={plan}", "-o", other).code == 0
    ops = [node.op_type for node in onnx.load(other).graph.node]
    assert ops.count("MatMulInteger") == 1


def test_a_plan_of_floats_is_written_too(run, net, tmp_path):
    """To be edited: it says what could be quantized."""
    plan = tmp_path / "plan.json"
    done = run("optimize", net, "--passes", "quantize-dynamic:exclude=*", "--plan", plan)
    assert done.code == 0
    assert {entry["scheme"] for entry in json.loads(plan.read_text())["nodes"]} == {"float"}


def test_without_a_plan_nothing_is_written(run, tiny, tmp_path):
    model = onnx.load(tiny)
    model.opset_import[0].version = 9
    onnx.save(model, tiny)
    plan = tmp_path / "plan.json"
    done = run("optimize", tiny, *DYNAMIC, "--plan", plan)
    assert done.code == 0
    assert "not written: nothing was quantized" in done.out
    assert not plan.exists()


def test_the_budget_of_a_metric(run, net, samples, code):
    generous = run(
        "optimize", net, *DYNAMIC, "--calib", samples, "--metric", "sqnr", "--max-drop", "20dB"
    )
    assert generous.code == 0
    assert "SQNR" in generous.out
    assert "(budget 20.0 dB)" in generous.out
    own = run("optimize", net, *DYNAMIC, "--calib", samples, "--metric", f"{code}:spread")
    assert own.code == 0
    assert "float model" in own.out


def test_a_budget_that_cannot_hold(run, net, samples):
    strict = run("optimize", net, *DYNAMIC, "--calib", samples, "--metric", "error",
                 "--max-drop", 1e-7)  # fmt: skip
    assert strict.code == 0
    assert "nothing is quantized: no part of it keeps the budget" in " ".join(strict.out.split())
    off = run("optimize", net, *DYNAMIC, "--calib", samples, "--max-drop", "off")
    assert "applied" in off.out


def test_pixels_for_floats(run, net, tmp_path):
    path = tmp_path / "pixels.npz"
    np.savez(path, x=RANDOM.integers(0, 256, (8, 64), dtype=np.uint8))
    done = run("optimize", net, *DYNAMIC, "--calib", path)
    assert done.code == 0
    assert "'x' holds uint8: its numbers are not scaled" in done.out


TROUBLED = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 64] x) => (float[N, 3] z) {
        h = MatMul (x, v) y = Add (h, far) z = MatMul (y, w) }"""


@pytest.mark.parametrize("observer", ["minmax", "mse"])
def test_what_8_bits_do_not_hold_is_named(run, tmp_path, observer):
    proto = parser.parse_model(TROUBLED)
    v = RANDOM.standard_normal((64, 400)).astype(np.float32) / 800_000
    w = RANDOM.standard_normal((400, 3)).astype(np.float32)
    w[7, 1] *= 1e6
    constants = {"v": v, "w": w, "far": np.full(400, 9, np.float32)}
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(proto, tmp_path / "troubled.onnx")
    x = RANDOM.standard_normal((50, 64)).astype(np.float32)
    x[3, 5] = 1e4
    np.savez(tmp_path / "x.npz", x=x)
    passes = f"quantize:mode=static:observer={observer}"
    options = ("--passes", passes, "--calib", tmp_path / "x.npz", "--no-measure")
    done = run("optimize", tmp_path / "troubled.onnx", *options)
    assert done.code == 0
    said = " ".join(done.out.split())
    assert "'w': in 1 of 3 outputs the largest weight is up to" in said
    assert "'x': its largest value is" in said
    assert "'y': nearly constant" in said


# -- bad input


def sample_file(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    return path


X = RANDOM.standard_normal((8, 64)).astype(np.float32)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"y": X}, "lacks input 'x'"),
        ({"x": X[:, :63]}, "has shape"),
        ({"x": X.reshape(2, 2, 2, 64)}, "rank"),
        ({"x": X.astype(np.complex64)}, "is complex64"),
        ({"x": (X * 1e9).astype(np.int64) | 1}, "does not hold exactly"),
        ({"x": np.array([["a"] * 64])}, "is <U1"),
        ({"x": X[:0]}, "no sample"),
        ({}, "is empty"),
        ({"x": np.where(X > 1, np.nan, X)}, "NaN or Inf"),
        ({"x": np.where(X > 1, np.inf, X)}, "NaN or Inf"),
    ],
)
def test_samples_that_do_not_fit(refused, net, tmp_path, arrays, says):
    refused("optimize", net, *DYNAMIC, "--calib", sample_file(tmp_path, **arrays), says=says)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "none.npz", "does not exist"),
        (lambda p: (p / "f.txt").write_text("a text\n") and p / "f.txt", "tokenizer"),
        (lambda p: (p / "f.bin").write_text("x") and p / "f.bin", "unknown format"),
        (lambda p: (p / "f.npz").write_text("x") and p / "f.npz", "not an .npz file"),
        (lambda p: (p / "d").mkdir() or p / "d", "holds no"),
        (lambda p: p / "mine.py", "name the function"),
        (lambda p: f"{p / 'mine.py'}:missing", "no object 'missing'"),
        (lambda p: f"{p / 'mine.py'}:half", "is not a function"),
        (lambda p: "no_such_module:f", "cannot import"),
    ],
)
def test_sources_that_are_none(refused, net, code, tmp_path, make, says):
    refused("optimize", net, *DYNAMIC, "--calib", make(tmp_path), says=says)


def test_an_unreadable_image(refused, tmp_path):
    pytest.importorskip("PIL")
    shape = ["batch", 3, 8, 8]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "image",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "image.onnx")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "broken.png").write_bytes(b"not an image")
    refused(
        "optimize", tmp_path / "image.onnx", *DYNAMIC, "--calib", tmp_path / "photos",
        says=("broken.png", "cannot be read"),
    )  # fmt: skip


@pytest.mark.parametrize("make", ["missing", "empty"])
def test_a_wrong_tokenizer_folder(refused, net, tmp_path, make):
    texts, folder = tmp_path / "texts.txt", tmp_path / "tokenizer"
    texts.write_text("a text\n")
    if make == "empty":
        pytest.importorskip("transformers")
        folder.mkdir()
    says = "tokenizer"
    refused("optimize", net, *DYNAMIC, "--calib", texts, "--tokenizer", folder, says=says)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("size", "name=value"),
        ("sizes=3", "did you mean 'size'"),
        ("size=3x4x5", "height x width"),
        ("mean=a,b", "expected float"),
        ("std=0", "above 0"),
        ("fit=wide", "stretch, crop, letterbox"),
        ("preset=coco", "imagenet"),
        ("rate=fast", "expected int"),
        ("columns=a,b,c", "one or two"),
    ],
)
def test_options_of_samples(refused, net, samples, option, says):
    refused("optimize", net, *DYNAMIC, "--calib", samples, "--calib-option", option, says=says)


def test_a_cache_where_none_can_be(refused, net, samples):
    static = ("--passes", "quantize-static", "--calib", samples)
    refused("optimize", net, *static, "--calib-cache", samples / "inside", says="is not writable")


def test_the_usual_cache_is_done_without(run, net, samples, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(samples))
    static = ("--passes", "quantize-static", "--calib", samples)
    assert run("optimize", net, *static, "-o", tmp_path / "out.onnx").code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-drop", "0.01"), "none of the passes quantizes"),
        (("--metric", "top1"), "none of the passes quantizes"),
        (("--plan", "plan.json"), "none of the passes quantizes"),
        (("--calib-samples", "5"), "without --calib"),
        (("--tokenizer", "folder"), "without --calib"),
        (("--calib-cache", "off"), "without --calib"),
        (("--calib-option", "size=3"), "without --calib"),
        ((*DYNAMIC, "--max-drop", "much"), "a number"),
        ((*DYNAMIC, "--max-drop", "-1"), "0 or more"),
        ((*DYNAMIC, "--max-drop", "5"), "not a fraction"),
        ((*DYNAMIC, "--metric", "top2"), "did you mean 'top1'"),
        (
            (*DYNAMIC, "--max-drop", "0.1", "--validate", "off"),
            "have no effect with --validate off",
        ),
        ((*DYNAMIC, "--prefer", "beauty"), "speed"),
        ((*DYNAMIC, "--plan", "no/such/folder.json"), "does not exist"),
    ],
)
def test_what_cannot_be_asked_together(refused, net, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    refused("optimize", net, *arguments, says=says)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "no object 'missing'"),
        ("half", "is not a function"),
        ("nothing", "must be a number"),
        ("fails", "no labels"),
    ],
)
def test_a_metric_that_is_none(refused, net, samples, code, name, says):
    refused("optimize", net, *DYNAMIC, "--calib", samples, "--metric", f"{code}:{name}", says=says)


def test_a_metric_without_samples(refused, net, code):
    refused(
        "optimize", net, *DYNAMIC, "--metric", f"{code}:spread", says="real samples, not synthetic"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"version": 1, "nodes": [{"node": "third", "scheme": "dynamic"}]}', "no node 'third'"),
        ('{"version": 1, "nodes": [{"node": "first", "scheme": "magic"}]}', "magic"),
        ('{"version": 9, "nodes": []}', "version"),
        ("nodes", "not JSON"),
    ],
)
def test_a_plan_that_does_not_fit(refused, net, tmp_path, content, says):
    plan = tmp_path / "plan.json"
    plan.write_text(content)
    refused("optimize", net, "--passes", f"quantize-dynamic:plan={plan}", says=says)


@pytest.mark.parametrize(
    ("passes", "idle"),
    [
        ("quantize:format=qop:mode=static:exclude=Conv", "mode, exclude"),
        ("quantize-static:format=qop:observer=mse", "observer"),
        ("quantize-dynamic:per_channel=false", "per_channel"),
        ("quantize-weights:form=qdq:method=hqq", "method"),
    ],
)
def test_options_that_a_plan_stands_in_place_of(run, net, tmp_path, passes, idle):
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "nodes": []}')
    done = run("optimize", net, "--passes", f"{passes}:plan={plan}")
    assert done.code == 0, done.err
    assert f"ignored, since a plan is given: {idle} " in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--passes", "fuse", "--prefer", "size"), "--prefer has no effect"),
        (("--passes", "fuse", "--no-measure"), "--no-measure has no effect"),
        (("--passes", "quantize-static:percent=99", "--calib", "random"), "observer=percentile"),
        (("--passes", "fp16:io=fp16"), "it takes --validate off"),
        (("--passes", "fp16:io=fp16:storage=true"), "storage=true converts weights only"),
        (("--passes", "quantize", "--max-drop", "inf"), "0 or more, as 0.01, or off"),
    ],
)
def test_quantization_options_need_a_quantizing_pass(refused, net, arguments, says):
    refused("optimize", net, *arguments, says=says)


def test_ends_in_16_bits_without_validation(run, net, tmp_path):
    half = tmp_path / "half.onnx"
    done = run("optimize", net, "--passes", "fp16:io=fp16", "--validate", "off", "-o", half)
    assert done.code == 0, done.err
    assert onnx.load(half).graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16


@pytest.mark.parametrize("option", ["-o", "--json"])
def test_the_plan_has_a_file_of_its_own(refused, net, tmp_path, option):
    same = tmp_path / "same"
    refused("optimize", net, *DYNAMIC, "--plan", same, option, same, says="name another file")


def test_the_plan_is_not_written_over_the_samples(refused, net, samples):
    refused("optimize", net, *DYNAMIC, "--calib", samples, "--plan", samples, says="a sample")


def test_help_is_still_instant(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("toolkit.calibrate")]:
        monkeypatch.delitem(sys.modules, name)
    assert run("optimize", "--help").code == 0
    assert not any(name.startswith("toolkit.calibrate") for name in sys.modules)
