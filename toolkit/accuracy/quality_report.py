"""The accuracy report of an evaluation: the figures of each output, and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toolkit.accuracy.budgets import Measure, decibels
from toolkit.verification.compare import json_number

_SHOWN = 3
"""The number of outputs named in a summary."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure of an output, or of a group of its channels.

    `loss` and `allowed` are losses as in `toolkit.accuracy.metrics`. `scores` are those of the
    model and of the float model by a user's metric. `plain` is the unweighted fraction of changed
    predictions if `loss` is weighted.
    """

    output: str
    measure: Measure
    loss: float
    allowed: float
    channels: str = ""
    scores: tuple[float, float] | None = None
    plain: float | None = None

    @property
    def ok(self) -> bool:
        return self.loss <= self.allowed

    @property
    def used(self) -> float:
        """The fraction of the budget used; above 1 it is exceeded."""
        if not self.loss:
            return 0.0
        return self.loss / self.allowed if self.allowed else math.inf

    def text(self) -> str:
        """Describe the figure, as `top-1 agreement 99.2 % (budget 98 %)`."""
        if self.scores is not None:
            score, floats = self.scores
            limit = f" (budget {self.allowed:.3g})" if math.isfinite(self.allowed) else ""
            return f"{self.output} {score:.5g}, float model {floats:.5g}{limit}"
        limit = f" (budget {self._number(self.allowed)})" if math.isfinite(self.allowed) else ""
        where = f" in {self.channels}" if self.channels else ""
        found = self._number(self.loss)
        if self.plain is not None and self._number(self.plain) != found:
            found = f"{self._number(self.plain)}, {found} weighted by margin"
        return f"{_NAMES[self.measure]} {found}{where}{limit}"

    def _number(self, loss: float) -> str:
        if self.measure in ("sqnr", "variance"):
            return f"{decibels(loss):.1f} dB"
        if self.measure == "error":
            return f"{loss:.2g}"
        if self.measure == "cosine":
            return f"{1 - loss:.4f}"
        return f"{100 * (1 - loss):.4g} %"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "measure": self.measure,
            "loss": json_number(self.loss),
            "allowed": json_number(self.allowed),
            "channels": self.channels,
        }
        if self.measure in ("sqnr", "variance"):
            found["decibels"] = json_number(decibels(self.loss))
        if self.plain is not None:
            found["plain_loss"] = json_number(self.plain)
        if self.scores is not None:
            found["score"], found["score_of_floats"] = map(json_number, self.scores)
        return found


_CLOSE = 0.7
"""The fraction of a budget above which the summary names the figure as limiting."""

_NAMES: dict[Measure, str] = {
    "top1": "top-1 agreement",
    "answers": "top-1 agreement",
    "decisions": "equal decisions",
    "cosine": "cosine",
    "sqnr": "SQNR",
    "variance": "SQNR around the mean",
    "agreement": "equal values",
    "error": "error",
    "score": "score",
}


@dataclass(frozen=True, slots=True)
class OutputQuality:
    """The figures of one output; the kind of a user's metric is `score`."""

    name: str
    kind: str
    figures: tuple[Figure, ...]

    @property
    def worst(self) -> Figure:
        return max(self.figures, key=lambda figure: figure.used)

    @property
    def shown(self) -> Figure:
        """The figure to show: the one that exceeds its budget, or else the kind's main measure."""
        own = [figure for figure in self.figures if figure.measure == self.figures[0].measure]
        return max(own if self.worst.ok else self.figures, key=lambda figure: figure.used)

    def text(self) -> str:
        """Describe the figure to show, and one that is closer to its limit."""
        closer = self.worst.used > max(self.shown.used, _CLOSE)
        return f"{self.shown.text()} and {self.worst.text()}" if closer else self.shown.text()


@dataclass(frozen=True, slots=True)
class Quality:
    """The accuracy of a model relative to the float model.

    `noise` is the largest noise power relative to signal power of any output; it ranks models that
    meet their budgets. `off`: the budget is reported but not enforced.
    """

    outputs: tuple[OutputQuality, ...]
    samples: int
    real: bool = True
    off: bool = False
    noise: float = 0.0

    @property
    def ok(self) -> bool:
        return self.off or self.held

    @property
    def held(self) -> bool:
        """Whether the budget is met, enforced or not."""
        return all(figure.ok for figure in self.figures())

    @property
    def worst(self) -> Figure | None:
        """The figure that uses the largest fraction of its budget."""
        return max(self.figures(), key=lambda figure: figure.used, default=None)

    @property
    def used(self) -> float:
        """The fraction of the budget that the worst figure uses; above 1 it is exceeded."""
        return self.worst.used if self.worst is not None else 0.0

    @property
    def reason(self) -> str:
        """Why the budget is exceeded, in one line; empty if it is met."""
        if self.held or self.worst is None:
            return ""
        worst = self.worst
        what = "the metric" if worst.scores is not None else f"output '{worst.output}'"
        return f"{what}: {worst.text()} on {self._on()}"

    def figures(self) -> Iterable[Figure]:
        return (figure for output in self.outputs for figure in output.figures)

    def summary(self) -> str:
        """Summarize the worst figure of each output in one line."""
        if not self.outputs:
            return "no outputs can be compared"
        ordered = sorted(self.outputs, key=lambda o: -o.worst.used)[:_SHOWN]
        several = len(self.outputs) > 1
        shown = [f"'{o.name}' {o.text()}" if several and o.name else o.text() for o in ordered]
        if len(self.outputs) > _SHOWN:
            shown.append(f"{len(self.outputs) - _SHOWN} more outputs")
        off = "is off" if self.held else "is exceeded, but off"
        return f"{', '.join(shown)} on {self._on()}{f'; the budget {off}' if self.off else ''}"

    def _on(self) -> str:
        kind = "sample" if self.real else "synthetic input"
        return f"1 {kind}" if self.samples == 1 else f"{self.samples} {kind}s"

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.held,
            "asked": not self.off,
            "samples": self.samples,
            "real": self.real,
            "noise": json_number(self.noise),
            "outputs": [
                {"name": o.name, "kind": o.kind, "figures": [f.to_json() for f in o.figures]}
                for o in self.outputs
            ],
        }
