"""The examples of the README and of docs/, run as a reader would: every block, in order.

Each page has a folder of its own with a model in it. A Python block that starts with `# name.py` is
that file; the others are run one after another in one session. Lines of `sh` blocks are commands.
`py` and `console` need what is not there: not run.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from toolkit.cli import demo_model
from toolkit.cli.main import main
from toolkit.pass_manager.registry import catalogue

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model in it, from which modules can be imported."""
    onnx.save(demo_model.build(), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_rules", "my_pass", "my_adapters", "my_data"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_runs(page, folder, capsys):
    if page.stem == "extending":
        for package in ("onnx_graphsurgeon", "onnxscript"):
            pytest.importorskip(package)
    session = run_page(page, folder, capsys)
    if page == README:
        done = {result.name for result in session["result"].passes if result.status == "applied"}
        assert "drop-dropout" in done


def test_all_kinds_of_blocks_are_known():
    found = {language for page in PAGES for language, _ in blocks(page)}
    assert found == {"python", "py", "sh", "json", "toml", "console", "text"}


def run_page(page: Path, folder: Path, capsys) -> dict[str, Any]:
    """Run the blocks of a page; what its Python session then holds."""
    session: dict[str, Any] = {"__name__": "readme"}
    for number, (language, text) in enumerate(blocks(page)):
        named = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and named:
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, f"{page.name}, block {number}", "exec", dont_inherit=True), session)
        elif language == "sh":
            for line in text.replace("\\\n", "").splitlines():
                command, *arguments = shlex.split(line)
                assert command == "toolkit"
                code = main(arguments)
                captured = capsys.readouterr()
                assert code == 0, (line, captured.err)
                assert "reverted" not in captured.out, (line, captured.out)
                assert "undone" not in captured.out, (line, captured.out)
    return session


def test_the_rules_find_what_they_are_for(folder):
    import toolkit

    (text,) = (text for _, text in blocks(README) if text.startswith("# my_rules.py"))
    session: dict[str, Any] = {"__name__": "my_rules"}
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
    section = (DOCS / "passes.md").read_text(encoding="utf-8").split(f"## What `{group}` does")[1]
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
    page = DOCS / "command-line.md"
    (example,) = (json.loads(text) for language, text in blocks(page) if language == "json")
    assert main(["optimize", "model.onnx", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(example) == list(report)
    for key in ("input", "output"):
        assert list(example[key]) == list(report[key])
    assert list(example["passes"][0]) == list(report["passes"][0])


def test_the_entry_point_example():
    tomllib = pytest.importorskip("tomllib")
    (text,) = (text for language, text in blocks(DOCS / "extending.md") if language == "toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["project"]["entry-points"]
    assert list(tomllib.loads(text)["project"]["entry-points"]) == list(groups)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        assert link.startswith("http") or there.exists(), link
        if anchor and not link.startswith("http"):
            assert anchor in anchors(there), link
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert not re.search(r"/(work|home|root|tmp|Users)/", text)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links to them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_listed():
    readme = README.read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f"](docs/{page.name})" in readme, page.name


def test_every_command_is_listed():
    from toolkit.cli.app import app

    section = README.read_text(encoding="utf-8").split("\n## Commands")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)", section, re.MULTILINE)
    assert listed == [command.callback.__name__ for command in app.registered_commands]
