"""The registry of passes, and the parser of pipelines.

Passes are discovered through entry points of the group `toolkit.passes`. Each is a mapping from a
name to `"module:Class"`, imported on demand, or to a list of names, a group. The syntax of a
pipeline is

    passes  = item ("," item)*
    item    = target (":" option "=" value)*
    target  = name | path/to/file.py:Object | package.module:Object

as in `fold:max_bytes=4096,./my_pass.py:MyRule,cleanup`. An object is a pass class, a pass, a
rewrite rule, or a list of those. An option of a group applies to every member that has it.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

from toolkit.errors import UsageError, summarize
from toolkit.messages import suggestion
from toolkit.pass_manager.pass_options import (
    OptionInfo,
    describe_options,
    option_names,
    read_options,
)
from toolkit.user_code import get_object, load_file, load_module

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Pass

GROUP = "toolkit.passes"
_PROTOCOL = "a pass has a `name`, a `tolerance` and a method `run(model, ctx)`"


@dataclass(frozen=True, slots=True)
class PassInfo:
    """One entry of the catalogue.

    A name is `broken` if two plugins offer it, its module cannot be imported, or its plugin cannot
    be loaded; `summary` is the reason then. `origin` is the distribution.
    """

    name: str
    kind: Literal["pass", "group", "broken"]
    summary: str
    options: tuple[OptionInfo, ...]
    members: tuple[str, ...]
    origin: str


def parse_passes(text: str) -> list[Pass]:
    """Return the passes that `text` names, in order, with their options set."""
    if not text.strip():
        raise UsageError("name a pass: `toolkit passes` lists them")
    resolver = _Resolver()
    return [built for item in text.split(",") for built in resolver.build(item.strip())]


def catalogue() -> list[PassInfo]:
    """Return all names of the installed plugins: groups, passes, broken names."""
    resolver = _Resolver()
    rows = [_describe(name, resolver) for name in resolver.names()]
    for plugin in resolver.plugins:
        if plugin.problem:
            reason = f"plugin not loaded: {plugin.problem}"
            rows.append(PassInfo(plugin.name, "broken", reason, (), (), plugin.origin))
    order = {"group": 0, "pass": 1, "broken": 2}
    return sorted(rows, key=lambda row: order[row.kind])


def find(name: str) -> PassInfo:
    """Return the catalogue entry of this name."""
    for row in catalogue():
        if row.name == name:
            return row
    raise UsageError(_Resolver().unknown(name))


# Plugins -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plugin:
    """One entry point: its names, or why it could not be loaded."""

    name: str
    origin: str
    offers: Mapping[str, str | Sequence[str]]
    problem: str = ""


def _offer_text(plugin: _Plugin, name: str) -> str:
    offer = plugin.offers[name]
    return f"{plugin.origin} ({offer if isinstance(offer, str) else 'a group'})"


@lru_cache(maxsize=8)
def _plugins_on(_: tuple[str, ...]) -> tuple[_Plugin, ...]:
    """Load the plugins, once per search path: this reads a file of every distribution."""
    found = sorted(entry_points(group=GROUP), key=lambda e: (_origin(e), e.name))
    return tuple(_load_plugin(entry) for entry in found)


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.module


def _load_plugin(entry: EntryPoint) -> _Plugin:
    """Load one entry point; a failure is recorded, not raised."""
    try:
        with redirect_stdout(sys.stderr):  # standard output is for reports
            offers = entry.load()
    except (Exception, SystemExit) as error:
        return _Plugin(entry.name, _origin(entry), {}, summarize(error))
    if not _is_catalogue(offers):
        wanted = "a mapping of names to 'module:Class' or to lists of names"
        return _Plugin(entry.name, _origin(entry), {}, f"{entry.value} is not {wanted}")
    return _Plugin(entry.name, _origin(entry), offers)


def _is_catalogue(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_offer(offer)
        for name, offer in cast("Mapping[object, object]", value).items()
    )


def _is_offer(offer: object) -> bool:
    if isinstance(offer, str):
        return ":" in offer
    return isinstance(offer, (list, tuple)) and all(
        isinstance(member, str) for member in cast("Sequence[object]", offer)
    )


# From text to passes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unbuilt:
    """A pass class with the texts of its options, or a pass."""

    label: str
    target: object
    options: Mapping[str, str]

    def takes(self, option: str) -> bool:
        return option in option_names(self.target)

    def build(self) -> Pass:
        values = read_options(self.target, self.options, self.label)
        if isinstance(self.target, type):
            self._require_all(values)
        target = cast("Any", self.target)
        try:
            if isinstance(self.target, type):
                built = target(**values)
            else:
                built = dataclasses.replace(target, **values) if values else target
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self.label}: {summarize(error)}") from error
        _require_pass(built, self.label)
        return built

    def _require_all(self, values: Mapping[str, object]) -> None:
        for option in describe_options(self.target):
            if option.default is None and option.name not in values:
                wanted = f"write {self.label}:{option.name}=VALUE"
                raise UsageError(f"{self.label} needs the option {option.name!r}: {wanted}")


class _Resolver:
    """Resolves the items of a pipeline; a file that is named twice is loaded once."""

    def __init__(self) -> None:
        self.plugins = _plugins_on(tuple(sys.path))
        self._files: dict[str, ModuleType] = {}

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for plugin in self.plugins for name in plugin.offers))

    def offering(self, name: str, prefer: _Plugin | None = None) -> _Plugin:
        """Return the only plugin that offers `name`.

        The members of a group come from its own plugin if possible: a pass of the same name in
        another plugin neither replaces them nor breaks the group.
        """
        if prefer is not None and name in prefer.offers:
            return prefer
        offering = [plugin for plugin in self.plugins if name in plugin.offers]
        if not offering:
            raise UsageError(self.unknown(name))
        if len(offering) > 1:
            both = " and ".join(_offer_text(plugin, name) for plugin in offering)
            raise UsageError(
                f"pass {name!r} is ambiguous, offered by {both}: "
                "name the one you want as module:Class, or uninstall the other"
            )
        return offering[0]

    def unknown(self, name: str) -> str:
        """Return the message for an unknown name."""
        if not self.plugins:
            return f"unknown pass {name!r}: no passes are installed, reinstall the toolkit"
        known = sorted(self.names())
        close = suggestion(name, known)
        hint = f"{close} see `toolkit passes`" if close else f": known: {', '.join(known)}"
        message = f"unknown pass {name!r}{hint}"
        broken = "; ".join(f"{p.origin}: {p.problem}" for p in self.plugins if p.problem)
        return f"{message}; a plugin could not be loaded, {broken}" if broken else message

    def build(self, item: str) -> list[Pass]:
        return [candidate.build() for candidate in self.expand(item)]

    def expand(
        self, item: str, plugin: _Plugin | None = None, groups: tuple[str, ...] = ()
    ) -> list[_Unbuilt]:
        """Return the passes of an item; `groups` are the groups that contain it."""
        target, options = self._split(item)
        if ":" in target:
            candidates = list(_flatten(self.load(target), target))
        else:
            owner = self.offering(target, plugin)
            offer = owner.offers[target]
            if isinstance(offer, str):
                candidates = list(_flatten(self.load(offer), target))
            else:
                if target in groups:
                    raise UsageError(f"group {' > '.join((*groups, target))} contains itself")
                candidates = [
                    candidate
                    for member in offer
                    for candidate in self.expand(member, owner, (*groups, target))
                ]
        return _distribute(options, candidates, target)

    def _split(self, item: str) -> tuple[str, dict[str, str]]:
        """Split `target:key=value:...` into the target and its options."""
        if not item:
            raise UsageError("an empty item between commas: write --passes fold,cleanup")
        if item.endswith(".py"):
            raise UsageError(f"{item} does not name an object: write {item}:MyRule")
        path, dot_py, rest = item.partition(".py:")
        head, *parts = rest.split(":") if dot_py else item.split(":")
        target = f"{path}.py:{head}" if dot_py else head
        if not dot_py and "=" in head:
            raise UsageError(
                f"{item!r} is not a pass: write an option behind its pass, as pass:{item}"
            )
        if not dot_py and parts and "=" not in parts[0]:
            if head in self.names():
                raise UsageError(f"{item!r}: {self._half_an_option(head, parts[0])}")
            target = f"{head}:{parts.pop(0)}"
        options: dict[str, str] = {}
        for part in parts:
            name, equals, value = part.partition("=")
            if not equals or not name:
                raise UsageError(f"{item!r}: {part!r} is not an option: write name=value")
            if name in options:
                raise UsageError(f"{item!r}: option {name!r} is given twice")
            options[name] = value
        return target, options

    def _half_an_option(self, name: str, part: str) -> str:
        """Return the message for an option without a value, as `fold:max_bytes` or `fold:4096`."""
        known = list(dict.fromkeys(o for c in self.expand(name) for o in option_names(c.target)))
        if part in known or suggestion(part, known):
            return f"option {part!r} has no value: write {name}:{part}=value"
        if not known:
            return f"{part!r} is not an option: {name} has none"
        if len(known) == 1:
            return f"{part!r} is not an option: write {name}:{known[0]}={part}"
        return f"{part!r} is not an option: write name=value; its options: {', '.join(known)}"

    def load(self, address: str) -> object:
        """Return the object at `file.py:Object` or `module:Object`."""
        place, _, dotted = address.rpartition(":")
        if not dotted:
            raise UsageError(f"{address} does not name an object: write {place}:MyRule")
        if not place.endswith(".py"):
            return get_object(load_module(place), dotted, place)
        if place not in self._files:
            self._files[place] = load_file(place)
        return get_object(self._files[place], dotted, place)


def _flatten(target: object, label: str) -> Iterator[_Unbuilt]:
    """Yield the members of a list of passes, or a single pass."""
    if isinstance(target, (list, tuple)):
        for index, member in enumerate(cast("Sequence[object]", target)):
            yield from _flatten(member, f"{label}[{index}]")
        return
    if inspect.isfunction(target):
        raise UsageError(f"{label} is a plain function, not a pass or a rewrite rule: {_PROTOCOL}")
    if not callable(getattr(target, "run", None)):
        raise UsageError(f"{label} is not a pass, it has no method `run`: {_PROTOCOL}")
    yield _Unbuilt(label, target, {})


def _require_pass(built: object, label: str) -> None:
    if not isinstance(getattr(built, "name", None), str):
        raise UsageError(f"{label} is not a pass, it has no `name`: {_PROTOCOL}")
    if not hasattr(built, "tolerance"):
        raise UsageError(f"{label} is not a pass, it has no `tolerance`: {_PROTOCOL}")


def _distribute(
    options: Mapping[str, str], candidates: list[_Unbuilt], label: str
) -> list[_Unbuilt]:
    """Set each option of the candidates that have it; the outermost value takes precedence."""
    for name in options:
        if not any(candidate.takes(name) for candidate in candidates):
            known = sorted({o for c in candidates for o in option_names(c.target)})
            has = f"its options: {', '.join(known)}" if known else "it has none"
            hint = suggestion(name, known) or ":"
            raise UsageError(f"{label} has no option {name!r}{hint} {has}")
    distributed: list[_Unbuilt] = []
    for candidate in candidates:
        own = {name: value for name, value in options.items() if candidate.takes(name)}
        distributed.append(dataclasses.replace(candidate, options={**candidate.options, **own}))
    return distributed


# The catalogue -----------------------------------------------------------------------------------


def _describe(name: str, resolver: _Resolver) -> PassInfo:
    origin = " and ".join(plugin.origin for plugin in resolver.plugins if name in plugin.offers)
    try:
        offer = resolver.offering(name).offers[name]
        resolver.expand(name)  # raises UsageError for a broken member
        if not isinstance(offer, str):
            return PassInfo(name, "group", ", ".join(offer), (), tuple(offer), origin)
        target = resolver.load(offer)
        options = tuple(describe_options(target))
    except UsageError as error:
        return PassInfo(name, "broken", str(error), (), (), origin)
    return PassInfo(name, "pass", _summary(target), options, (), origin)


def _summary(target: object) -> str:
    """Return the first line of the docstring, unless `dataclass` generated it."""
    cls = target if isinstance(target, type) else type(target)
    text = inspect.getdoc(target) or ""
    if text.startswith(f"{cls.__name__}("):
        return ""
    return text.split("\n", 1)[0]
