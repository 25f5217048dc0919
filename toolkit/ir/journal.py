"""The journal: every edit since the last commit, grouped into the rewrites that made them.

`seek` moves the model to any point of the journal, back and forth. That is rollback (seek to the
start) and bisection (seek to the n-th rewrite) in one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from toolkit.ir.edits import Edit, inverse, perform

_versions = count()


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A group of edits: the rule, its site (a value name) and the index of the first edit.

    Edits before the first `begin` of a pass form an implicit rewrite, which cannot be vetoed.
    """

    rule: str
    site: str
    start: int
    implicit: bool = False


class Journal:
    """The edits since the last commit, and a position in them."""

    version: int
    """A number that changes with each edit and that no other journal has."""

    def __init__(self) -> None:
        self.version = next(_versions)
        self._edits: list[Edit] = []
        self._rewrites: list[Rewrite] = []
        self._position = 0
        self._listeners: list[Callable[[Edit], None]] = []
        self._vetoed: set[tuple[str, str]] = set()
        self._vetoed_rules: set[str] = set()

    def __len__(self) -> int:
        return len(self._edits)

    def apply(self, edit: Edit) -> None:
        """Perform an edit and record it. Editing after a `seek` drops the edits ahead."""
        if self._position < len(self._edits):
            self._forget_from(self._position)
        self._perform(edit)
        self._edits.append(edit)
        self._position += 1

    @contextmanager
    def listening(self, listener: Callable[[Edit], None]) -> Generator[None]:
        """Call `listener` after every edit in this block; undoing is an edit as well."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def begin(self, rule: str, site: str) -> bool:
        """Start a rewrite; return False if it is vetoed and must not be made."""
        if rule in self._vetoed_rules or (rule, site) in self._vetoed:
            return False
        if self._rewrites and self._rewrites[-1].start == len(self._edits):
            self._rewrites.pop()  # it changed nothing
        self._rewrites.append(Rewrite(rule, site, len(self._edits)))
        return True

    @property
    def position(self) -> int:
        """The number of edits in effect."""
        return self._position

    @property
    def rewrites(self) -> list[Rewrite]:
        """The rewrites that changed something, oldest first."""
        made = [r for r in self._rewrites if r.start < len(self._edits)]
        if self._edits and (not made or made[0].start > 0):
            made.insert(0, Rewrite("edit", "", 0, implicit=True))
        return made

    def places_by_rule(self) -> dict[str, list[str]]:
        """Return the sites of each rule's rewrites, oldest first."""
        places: dict[str, list[str]] = {}
        for rewrite in self.rewrites:
            places.setdefault(rewrite.rule, []).append(rewrite.site)
        return places

    def seek(self, position: int) -> None:
        """Undo or redo edits until exactly the first `position` of them are in effect."""
        while self._position > position:
            self._position -= 1
            self._perform(inverse(self._edits[self._position]))
        while self._position < position:
            self._perform(self._edits[self._position])
            self._position += 1

    def undo_to(self, position: int) -> None:
        """Undo all but the first `position` edits, and drop them."""
        self.seek(position)
        self._forget_from(position)

    def _perform(self, edit: Edit) -> None:
        perform(edit)
        self.version = next(_versions)
        for listener in self._listeners:
            listener(edit)

    def _forget_from(self, position: int) -> None:
        del self._edits[position:]
        while self._rewrites and self._rewrites[-1].start >= position:
            self._rewrites.pop()

    def commit(self) -> None:
        """Make the edits in effect final, and drop the others."""
        self._edits.clear()
        self._rewrites.clear()
        self._position = 0

    def rollback(self) -> None:
        """Undo everything since the last commit."""
        self.seek(0)
        self.commit()

    def veto(self, rewrite: Rewrite) -> None:
        """Veto this rewrite for the next run of the pass."""
        self._vetoed.add((rewrite.rule, rewrite.site))

    def veto_rule(self, rule: str) -> None:
        """Veto all rewrites of this rule for the next run of the pass."""
        self._vetoed_rules.add(rule)

    def clear_vetoes(self) -> None:
        """Drop all vetoes."""
        self._vetoed.clear()
        self._vetoed_rules.clear()
