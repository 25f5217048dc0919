"""The user's accuracy requirement: a metric, and the largest loss that it allows.

By default, the error budgets of `toolkit.accuracy.budgets` apply to each output. A loss is a
fraction: `max_drop=0.01` allows 1 % changed predictions, a cosine of 0.99, or noise of 1 % of the
signal's power (20 dB), depending on the output. An SQNR may be given in decibels, as `"30dB"`.

A user's metric is a function of all outputs, in the order of the samples:

    def accuracy(outputs: Iterable[dict[str, ndarray]]) -> float: ...

Higher is better; the function has its own labels. The drop is the float model's score minus the
quantized model's, in the function's own unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from toolkit.accuracy.budgets import BUDGETS, Measure
from toolkit.errors import UsageError
from toolkit.messages import suggestion
from toolkit.user_code import call, object_at

Outputs = Iterable[dict[str, Any]]
Function = Callable[[Outputs], float]
Named = Literal["sqnr", "cosine", "top1", "error"]

_DEFAULT_ERROR = 0.1
"""The default loss of the metric `error`."""

_DEFAULT_SCORE_DROP = 0.01
"""The default drop of a user's metric, relative to the float model's score."""

_ROUNDING: Mapping[Measure, float] = {"sqnr": 1e-10, "cosine": 1e-10, "error": 1e-5}
"""The loss by reordered sums alone, which is always allowed."""

_MIN_DECIBELS = 1.0
"""With the metric `sqnr`, numbers from this one on are decibels."""


@dataclass(frozen=True, slots=True)
class Score:
    """A user's metric."""

    name: str
    function: Function

    def __call__(self, outputs: Outputs) -> float:
        """Return the score; raises UsageError, in one line, if the function fails."""
        found = call(lambda: self.function(outputs), f"metric {self.name}")
        try:
            if found is None or isinstance(found, (str, bytes)):
                raise TypeError
            return float(found)
        except (TypeError, ValueError) as error:
            kind = type(found).__name__
            raise UsageError(f"metric {self.name} returns {kind}; it must be a number") from error


@dataclass(frozen=True, slots=True)
class Requirement:
    """A metric (None: by the kind of each output) and its largest loss (None: the default).

    `off` measures the loss without limiting it.
    """

    metric: Named | Score | None = None
    most: float | None = None
    off: bool = False

    @classmethod
    def of(
        cls, max_drop: float | str | None = None, metric: str | Function | None = None
    ) -> Requirement:
        """Parse `--max-drop` and `--metric`; raises UsageError for invalid values."""
        found = _metric(metric)
        if max_drop == "off":
            return cls(found, off=True)
        return cls(found, None if max_drop is None else _fraction(max_drop, found))

    def allowed(self, measure: Measure) -> float | None:
        """Return the loss that the user allows by this measure, or None for the error budgets."""
        if self.most is not None:
            return max(self.most, _ROUNDING.get(measure, 0.0))
        if self.metric is None:
            return None
        if measure == "error":
            return _DEFAULT_ERROR
        limits = (limit for kind in BUDGETS.values() for limit in kind)
        return min(limit.loss for limit in limits if limit.measure == measure)

    def allowed_drop(self, score: float) -> float:
        """Return the drop that the user allows from the float model's `score`."""
        return self.most if self.most is not None else _DEFAULT_SCORE_DROP * abs(score)


def _metric(given: str | Function | None) -> Named | Score | None:
    if given is None:
        return None
    if not isinstance(given, str):
        if not callable(given):  # pyright: ignore[reportUnnecessaryComparison]
            raise UsageError(f"the metric is {type(given).__name__}; give a name or a function")
        return Score(getattr(given, "__name__", "function"), given)
    known = get_args(Named)
    if given in known:
        return cast("Named", given)
    if ":" not in given.strip(":"):
        listed = ", ".join(known)
        hint = suggestion(given, list(known)) or f": choose one of {listed}, or module:function"
        raise UsageError(f"no metric is called '{given}'{hint}")
    function = object_at(given)
    if not callable(function):
        raise UsageError(f"{given} is not a function of a model's outputs")
    return Score(given, cast("Function", function))


def _fraction(given: float | str, metric: Named | Score | None) -> float:
    text = str(given).strip()
    decibels = text.lower().endswith("db")
    try:
        number = float(text[:-2] if decibels else text)
    except ValueError as error:
        raise UsageError(f"max-drop '{given}' is not valid: a number, as 0.01, or off") from error
    if not number >= 0 or math.isinf(number):
        raise UsageError(f"max-drop {given} is not valid: 0 or more, as 0.01, or off")
    if decibels and metric not in (None, "sqnr"):
        raise UsageError(f"max-drop {given}: only the metric sqnr is in decibels")
    if decibels or (metric == "sqnr" and number >= _MIN_DECIBELS):
        return 10 ** (-number / 10)
    if number >= 1 and not isinstance(metric, Score):
        raise UsageError(f"max-drop {given} is not a fraction: 0.01 is 1 %, 20dB is decibels")
    return number
