"""Run one peer on one model in a separate process, and sample its memory from outside.

Memory is RssAnon + RssShmem of /proc/<pid>/status: allocated memory, without mapped files. The
parent samples it, because a thread inside the tool's process would sleep while the tool holds the
interpreter lock. `peak_mb` is the highest sample minus the one after the imports.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SAMPLE_MILLISECONDS = 2
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of a run: `seconds` of the call, `total_seconds` of the whole process."""

    seconds: float
    cpu_seconds: float
    startup_seconds: float
    total_seconds: float
    startup_mb: float
    peak_mb: float
    late_imports: int
    error: str = ""


def measure(peer: str, source: Path, target: Path, cores: int, timeout: float) -> Measurement:
    """Run `peers.py` for this peer; a failed Measurement has its reason in `error`."""
    command = [sys.executable, str(HERE / "peers.py"), peer, str(source), str(target), str(cores)]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=child_environment(cores),
        )
        try:
            outcome = _watch(child, start, timeout)
        finally:
            child.kill()
            child.communicate()
        if isinstance(outcome, Measurement):
            return outcome
        if child.returncode and not outcome:
            log.seek(0)
            outcome = _last_line(log.read()) or f"exit code {child.returncode}"
    elapsed = time.perf_counter() - start
    return Measurement(0, 0, 0, elapsed, 0, 0, 0, outcome or "no answer")


def _watch(child: subprocess.Popen[bytes], start: float, timeout: float) -> Measurement | str:
    assert child.stdin is not None
    assert child.stdout is not None
    if child.stdout.readline() != b"ready\n":
        child.wait()
        return ""
    startup_seconds = time.perf_counter() - start
    baseline = peak = anonymous_bytes(child.pid)
    child.stdin.write(b"go\n")
    child.stdin.flush()
    answer = select.poll()
    answer.register(child.stdout, select.POLLIN | select.POLLHUP)
    while not answer.poll(SAMPLE_MILLISECONDS):
        peak = max(peak, anonymous_bytes(child.pid))
        if time.perf_counter() - start > timeout:
            return f"timeout: more than {timeout:.0f} s, {(peak - baseline) / MEGABYTE:.0f} MB"
    line = child.stdout.readline()
    total_seconds = time.perf_counter() - start
    if not line:
        child.wait()
        return ""
    result: dict[str, Any] = json.loads(line)
    return Measurement(
        startup_seconds=startup_seconds,
        total_seconds=total_seconds,
        startup_mb=baseline / MEGABYTE,
        peak_mb=(peak - baseline) / MEGABYTE,
        **result,
    )


def anonymous_bytes(pid: int) -> int:
    """Return the memory that a process has allocated; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields.get(key, "0 kB").split()[0]) for key in ("RssAnon", "RssShmem")) * 1024


def child_environment(cores: int) -> dict[str, str]:
    """Return environment variables: the project's packages on the path, one thread per core."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(cores),
    }


def _last_line(log: bytes) -> str:
    lines = log.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
