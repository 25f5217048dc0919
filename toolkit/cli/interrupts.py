"""Ctrl-C: noticed whatever a library makes of it."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from toolkit.errors import ToolkitError

INTERRUPTED = 130


class Interrupted(ToolkitError):
    """A Ctrl-C after something was written; the message says what."""

    exit_code = INTERRUPTED


class Interrupts:
    """Remembers a Ctrl-C: what is being imported then may turn it into an error of its own."""

    def __init__(self) -> None:
        self.seen = False
        self._watching = False

    def __enter__(self) -> Interrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        # somebody else's handler, or none at all in a background job, stays as it is
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._remember)
            self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._watching:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(number, frame)
