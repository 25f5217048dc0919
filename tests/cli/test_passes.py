"""`toolkit passes`: table, one pass in detail, JSON."""

from __future__ import annotations

import json

import pytest

from toolkit.cli.main import main
from toolkit.pass_manager import registry
from toolkit.pass_manager.pass_options import OptionInfo
from toolkit.pass_manager.registry import PassInfo

LIMIT = OptionInfo("limit", "int", "1024", "Largest [bold]thing[/bold] to squash.")
NEEDED = OptionInfo("path", "str", None, "")
ROWS = [
    PassInfo("all", "group", "squash, gone", (), ("squash", "gone"), "acme"),
    PassInfo("squash", "pass", "Squash :smile: what can be squashed.", (LIMIT, NEEDED), (), "acme"),
    PassInfo("gone", "broken", "cannot import gone", (), (), "acme"),
]


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setattr(registry, "catalogue", lambda: ROWS)
    for variable in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_table(capsys):
    assert main(["passes"]) == 0
    out = capsys.readouterr().out
    assert "group: squash, gone" in out
    assert "limit=1024" in out
    assert ":smile:" in out
    assert "cannot import gone" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_the_width(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (["passes"], ["passes", "squash"]):
        assert main(arguments) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_one_pass(capsys):
    assert main(["passes", "squash"]) == 0
    out = capsys.readouterr().out
    assert "squash (pass, from acme)" in out
    assert "Largest [bold]thing[/bold] to squash." in out
    assert "(required)" in out
    assert "int, by default 1024" in out


def test_an_unknown_pass_suggests(capsys):
    assert main(["passes", "simplfy"]) == 2
    assert "did you mean 'simplify'?" in capsys.readouterr().err


def test_json(capsys):
    assert main(["passes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["all", "squash", "gone"]
    assert rows[1]["options"][0] == {
        "name": "limit",
        "type": "int",
        "default": "1024",
        "doc": "Largest [bold]thing[/bold] to squash.",
    }
    assert main(["passes", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == ["squash", "gone"]


def test_a_group_says_that_it_takes_options(capsys):
    assert main(["passes", "all"]) == 0
    assert "all:OPTION=VALUE" in " ".join(capsys.readouterr().out.split())
