"""Publish a run: progress messages, Markdown tables and JSON data."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from claims import Claim

RESULTS = Path(__file__).resolve().parent / "results"


def setting(how: str, packages: Iterable[str]) -> str:
    """Return a description of the machine, the method, and the versions of these packages."""
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    return f"{processor()}, Python {platform.python_version()}, {how}. {versions}."


def publish(
    folder: Path,
    name: str,
    text: str,
    measured_on: str,
    judged: Sequence[Claim],
    data: Mapping[str, Any],
) -> None:
    """Write `text` to `name.md`, and the data with the claims to `name.json`."""
    whole = {"setting": measured_on, "claims": [asdict(claim) for claim in judged], **data}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def processor() -> str:
    """Return the name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
