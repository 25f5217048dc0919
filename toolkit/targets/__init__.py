"""The runtimes that a model can be written for, one file each.

Every other module of this package defines one target under the name `TARGET`. Adding a target is
adding such a file.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from toolkit.errors import UsageError
from toolkit.targets.target import CONTRIB, Target

__all__ = ["CONTRIB", "DEFAULT_TARGET", "Target", "find_target", "target_names"]

DEFAULT_TARGET = "ort-cpu"


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
    modules = (module.name for module in iter_modules(__path__) if module.name != "target")
    found: list[Target] = [import_module(f"{__name__}.{name}").TARGET for name in modules]
    return {target.name: target for target in found}
