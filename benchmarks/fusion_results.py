"""The data of one run of the fusion benchmark: exports, and one row per export and tool."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

KINDS = ("attention", "norms", "gelus")
REGIMES = ("plain", "padded")

# The architectures that have to be covered completely; the others show how far it carries.
NAMED = frozenset(
    {
        *("bert", "roberta", "distilbert", "electra", "albert", "modernbert"),
        *("bart-encoder", "bart-decoder", "t5-encoder", "t5-decoder"),
        *("gpt2", "llama", "qwen3", "gemma"),
        *("vit", "clip-text", "clip-vision", "whisper-encoder", "whisper-decoder"),
        *("torch-encoder", "torch-attention"),
    }
)
BERT_LIKE = frozenset({"bert", "roberta", "distilbert", "electra", "albert"})
CAUSAL = frozenset(
    {
        *("bart-decoder", "t5-decoder", "whisper-decoder", "gpt2", "llama", "qwen3", "gemma"),
        *("mistral", "phi", "gpt-neox", "gptj", "opt", "bloom", "clip-text"),
    }
)


@dataclass(frozen=True, slots=True)
class Case:
    """An export and its number of layers of each kind; `reason` is set if the export failed.

    A network without counts is not a transformer.
    """

    name: str
    architecture: str
    expected: dict[str, int] = field(default_factory=dict[str, int])
    nodes: int = 0
    reason: str = ""

    @property
    def transformer(self) -> bool:
        return bool(self.expected)


@dataclass(slots=True)
class Row:
    """The result of one tool on one export; `latency` holds seconds per round, by regime."""

    model: str
    tool: str
    seconds: float = 0
    nodes: int = 0
    found: dict[str, int] = field(default_factory=dict[str, int])
    foreign: list[str] = field(default_factory=list[str])
    agrees: bool = False
    error: float | None = None
    reason: str = ""
    latency: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @property
    def written(self) -> bool:
        return self.nodes > 0


@dataclass(slots=True)
class Run:
    """All measurements so far, in order."""

    tools: list[str]
    cases: dict[str, Case] = field(default_factory=dict[str, Case])
    rows: dict[tuple[str, str], Row] = field(default_factory=dict[tuple[str, str], Row])
    original: dict[str, dict[str, list[float]]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )
    depths: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])

    def get(self, model: str, tool: str) -> Row | None:
        """Return the row if the tool wrote a model that onnx can read."""
        row = self.rows.get((model, tool))
        return row if row is not None and row.written else None

    def sound(self, model: str, tool: str) -> Row | None:
        """Return the row if the result also agrees with the original."""
        row = self.get(model, tool)
        return row if row is not None and row.agrees else None

    def measured(self, *tools: str) -> Iterator[Case]:
        """Return the exports on which all of these tools ran."""
        for case in self.cases.values():
            if all((case.name, tool) in self.rows for tool in tools):
                yield case

    def speedup(self, model: str, tool: str, regime: str) -> float | None:
        """Return the speedup of the result: the median of the ratios per round."""
        row = self.sound(model, tool)
        before = self.original.get(model, {}).get(regime)
        after = row.latency.get(regime) if row else None
        if not before or not after:
            return None
        return statistics.median(b / a for b, a in zip(before, after, strict=True))

    def speedups(
        self, tool: str, regimes: Iterable[str] = REGIMES, among: Iterable[Case] | None = None
    ) -> dict[str, float]:
        """Return the speedups by export and regime."""
        cases = list(self.cases.values() if among is None else among)
        found = {
            f"{case.name} {regime}": self.speedup(case.name, tool, regime)
            for case in cases
            for regime in regimes
        }
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    def coverage(self, case: Case, *tools: str) -> dict[str, int]:
        """Return the number of layers of each kind that any of the tools fused."""
        rows = [row for tool in tools if (row := self.sound(case.name, tool))]
        return {
            kind: min(wanted, max((row.found.get(kind, 0) for row in rows), default=0))
            for kind, wanted in case.expected.items()
        }

    def to_json(self) -> dict[str, Any]:
        from dataclasses import asdict

        return {
            "cases": [asdict(case) for case in self.cases.values()],
            "rows": [asdict(row) for row in self.rows.values()],
            "original_latency": self.original,
            "depths": self.depths,
        }
