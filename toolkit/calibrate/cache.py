"""What was collected, in a file: named by a digest of model and data, written whole or not at all.

The file is an .npz of plain arrays (nothing in it is code), with an index in JSON. A file that
cannot be read counts as absent: it is only a cache.

A second file holds a sweep over the data that is under way, with the number of feeds that it has
counted, so that an interruption does not lose it.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.calibrate.statistics import State, Statistic
from toolkit.errors import SaveError, UsageError
from toolkit.ir.model import Model
from toolkit.storage.atomic_write import require_writable, write_files
from toolkit.storage.weights import is_external, reference

_VERSION = 2
_INDEX = "index"


class Store:
    """Statistics by tensor and key, and the reasons why some tensors have none."""

    def __init__(self, folder: Path | None = None, digest: str = "") -> None:
        """A store in a file of `folder`, or one that keeps nothing."""
        self._path = folder / f"calibration-{digest}.npz" if folder is not None else None
        self._part = folder / f"calibration-{digest}.part.npz" if folder is not None else None
        self._states: dict[str, State] = {}
        self._failures: dict[str, str] = {}
        if folder is not None and self._path is not None:
            require_cache(folder)
            self._states, self._failures, _ = _read(self._path)

    def load(self, statistic: Statistic) -> bool:
        """Fill an empty statistic with what is kept; False when there is nothing for it."""
        state = self._states.get(_name(statistic))
        if state is None:
            return False
        statistic.restore(state)
        return True

    def failure(self, statistic: Statistic) -> str:
        """Why the tensor has no such statistic; empty when it is not known to fail."""
        return self._failures.get(_name(statistic), "")

    def keep(
        self, statistics: Iterable[Statistic], failures: Iterable[tuple[Statistic, str]]
    ) -> None:
        """Add what was collected, and write the file anew; the sweep is over."""
        if self._path is None or self._part is None:
            return
        self._states |= {_name(found): found.state() for found in statistics}
        self._failures |= {_name(failed): why for failed, why in failures}
        _write(self._path, self._states, self._failures, 0)
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    # -- a sweep that is under way

    def pause(
        self, statistics: Mapping[str, Statistic], failed: Mapping[str, str], feeds: int
    ) -> None:
        """Write down what a sweep has counted of so many feeds."""
        if self._part is None:
            return
        states = {_name(found): found.state() for found in statistics.values()}
        failures = {_name(statistics[name]): why for name, why in failed.items()}
        _write(self._part, states, failures, feeds)

    def resume(self, statistics: Mapping[str, Statistic]) -> tuple[int, dict[str, str]]:
        """Fill statistics with what their sweep had counted: of how many feeds, and what failed."""
        states, failures, feeds = _read(self._part) if self._part is not None else ({}, {}, 0)
        if not feeds or states.keys() != {_name(found) for found in statistics.values()}:
            return 0, {}
        for found in statistics.values():
            found.restore(states[_name(found)])
        failed = {name: failures.get(_name(found), "") for name, found in statistics.items()}
        return feeds, {name: why for name, why in failed.items() if why}


def require_cache(folder: Path) -> None:
    """Make the folder; UsageError where nothing can be kept in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_writable(folder / "calibration")
    except OSError as error:
        raise UsageError(f"nothing can be kept in '{folder}': {error.strerror}") from error
    except SaveError as error:
        raise UsageError(f"nothing can be kept in '{folder}': {error}") from error


def _write(
    path: Path, states: Mapping[str, State], failures: Mapping[str, str], feeds: int
) -> None:
    fields = [[name, list(state)] for name, state in states.items()]
    index = {"version": _VERSION, "states": fields, "failures": failures, "feeds": feeds}
    arrays = {
        f"{number}.{field}": array
        for number, state in enumerate(states.values())
        for field, array in state.items()
    }
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{_INDEX: np.array(json.dumps(index)), **arrays})
    with suppress(SaveError):  # a full disk costs the next run its time, not this one its result
        write_files({path: [file.getbuffer()]})


def _read(path: Path) -> tuple[dict[str, State], dict[str, str], int]:
    if not path.exists():
        return {}, {}, 0
    try:
        with np.load(path, allow_pickle=False) as loaded:
            index: Any = json.loads(str(loaded[_INDEX]))
            if index["version"] != _VERSION:
                return {}, {}, 0
            states = {
                str(name): {str(field): loaded[f"{number}.{field}"] for field in fields}
                for number, (name, fields) in enumerate(index["states"])
            }
            failures = {str(name): str(why) for name, why in index["failures"].items()}
            return states, failures, int(index["feeds"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return {}, {}, 0


def calibration_digest(model: Model, data: str) -> str:
    """A name for this model on these data."""
    digest = hashlib.blake2b(f"{_VERSION} {data}\n".encode(), digest_size=16)
    digest.update(model.to_proto().SerializeToString(deterministic=True))
    locations: set[str] = set()
    for tensor in filter(is_external, model.tensors()):
        if model.weights.overlaid(tensor) is not None:
            digest.update(model.weights.raw(tensor))
        else:
            locations.add(reference(tensor)[0])
    # Of weights in files, size and time of the file must do: reading gigabytes is not instant.
    for location in sorted(locations):
        found = ((model.weights.folder or Path()) / location).stat()
        digest.update(f"{location} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _name(statistic: Statistic) -> str:
    return f"{statistic.key} {statistic.tensor}"
