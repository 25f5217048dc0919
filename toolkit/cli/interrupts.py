"""SIGINT and SIGTERM, recorded even if a library turns them into errors of its own.

Both end the program in the same orderly way, so that scratch files are removed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from toolkit.errors import ToolkitError

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

INTERRUPTED = 128 + signal.SIGINT


class Interrupted(ToolkitError):
    """A Ctrl-C after a file was written; the message names it."""

    exit_code = INTERRUPTED


class Interrupts:
    """A recorder of signals: a module being imported may replace the exception by its own."""

    def __init__(self) -> None:
        self.code = 0
        """The exit code of the signal that was received; 0 if none was."""
        self._watched: list[signal.Signals] = []

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULTS.items():
                # another handler, or none at all in a background job, stays as it is
                if signal.getsignal(number) is default:
                    signal.signal(number, self._remember)
                    self._watched.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._watched:
            signal.signal(number, _DEFAULTS[number])

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.code = 128 + number
        signal.default_int_handler(number, frame)
