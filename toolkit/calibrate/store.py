"""What was collected, in a file: named by a digest of model and data, written whole or not at all.

The file is an .npz of plain arrays (nothing in it is code), with an index in JSON. A file that
cannot be read counts as absent: it is only a cache.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.calibrate.statistics import State, Statistic
from toolkit.files import require_writable, write_files
from toolkit.model import Model
from toolkit.weights import is_external, reference

_VERSION = 1
_INDEX = "index"


class Store:
    """Statistics by tensor and key, and the reasons why some tensors have none."""

    def __init__(self, folder: Path | None = None, digest: str = "") -> None:
        """A store in a file of `folder`, or one that keeps nothing."""
        self._path = folder / f"calibration-{digest}.npz" if folder is not None else None
        self._states: dict[str, State] = {}
        self._failures: dict[str, str] = {}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            require_writable(self._path)
            self._read(self._path)

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
        """Add what was collected, and write the file anew."""
        if self._path is None:
            return
        self._states |= {_name(found): found.state() for found in statistics}
        self._failures |= {_name(failed): why for failed, why in failures}
        fields = [[name, list(state)] for name, state in self._states.items()]
        index = {"version": _VERSION, "states": fields, "failures": self._failures}
        arrays = {
            f"{number}.{field}": array
            for number, state in enumerate(self._states.values())
            for field, array in state.items()
        }
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **{_INDEX: np.array(json.dumps(index)), **arrays})
        write_files({self._path: [file.getbuffer()]})

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            with np.load(path, allow_pickle=False) as loaded:
                index: Any = json.loads(str(loaded[_INDEX]))
                if index["version"] != _VERSION:
                    return
                self._states = {
                    str(name): {str(field): loaded[f"{number}.{field}"] for field in fields}
                    for number, (name, fields) in enumerate(index["states"])
                }
                self._failures = {str(name): str(why) for name, why in index["failures"].items()}
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            self._states, self._failures = {}, {}


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
