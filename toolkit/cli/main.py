"""The entry point of `toolkit`, and its exit codes.

0 done, 1 not proven (nothing written), 2 bad usage or bad input, 70 a defect of the toolkit,
130 interrupted, 143 terminated, 141 the output pipe was closed. Errors are one line on standard
error; TOOLKIT_TRACEBACK=1 adds the traceback.

The commands are imported inside `main`, so that a Ctrl-C during imports is handled like any other.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO, cast

from toolkit.cli.interrupts import INTERRUPTED, Interrupted, Interrupts
from toolkit.errors import ToolkitError

_BAD, _DEFECT, _PIPE_CLOSED = 2, 70, 141

_LIBRARY_PHRASES = re.compile(r"Value error, |, unable to parse \w+ as an? \w+")
"""Phrases that typer's validation library adds to messages."""

_WRITERS = ("optimize", "export")
"""Commands to which users of other tools pass the output as a second argument."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; without arguments, show the help."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with Interrupts() as interrupts:
        try:
            _prepare_streams()
            code = _run(given)
        except BaseException as error:
            code = _explain(error, interrupts.code)
        else:
            if code == INTERRUPTED:  # typer's exit code for a KeyboardInterrupt
                _say("interrupted, nothing written")
                code = interrupts.code or code
        if not _flushed():
            _discard_output()
    return code


def _run(given: list[str]) -> int:
    import typer

    from toolkit.cli.app import app

    try:
        result = app(args=given, prog_name="toolkit", standalone_mode=False)
    except typer.TyperException as error:
        message = _LIBRARY_PHRASES.sub("", error.format_message())
        if message.startswith("Missing argument"):
            message = f"{message.rstrip('.')}: see toolkit {given[0]} --help"
        if "unexpected extra argument" in message and given[0] in _WRITERS:
            message += ": the output is -o FILE, and --passes a,b has no spaces"
        return _fail(error, message.replace("Input should", "it should"), _BAD)
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _explain(error: BaseException, interrupted: int) -> int:
    """Print one line about the error or interrupt, and return the exit code."""
    if isinstance(error, Interrupted):
        _say(f"interrupted, {error}")
        return interrupted or error.exit_code
    if interrupted or isinstance(error, KeyboardInterrupt):
        _say("interrupted, nothing written")
        return interrupted or INTERRUPTED
    if isinstance(error, ToolkitError):
        return _fail(error, str(error), error.exit_code)
    # typer and rich answer a closed pipe with exit code 1, which here means "not proven"
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        _discard_output()
        return _PIPE_CLOSED
    if isinstance(error, SystemExit):
        return _fail(
            error, f"a pass, a reader or a metric ended the program: exit {error.code}", _BAD
        )
    if isinstance(error, OSError):
        # a full disk, a folder without permission, a name too long: not a defect
        name = f"'{error.filename}'" if error.filename else "" if _flushed() else "standard output"
        return _fail(error, ": ".join(filter(None, [name, error.strerror or str(error)])), _BAD)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    message = f"internal error: {type(error).__name__}: {error} ({where}); please report it"
    return _fail(error, message, _DEFECT)


def _fail(error: BaseException, message: str, exit_code: int) -> int:
    if os.environ.get("TOOLKIT_TRACEBACK"):
        traceback.print_exception(error)
    _say(f"error: {' '.join(message.split())}")
    return exit_code


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        print(message, file=sys.stderr)


# Standard streams --------------------------------------------------------------------------------


def _prepare_streams() -> None:
    """Make printing safe for unencodable characters and for closed streams (`>&-`)."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            cast("Any", stream).reconfigure(errors="replace")


def _flushed() -> bool:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True


def _discard_output() -> None:
    """Redirect standard output to the null device, so that flushing at exit does not fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
