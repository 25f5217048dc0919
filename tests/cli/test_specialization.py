"""`--fix` and `--freeze`: the way from the command line into the file, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from tests import ort
from toolkit.cli import specialization
from toolkit.errors import UsageError

RECURRENT = """
<ir_version: 8, opset_import: ["" : 17]>
tiny (float[batch, length] x, int64 sr, float[2] scale) => (float[batch, length] y)
<int64 wide = {16000}, int64[1] at = {1}>
{
    is_wide = Equal (sr, wide)
    k = Slice (scale, zero, at)
    z = If (is_wide) <
        then_branch = t () => (float[batch, length] a) { a = Mul (x, k) },
        else_branch = e () => (float[batch, length] b) { b = Sub (x, k) }>
    y = Relu (z)
}
""".replace("int64[1] at = {1}", "int64[1] at = {1}, int64[1] zero = {0}")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(RECURRENT), path)
    return path


def shapes(proto):
    return {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in proto.graph.input
    }


def test_the_written_model_has_neither_the_choice_nor_its_control_flow(run, model, tmp_path):
    out = tmp_path / "out.onnx"
    done = run(
        *("optimize", model, "-o", out, "--fix", "batch=1,length=4"),
        *("--freeze", "sr=16000,scale=[3,4]", "--json", "-"),
    )
    assert done.code == 0, done.err
    written = onnx.load(out)
    assert shapes(written) == {"x": [1, 4]}
    assert {n.op_type for n in written.graph.node} == {"Mul", "Relu"}
    feed = {"x": np.ones((1, 4), np.float32)}
    np.testing.assert_array_equal(ort.run(written, feed)[0], [[3, 3, 3, 3]])
    proof = json.loads(done.out)["proof"]
    assert "specialized to batch=1, length=4, sr=16000, scale=[3.0, 4.0]" in proof


def test_options_repeat_and_arrays_come_from_files(run, model, tmp_path):
    np.save(tmp_path / "scale.npy", np.array([3, 4], np.float32))
    out = tmp_path / "out.onnx"
    done = run(
        *("optimize", model, "-o", out, "--fix", "x:0=2", "--fix", "length=3"),
        *("--freeze", f"scale=@{tmp_path / 'scale.npy'}", "--time"),
    )
    assert done.code == 0, done.err
    assert shapes(onnx.load(out)) == {"x": [2, 3], "sr": []}
    assert "speed" in done.out
    assert "not timed" not in done.out


def test_samples_with_the_frozen_input_are_timed(run, model, tmp_path):
    sample = tmp_path / "sample.npz"
    x = np.ones((2, 3), np.float32)
    np.savez(sample, x=x, scale=np.ones(2, np.float32), sr=np.array(8000))
    done = run(
        *("optimize", model, "-o", tmp_path / "out.onnx", "--freeze", "sr=8000"),
        *("--sample", sample, "--time"),
    )
    assert done.code == 0, done.err
    assert "not timed" not in done.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--fix", "batch"), ("--fix 'batch' is not valid", "--fix batch=1")),
        (("--fix", "batch=1,length"), "--fix 'length' is not valid"),
        (("--fix", "=1"), "is not valid"),
        (("--fix", "batch=1", "--fix", "batch=2"), "'batch' is given twice, 1 and 2"),
        (("--fix", "batch=1,x:0=2"), "'batch' is given two sizes, 1 and 2"),
        (("--fix", "batch=0"), "a size is an integer, 1 or more"),
        (("--fix", "batch=big"), "a size is an integer, 1 or more"),
        (("--fix", "width=1"), ("no dimension 'width'", "x float32[batch, length], sr int64[]")),
        (("--fix", "scale:0=3"), "this dimension is 2 in the model"),
        (("--fix", "scale:0=2", "--freeze", "scale=[1,2]"), "'scale' is frozen"),
        (("--freeze", "sr"), "--freeze 'sr' is not valid"),
        (("--freeze", "rate=1"), ("no input 'rate'", "x float32[batch, length]")),
        (("--freeze", "sr=1.5"), "float64; the model takes int64[]"),
        (("--freeze", "sr=fast"), "'fast'; the model takes int64[]"),
        (("--freeze", "scale=[1,2,3]"), "has shape [3]; the model takes float32[2]"),
        (("--freeze", "scale=@missing.npy"), ("'missing.npy'", "No such file")),
        (("--freeze", "scale=@model.onnx"), "is not an .npy file"),
    ],
)
def test_a_wrong_choice_is_one_line(refused, model, tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    refused("optimize", model, "-o", tmp_path / "out.onnx", *options, says=says)


def test_an_archive_of_arrays_is_no_value(refused, model, tmp_path):
    np.savez(tmp_path / "all.npz", scale=np.ones(2))
    value = f"scale=@{tmp_path / 'all.npz'}"
    refused("optimize", model, "--freeze", value, says="holds several arrays")


def test_a_frozen_array_is_not_overwritten(refused, model, tmp_path):
    np.save(tmp_path / "scale.npy", np.ones(2, np.float32))
    value = f"scale=@{tmp_path / 'scale.npy'}"
    out = tmp_path / "scale.npy"
    refused("optimize", model, "--freeze", value, "--html", out, says="is a sample")


def test_a_sample_with_another_value_is_refused(refused, model, tmp_path):
    x = np.ones((2, 3), np.float32)
    np.savez(tmp_path / "s.npz", x=x, scale=np.ones(2, np.float32), sr=np.array(1))
    refused(
        *("optimize", model, "--freeze", "sr=2", "--sample", tmp_path / "s.npz"),
        says="'sr' differs from its frozen value",
    )


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a=1,b=2", {"a": "1", "b": "2"}),
        ("a=1,2,b=[3,4],c=5", {"a": "1,2", "b": "[3,4]", "c": "5"}),
        ("a = 1, b = 2", {"a": "1", "b": "2"}),
        ("a:0=1", {"a:0": "1"}),
        ("lang=a=b", {"lang": "a=b"}),
    ],
)
def test_items_are_separated_by_commas_before_a_name(text, items):
    assert specialization.values([text]) == items


def test_an_item_that_is_repeated_alike_is_accepted():
    assert specialization.sizes(["a=1", "a=1"]) == {"a": "1"}
    with pytest.raises(UsageError, match="given twice"):
        specialization.values(["a=1,a=2"])
