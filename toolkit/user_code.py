"""Load objects by address: `./my_pass.py:MyRule` or `package.module:MyRule`.

Both run the user's own code, which may raise anything: each failure becomes a one-line error with
the line of the user's file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.errors import ToolkitError, UsageError, summarize
from toolkit.messages import suggestion


def load_file(path_text: str) -> ModuleType:
    """Run a Python file as a separate module.

    It can import files from its own folder. The module's name is derived from the whole path, so
    that two files of the same name do not clash.
    """
    path = Path(path_text).expanduser()
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UsageError(f"{path_text} {what}: name a Python file, as in ./file.py:name")
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    module_name = f"_toolkit_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path_text} is not a Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while the file runs
    sys.modules[module_name] = module
    sys.path.append(str(path.parent))
    try:
        with redirect_stdout(sys.stderr):  # standard output is for reports
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        where = f"{path_text}:{_line_in(str(path), error)}"
        raise UsageError(f"{where}: {summarize(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def load_module(name: str) -> ModuleType:
    """Import an installed module."""
    try:
        with redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        hint = ""
        if (
            isinstance(error, ModuleNotFoundError)
            and Path(*name.split(".")).with_suffix(".py").is_file()
        ):
            hint = f"; for the file write ./{Path(*name.split('.'))}.py"
        raise UsageError(f"cannot import {name}: {summarize(error)}{hint}") from error


def running_files() -> list[Path]:
    """Return the files of all loaded modules, including the user's own."""
    # by their dictionaries: an attribute of a lazy module may trigger an import
    dictionaries: list[Mapping[str, object]] = [
        getattr(module, "__dict__", {}) for module in list(sys.modules.values())
    ]
    files = (found.get("__file__") for found in dictionaries)
    return [Path(file) for file in files if isinstance(file, str)]


def object_at(address: str) -> object:
    """Import and return the object named by `module:name` or `./file.py:name`."""
    home, _, name = address.rpartition(":")
    if not home or not name or not name.replace(".", "_").isidentifier():
        raise UsageError(f"'{address}' is not valid: write module:name, or ./file.py:name")
    is_file = home.endswith(".py") or "/" in home or "\\" in home
    return get_object(load_file(home) if is_file else load_module(home), name, home)


def call(function: Callable[[], Any], what: str) -> Any:
    """Call a user's function; any exception becomes a UsageError of one line."""
    try:
        with redirect_stdout(sys.stderr):  # standard output is for reports
            return function()
    except ToolkitError:
        raise
    except Exception as error:
        raise UsageError(f"{what} failed: {summarize(error)}") from error


def get_object(module: ModuleType, dotted: str, address: str) -> object:
    """Return `module.dotted`; raises UsageError with a suggestion if there is no such object."""
    found: object = module
    for part in dotted.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(module) if not name.startswith("_")]
            raise UsageError(f"{address} has no object {dotted!r}{suggestion(dotted, public)}")
        found = getattr(found, part)
    return found


def _line_in(filename: str, error: BaseException) -> int:
    """Return the line of `filename` that led to the error, even if it was raised elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == filename:
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 1 for f in reversed(frames) if f.filename == filename), 1)
