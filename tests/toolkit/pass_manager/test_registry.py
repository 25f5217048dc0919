"""Names to passes: plugins through entry points, the grammar, users' files, and what goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from toolkit.errors import UsageError
from toolkit.pass_manager import registry
from toolkit.pass_manager.registry import PassInfo, catalogue

ACME = '''
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TYPE_CHECKING

if TYPE_CHECKING:
    from nowhere import Tolerance


@dataclass(frozen=True, slots=True)
class Squash:
    """Squash what can be squashed.

    In more words.
    """

    name: ClassVar[str] = "squash"
    tolerance: ClassVar[Tolerance] = "exact"
    limit: int = field(default=1 << 10, metadata={"help": "Largest thing to squash."})
    factor: float = 0.5
    hard: bool = False
    mode: Literal["dynamic", "static"] = "dynamic"
    keep: tuple[str, ...] = ()
    box: tuple[int, int] = (1, 2)
    seed: int | None = None

    def run(self, model, ctx): ...


@dataclass(frozen=True, slots=True)
class Polish:
    name: ClassVar[str] = "polish"
    tolerance: ClassVar[str] = "float"
    limit: int = 7

    def run(self, model, ctx): ...


@dataclass(frozen=True, slots=True)
class Needy:
    """Needs a path."""

    name: ClassVar[str] = "needy"
    tolerance: ClassVar[str] = "float"
    path: str

    def run(self, model, ctx): ...
'''
ACME_CATALOGUE = """
CATALOGUE = {
    "squash": "acme_impl:Squash",
    "polish": "acme_impl:Polish",
    "needy": "acme_impl:Needy",
    "both": ["squash", "polish"],
    "tuned": ["squash:limit=5:hard=yes", "polish"],
    "nested": ("both", "squash"),
    "loop": ["polish", "loop"],
}
"""


def parse_passes(text: str) -> list[Any]:
    return list(registry.parse_passes(text))


class Site:
    """A fake site-packages folder: third-party distributions with their own entry points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(dedent(source))

    def distribution(self, name: str, entry: str) -> None:
        info = self.folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[toolkit.passes]\n{entry}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    site = Site(folder)
    site.module("acme_impl", ACME)
    site.module("acme_passes", ACME_CATALOGUE)
    site.distribution("acme-passes", "acme = acme_passes:CATALOGUE")
    yield site
    for name in set(sys.modules) - before:
        if name.startswith(("acme", "rival", "_toolkit_user")):
            del sys.modules[name]


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """Writes ./mine.py into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return path

    return write


def find(name: str, origin: str = "acme-passes") -> PassInfo:
    return next(row for row in catalogue() if row.name == name and origin in row.origin)


def error(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_passes(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestGrammar:
    def test_names_in_order(self, site):
        assert [p.name for p in parse_passes("polish, squash,polish")] == [
            "polish",
            "squash",
            "polish",
        ]

    def test_a_plugin_is_not_imported_before_it_is_asked_for(self, site):
        with pytest.raises(UsageError):
            parse_passes("nothing")
        assert "acme_impl" not in sys.modules

    @pytest.mark.parametrize(
        ("option", "field", "value"),
        [
            ("limit=1_000", "limit", 1000),
            ("factor=1e-3", "factor", 1e-3),
            ("hard=on", "hard", True),
            ("hard=No", "hard", False),
            ("mode=static", "mode", "static"),
            ("keep=a+b", "keep", ("a", "b")),
            ("keep=", "keep", ()),
            ("box=3+4", "box", (3, 4)),
            ("seed=4", "seed", 4),
            ("seed=none", "seed", None),
        ],
    )
    def test_options_are_read_by_their_annotation(self, site, option, field, value):
        (squash,) = parse_passes(f"squash:{option}")
        assert getattr(squash, field) == value

    def test_several_options(self, site):
        (squash,) = parse_passes("squash:limit=1:mode=static")
        assert (squash.limit, squash.mode) == (1, "static")

    @pytest.mark.parametrize(
        ("option", "reason"),
        [
            ("limit=abc", "expected int"),
            ("hard=maybe", "expected true or false"),
            ("mode=slow", "choose one of dynamic, static"),
            ("box=1+2+3", "expected 2 values"),
            ("seed=x", "expected int"),
        ],
    )
    def test_bad_values(self, site, option, reason):
        message = error(f"squash:{option}")
        assert message.startswith("squash: ")
        assert reason in message

    def test_unknown_option_suggests(self, site):
        message = error("squash:limti=3")
        assert "did you mean 'limit'?" in message
        assert "its options: box, factor, hard, keep, limit, mode, seed" in message

    def test_unknown_pass_suggests(self, site):
        message = error("sqash")
        assert "unknown pass 'sqash': did you mean 'squash'?" in message
        assert "toolkit passes" in message

    def test_unknown_pass_that_is_like_none(self, site):
        assert "polish" in error("zzz")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "name a pass"),
            ("squash,,polish", "empty item"),
            ("squash:limit", "write squash:limit=value"),
            ("squash:limit=1:hard", "'hard' is not an option"),
            ("squash,limit=1", "write an option behind its pass, as pass:limit=1"),
            ("squash:limit=1:limit=2", "given twice"),
        ],
    )
    def test_bad_grammar(self, site, text, reason):
        assert reason in error(text)

    def test_a_required_option_that_is_missing(self, site):
        assert "path" in error("needy")
        assert parse_passes("needy:path=x")[0].path == "x"


class TestGroups:
    def test_members_in_order(self, site):
        assert [p.name for p in parse_passes("both")] == ["squash", "polish"]

    def test_nested(self, site):
        assert [p.name for p in parse_passes("nested")] == ["squash", "polish", "squash"]

    def test_an_option_goes_to_the_members_that_have_it(self, site):
        squash, polish = parse_passes("both:limit=3:hard=true")
        assert (squash.limit, squash.hard, polish.limit) == (3, True, 3)

    def test_an_option_that_no_member_has(self, site):
        assert "both has no option 'nope'" in error("both:nope=1")

    def test_the_group_sets_options_and_the_user_overrides_them(self, site):
        assert [p.limit for p in parse_passes("tuned")] == [5, 7]
        squash, polish = parse_passes("tuned:limit=9")
        assert (squash.limit, squash.hard, polish.limit) == (9, True, 9)

    def test_a_group_that_contains_itself(self, site):
        assert "loop > loop contains itself" in error("loop")


class TestPlugins:
    def test_builtin_passes_come_through_the_same_door(self):
        from passes import CATALOGUE

        names = {row.name for row in catalogue() if row.origin == "onnx-toolkit-passes"}
        assert names == set(CATALOGUE)

    def test_a_broken_plugin_leaves_the_others_alone(self, site):
        site.module("rival", "raise RuntimeError('out of order')")
        site.distribution("rival-passes", "rival = rival:CATALOGUE")
        assert parse_passes("squash")[0].name == "squash"
        assert "rival-passes: RuntimeError: out of order" in error("rivalry")
        row = find("rival", "rival-passes")
        assert row.kind == "broken"
        assert "out of order" in row.summary

    @pytest.mark.parametrize("catalogue_text", ["['squash']", "{'squash': 3}", "{'a': 'no_colon'}"])
    def test_a_plugin_that_is_no_catalogue(self, site, catalogue_text):
        site.module("rival", f"CATALOGUE = {catalogue_text}")
        site.distribution("rival-passes", "rival = rival:CATALOGUE")
        assert "is not a mapping" in find("rival", "rival-passes").summary

    def test_two_plugins_with_the_same_name(self, site):
        site.module("rival", "CATALOGUE = {'squash': 'acme_impl:Polish'}")
        site.distribution("rival-passes", "rival = rival:CATALOGUE")
        message = error("squash")
        assert "acme-passes (acme_impl:Squash)" in message
        assert "rival-passes (acme_impl:Polish)" in message
        assert find("squash", "acme-passes and rival-passes").kind == "broken"
        assert parse_passes("acme_impl:Squash")[0].name == "squash"

    def test_a_rival_name_does_not_reach_into_a_group(self, site):
        site.module("rival", "CATALOGUE = {'squash': 'acme_impl:Polish'}")
        site.distribution("rival-passes", "rival = rival:CATALOGUE")
        assert [p.name for p in parse_passes("both")] == ["squash", "polish"]

    def test_a_pass_whose_module_fails(self, site):
        site.module("rival", "CATALOGUE = {'gone': 'rival_nowhere:Gone'}")
        site.distribution("rival-passes", "rival = rival:CATALOGUE")
        assert "cannot import rival_nowhere" in error("gone")
        assert find("gone", "rival-passes").kind == "broken"
        assert find("squash").kind == "pass"


class TestUserFile:
    PASS = """
    class Mine:
        name = "mine"
        tolerance = "exact"
        def run(self, model, ctx): ...
    """

    def test_a_class(self, user_file):
        user_file(self.PASS)
        assert parse_passes("./mine.py:Mine")[0].name == "mine"

    def test_between_other_passes(self, site, user_file):
        user_file(self.PASS)
        names = [p.name for p in parse_passes("squash:limit=1,mine.py:Mine,polish")]
        assert names == ["squash", "mine", "polish"]

    def test_a_dataclass_with_options(self, user_file):
        user_file(ACME)
        assert parse_passes("./mine.py:Squash:limit=3:keep=a")[0].limit == 3

    def test_an_instance_and_its_options(self, user_file):
        user_file(ACME + "\nloose = Squash(limit=2, hard=True)\n")
        assert parse_passes("./mine.py:loose")[0].limit == 2
        changed = parse_passes("./mine.py:loose:limit=4")[0]
        assert (changed.limit, changed.hard) == (4, True)

    def test_a_list(self, user_file):
        user_file(ACME + "\nALL = [Squash, Polish(limit=1)]\n")
        assert [p.name for p in parse_passes("./mine.py:ALL:limit=8")] == ["squash", "polish"]
        assert [p.limit for p in parse_passes("./mine.py:ALL:limit=8")] == [8, 8]

    def test_a_nested_object(self, user_file):
        user_file(
            "class Outer:\n    class Mine:\n        name = tolerance = 'm'\n"
            "        def run(self, model, ctx): ...\n"
        )
        assert parse_passes("./mine.py:Outer.Mine")[0].name == "m"

    def test_the_file_runs_once_for_two_objects(self, user_file):
        path = user_file("""
            from pathlib import Path
            with open(Path(__file__).with_name("runs"), "a") as runs:
                runs.write("x")
            class A:
                name, tolerance = "a", "exact"
                def run(self, model, ctx): ...
            class B(A):
                name = "b"
        """)
        assert [p.name for p in parse_passes("./mine.py:A,./mine.py:B")] == ["a", "b"]
        assert path.with_name("runs").read_text() == "x"

    def test_equal_file_names_do_not_clash(self, user_file):
        for folder in ("one", "two"):
            user_file(self.PASS.replace('"mine"', f'"{folder}"'), f"{folder}/mine.py")
        names = [p.name for p in parse_passes("one/mine.py:Mine,two/mine.py:Mine")]
        assert names == ["one", "two"]

    def test_a_file_beside_it_can_be_imported(self, user_file):
        user_file("NAME = 'from beside'", "acme_beside.py")
        user_file("from acme_beside import NAME\n" + dedent(self.PASS).replace('"mine"', "NAME"))
        before = list(sys.path)
        assert parse_passes("./mine.py:Mine")[0].name == "from beside"
        assert sys.path == before

    def test_no_such_file(self, user_file):
        assert "./none.py does not exist" in error("./none.py:Mine")

    def test_no_object_named(self, user_file):
        user_file(self.PASS)
        assert "write ./mine.py:MyRule" in error("./mine.py")
        assert "does not name an object" in error("./mine.py:")

    def test_a_missing_object_suggests(self, user_file):
        user_file(self.PASS)
        assert "./mine.py has no object 'Mien': did you mean 'Mine'?" in error("./mine.py:Mien")

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("x = 1\ny = x.nope\n", "./mine.py:2: AttributeError"),
            ("x = 1\n\ndef broken(:\n", "./mine.py:3: SyntaxError"),
            ("import acme_not_there\n", "./mine.py:1: ModuleNotFoundError"),
            ("def f():\n    raise ValueError('two\\nlines')\n\nf()\n", "./mine.py:2: ValueError"),
            ("import json\njson.loads('{')\n", "./mine.py:2: JSONDecodeError"),
            ("import sys\nsys.exit(3)\n", "./mine.py:2: SystemExit"),
        ],
    )
    def test_a_file_that_fails(self, user_file, source, reason):
        user_file(source)
        assert error("./mine.py:Mine").startswith(reason)

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("class Mine: ...", "no method `run`"),
            ("Mine = 3", "no method `run`"),
            ("def Mine(model): ...", "is a plain function"),
            ("class Mine:\n    tolerance = 1\n    def run(self, m, c): ...", "no `name`"),
            ("class Mine:\n    name = 'm'\n    def run(self, m, c): ...", "no `tolerance`"),
        ],
    )
    def test_objects_that_are_no_passes(self, user_file, source, reason):
        user_file(source)
        message = error("./mine.py:Mine")
        assert reason in message
        assert "run(model, ctx)" in message

    def test_options_for_something_that_has_none(self, user_file):
        user_file(self.PASS)
        assert "has no option 'x': it has none" in error("./mine.py:Mine:x=1")

    def test_a_constructor_that_refuses(self, user_file):
        user_file("""
            class Fussy:
                name = tolerance = "fussy"
                def __init__(self):
                    raise ValueError("limit is odd")
                def run(self, model, ctx): ...
        """)
        assert error("./mine.py:Fussy") == "./mine.py:Fussy: ValueError: limit is odd"

    def test_a_module_that_is_a_file_here(self, user_file):
        user_file(self.PASS, "acme_local.py")
        assert "write ./acme_local.py" in error("acme_local:Mine")


class TestCatalogue:
    def test_a_pass(self, site):
        row = find("squash")
        assert (row.kind, row.summary) == ("pass", "Squash what can be squashed.")
        limit = row.options[0]
        assert (limit.name, limit.type, limit.default) == ("limit", "int", "1024")
        assert limit.doc == "Largest thing to squash."
        types = {option.name: (option.type, option.default) for option in row.options}
        assert types["mode"] == ("dynamic|static", "dynamic")
        assert types["keep"] == ("str+...", "")
        assert types["box"] == ("int+int", "1+2")
        assert types["seed"] == ("int|none", "none")
        assert types["hard"] == ("bool", "false")

    def test_a_required_option_has_no_default(self, site):
        assert find("needy").options[0].default is None

    def test_the_signature_of_a_dataclass_is_no_summary(self, site):
        assert find("polish").summary == ""

    def test_a_group(self, site):
        row = find("both")
        assert (row.kind, row.members) == ("group", ("squash", "polish"))

    def test_a_group_that_cannot_be_used(self, site):
        assert find("loop").kind == "broken"
