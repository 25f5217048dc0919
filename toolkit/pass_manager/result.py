"""What an optimization did: the model, each pass's outcome, and the numbers around them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.storage import serialize
from toolkit.verification.compare import json_number

if TYPE_CHECKING:
    from toolkit.accuracy.quality_report import Quality

Status = Literal["applied", "unchanged", "reverted", "skipped"]


@dataclass(frozen=True, slots=True)
class Undone:
    """One rewrite that did not hold and was taken back alone."""

    rule: str
    site: str
    error: float | None
    reason: str

    def __str__(self) -> str:
        return f"undone: {self.rule} at '{self.site}' ({self.reason})"


@dataclass(frozen=True, slots=True)
class PassResult:
    """The outcome of one pass.

    `rules` counts the rewrites that stayed, by rule, and `places` are the values where they were
    made; `undone` are those that did not hold; `reason` says why a pass was reverted or skipped;
    `notes` are what the pass itself had to say; `quality` is the accuracy of a model that the pass
    has quantized.
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
    """The figures of a model that was quantized; of others there are none."""
    return {} if quality is None else {"quality": quality.to_json()}


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Size of a model: bytes as one file, nodes (subgraphs and functions too), ops by type."""

    bytes: int
    nodes: int
    ops: dict[str, int]

    @classmethod
    def of(cls, model: Model) -> ModelStats:
        return cls(
            bytes=serialize.size_of(serialize.inflate(model.to_proto(), model.weights)),
            nodes=model.node_count(),
            ops=count_ops(model),
        )

    def to_json(self, path: Path | None) -> dict[str, Any]:
        """The figures of the model that was read from, or written to, `path`."""
        shown = None if path is None else str(path)
        return {"path": shown, "bytes": self.bytes, "nodes": self.nodes, "ops": self.ops}


def count_ops(model: Model) -> dict[str, int]:
    """Nodes by operator in all graphs and functions, the most frequent first."""
    bodies = (*(g.nodes for g in model.graphs()), *(f.node for f in model.functions))
    counts = Counter(nd.qualified(node) for nodes in bodies for node in nodes)
    return dict(counts.most_common())


@dataclass(slots=True)
class Result:
    """What `optimize` hands back. `proof` says in one line what was shown about the model.

    `quality` are the figures behind it where the model was quantized, `plans` what was applied, as
    JSON, and `notes` what is to be said of the run as a whole.
    """

    model: Model
    passes: list[PassResult]
    before: ModelStats
    proof: str
    seconds: float
    quality: Quality | None = None
    plans: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    after: ModelStats = field(init=False)
    saved: Path | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.after = ModelStats.of(self.model)

    def save(self, path: str | os.PathLike[str], external_data: bool = False) -> Path:
        """Write the model to `path`; whole or not at all, never over the input."""
        self.saved = self.model.save(path, external_data)
        return self.saved

    def to_json(self) -> dict[str, Any]:
        """The report, as plain data for `json.dump`."""
        return {
            "input": self.before.to_json(self.model.path),
            "output": self.after.to_json(self.saved),
            "passes": [p.to_json() for p in self.passes],
            "proof": self.proof,
            "seconds": round(self.seconds, 6),
            **_quality_json(self.quality),
            **({"notes": self.notes} if self.notes else {}),
        }
