"""`toolkit optimize`: what it writes, what it says, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.cli.models import listing, parse, with_external
from toolkit.cli import demo_model

WRONG_RULE = """
import numpy as np
from toolkit import op, rewrite, var

x = var("x")


@rewrite(op.Identity(x))
def off_by_some(g, x):
    return g.op("Mul", x, g.constant(np.array(1.5, np.float32)))
"""


LOUD_PASS = """
from toolkit import EXACT

print("imported")


class Loud:
    name = "loud"
    tolerance = EXACT

    def run(self, model, ctx):
        print("ran")
"""


@pytest.fixture
def noisy(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(demo_model.build(), path)
    return path


@pytest.fixture
def wrong_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "rules.py"
    path.write_text(WRONG_RULE)
    return f"{path}:off_by_some"


def outputs(path, batch) -> Any:
    session = onnxruntime.InferenceSession(str(path))
    image = np.random.default_rng(batch).standard_normal((batch, 3, 32, 32)).astype(np.float32)
    return session.run(None, {"image": image})


def test_the_default_output(run, noisy, tmp_path):
    done = run("optimize", noisy)
    assert done.code == 0, done.err
    written = tmp_path / "model.opt.onnx"
    assert str(written) in done.out
    onnx.checker.check_model(onnx.load(written), full_check=True)
    for batch in (1, 3):
        for ours, theirs in zip(outputs(written, batch), outputs(noisy, batch), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_report_reads_well_at_80_columns(run, noisy):
    done = run("optimize", noisy)
    lines = [line for line in done.out.splitlines() if not line.startswith("written")]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.out
    assert done.err == ""
    for word in ("pass", "status", "rewrites", "error", "time"):
        assert word in lines[0]
    for label in ("nodes", "size", "proof"):
        assert any(line.startswith(label) for line in lines)


def test_passes_that_had_nothing_to_do_are_only_named(run, noisy):
    done = run("optimize", noisy)
    table, _, rest = done.out.partition("\nunchanged ")
    rows = {line.split(" ")[0] for line in table.splitlines()}
    idle = {name.strip() for name in rest.split("\nnodes")[0].split(",")}
    assert idle >= {"inline", "shapes"}
    # a pass that ran twice and did something once is no idle one
    assert rows >= {"fold", "reshape", "dead"}
    assert not rows & idle
    assert "skipped" not in done.out


def test_nothing_to_do_at_all(run, noisy, tmp_path):
    assert run("optimize", noisy, "-o", tmp_path / "small.onnx", "-q").code == 0
    done = run("optimize", tmp_path / "small.onnx")
    assert done.out.startswith("unchanged  inline")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_pass_or_status_is_cut(run, noisy, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    done = run("optimize", noisy, "--passes", "fuse")
    assert "fuse-activations   applied" in done.out
    assert "…" not in done.out


def test_the_opset_is_told_where_it_changes(run, noisy):
    assert "opset      17 -> 23" in run("optimize", noisy, "--passes", "opset").out
    assert "\nopset" not in run("optimize", noisy).out


def test_the_input_is_untouched_and_nothing_else_appears(run, noisy, tmp_path):
    before = listing(tmp_path)
    run("optimize", noisy)
    after = listing(tmp_path)
    assert after.pop("model.opt.onnx")
    assert after == before


def test_an_existing_output_is_replaced_as_a_whole(run, noisy, tmp_path):
    output = tmp_path / "out.onnx"
    output.write_bytes(b"something else " * 100_000)
    assert run("optimize", noisy, "-o", output).code == 0
    onnx.checker.check_model(onnx.load(output))


def test_relative_names(run, noisy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("optimize", "model.onnx").code == 0
    assert run("optimize", "model.onnx", "-o", "other.onnx").code == 0
    assert (tmp_path / "model.opt.onnx").read_bytes() == (tmp_path / "other.onnx").read_bytes()


def test_a_file_without_a_suffix(run, noisy, tmp_path):
    noisy.rename(tmp_path / "model")
    assert run("optimize", tmp_path / "model").code == 0
    assert (tmp_path / "model.opt.onnx").is_file()


def test_only_the_suffix_goes(run, noisy, tmp_path):
    noisy.rename(tmp_path / "net.v1")
    assert run("optimize", tmp_path / "net.v1").code == 0
    assert (tmp_path / "net.v1.opt.onnx").is_file()


def test_json(run, noisy, tmp_path):
    report = tmp_path / "report.json"
    assert run("optimize", noisy, "--json", report).code == 0
    data = json.loads(report.read_text())
    assert list(data) == ["input", "output", "passes", "proof", "loads_on", "seconds"]
    assert list(data["loads_on"]) == ["onnxruntime", "opset", "ir_version"]
    for side in ("input", "output"):
        assert list(data[side]) == ["path", "bytes", "nodes", "ops"]
    assert data["input"]["path"] == str(noisy)
    assert data["input"]["bytes"] == noisy.stat().st_size
    written = tmp_path / "model.opt.onnx"
    assert data["output"]["path"] == str(written)
    assert data["output"]["bytes"] == written.stat().st_size
    assert data["output"]["nodes"] < data["input"]["nodes"]
    for item in data["passes"]:
        wanted = {"name", "status", "rewrites", "seconds", "error", "reason"}
        assert wanted <= set(item)
        assert item["status"] in ("applied", "unchanged", "reverted", "skipped")


def test_json_on_standard_output_is_alone_there(run, noisy):
    done = run("optimize", noisy, "--json", "-")
    assert json.loads(done.out)["passes"]
    assert done.err == ""


def test_quiet(run, noisy):
    done = run("optimize", noisy, "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_external_data(run, noisy, tmp_path):
    output = tmp_path / "out.onnx"
    assert run("optimize", noisy, "-o", output, "--external-data").code == 0
    assert (tmp_path / "out.onnx.data").stat().st_size > output.stat().st_size / 4
    np.testing.assert_allclose(outputs(output, 2)[0], outputs(noisy, 2)[0], rtol=1e-4, atol=1e-5)


def test_from_external_data(run, tmp_path):
    (tmp_path / "weights.bin").write_bytes(np.eye(4, dtype=np.float32).tobytes())
    onnx.save(with_external("weights.bin"), tmp_path / "model.onnx")
    assert run("optimize", tmp_path / "model.onnx").code == 0
    (tmp_path / "weights.bin").unlink()
    onnxruntime.InferenceSession(str(tmp_path / "model.opt.onnx"))


@pytest.mark.parametrize("validate", ["each", "final", "off"])
def test_validate(run, noisy, validate):
    done = run("optimize", noisy, "--validate", validate, "--json", "-")
    data = json.loads(done.out)
    assert (data["proof"] == "not validated") is (validate == "off")
    measured = [p["error"] is not None for p in data["passes"] if p["status"] == "applied"]
    assert any(measured) is (validate == "each")


def test_samples(run, tiny, sample):
    assert run("optimize", tiny, "--sample", sample, "--sample", sample).code == 0


def test_samples_need_validation(run, tiny, sample):
    done = run("optimize", tiny, "--sample", sample, "--validate", "off")
    assert (done.code, done.out) == (2, "")


def test_seed_decides(run, noisy):
    same = [run("optimize", noisy, "--json", "-", "--seed", 3).out for _ in range(2)]
    errors = [[p["error"] for p in json.loads(text)["passes"]] for text in same]
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        (["--passes", "opset"], 23),
        (["--passes", "opset", "--opset", "20"], 20),
        (["--passes", "opset", "--opset", "keep"], 17),
        (["--passes", "opset:to=22", "--opset", "20"], 22),
        (["--passes", "simplify", "--opset", "20"], 17),
    ],
)
def test_opset(run, noisy, tmp_path, options, reached):
    assert run("optimize", noisy, *options).code == 0
    assert onnx.load(tmp_path / "model.opt.onnx").opset_import[0].version == reached


def test_an_opset_that_cannot_be_met(run, tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1,1,4,4] x, float[1,2,2,2] g) => (float[1,1,2,2] y) {
            r = Relu (x) y = GridSample (r, g) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "warp.onnx")
    done = run("optimize", tmp_path / "warp.onnx", "--opset", 13)
    assert done.code == 2
    assert done.err.startswith("error: opset 13 cannot be met: ")
    assert "GridSample 'y' needs opset 16" in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "warp.opt.onnx").exists()
    assert run("optimize", tmp_path / "warp.onnx", "--opset", 16).code == 0
    assert onnx.load(tmp_path / "warp.opt.onnx").opset_import[0].version == 16


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("27", "loads opsets 1 to 26"),
        ("0", "out of range"),
        ("-3", "out of range"),
        ("newest", "a number, or keep"),
        ("", "a number, or keep"),
        ("1.5", "a number, or keep"),
    ],
)
def test_opsets_that_are_none(refused, noisy, given, says):
    refused("optimize", noisy, f"--opset={given}", says=("opset", says))


# Wrong rewrites ----------------------------------------------------------------------------------


def test_a_wrong_rewrite_is_undone_and_named(run, tiny, wrong_rule):
    done = run("optimize", tiny, "--passes", wrong_rule)
    assert done.code == 0
    assert "undone: off-by-some at 'same'" in done.out


def test_a_wrong_rewrite_in_json(run, tiny, wrong_rule):
    done = run("optimize", tiny, "--passes", wrong_rule, "--json", "-")
    (item,) = json.loads(done.out)["passes"]
    (undone,) = item["undone"]
    assert (undone["rule"], undone["site"]) == ("off-by-some", "same")
    assert undone["error"] > 0.1
    assert item["rewrites"] == 0


def test_not_proven_writes_nothing(run, tiny, wrong_rule, tmp_path):
    before = listing(tmp_path)
    done = run("optimize", tiny, "--passes", wrong_rule, "--validate", "final")
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "'y'" in done.err
    assert "--validate each" in done.err
    assert "off-by-some" in done.out
    assert listing(tmp_path) == before


def test_not_proven_in_json(run, tiny, wrong_rule, tmp_path):
    report = tmp_path / "report.json"
    done = run("optimize", tiny, "--passes", wrong_rule, "--validate", "final", "--json", report)
    assert done.code == 1
    data = json.loads(report.read_text())
    assert data["output"] is None
    assert data["input"]["nodes"] == 3
    assert [p["name"] for p in data["passes"]] == ["off-by-some"]
    assert "not proven" in data["proof"]
    assert not (tmp_path / "tiny.opt.onnx").exists()


def test_what_a_user_file_prints_is_not_in_the_report(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "loud.py").write_text(LOUD_PASS)
    passes = f"{tmp_path}/loud.py:Loud"
    done = run("optimize", tiny, "--passes", passes, "--json", "-")
    assert json.loads(done.out)["passes"][0]["name"] == "loud"
    assert done.err == "imported\nran\n"
    assert run("optimize", tiny, "--passes", passes, "-q").out == ""


def test_a_model_that_does_not_run_is_checked_by_structure(run, tmp_path):
    text = """
        <ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[n] x) => (float[n] y) { a = Identity(x)  b = acme.Strange(a)  y = Identity(b) }
    """
    path = tmp_path / "model.onnx"
    onnx.save(parse(text), path)
    done = run("optimize", path, "--json", "-")
    data = json.loads(done.out)
    assert data["output"]["ops"] == {"acme::Strange": 1}
    assert "structure" in data["proof"]
    assert "acme" in data["proof"] or "Strange" in data["proof"]


def test_a_terminal_gets_colours_and_progress(noisy, tmp_path):
    """Through a pseudo-terminal, as in a user's shell."""
    pty = pytest.importorskip("pty")
    import os

    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "toolkit.cli.main", "optimize", str(noisy)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(main, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(main)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "\x1b[32mapplied" in text
    assert "proving" in text or "running" in text
