"""Errors that a user can act on.

The message is one line: what is wrong, where, and what to do. The command line prints it without a
traceback and exits with the class's `exit_code`: 1 for "not proven, nothing written", 2 for bad
usage or bad input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class ToolkitError(Exception):
    """Base class of all errors that a user can act on."""

    exit_code: ClassVar[int] = 2


class UsageError(ToolkitError):
    """A pass, an option or an argument is unknown or invalid."""


class ModelError(ToolkitError):
    """The model file, or the graph in it, is invalid or not supported."""


class SaveError(ToolkitError):
    """The output cannot be written to the requested path."""


class RuntimeRefused(ToolkitError):
    """onnxruntime cannot load or run the model: missing kernel, unknown domain, bad feed."""


class PreconditionFailed(ToolkitError):
    """A pass does not apply to this model; it is skipped."""


class PostconditionFailed(ToolkitError):
    """A pass did not do what it promises; it is undone."""


class NotProven(ToolkitError):
    """The result could not be shown to equal the original; nothing was written.

    `passes` are the outcomes of the passes that led to it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, passes: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.passes = tuple(passes)


def one_line(text: object, limit: int = 400) -> str:
    """Return the text, or an error's message, in one line of at most `limit` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def summarize(error: BaseException) -> str:
    """Return the type and message of an exception in one line."""
    message = one_line(error.msg if isinstance(error, SyntaxError) else error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
