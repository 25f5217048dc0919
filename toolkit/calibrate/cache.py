"""The calibration cache: statistics in a file named by a digest of the model and the data.

The file is an .npz of plain arrays (no pickles) with an index in JSON, and is written atomically.
An unreadable file counts as absent. A second file holds an unfinished sweep over the data, with the
number of feeds counted, and survives an interruption.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.calibrate.statistics import State, Statistic
from toolkit.errors import SaveError, UsageError
from toolkit.ir.model import Model
from toolkit.storage.atomic_write import require_writable, write_files
from toolkit.storage.weights import is_external, reference

_VERSION = 4
_INDEX = "index"


class Store:
    """The statistics of one model on one set of data, by tensor and key."""

    def __init__(self, folder: Path | None = None, digest: str = "") -> None:
        """Open the cache file in `folder`; without one, nothing is saved."""
        self._path = folder / f"calibration-{digest}.npz" if folder is not None else None
        self._part = folder / f"calibration-{digest}.part.npz" if folder is not None else None
        if folder is not None:
            require_cache(folder)
        self._states = _read(self._path)[0]

    def load(self, statistic: Statistic) -> bool:
        """Restore a statistic; return whether it was cached."""
        state = self._states.get(_name(statistic))
        if state is not None:
            statistic.restore(state)
        return state is not None

    def keep(self, statistics: Iterable[Statistic]) -> None:
        """Save the statistics of a finished sweep."""
        if self._path is None or self._part is None:
            return
        self._states |= {_name(found): found.state() for found in statistics}
        _write(self._path, self._states, 0)
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    # -- unfinished sweeps

    def pause(self, statistics: Iterable[Statistic], feeds: int) -> None:
        """Save an unfinished sweep that has counted this many feeds."""
        if self._part is not None:
            _write(self._part, {_name(found): found.state() for found in statistics}, feeds)

    def resume(self, statistics: Collection[Statistic]) -> int:
        """Restore an unfinished sweep over these statistics; return the number of feeds counted."""
        states, feeds = _read(self._part)
        if not feeds or states.keys() != {_name(found) for found in statistics}:
            return 0
        for found in statistics:
            found.restore(states[_name(found)])
        return feeds


def require_cache(folder: Path) -> None:
    """Create the folder; raises UsageError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_writable(folder / "calibration")
    except (OSError, SaveError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the calibration cache '{folder}' is not writable: {reason}") from error


def _write(path: Path, states: Mapping[str, State], feeds: int) -> None:
    fields = [[name, list(state)] for name, state in states.items()]
    index = {"version": _VERSION, "states": fields, "feeds": feeds}
    arrays = {
        f"{number}.{field}": array
        for number, state in enumerate(states.values())
        for field, array in state.items()
    }
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{_INDEX: np.array(json.dumps(index)), **arrays})
    with suppress(SaveError):  # a full disk must not fail the run
        write_files({path: [file.getbuffer()]})


def _read(path: Path | None) -> tuple[dict[str, State], int]:
    """Return the states in a file and the number of feeds counted, both empty if unreadable."""
    if path is None or not path.exists():
        return {}, 0
    try:
        with np.load(path, allow_pickle=False) as loaded:
            index: Any = json.loads(str(loaded[_INDEX]))
            if index["version"] != _VERSION:
                return {}, 0
            states = {
                str(name): {str(field): loaded[f"{number}.{field}"] for field in fields}
                for number, (name, fields) in enumerate(index["states"])
            }
            return states, int(index["feeds"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return {}, 0


def calibration_digest(model: Model, data: str) -> str:
    """Return a digest of the model and of the digest of the data."""
    digest = hashlib.blake2b(f"{_VERSION} {data}\n".encode(), digest_size=16)
    digest.update(model.to_proto().SerializeToString(deterministic=True))
    locations: set[str] = set()
    for tensor in filter(is_external, model.tensors()):
        if model.weights.overlaid(tensor) is not None:
            digest.update(model.weights.raw(tensor))
        else:
            locations.add(reference(tensor)[0])
    # External weights count by the size and time of their file: reading gigabytes takes too long.
    for location in sorted(locations):
        found = ((model.weights.folder or Path()) / location).stat()
        digest.update(f"{location} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _name(statistic: Statistic) -> str:
    return f"{statistic.key} {statistic.tensor}"
