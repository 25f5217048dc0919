"""Objects of the user's own code, by address, and errors with the line that caused them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ModelError, UsageError
from toolkit.user_code import call, load_file, load_module, object_at, running_files


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def refused(address: str) -> str:
    with pytest.raises(UsageError) as caught:
        object_at(address)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_objects_of_files_and_of_modules(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.py", "class Rule:\n    class Inner: name = 'inner'\n")
    assert getattr(object_at(f"{file}:Rule.Inner"), "name", "") == "inner"
    assert object_at("pathlib:Path") is Path


def test_files_of_one_name_do_not_clash(tmp_path: Path) -> None:
    one, other = (write(tmp_path, f"{folder}/mine.py", f"name = '{folder}'") for folder in "ab")
    loaded = [load_file(file) for file in (one, other)]
    assert [vars(module)["name"] for module in loaded] == ["a", "b"]
    assert {Path(one), Path(other)} <= {path.resolve() for path in running_files()}


def test_a_file_imports_its_neighbours_and_leaves_the_path_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, "neighbour_of_mine.py", "number = 7")
    file = write(tmp_path, "mine.py", "from neighbour_of_mine import number")
    before = list(sys.path)
    assert object_at(f"{file}:number") == 7
    assert sys.path == before


def test_dataclasses_of_a_file_find_their_module(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "from typing import ClassVar\n\n@dataclass\nclass Options:\n    a: ClassVar[int] = 3\n"
    text += "    b: int = 4\n"
    made: Any = object_at(f"{write(tmp_path, 'mine.py', text)}:Options")
    assert made().b == 4


def test_output_of_a_file_goes_to_standard_error(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path, "mine.py", "print('loading')\ndef f():\n    print('running')\n")
    function: Any = object_at(f"{file}:f")
    call(function, "f")
    assert capsys.readouterr() == ("", "loading\nrunning\n")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a = 1\nb = 1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("a = 1\n\ndef f(:\n", 3, "SyntaxError: "),
        ("import json\n\njson.loads('{')\n", 3, "JSONDecodeError: "),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("def f():\n    raise KeyError\n\nf()\n", 2, "KeyError"),
        ("import no_such_package\n", 1, "ModuleNotFoundError: "),
    ],
)
def test_errors_have_the_line_of_the_file(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    file = write(tmp_path, "mine.py", text)
    before = set(sys.modules)
    assert refused(f"{file}:f").startswith(f"{file}:{line}: {message}")
    assert not any("_toolkit_user_mine" in name for name in set(sys.modules) - before)


def test_addresses_without_a_file(tmp_path: Path) -> None:
    assert refused(f"{tmp_path}/gone.py:f").endswith(
        "gone.py does not exist: name a Python file, as in ./file.py:name"
    )
    assert "is a directory: name a Python file" in refused(f"{tmp_path}/:f")
    text = write(tmp_path, "mine.txt", "f = 1")
    assert "is not a Python file: name one that ends in .py" in refused(f"{text}:f")


@pytest.mark.parametrize("address", ["", "json", "json:", ":f", "json:1f", "json:a-b", "json:a b"])
def test_addresses_that_are_not_valid(address: str) -> None:
    assert refused(address) == f"'{address}' is not valid: write module:name, or ./file.py:name"


def test_misspelled_objects_and_modules(tmp_path: Path, monkeypatch: Any) -> None:
    file = write(tmp_path, "mine.py", "def calibrate(): ...\n_calibrated = 1\n")
    assert refused(f"{file}:calibrat") == (
        f"{file} has no object 'calibrat': did you mean 'calibrate'?"
    )
    assert refused(f"{file}:calibrate.inner").startswith(f"{file} has no object 'calibrate.inner'")
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(
        r"cannot import no_such_module: ModuleNotFoundError: .*", refused("no_such_module:f")
    )
    write(tmp_path, "sub/rules_of_mine.py", "f = 1")
    assert refused("sub.rules_of_mine:f").endswith("; for the file write ./sub/rules_of_mine.py")


def test_calls_turn_exceptions_into_usage_errors() -> None:
    def fails() -> None:
        raise ValueError("two\nlines")

    def refuses() -> None:
        raise ModelError("as it is")

    with pytest.raises(UsageError, match=r"^'f' failed: ValueError: two lines$"):
        call(fails, "'f'")
    with pytest.raises(ModelError, match="as it is"):
        call(refuses, "'f'")
    assert load_module("json").__name__ == "json"
