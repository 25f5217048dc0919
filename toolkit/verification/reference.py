"""Reference outputs: what a model answers to a set of feeds, for others to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.errors import ToolkitError, summarize
from toolkit.feeds import Feed, Feeds, Sample, Search, find_feeds
from toolkit.ir.model import Model
from toolkit.ir.op_traits import is_random
from toolkit.runtime.session import Session
from toolkit.verification.compare import Difference, compare, worst
from toolkit.verification.tolerance import EXACT

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Redefinition


@dataclass(frozen=True, slots=True)
class Reference:
    """Feeds and the outputs of one model on them."""

    outputs: tuple[str, ...]
    feeds: Feeds
    unstable: frozenset[str] = frozenset()
    """Outputs that differ between two runs on the same feed: they cannot be compared."""
    changes: tuple[Mapping[str, Redefinition], ...] = ()
    """What has been made of the model's answers, one after the other."""

    @classmethod
    def of(
        cls,
        model: Model,
        samples: Sequence[Sample] = (),
        seed: int = 0,
        count: int | None = None,
        custom_ops: Sequence[str] = (),
    ) -> Reference:
        """Run `model` as written. Raises RuntimeRefused when it does not load."""
        try:
            search = Search(model, seed)
        except Exception:
            # Malformed operators confuse the search: what the runtime says of them goes first.
            Session(model, custom_ops=custom_ops)
            raise
        session = Session(model, custom_ops=custom_ops)
        feeds = find_feeds(model, search, session.run, samples, count)
        outputs = tuple(model.graph.outputs)
        return cls(outputs, feeds, _unstable(model, outputs, feeds, session))

    def redefined(self, changes: Mapping[str, Redefinition]) -> Reference:
        """The same feeds, with some of the outputs as they are to be instead."""
        if not changes:
            return self
        trials = [
            replace(t, outputs=self._changed(t.feed, t.outputs, changes)) for t in self.feeds.trials
        ]
        feeds = replace(self.feeds, trials=trials)
        return replace(self, feeds=feeds, changes=(*self.changes, dict(changes)))

    def _changed(
        self, feed: Feed, answers: Sequence[Any], changes: Mapping[str, Redefinition]
    ) -> list[Any]:
        """Raises ToolkitError where a pass cannot tell what an output is to be."""
        found = list(answers)
        for at, name in enumerate(self.outputs):
            if name in changes:
                try:  # on copies: others are compared with these
                    found[at] = changes[name](deepcopy(feed), deepcopy(answers[at]))
                except Exception as error:
                    raise ToolkitError(
                        f"output '{name}' cannot be what it is to be: {summarize(error)}"
                    ) from error
        return found

    def differences(self, session: Session, original: bool = False) -> dict[str, Difference]:
        """How far each output of another model is from this one's, over all feeds.

        Of the `original` itself, in another session, what was made of its answers is made again.
        """
        return self._compared(session, lambda feed: feed, original)

    def sensitivity(self, session: Session) -> dict[str, Difference]:
        """How far each output of the same model moves when its inputs are rounded once more."""
        return self._compared(session, _rounded_anew, original=True)

    def _compared(
        self, session: Session, given: Callable[[Feed], Feed], original: bool
    ) -> dict[str, Difference]:
        found: dict[str, list[Difference]] = {}
        for trial in self.feeds.trials:
            feed = given(trial.feed)
            answers = session.run(feed, self.outputs)
            for changes in self.changes if original else ():
                answers = self._changed(feed, answers, changes)
            for name, expected, actual in zip(self.outputs, trial.outputs, answers, strict=True):
                if name not in self.unstable:
                    found.setdefault(name, []).append(compare(expected, actual))
        return {name: worst(each) for name, each in found.items()}


def _rounded_anew(feed: Feed) -> Feed:
    """The floats of a feed, each a unit in the last place up or down, or as it is."""
    draw = np.random.default_rng(0)

    def moved(value: Any) -> Any:
        known = np.asarray(value)
        if known.dtype.kind != "f":
            return value
        steps = draw.integers(-1, 2, known.shape) * float(np.finfo(known.dtype).eps)
        return (known * (1 + steps)).astype(known.dtype)

    return {name: moved(value) for name, value in feed.items()}


def _unstable(
    model: Model, outputs: Sequence[str], feeds: Feeds, session: Session
) -> frozenset[str]:
    """One feed is run again, to be sure; all of them when the model draws random numbers."""
    random = any(map(is_random, model.nodes()))
    found: set[str] = set()
    for trial in feeds.trials if random else feeds.trials[:1]:
        again = session.run(trial.feed)
        for name, first, second in zip(outputs, trial.outputs, again, strict=True):
            if compare(first, second).relative > EXACT.relative:
                found.add(name)
    return frozenset(found)
