"""Which front end takes a source: those of the entry point `toolkit.exporters`, then our own.

A source is a model object, a path, or text: a path, or `module:factory` (also `./file.py:factory`),
where the factory is called without arguments and returns the model, or the model and its example.
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
from toolkit.user_code import get_object, load_file, load_module

GROUP = "toolkit.exporters"
_BUILT_IN = (
    "toolkit.frontends.transformers:FRONT_END",
    "toolkit.frontends.pytorch:FRONT_END",
    "toolkit.frontends.tensorflow.frontend:FRONT_END",
    "toolkit.frontends.sklearn:FRONT_END",
    "toolkit.frontends.generic:FRONT_END",
)
"""In the order in which they are asked; the last takes whatever has an `export_onnx`."""

_SPECIAL = {
    "task": "--task names what a transformers checkpoint is for",
    "exporter": "--exporter chooses between the two of PyTorch",
    "weights": "--weights are for the model that a PyTorch factory builds",
    "translations": "--translate is for operators of PyTorch",
}
"""What a request may ask that not every front end can answer, with what it is for."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The front end that takes a source, and both as they go on from here."""

    front_end: FrontEnd
    source: Any
    request: Request


def choose(source: Any, request: Request) -> Chosen:
    """Find out what `source` is, and who exports it; raises UsageError when nobody does."""
    available, broken = _available()
    if request.framework is not None:
        available = [_named(request.framework, available, broken)]
    if isinstance(source, str):
        source = _resolve(source)
    taker = _taker(source, available)
    if taker is None and isinstance(source, tuple) and len(cast("tuple[Any, ...]", source)) == 2:
        # what a factory returns: a model and what to call it with
        model, example = cast("tuple[Any, Any]", source)
        taker = _taker(model, available)
        if taker is not None:
            source = model
            if request.example is None:
                request = replace(request, example=example)
    if taker is None:
        raise UsageError(_nobody(source, available, broken))
    _require_answers(taker, request)
    return Chosen(taker, source, request)


def _taker(source: Any, available: Sequence[FrontEnd]) -> FrontEnd | None:
    return next((each for each in available if each.takes(source)), None)


def _require_answers(front_end: FrontEnd, request: Request) -> None:
    """Raise when the request asks for what the front end would pass over in silence.

    `answers` lists what a front end knows of `_SPECIAL`; one of a third party without it is trusted
    to read all.
    """
    usual = Request()
    answers = getattr(front_end, "answers", _SPECIAL)
    for name, purpose in _SPECIAL.items():
        if name not in answers and getattr(request, name) != getattr(usual, name):
            raise UsageError(f"{purpose}: it says nothing to the front end {front_end.name}")


def _nobody(source: Any, available: Sequence[FrontEnd], broken: Sequence[str]) -> str:
    what = f"'{source}'" if isinstance(source, Path) else f"a {type(source).__name__}"
    names = ", ".join(each.name for each in available)
    hint = "; ".join(["", *broken]) if broken else ""
    return f"no front end takes {what}: asked were {names}{hint}"


# Sources -----------------------------------------------------------------------------------------


def _resolve(text: str) -> Any:
    """The path or the object that a text names."""
    path = Path(text).expanduser()
    if path.exists():
        return path
    if ":" not in text:
        raise UsageError(
            f"'{text}' does not exist: name a model's file or folder, or a factory as in "
            "./my_model.py:build"
        )
    return build(object_at(text), text)


def object_at(text: str) -> object:
    """What `module:name` or `./file.py:name` names."""
    address, _, name = text.rpartition(":")
    if not address or not name or not name.replace(".", "_").isidentifier():
        raise UsageError(f"'{text}' is not valid: write module:name, or ./file.py:name")
    is_file = address.endswith(".py") or "/" in address or "\\" in address
    module = load_file(address) if is_file else load_module(address)
    return get_object(module, name, address)


def build(found: object, address: str) -> Any:
    """What a factory returns; an object that is no function or class stands for itself."""
    import types

    if not isinstance(found, (types.FunctionType, type, types.BuiltinFunctionType)):
        return found
    try:
        with redirect_stdout(sys.stderr):  # standard output is for reports
            return cast("Any", found)()
    except ToolkitError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"factory {address} failed: {summarize(error)}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """` (my_model.py, line 7)`: where the user's code raised."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    if len(frames) < 2:
        return ""
    return f" ({Path(frames[1].filename).name}, line {frames[1].lineno})"


# Front ends --------------------------------------------------------------------------------------


def _available() -> tuple[list[FrontEnd], list[str]]:
    """All front ends, third parties' first, and why some could not be loaded."""
    found: list[FrontEnd] = []
    broken: list[str] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        loaded = _load(entry)
        if isinstance(loaded, str):
            broken.append(loaded)
        else:
            found.append(loaded)
    found += filter(None, map(_built_in, _BUILT_IN))
    return found, broken


def _built_in(address: str) -> FrontEnd | None:
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name == module:  # not part of this build
            return None
        raise


def _load(entry: EntryPoint) -> FrontEnd | str:
    """A third party's front end, or why there is none."""
    origin = entry.dist.name if entry.dist else entry.module
    try:
        with redirect_stdout(sys.stderr):
            loaded = entry.load()
            made = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:
        return f"exporter '{entry.name}' of {origin} could not be loaded: {summarize(error)}"
    missing = [part for part in ("name", "takes", "plan") if not hasattr(made, part)]
    if missing:
        return f"exporter '{entry.name}' of {origin} is none: it has no {', '.join(missing)}"
    return cast("FrontEnd", made)


def _named(name: str, available: Sequence[FrontEnd], broken: Sequence[str]) -> FrontEnd:
    for each in available:
        if each.name == name:
            return each
    known = [each.name for each in available]
    hint = "; ".join(["", *broken]) if broken else ""
    guess = suggestion(name, known) or ":"
    raise UsageError(f"unknown framework '{name}'{guess} known: {', '.join(known)}{hint}")
