"""The runtimes that a model can be written for, one file each.

Adding a target is adding such a file, which defines it under the name `TARGET`. Other
distributions offer targets by entry points of the group `toolkit.targets`, each a `Target`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules

from toolkit.errors import UsageError, summarize
from toolkit.targets.target import CONTRIB, Target

__all__ = ["CONTRIB", "DEFAULT_TARGET", "Target", "find_target", "target_names"]

DEFAULT_TARGET = "ort-cpu"

GROUP = "toolkit.targets"
"""The group of entry points by which other distributions offer targets."""

_NO_TARGETS = ("releases", "target")
"""Modules of this package that define no target."""


def find_target(name: str) -> Target:
    """Return the target of this name; UsageError when there is none."""
    if name not in _targets():
        raise UsageError(f"unknown target '{name}': choose one of {', '.join(target_names())}")
    return _targets()[name]


def target_names() -> list[str]:
    """Return the names of all targets, the default first."""
    return sorted(_targets(), key=lambda name: (name != DEFAULT_TARGET, name))


@cache
def _targets() -> dict[str, Target]:
    names = (module.name for module in iter_modules(__path__) if module.name not in _NO_TARGETS)
    found: list[Target] = [import_module(f"{__name__}.{name}").TARGET for name in names]
    plugins = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    return {target.name: target for target in (*map(_load, plugins), *found)}


def _load(entry: EntryPoint) -> Target:
    """Load the target of another distribution, which cannot replace a built-in one."""
    try:
        target = entry.load()
    except (Exception, SystemExit) as error:
        raise UsageError(f"target '{entry.name}' cannot be loaded: {summarize(error)}") from error
    if not isinstance(target, Target):
        raise UsageError(f"target '{entry.name}': {entry.value} is not a Target")
    return target
