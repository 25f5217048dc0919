"""The README's examples, run as a reader would: every block, in order, in one folder.

A Python block that starts with `# name.py` is that file; the others are run one after another in
one session. Lines of `sh` blocks are commands. `py` and `console` need what is not there: not run.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import onnx
import pytest

from toolkit.cli import demo_model
from toolkit.cli.main import main
from toolkit.registry import catalogue

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(README.read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model in it, from which modules can be imported."""
    onnx.save(demo_model.build(), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_rules", "my_pass", "my_adapters"):
        sys.modules.pop(name, None)


def test_every_example_runs(folder, capsys):
    for package in ("onnx_graphsurgeon", "onnxscript"):
        pytest.importorskip(package)
    session: dict[str, object] = {"__name__": "readme"}
    seen = []
    for language, text in blocks():
        named = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and named:
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, f"README.md, block {len(seen)}", "exec", dont_inherit=True), session)
        elif language == "sh":
            for line in text.splitlines():
                command, *arguments = shlex.split(line)
                assert command == "toolkit"
                code = main(arguments)
                captured = capsys.readouterr()
                assert code == 0, (line, captured.err)
                assert "reverted" not in captured.out, (line, captured.out)
                assert "undone" not in captured.out, (line, captured.out)
        seen.append(language)
    assert {"python", "py", "sh", "json", "toml", "console"} == set(seen)
    done = {result.name for result in session["result"].passes if result.status == "applied"}
    assert "drop-dropout" in done


def test_the_rules_find_what_they_are_for(folder):
    import toolkit

    (text,) = (text for language, text in blocks() if text.startswith("# my_rules.py"))
    session: dict[str, object] = {"__name__": "my_rules"}
    exec(text, session)
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 20]>
        g (float[n, 4] x) => (float[n, 4] y)
        <float half = {0.5}, float one = {1}, float root = {1.41421356}>
        {
            a = Relu(x)
            b = Relu(a)
            c = Div(b, root)
            d = Erf(c)
            e = Add(one, d)
            f = Mul(half, b)
            y = Mul(f, e)
        }
        """
    )
    result = toolkit.optimize(model, [session["gelu"], session["relu_once"]])
    assert [node.op_type for node in result.model.graph.nodes] == ["Relu", "Gelu"]
    assert [done.status for done in result.passes] == ["applied", "applied"]


@pytest.mark.parametrize("group", ["simplify", "fuse"])
def test_the_table_of_passes_is_complete(group):
    section = README.read_text(encoding="utf-8").split(f"## What `{group}` does")[1]
    table = re.findall(r"^\| `([\w-]+)` \|", section.split("\n## ")[0], re.MULTILINE)
    rows = {row.name: row for row in catalogue()}
    members = [member.split(":")[0] for member in rows[group].members]
    at = members.index("tidy") if "tidy" in members else len(members)
    inside = [m.split(":")[0] for m in rows["tidy"].members] if group == "simplify" else []
    listed = dict.fromkeys([*members[:at], *inside, *members[at + 1 :]])
    # What fuse ends with is clean-up that simplify has named already.
    named = {"shapes", "cse", "dead"} if group == "fuse" else set()
    assert table == [name for name in listed if name not in named]


def test_the_json_example_has_the_fields_of_a_report(folder, capsys):
    (example,) = (json.loads(text) for language, text in blocks() if language == "json")
    assert main(["optimize", "model.onnx", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(example) == list(report)
    for key in ("input", "output"):
        assert list(example[key]) == list(report[key])
    assert list(example["passes"][0]) == list(report["passes"][0])


def test_the_entry_point_example():
    tomllib = pytest.importorskip("tomllib")
    (text,) = (text for language, text in blocks() if language == "toml")
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["project"]["entry-points"]
    assert list(tomllib.loads(text)["project"]["entry-points"]) == list(groups)


def test_links_and_targets_exist():
    readme = README.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("http") or (README.parent / link).exists(), link
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", readme):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert not re.search(r"/(work|home|root|tmp|Users)/", readme)
