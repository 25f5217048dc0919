"""Options of passes: the fields of their dataclasses, described and parsed.

`fold:max_bytes=4096` sets the field `max_bytes` of the pass `fold`. The text is parsed according to
the field's annotation:

    int, float, str, Path       as usual (`1_000` is an int too)
    bool                        true/false, yes/no, on/off, 1/0
    Literal["a", "b"], an Enum  one of the values
    tuple[X, ...]               `x+y+z`; the empty text is the empty tuple
    X | None                    `none`, or an X

A field's help comes from `field(metadata={"help": ...})`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError

_TRUTH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_SEQUENCES: tuple[Any, ...] = (tuple, list, frozenset)


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option of a pass. `default` is its text on the command line; None: it is required."""

    name: str
    type: str
    default: str | None
    doc: str


def option_names(target: object) -> list[str]:
    """Return the names of the options of a pass or a pass class; none for other classes."""
    return [field.name for field in _fields(target)]


def describe_options(target: object) -> list[OptionInfo]:
    """Return the options of a pass class, or of a pass with its values as defaults."""
    return [
        OptionInfo(
            name=field.name,
            type=_type_text(_annotation(target, field.name)),
            default=_default_text(target, field),
            doc=str(field.metadata.get("help", "")),
        )
        for field in _fields(target)
    ]


def read_options(target: object, texts: Mapping[str, str], label: str) -> dict[str, object]:
    """Parse options of `target`; `label` names it in errors."""
    values: dict[str, object] = {}
    for name, text in texts.items():
        annotation = _annotation(target, name)
        try:
            values[name] = _convert(text, annotation)
        except ValueError as error:
            raise UsageError(f"{label}: {name}={text} is not valid: {error}") from error
    return values


def _fields(target: object) -> list[dataclasses.Field[Any]]:
    if not dataclasses.is_dataclass(target):
        return []
    return [field for field in dataclasses.fields(target) if field.init]


def _annotation(target: object, name: str) -> Any:
    """Return the evaluated annotation of a field, or its source text if evaluation fails.

    Other annotations, which may use names imported for type checkers only, are not evaluated.
    """
    cls = target if isinstance(target, type) else type(target)
    for base in cls.__mro__:
        annotation = inspect.get_annotations(base).get(name)
        if isinstance(annotation, str):
            module = sys.modules.get(base.__module__)
            try:
                hints = typing.get_type_hints(
                    types.SimpleNamespace(__annotations__={name: annotation}),
                    globalns=dict(vars(module)) if module else {},
                    localns=dict(vars(base)),
                )
            except (NameError, AttributeError, TypeError):
                return annotation
            return hints[name]
        if annotation is not None:
            return annotation
    return Any


def _convert(text: str, annotation: Any) -> object:
    """Parse `text` as the annotated type; raises ValueError with the reason."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        if text.lower() not in _TRUTH:
            raise ValueError("expected true or false")
        return _TRUTH[text.lower()]
    if annotation is int or annotation is float:
        try:
            return annotation(text)
        except ValueError as error:
            raise ValueError(f"expected {_type_text(annotation)}") from error
    if annotation is str or annotation is Any:
        return text
    if annotation is Path:
        return Path(text).expanduser()
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _one_of(text, {member.name.lower(): member for member in annotation})
    if origin is typing.Literal:
        return _one_of(text, {str(value).lower(): value for value in arguments})
    if origin in (typing.Union, types.UnionType):
        return _convert_union(text, arguments)
    kind = typing.cast("Any", origin or annotation)
    if kind in _SEQUENCES:
        return kind(_convert_items(text, kind, arguments))
    raise ValueError(f"an option of type {_type_text(annotation)} can only be set in Python")


def _one_of(text: str, choices: Mapping[str, object]) -> object:
    if text.lower() not in choices:
        raise ValueError(f"choose one of {', '.join(choices)}")
    return choices[text.lower()]


def _convert_union(text: str, members: tuple[object, ...]) -> object:
    if types.NoneType in members and text.lower() == "none":
        return None
    reasons: list[str] = []
    # str accepts any text, and comes last
    for member in sorted((m for m in members if m is not types.NoneType), key=lambda m: m is str):
        try:
            return _convert(text, member)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(reasons))


def _convert_items(text: str, kind: object, arguments: tuple[object, ...]) -> list[object]:
    items = text.split("+") if text else []
    fixed_length = kind is tuple and bool(arguments) and arguments[-1] is not Ellipsis
    if not fixed_length:
        item_type = arguments[0] if arguments else str
        return [_convert(item, item_type) for item in items]
    if len(items) != len(arguments):
        raise ValueError(f"expected {len(arguments)} values joined by '+'")
    return [_convert(item, item_type) for item, item_type in zip(items, arguments, strict=True)]


def _type_text(annotation: Any) -> str:
    """Return a type for help texts: `int`, `a|b`, `str+...`, `int|none`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "|".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return "|".join(_type_text(argument) for argument in arguments)
    if origin in _SEQUENCES:
        if arguments[-1] is Ellipsis or origin is not tuple:
            return f"{_type_text(arguments[0])}+..."
        return "+".join(_type_text(argument) for argument in arguments)
    if annotation is types.NoneType:
        return "none"
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            return "|".join(member.name.lower() for member in annotation)
        return annotation.__name__
    return str(annotation)


def _default_text(target: object, field: dataclasses.Field[Any]) -> str | None:
    if not isinstance(target, type):
        return _value_text(getattr(target, field.name))
    if field.default is not MISSING:
        return _value_text(field.default)
    if field.default_factory is not MISSING:
        return _value_text(field.default_factory())
    return None


def _value_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, (tuple, list, frozenset)):
        return "+".join(_value_text(item) for item in typing.cast("tuple[object, ...]", value))
    return str(value)
