"""Ctrl-C and the request to terminate: noticed whatever a library makes of them.

Both end the program in the same orderly way, so that scratch files do not stay behind.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from toolkit.errors import ToolkitError

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

INTERRUPTED = 128 + signal.SIGINT


class Interrupted(ToolkitError):
    """A Ctrl-C after something was written; the message says what."""

    exit_code = INTERRUPTED


class Interrupts:
    """Remembers a signal: what is being imported then may turn it into an error of its own."""

    def __init__(self) -> None:
        self.code = 0
        """The exit code for the signal that came; 0 when none did."""
        self._watched: list[signal.Signals] = []

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULTS.items():
                # somebody else's handler, or none at all in a background job, stays as it is
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
