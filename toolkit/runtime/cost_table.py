"""Cost tables: the measured costs of equivalent forms of a computation.

A *computation* (`residual-layernorm`) can be written in several *forms* (`add`, `sum`), the first
of which is the default. Costs are relative to the default, for one *regime*: tokens, width and
threads (`128x768@2`).

Passes ship a folder of tables, one per processor vendor, of which the table of the most similar
processor is used. `toolkit tune` measures this machine and writes a table to the user's cache,
which takes precedence for the same runtime and processor.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Protocol, runtime_checkable

from toolkit.errors import ToolkitError
from toolkit.storage.atomic_write import cache_folder, require_writable, write_files
from toolkit.targets.releases import runtime_version

GAIN = 1.05
"""The smallest speed-up over the default form that counts: less is noise."""

LOSS = 1.05
"""The largest cost, relative to the default form, allowed in any relevant regime."""


class CostsError(ToolkitError):
    """A cost table cannot be read."""


@dataclass(frozen=True, slots=True, order=True)
class Regime:
    """The shape and the number of threads of a measurement."""

    tokens: int
    width: int
    threads: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}@{self.threads}"

    @classmethod
    def parse(cls, text: str) -> Regime:
        """Parse the text that `str` returns."""
        numbers = re.fullmatch(r"(\d+)x(\d+)@(\d+)", text)
        if numbers is None:
            raise ValueError(f"'{text}' is not a regime such as 128x768@1")
        return cls(*map(int, numbers.groups()))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate form of a computation, and its measured cost.

    `runs` are its operators after the runtime's load-time optimizations, and `undone` says that
    these revert the choice of form. `microseconds` is the time of one application, `cost` the same
    relative to the default form.
    """

    name: str
    runs: tuple[str, ...]
    undone: bool
    cost: Mapping[Regime, float]
    microseconds: Mapping[Regime, float]


@dataclass(frozen=True, slots=True)
class Costs:
    """A cost table, with the runtime, the processor and the script that measured it."""

    runtime: str
    cpu: str
    script: str
    computations: Mapping[str, tuple[Candidate, ...]]

    def gain(
        self,
        computation: str,
        candidate: str,
        tokens: int | None = None,
        width: int | None = None,
        threads: int = 1,
    ) -> float | None:
        """Return the speed-up over the default form in the regimes nearest to this shape, or None.

        A size of None is dynamic and stands for the mean over all measured sizes. The result is
        None if the form is not in the table, if the runtime undoes it, if it is slower in one of
        these regimes or on one thread, or if the speed-up is within the noise.
        """
        forms = {found.name: found for found in self.computations.get(computation, ())[1:]}
        form = forms.get(candidate)
        if form is None or form.undone:
            return None
        costs = _nearest(form.cost, tokens, width, threads)
        single = _nearest(form.cost, tokens, width, 1)
        if not costs or max((*costs, *single)) > LOSS:
            return None
        mean = 1 / geometric_mean(costs)
        return mean if mean >= GAIN else None

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain data for `json.dump`."""
        return {
            "runtime": self.runtime,
            "cpu": self.cpu,
            "script": self.script,
            "computations": {
                name: {form.name: _form_to_json(form) for form in forms}
                for name, forms in self.computations.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any) -> Costs:
        """Read a table from the data of `to_json`; raises ValueError for other data."""
        try:
            computations = {
                str(name): tuple(_form_from_json(form, entry) for form, entry in forms.items())
                for name, forms in data["computations"].items()
            }
            return cls(str(data["runtime"]), str(data["cpu"]), str(data["script"]), computations)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a cost table: {type(error).__name__} {error}") from error

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a table from a file; raises CostsError."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise CostsError(f"cannot read '{path}': {error.strerror}") from error
        except ValueError as error:
            problem = f"'{path}' is not a cost table: measure again, toolkit tune"
            raise CostsError(problem) from error

    def save(self, path: Path) -> None:
        """Write the table atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        require_writable(path)
        write_files({path: [json.dumps(self.to_json(), indent=1).encode() + b"\n"]})


def _nearest(
    cost: Mapping[Regime, float], tokens: int | None, width: int | None, threads: int
) -> list[float]:
    """Return the costs of the nearest regimes, by threads first, then width, then tokens."""
    left = dict(cost)
    for attribute, size in (("threads", threads), ("width", width), ("tokens", tokens)):
        if size is not None and left:
            distance = {r: _distance(getattr(r, attribute), size) for r in left}
            left = {r: left[r] for r in left if distance[r] == min(distance.values())}
    return list(left.values())


def _distance(one: int, other: int) -> float:
    return abs(math.log(max(one, 1) / max(other, 1)))


def _form_to_json(form: Candidate) -> dict[str, Any]:
    return {
        "runs": list(form.runs),
        "undone": form.undone,
        "cost": {str(regime): round(cost, 3) for regime, cost in form.cost.items()},
        "microseconds": {str(r): round(time, 1) for r, time in form.microseconds.items()},
    }


def _form_from_json(name: str, data: Any) -> Candidate:
    def numbers(key: str) -> dict[Regime, float]:
        found = {Regime.parse(regime): float(number) for regime, number in data[key].items()}
        if not all(math.isfinite(number) and number > 0 for number in found.values()):
            raise ValueError(f"{key} of '{name}' must be positive numbers")
        return found

    return Candidate(
        name=name,
        runs=tuple(map(str, data["runs"])),
        undone=bool(data["undone"]),
        cost=numbers("cost"),
        microseconds=numbers("microseconds"),
    )


# -- the interface of passes with a cost table

Progress = Callable[[int, int, str], None]
"""Called before each measurement with (done, total, description)."""


@runtime_checkable
class Tunable(Protocol):
    """A pass that chooses by measured costs, which `toolkit tune` measures."""

    @property
    def name(self) -> str: ...

    @property
    def topic(self) -> str:
        """The name of its cost table."""
        ...

    def costs_in_use(self) -> tuple[Costs, str]:
        """Return the table that the pass would use, and a description of its origin."""
        ...

    def measure(self, progress: Progress, seconds: float) -> Costs:
        """Measure this machine in about `seconds`."""
        ...


# -- this machine


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Return the processor and its widest vector instructions: `AMD EPYC, avx512-vnni`."""
    name = platform.processor() or platform.machine() or "unknown"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return name
    fields = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    name = fields.get("model name", name)
    if vendor_of(name) == "other" and "vendor_id" in fields:  # a virtual machine's name
        name += f" ({fields['vendor_id']})"
    flags = f" {fields.get('flags', '')} "
    for flag in ("avx512_vnni", "avx512f", "avx_vnni", "avx2", "avx"):
        if f" {flag} " in flags:
            return f"{name}, {flag.replace('_', '-')}"
    return name


def cores() -> int:
    """Return the runtime's default number of threads: the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def cache_path(topic: str = "costs") -> Path:
    """Return the path of this machine's own table of a topic, which may not exist yet."""
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{runtime_version()}-{cpu_name()}".lower()).strip("-")
    return cache_folder() / "toolkit" / f"{topic}-{slug}.json"


def vendor_of(cpu: str) -> str:
    """Return the vendor of a processor: `amd`, `intel` or `other`."""
    found = re.search("amd(?!64)|intel", cpu.lower())
    return found.group() if found else "other"


def shipped_path(folder: Path, cpu: str) -> Path:
    """Return the path of a processor's table in a folder of shipped tables."""
    return folder / f"{vendor_of(cpu)}.json"


def nearest_table(folder: Path, cpu: str) -> Costs:
    """Return the table of the same vendor, else of the same instructions, else the first."""

    def similarity(table: Costs) -> tuple[bool, bool]:
        instructions, wanted = (name.rpartition(", ")[2] for name in (table.cpu, cpu))
        return vendor_of(table.cpu) == vendor_of(cpu), instructions == wanted

    return max(map(Costs.load, sorted(folder.glob("*.json"))), key=similarity)


def costs_in_use(shipped: Path, topic: str = "costs") -> tuple[Costs, str]:
    """Return this machine's own table, or the nearest in the folder `shipped`, and its origin."""
    own = cache_path(topic)
    if own.is_file():
        try:
            return Costs.load(own), f"measured on this machine, '{own}'"
        except CostsError as error:
            return nearest_table(shipped, cpu_name()), f"the shipped table; {error}"
    table = nearest_table(shipped, cpu_name())
    origin = f"the shipped table, onnxruntime {table.runtime} on {table.cpu}"
    here = [f"onnxruntime {runtime_version()}"] if table.runtime != runtime_version() else []
    here += [cpu_name()] if vendor_of(table.cpu) != vendor_of(cpu_name()) else []
    if here:
        origin += f"; this is {' on '.join(here)}: toolkit tune measures it"
    return table, origin
