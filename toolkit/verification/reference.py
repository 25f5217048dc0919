"""Reference outputs: the outputs of a model on feeds, to compare other models with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.errors import ToolkitError, summarize
from toolkit.feeds import Feed, FeedGenerator, FeedSet, Sample, find_feeds
from toolkit.feeds.generate import RunModel
from toolkit.ir.model import Model
from toolkit.ir.op_traits import is_random
from toolkit.runtime.session import Session
from toolkit.verification.compare import Difference, compare, worst
from toolkit.verification.tolerance import UNSTABLE

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Redefinition


@dataclass(frozen=True, slots=True)
class Reference:
    """Feeds, and the outputs of one model on them."""

    outputs: tuple[str, ...]
    feeds: FeedSet
    unstable: frozenset[str] = frozenset()
    """Nondeterministic outputs: two runs on the same feed differ. They are not compared."""
    changes: tuple[Mapping[str, Redefinition], ...] = ()
    """The redefinitions applied to the model's outputs, in order."""
    frozen: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The frozen values, which the original of a specialized model takes besides the feeds."""

    @classmethod
    def of(
        cls,
        model: Model,
        samples: Sequence[Sample] = (),
        seed: int = 0,
        custom_ops: Sequence[str] = (),
        original: Model | None = None,
    ) -> Reference:
        """Run `model` as written; raises RuntimeRefused when it does not load.

        If `model` is a specialization, the `original` runs instead, fed with the frozen values too.
        """
        try:
            generator = FeedGenerator(model, seed)
        except Exception:
            # Malformed operators may break the analysis; the runtime's error message is better.
            Session(model, custom_ops=custom_ops)
            raise
        session = Session(original or model, custom_ops=custom_ops)
        frozen = model.frozen if original is not None else {}

        def run(feed: Feed) -> list[Any]:
            return session.run({**feed, **frozen})

        feeds = find_feeds(model, generator, run, samples)
        outputs = tuple(model.graph.outputs)
        unstable = _unstable(model, outputs, feeds, run)
        return cls(outputs, feeds, unstable, frozen=frozen)

    def redefined(self, changes: Mapping[str, Redefinition]) -> Reference:
        """Return the reference with `changes` applied to its outputs."""
        if not changes:
            return self
        runs = [
            replace(run, outputs=self._changed(run.feed, run.outputs, changes))
            for run in self.feeds.runs
        ]
        feeds = replace(self.feeds, runs=runs)
        return replace(self, feeds=feeds, changes=(*self.changes, dict(changes)))

    def _changed(
        self, feed: Feed, outputs: Sequence[Any], changes: Mapping[str, Redefinition]
    ) -> list[Any]:
        """Apply the redefinitions to outputs; raises ToolkitError if one fails."""
        changed = list(outputs)
        for index, name in enumerate(self.outputs):
            if name in changes:
                try:  # on copies: a redefinition may write to its arguments
                    changed[index] = changes[name](deepcopy(feed), deepcopy(outputs[index]))
                except Exception as error:
                    raise ToolkitError(
                        f"output '{name}' cannot be redefined: {summarize(error)}"
                    ) from error
        return changed

    def differences(
        self, session: Session, original: bool = False, perturbed: bool = False
    ) -> dict[str, Difference]:
        """Return the difference of each output of a session's model, over all feeds.

        If the session runs the `original` model, its outputs are redefined before the comparison.
        Inputs may be `perturbed` by one unit in the last place.
        """
        found: dict[str, list[Difference]] = {}
        for run in self.feeds.runs:
            feed = _perturbed(run.feed) if perturbed else run.feed
            given = {**feed, **self.frozen} if original else feed
            outputs = session.run(given, self.outputs)
            for changes in self.changes if original else ():
                outputs = self._changed(feed, outputs, changes)
            for name, expected, actual in zip(self.outputs, run.outputs, outputs, strict=True):
                if name not in self.unstable:
                    found.setdefault(name, []).append(compare(expected, actual))
        return {name: worst(each) for name, each in found.items()}


def _perturbed(feed: Feed) -> Feed:
    """Move each float of a feed by -1, 0 or 1 units in the last place, at random."""
    random = np.random.default_rng(0)

    def perturb(value: Any) -> Any:
        array = np.asarray(value)
        if array.dtype.kind != "f":
            return value
        steps = random.integers(-1, 2, array.shape) * float(np.finfo(array.dtype).eps)
        return (array * (1 + steps)).astype(array.dtype)

    return {name: perturb(value) for name, value in feed.items()}


def unstable_outputs(
    first: Mapping[str, Any], again: Mapping[str, Any], threshold: float
) -> list[str]:
    """Return the outputs that differ between two runs on the same feed."""
    return [name for name in first if compare(first[name], again[name]).relative > threshold]


def _unstable(
    model: Model, outputs: Sequence[str], feeds: FeedSet, again: RunModel
) -> frozenset[str]:
    """Rerun one feed to detect nondeterminism; all feeds if the model draws random numbers."""
    random = any(map(is_random, model.nodes()))
    found: set[str] = set()
    for run in feeds.runs if random else feeds.runs[:1]:
        first, second = (
            dict(zip(outputs, values, strict=True)) for values in (run.outputs, again(run.feed))
        )
        found.update(unstable_outputs(first, second, UNSTABLE["graph"]))
    return frozenset(found)
