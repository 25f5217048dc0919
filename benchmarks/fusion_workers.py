"""Worker processes that answer requests: tools start once, and may crash.

A child prints `ready` after its imports and then answers each line of JSON with one. The parent
restarts it when it dies or times out.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from measure import child_environment

HERE = Path(__file__).resolve().parent


@dataclass(slots=True)
class Worker:
    """A child process that runs `script` with `arguments` on one core."""

    script: str
    arguments: tuple[str, ...] = ()
    core: int = 0
    timeout: float = 120
    _child: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, or `{"error": reason}`."""
        try:
            child = self._started()
            assert child.stdin is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            return json.loads(self._read(child, self.timeout))
        except _Gone as gone:
            self.close()
            return {"error": str(gone)}

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, str(HERE / self.script), str(self.core), *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=child_environment(1),
            )
            self._read(self._child, self.timeout)  # it says that it is ready
        return self._child

    def _read(self, child: subprocess.Popen[bytes], timeout: float) -> bytes:
        assert child.stdout is not None
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN | select.POLLHUP)
        if not poll.poll(timeout * 1000):
            raise _Gone(f"timeout: more than {timeout:.0f} s")
        line = child.stdout.readline()
        if not line:
            child.wait()
            raise _Gone(f"crashed, exit code {child.returncode}: {self._last_words()}")
        return line

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


class _Gone(Exception):
    """Raised when the child must be restarted; the message is the reason."""


def serve(core: int, handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until there are no more; runs in the child."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[core % len(allowed)]})
    # Tools print to stdout: keep it for the answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print("ready", file=answers)
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line))
        # Whatever a tool raises is its result for this model.
        except Exception as problem:
            lines = str(problem).strip().splitlines()
            answer = {"error": f"{type(problem).__name__}: {lines[0] if lines else ''}"}
        print(json.dumps(answer), file=answers)


CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    # of this thread: the same on a machine that is idle, and the better one on one that is not
    "cpu": time.thread_time,
}


def timed(call: Callable[[], Any], clock: str) -> tuple[Any, float]:
    """Return the result of the call, and its seconds by this clock."""
    now = CLOCKS[clock]
    start = now()
    value = call()
    return value, now() - start
