"""Select the front end for a source: third-party ones (entry point `toolkit.exporters`) first.

A source is a model object, a path, or text: a path, or `module:factory` (also `./file.py:factory`).
The factory takes no arguments and returns the model, or the model and an example of its inputs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from toolkit.errors import ToolkitError, UsageError, summarize
from toolkit.frontends.protocol import FrontEnd
from toolkit.frontends.request import Request
from toolkit.messages import suggestion
from toolkit.user_code import object_at

ENTRY_POINT = "toolkit.exporters"
BUILT_IN = (
    "toolkit.frontends.transformers.frontend:FRONT_END",
    "toolkit.frontends.pytorch:FRONT_END",
    "toolkit.frontends.tensorflow.frontend:FRONT_END",
    "toolkit.frontends.sklearn:FRONT_END",
    "toolkit.frontends.generic:FRONT_END",
)
"""Built-in front ends in order of precedence; the last takes any object with `export_onnx`."""

_SPECIAL = {
    "task": "--task selects the task of a transformers checkpoint",
    "exporter": "--exporter selects one of PyTorch's two exporters",
    "weights": "--weights loads a file into the model that a PyTorch factory builds",
    "translations": "--translate is for operators of PyTorch",
}
"""Request fields that only some front ends support, with their purpose."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A front end, the resolved source, and the request completed with the factory's example."""

    front_end: FrontEnd
    source: Any
    request: Request


def select_front_end(source: Any, request: Request) -> Selection:
    """Resolve `source` and select its front end; raise UsageError if none accepts it."""
    available, broken = _available()
    if request.framework is not None:
        available = [_named(request.framework, available, broken)]
    if isinstance(source, str):
        source = _resolve(source)
    chosen = _first_that_takes(source, available)
    if chosen is None and isinstance(source, tuple) and len(cast("tuple[Any, ...]", source)) == 2:
        # a factory may return (model, example)
        model, example = cast("tuple[Any, Any]", source)
        chosen = _first_that_takes(model, available)
        if chosen is not None:
            source = model
            if request.example is None:
                request = replace(request, example=example)
    if chosen is None:
        raise UsageError(_not_taken(source, available, broken))
    _require_supported(chosen, request)
    return Selection(chosen, source, request)


def _first_that_takes(source: Any, available: Sequence[FrontEnd]) -> FrontEnd | None:
    return next((each for each in available if each.takes(source)), None)


def _require_supported(front_end: FrontEnd, request: Request) -> None:
    """Raise if the request sets a field that the front end would silently ignore.

    `supports` lists the `_SPECIAL` fields a front end reads; without it, all are assumed.
    """
    defaults = Request()
    supports = getattr(front_end, "supports", _SPECIAL)
    for name, purpose in _SPECIAL.items():
        if name not in supports and getattr(request, name) != getattr(defaults, name):
            raise UsageError(f"{purpose}: the front end {front_end.name} does not support it")


def _not_taken(source: Any, available: Sequence[FrontEnd], broken: Sequence[str]) -> str:
    what = f"'{source}'" if isinstance(source, Path) else f"a value of type {type(source).__name__}"
    names = ", ".join(each.name for each in available)
    hint = "; ".join(["", *broken]) if broken else ""
    return f"no front end accepts {what}; available: {names}{hint}"


# Sources -----------------------------------------------------------------------------------------


def _resolve(text: str) -> Any:
    """Return the existing path that the text names, or build the object it names."""
    path = Path(text).expanduser()
    if path.exists():
        return path
    if ":" not in text:
        raise UsageError(
            f"'{text}' does not exist: name a model's file or folder, or a factory as in "
            "./my_model.py:build"
        )
    return build(object_at(text), text)


def build(found: object, address: str) -> Any:
    """Call a factory (function or class); return any other object as it is."""
    import types

    if not isinstance(found, (types.FunctionType, type, types.BuiltinFunctionType)):
        return found
    try:
        with redirect_stdout(sys.stderr):  # standard output is for reports
            return cast("Any", found)()
    except ToolkitError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"factory {address} failed: {summarize(error)}{_line(error)}") from error


def _line(error: BaseException) -> str:
    """Return the line of the user's code that raised, as ` (my_model.py, line 7)`."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    if len(frames) < 2:
        return ""
    return f" ({Path(frames[1].filename).name}, line {frames[1].lineno})"


# Front ends --------------------------------------------------------------------------------------


def _available() -> tuple[list[FrontEnd], list[str]]:
    """Return all front ends, third-party ones first, and why some could not be loaded."""
    found: list[FrontEnd] = []
    broken: list[str] = []
    for entry in sorted(entry_points(group=ENTRY_POINT), key=lambda each: each.name):
        loaded = _load(entry)
        if isinstance(loaded, str):
            broken.append(loaded)
        else:
            found.append(loaded)
    found += filter(None, map(_built_in, BUILT_IN))
    return found, broken


def _built_in(address: str) -> FrontEnd | None:
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name == module:  # excluded from this build
            return None
        raise


def _load(entry: EntryPoint) -> FrontEnd | str:
    """Return a third-party front end, or why it cannot be used."""
    origin = entry.dist.name if entry.dist else entry.module
    try:
        with redirect_stdout(sys.stderr):
            loaded = entry.load()
            made = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:
        return f"exporter '{entry.name}' of {origin} could not be loaded: {summarize(error)}"
    missing = [part for part in ("name", "takes", "plan") if not hasattr(made, part)]
    if missing:
        return f"exporter '{entry.name}' of {origin} is not valid: no {', '.join(missing)}"
    return cast("FrontEnd", made)


def _named(name: str, available: Sequence[FrontEnd], broken: Sequence[str]) -> FrontEnd:
    for each in available:
        if each.name == name:
            return each
    known = [each.name for each in available]
    hint = "; ".join(["", *broken]) if broken else ""
    guess = suggestion(name, known) or ":"
    raise UsageError(f"unknown framework '{name}'{guess} known: {', '.join(known)}{hint}")
