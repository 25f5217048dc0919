"""The result of an optimization: the model, the outcome of each pass, and statistics."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.storage import serialize
from toolkit.verification.compare import json_number

if TYPE_CHECKING:
    from toolkit.accuracy.quality_report import Quality
    from toolkit.targets.releases import Needs

Status = Literal["applied", "unchanged", "reverted", "skipped"]

UNCHANGED_SINCE = "nothing has changed since it last ran"
"""Why an idempotent pass is skipped."""


@dataclass(frozen=True, slots=True)
class Undone:
    """One rewrite that failed verification and was undone."""

    rule: str
    site: str
    error: float | None
    reason: str

    def __str__(self) -> str:
        return f"undone: {self.rule} at '{self.site}' ({self.reason})"


@dataclass(frozen=True, slots=True)
class PassResult:
    """The outcome of one pass.

    `rules` counts the kept rewrites by rule, and `places` are the values at their sites; `undone`
    are the rewrites that failed verification; `reason` explains why a pass was reverted or skipped;
    `notes` are remarks of the pass; `quality` is the accuracy of a model that it has quantized.
    """

    name: str
    status: Status
    rewrites: int = 0
    seconds: float = 0.0
    error: float | None = None
    reason: str = ""
    rules: dict[str, int] = field(default_factory=dict[str, int])
    undone: list[Undone] = field(default_factory=list[Undone])
    notes: list[str] = field(default_factory=list[str])
    places: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    quality: Quality | None = None

    def to_json(self) -> dict[str, Any]:
        notes = [*filter(None, [self.reason]), *map(str, self.undone), *self.notes]
        return {
            "name": self.name,
            "status": self.status,
            "rewrites": self.rewrites,
            "seconds": round(self.seconds, 6),
            "error": json_number(self.error),
            "reason": "; ".join(notes),
            "notes": notes,
            "rules": self.rules,
            "undone": [
                {"rule": u.rule, "site": u.site, "error": json_number(u.error), "reason": u.reason}
                for u in self.undone
            ],
            **_quality_json(self.quality),
        }


def _quality_json(quality: Quality | None) -> dict[str, Any]:
    """Return the accuracy of a quantized model as a JSON member."""
    return {} if quality is None else {"quality": quality.to_json()}


@dataclass(frozen=True, slots=True)
class ModelStats:
    """The size of a model: bytes as one file, nodes with those of subgraphs and functions, ops."""

    bytes: int
    nodes: int
    ops: dict[str, int]

    @classmethod
    def of(cls, model: Model) -> ModelStats:
        """Return the statistics of a model."""
        return cls(
            bytes=serialize.size_of(serialize.inflate(model.to_proto(), model.weights)),
            nodes=model.node_count(),
            ops=count_ops(model),
        )

    def to_json(self, path: Path | None) -> dict[str, Any]:
        """Return the statistics of the model at `path` as plain data."""
        shown = None if path is None else str(path)
        return {"path": shown, "bytes": self.bytes, "nodes": self.nodes, "ops": self.ops}


def count_ops(model: Model) -> dict[str, int]:
    """Count the nodes of all graphs and functions by operator, the most frequent first."""
    nodes = chain(model.nodes(), *(function.node for function in model.functions))
    counts = Counter(map(nd.qualified, nodes))
    return dict(counts.most_common())


@dataclass(slots=True)
class Result:
    """The result of `optimize`. `proof` summarizes the verification in one line.

    `quality` is the accuracy of a quantized model, `plans` are the applied quantization plans as
    JSON, and `notes` concern the run as a whole. `loads_on` says which runtimes load the model.
    """

    model: Model
    passes: list[PassResult]
    before: ModelStats
    proof: str
    seconds: float
    quality: Quality | None = None
    plans: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    loads_on: Needs | None = None
    after: ModelStats = field(init=False)
    saved: Path | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.after = ModelStats.of(self.model)

    def save(self, path: str | os.PathLike[str], external_data: bool = False) -> Path:
        """Write the model atomically to `path`, which must not be the input."""
        self.saved = self.model.save(path, external_data)
        return self.saved

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for `json.dump`."""
        return {
            "input": self.before.to_json(self.model.path),
            "output": self.after.to_json(self.saved),
            "passes": [p.to_json() for p in self.passes],
            "proof": self.proof,
            "loads_on": self.loads_on.to_json() if self.loads_on else None,
            "seconds": round(self.seconds, 6),
            **_quality_json(self.quality),
            **({"notes": self.notes} if self.notes else {}),
        }
