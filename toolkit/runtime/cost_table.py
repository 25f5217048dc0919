"""What spellings of a computation cost, as measured: the table, and where a machine keeps its own.

A *computation* (`residual-layernorm`) can be written in several *spellings* (`add`, `sum`). The
first of them is the usual one, what a model has when nobody chooses. Costs are relative to it, for
one *regime*: so many tokens of such a width, on so many threads (`128x768@2`).

Tables ship with the passes that use them, a folder with one for each maker of processors; the one
of the nearest processor counts. `toolkit tune` measures this machine and writes a table to the
user's cache, which is preferred from then on, for the same runtime and processor.
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
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from toolkit.errors import ToolkitError
from toolkit.storage.atomic_write import cache_folder, require_writable, write_files

GAIN = 1.05
"""A spelling must be that much faster than the usual one: less is noise."""

LOSS = 1.05
"""It must not cost more than that in any regime that may be met, nor on a single thread."""


class CostsError(ToolkitError):
    """A table of costs that cannot be read."""


@dataclass(frozen=True, slots=True, order=True)
class Regime:
    """The shape and the number of threads that a cost was measured with."""

    tokens: int
    width: int
    threads: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}@{self.threads}"

    @classmethod
    def parse(cls, text: str) -> Regime:
        numbers = re.fullmatch(r"(\d+)x(\d+)@(\d+)", text)
        if numbers is None:
            raise ValueError(f"'{text}' is no regime such as 128x768@1")
        return cls(*map(int, numbers.groups()))


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a computation.

    `runs` are the operators that the runtime made of it at load time; `undone` says that it is not
    what was written. `microseconds` is what one application took, `cost` the same relative to the
    usual spelling.
    """

    name: str
    runs: tuple[str, ...]
    undone: bool
    cost: Mapping[Regime, float]
    microseconds: Mapping[Regime, float]


@dataclass(frozen=True, slots=True)
class Costs:
    """A table of costs, and what it was measured with."""

    runtime: str
    cpu: str
    script: str
    computations: Mapping[str, tuple[Spelling, ...]]

    def gain(
        self,
        computation: str,
        spelling: str,
        tokens: int | None = None,
        width: int | None = None,
        threads: int = 1,
    ) -> float | None:
        """How many times faster than the usual spelling, in the regimes nearest to this shape.

        A size that is None varies from run to run: it is the mean over all measured ones then.
        None when there is nothing to gain for sure: the spelling is not in the table, the runtime
        undoes it, it loses in one of these regimes or in those of one thread, or what it gains is
        no more than noise.
        """
        for found in self.computations.get(computation, ())[1:]:
            if found.name != spelling or found.undone:
                continue
            costs = _nearest(found.cost, tokens, width, threads)
            alone = _nearest(found.cost, tokens, width, 1)
            if costs and max((*costs, *alone)) <= LOSS:
                mean = math.exp(-sum(map(math.log, costs)) / len(costs))
                return mean if mean >= GAIN else None
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "cpu": self.cpu,
            "script": self.script,
            "computations": {
                name: {spelling.name: _spelling_to_json(spelling) for spelling in spellings}
                for name, spellings in self.computations.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any) -> Costs:
        """The table that `to_json` wrote; ValueError when it is none."""
        try:
            computations = {
                str(name): tuple(_spelling_from_json(s, d) for s, d in spellings.items())
                for name, spellings in data["computations"].items()
            }
            return cls(str(data["runtime"]), str(data["cpu"]), str(data["script"]), computations)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no table of costs: {type(error).__name__} {error}") from error

    @classmethod
    def load(cls, path: Path) -> Costs:
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise CostsError(f"cannot read '{path}': {error.strerror}") from error
        except ValueError as error:
            raise CostsError(
                f"'{path}' is no table of costs: measure again, toolkit tune"
            ) from error

    def save(self, path: Path) -> None:
        """Write the table, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        require_writable(path)
        write_files({path: [json.dumps(self.to_json(), indent=1).encode() + b"\n"]})


def _nearest(
    cost: Mapping[Regime, float], tokens: int | None, width: int | None, threads: int
) -> list[float]:
    """The costs of the regimes nearest to what is known: threads first, then width, then tokens."""
    left = dict(cost)
    wanted = (("threads", threads), ("width", width), ("tokens", tokens))
    for attribute, size in wanted:
        if size is not None and left:
            distance = {r: _distance(getattr(r, attribute), size) for r in left}
            least = min(distance.values())
            left = {r: left[r] for r in left if distance[r] == least}
    return list(left.values())


def _distance(one: int, other: int) -> float:
    return abs(math.log(max(one, 1) / max(other, 1)))


def _spelling_to_json(spelling: Spelling) -> dict[str, Any]:
    return {
        "runs": list(spelling.runs),
        "undone": spelling.undone,
        "cost": {str(regime): round(cost, 3) for regime, cost in spelling.cost.items()},
        "microseconds": {str(r): round(time, 1) for r, time in spelling.microseconds.items()},
    }


def _spelling_from_json(name: str, data: Any) -> Spelling:
    def numbers(key: str) -> dict[Regime, float]:
        found = {Regime.parse(regime): float(number) for regime, number in data[key].items()}
        if not all(math.isfinite(number) and number > 0 for number in found.values()):
            raise ValueError(f"{key} of '{name}' are no positive numbers")
        return found

    return Spelling(
        name=name,
        runs=tuple(map(str, data["runs"])),
        undone=bool(data["undone"]),
        cost=numbers("cost"),
        microseconds=numbers("microseconds"),
    )


# -- who measures

Progress = Callable[[int, int, str], None]
"""Told what is measured now: (done, total, what)."""


@runtime_checkable
class Tunable(Protocol):
    """A pass that chooses by measured costs. `toolkit tune` finds it by these members."""

    @property
    def name(self) -> str: ...

    @property
    def topic(self) -> str:
        """The name of its cost table."""
        ...

    def costs_in_use(self) -> tuple[Costs, str]:
        """The table that the pass would use now, and where it is from."""
        ...

    def measure(self, progress: Progress, seconds: float) -> Costs:
        """Measure this machine, in about so many seconds."""
        ...


# -- this machine


def runtime_version() -> str:
    """The version of onnxruntime, of whichever distribution it comes from."""
    for name in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The processor and the widest instructions that matter to kernels: `AMD EPYC, avx512-vnni`."""
    name, flags = platform.processor() or platform.machine() or "unknown", ""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return name
    fields = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    name = fields.get("model name", name)
    if maker_of(name) == "other" and "vendor_id" in fields:  # as virtual machines are named
        name += f" ({fields['vendor_id']})"
    flags = f" {fields.get('flags', '')} "
    for flag in ("avx512_vnni", "avx512f", "avx_vnni", "avx2", "avx"):
        if f" {flag} " in flags:
            return f"{name}, {flag.replace('_', '-')}"
    return name


def cores() -> int:
    """How many threads the runtime takes by default: the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def cache_path(topic: str = "costs") -> Path:
    """Where this machine's own table of a topic is, whether or not it was measured yet."""
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{runtime_version()}-{cpu_name()}".lower()).strip("-")
    return cache_folder() / "toolkit" / f"{topic}-{slug}.json"


def maker_of(cpu: str) -> str:
    """Who made a processor of this name: `amd`, `intel` or `other`."""
    found = re.search("amd(?!64)|intel", cpu.lower())
    return found.group() if found else "other"


def shipped_path(folder: Path, cpu: str) -> Path:
    """Where the table of a processor belongs among those that ship."""
    return folder / f"{maker_of(cpu)}.json"


def nearest_table(folder: Path, cpu: str) -> Costs:
    """The table of a processor of the same maker, else of the same instructions, else the first."""

    def likeness(table: Costs) -> tuple[bool, bool]:
        alike = _instructions(table.cpu) == _instructions(cpu)
        return maker_of(table.cpu) == maker_of(cpu), alike

    return max(map(Costs.load, sorted(folder.glob("*.json"))), key=likeness)


def _instructions(cpu: str) -> str:
    return cpu.rpartition(", ")[2]


def costs_in_use(shipped: Path, topic: str = "costs") -> tuple[Costs, str]:
    """This machine's own table where it was measured with this runtime, else one that ships.

    With where it is from, and what there is to say of it. `shipped` is the folder of those.
    """
    own = cache_path(topic)
    if own.is_file():
        try:
            return Costs.load(own), f"measured on this machine, '{own}'"
        except CostsError as error:
            return nearest_table(shipped, cpu_name()), f"the shipped table; {error}"
    table = nearest_table(shipped, cpu_name())
    origin = f"the shipped table, onnxruntime {table.runtime} on {table.cpu}"
    here = [f"onnxruntime {runtime_version()}"] if table.runtime != runtime_version() else []
    here += [cpu_name()] if maker_of(table.cpu) != maker_of(cpu_name()) else []
    if here:
        origin += f"; this is {' on '.join(here)}: toolkit tune measures it"
    return table, origin
