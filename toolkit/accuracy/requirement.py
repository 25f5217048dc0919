"""What a user asks of quality: a metric, and the most that may be lost by it.

Without either, the budgets of `toolkit.quality.budgets` hold, output by output. A loss is a share:
`max_drop=0.01` is 1 % of the answers changed, 1 - cosine of 0.01, or noise of 1 % of the signal's
power (20 dB), whatever the output is. An SQNR may be given in decibels instead, as `"30dB"`.

A user's metric is a function of all outputs, in the order of the samples:

    def accuracy(outputs: Iterable[dict[str, ndarray]]) -> float: ...

Higher is better; it knows its labels. The drop is the float model's score minus the other's, in the
function's own unit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from toolkit.accuracy.budgets import BUDGETS, Measure
from toolkit.errors import ToolkitError, UsageError, summarize
from toolkit.messages import suggestion
from toolkit.user_code import get_object, load_file, load_module

Outputs = Iterable[dict[str, Any]]
Function = Callable[[Outputs], float]
Named = Literal["sqnr", "cosine", "top1", "error"]

_USUAL_ERROR = 0.1
_USUAL_SCORE = 0.01
"""What a score may drop by when nobody says: this share of the float model's."""

_ROUNDING: Mapping[Measure, float] = {"sqnr": 1e-10, "cosine": 1e-10, "error": 1e-5}
"""What the same model differs by when its sums are taken in another order: that is no loss."""

_LEAST_DECIBELS = 1.0
"""A share of noise of 1 or more is no budget: with sqnr, such a number is meant in decibels."""


@dataclass(frozen=True, slots=True)
class Score:
    """A user's metric."""

    name: str
    function: Function

    def __call__(self, outputs: Outputs) -> float:
        """The score; UsageError, in one line, when the function fails or gives no number."""
        try:
            with redirect_stdout(sys.stderr):  # standard output is for reports
                found: Any = self.function(outputs)
        except ToolkitError:
            raise
        except Exception as error:
            raise UsageError(f"metric {self.name} failed: {summarize(error)}") from error
        try:
            if found is None or isinstance(found, (str, bytes)):
                raise TypeError
            return float(found)
        except (TypeError, ValueError) as error:
            kind = type(found).__name__
            raise UsageError(f"metric {self.name} returns {kind}; it must be a number") from error


@dataclass(frozen=True, slots=True)
class Demand:
    """The metric (None: by the kind of each output) and the most it may lose (None: built in).

    `off`: nothing is asked; what was lost is told all the same.
    """

    metric: Named | Score | None = None
    most: float | None = None
    off: bool = False

    @classmethod
    def of(
        cls, max_drop: float | str | None = None, metric: str | Function | None = None
    ) -> Demand:
        """What `--max-drop` and `--metric` say; raises UsageError for what cannot be."""
        found = _metric(metric)
        if max_drop == "off":
            return cls(found, off=True)
        return cls(found, None if max_drop is None else _share(max_drop, found))

    def allowed(self, measure: Measure) -> float | None:
        """What the user allows of this measure; None when that is for the budgets to say."""
        if self.most is not None:
            return max(self.most, _ROUNDING.get(measure, 0.0))
        if self.metric is None:
            return None
        return _USUAL_ERROR if measure == "error" else _usual(measure)

    def allowed_score(self, of_floats: float) -> float:
        return self.most if self.most is not None else _USUAL_SCORE * abs(of_floats)


def _usual(measure: Measure) -> float:
    return min(limit.loss for limits in BUDGETS.values() for limit in limits
               if limit.measure == measure)  # fmt: skip


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
    home, _, name = given.rpartition(":")
    if not home or not name:
        listed = ", ".join(known)
        hint = suggestion(given, list(known)) or f": there are {listed}, or module:function"
        raise UsageError(f"no metric is called '{given}'{hint}")
    module = load_file(home) if home.endswith(".py") else load_module(home)
    function = get_object(module, name, home)
    if not callable(function):
        raise UsageError(f"{given} is no function of a model's outputs")
    return Score(given, cast("Function", function))


def _share(given: float | str, metric: Named | Score | None) -> float:
    text = str(given).strip()
    decibels = text.lower().endswith("db")
    try:
        number = float(text[:-2] if decibels else text)
    except ValueError as error:
        raise UsageError(f"max-drop '{given}' is not valid: a number, as 0.01, or off") from error
    if not number >= 0 or math.isinf(number):
        raise UsageError(f"max-drop {given} is not valid: 0 or more, as 0.01, or off")
    if decibels and metric not in (None, "sqnr"):
        raise UsageError(f"max-drop {given}: only an SQNR is in decibels")
    if decibels or (metric == "sqnr" and number >= _LEAST_DECIBELS):
        return 10 ** (-number / 10)
    if number >= 1 and not isinstance(metric, Score):
        raise UsageError(f"max-drop {given} is no share: write 0.01 for 1 %, 20dB for decibels")
    return number
