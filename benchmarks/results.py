"""The data of one run of the engine benchmark: models, and one row per model and peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from compare import Examination
from measure import Measurement


@dataclass(frozen=True, slots=True)
class Case:
    """An original model; `reason` is set if it could not be exported."""

    name: str
    bytes: int = 0
    nodes: int = 0
    exported: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one peer on one model: median times and the highest memory over all rounds."""

    model: str
    peer: str
    seconds: float
    cpu_seconds: float
    startup_seconds: float
    total_seconds: float
    startup_mb: float
    peak_mb: float
    late_imports: int
    nodes: int
    ops: dict[str, int]
    foreign: dict[str, int]
    agrees: bool
    error: float | None
    reason: str

    @property
    def written(self) -> bool:
        """Whether the tool finished and wrote a model that onnx can read."""
        return self.nodes > 0

    @property
    def sound(self) -> bool:
        """Whether the result has only standard operators, and the outputs of the original."""
        return self.written and self.agrees and not self.foreign


def row(model: str, peer: str, rounds: Sequence[Measurement], examined: Examination | None) -> Row:
    """Combine the rounds of one peer; a failed round becomes the reason of the row."""
    failed = next((r.error for r in rounds if r.error), "")
    ended = [r for r in rounds if not r.error] or list(rounds)
    found = examined or Examination(0, {}, {}, False, None, failed)
    return Row(
        model,
        peer,
        seconds=statistics.median(r.seconds for r in ended),
        cpu_seconds=statistics.median(r.cpu_seconds for r in ended),
        startup_seconds=statistics.median(r.startup_seconds for r in ended),
        total_seconds=statistics.median(r.total_seconds for r in ended),
        startup_mb=statistics.median(r.startup_mb for r in ended),
        peak_mb=max(r.peak_mb for r in ended),
        late_imports=max(r.late_imports for r in ended),
        nodes=found.nodes,
        ops=found.ops,
        foreign=found.foreign,
        agrees=found.agrees,
        error=found.error,
        reason=failed or found.reason,
    )


@dataclass(slots=True)
class Run:
    """All measurements so far, in order."""

    peers: list[str]
    cases: dict[str, Case] = field(default_factory=dict[str, Case])
    rows: dict[tuple[str, str], Row] = field(default_factory=dict[tuple[str, str], Row])

    def get(self, model: str, peer: str) -> Row | None:
        """Return the row if the peer wrote a model."""
        found = self.rows.get((model, peer))
        return found if found is not None and found.written else None

    def of(self, peer: str) -> Iterator[tuple[Case, Row]]:
        """Return the models for which this peer wrote a result, with its rows."""
        for case in self.cases.values():
            found = self.get(case.name, peer)
            if found is not None:
                yield case, found
