"""Which samples a judge judges by: the user's, or else those that the validation made up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.accuracy.evaluator import MOST_SAMPLES, Judge
from toolkit.accuracy.requirement import Demand, Score
from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed

if TYPE_CHECKING:
    from toolkit.calibrate.data import CalibrationData
    from toolkit.ir.model import Model
    from toolkit.verification.validator import Validator


@dataclass(frozen=True, slots=True)
class Samples:
    """Feeds, `real` or made up; `ignored` are outputs that differ from run to run."""

    feeds: Iterable[Feed] = ()
    real: bool = True
    ignored: frozenset[str] = field(default=frozenset())

    def judge(
        self,
        floats: Model,
        demand: Demand | None = None,
        custom_ops: Sequence[str] = (),
        most: int = MOST_SAMPLES,
    ) -> Judge | None:
        """A judge by these samples; None when there are none."""
        if isinstance(self.feeds, Sequence) and not self.feeds:
            return None
        if demand and isinstance(demand.metric, Score) and not self.real:
            name = demand.metric.name
            raise UsageError(
                f"metric {name} needs real samples, not made-up ones: name them with --calib"
            )
        try:
            return Judge(
                floats,
                self.feeds,
                demand,
                real=self.real,
                most=most,
                custom_ops=custom_ops,
                ignored=self.ignored,
            )
        except RuntimeRefused as refusal:
            raise UsageError(f"the model does not run {refusal}") from refusal


def samples_of(
    data: CalibrationData | None, validator: Validator | None, given: int = 0
) -> Samples:
    """Calibration data, else the `given` samples of the validator, else what it made up."""
    ignored = validator.unstable if validator is not None else frozenset[str]()
    if data is not None:
        return Samples(data.feeds, data.real, ignored)
    made = validator.feeds.feeds if validator is not None else []
    return Samples(made[:given] or made, bool(given), ignored)
