"""Parse plans from JSON; errors are one line, since users edit plans by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_args

from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.quantization.number_format import FORMATS
from toolkit.quantization.plan import (
    BLOCK_SIZES,
    VERSION,
    ActivationType,
    Entry,
    Method,
    Plan,
    Scheme,
    TensorEntry,
    WeightType,
)

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "scheme": get_args(Scheme),
    "weight": get_args(WeightType),
    "dtype": get_args(ActivationType),
    "symmetric": (True, False),
    "reduce_range": (True, False),
    "tied": (True, False),
    "float_result": (True, False),
    "block_size": (*BLOCK_SIZES, None),
    "method": get_args(Method),
}
_NUMBERS = ("low", "high", "scale")
_WHOLE = ("axis", "zero")
_SMALLEST, _LARGEST = 2.0**-126, 3.4e38
"""The range of normal positive float32 numbers."""


def read_plan(source: Path | Plan, model: Model) -> Plan:
    """Return the plan, read from JSON if it is a path, with its entries completed.

    Raises UsageError unless it refers to nodes and tensors of `model`.
    """
    if isinstance(source, Plan):
        return source.completed(model)
    path = source
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"the plan '{path}' does not exist; --plan FILE writes one") from error
    except OSError as error:
        raise UsageError(f"the plan '{path}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"'{path}' is not JSON: it is not text") from error
    plan = parse_plan(text, f"'{path}'")
    plan.require_known(model, f"'{path}'")
    return plan.completed(model)


def parse_plan(text: str, source: str = "plan") -> Plan:
    """Parse the output of `Plan.to_json`; raise UsageError for anything else."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{source}: expected an object with 'version' and 'nodes'")
    found = cast("dict[str, Any]", data)
    version = found.get("version")
    if type(version) is not int or version != VERSION:
        raise UsageError(f"{source}: version {version!r} is not {VERSION}")
    unknown = sorted(set(found) - {"version", "nodes", "tensors"})
    if unknown:
        raise UsageError(f"{source}: '{unknown[0]}' is none of version, nodes, tensors")
    nodes = _items(found.get("nodes"), f"{source}: 'nodes'")
    tensors = _items(found.get("tensors", []), f"{source}: 'tensors'")
    entries = tuple(_entry(item, f"{source}: node {i}") for i, item in enumerate(nodes))
    ranges = tuple(_tensor(item, f"{source}: tensor {i}") for i, item in enumerate(tensors))
    _require_once((entry.key for entry in entries), source)
    _require_once((f"tensor {found.tensor}" for found in ranges), source)
    return Plan(entries, ranges)


def _require_once(names: Iterable[str], source: str) -> None:
    counted = Counter(names)
    if counted and max(counted.values()) > 1:
        kind, _, name = counted.most_common(1)[0][0].partition(" ")
        raise UsageError(f"{source}: {kind} '{name}' occurs twice")


def _items(listed: Any, what: str) -> list[Any]:
    if not isinstance(listed, list):
        raise UsageError(f"{what} is not a list")
    return cast("list[Any]", listed)


def _entry(item: Any, where: str) -> Entry:
    given = _checked(item, [field.name for field in fields(Entry)], where)
    if not given.get("node") and not given.get("output"):
        raise UsageError(f"{where}: give its 'output' or 'node'")
    return Entry(**given)


def _tensor(item: Any, where: str) -> TensorEntry:
    given = _checked(item, [field.name for field in fields(TensorEntry)], where)
    if not given.get("tensor"):
        raise UsageError(f"{where}: give its name as 'tensor'")
    found = TensorEntry(**given)
    where = f"{where} ('{found.tensor}')"
    ranged = found.low is not None and found.high is not None
    if ranged == (found.scale is not None):
        raise UsageError(f"{where}: give either 'low' and 'high', or 'scale' and 'zero'")
    if found.low is not None and found.high is not None and found.low > found.high:
        raise UsageError(f"{where}: low {found.low} is above high {found.high}")
    if found.scale is not None:
        fmt = FORMATS[found.dtype]
        if not _SMALLEST <= found.scale <= _LARGEST:
            raise UsageError(f"{where}: scale {found.scale} is not a positive 32-bit float")
        if found.zero is None or not fmt.low <= found.zero <= fmt.high:
            raise UsageError(f"{where}: zero {found.zero} is not in {fmt.low}..{fmt.high}")
    return found


def _checked(item: Any, names: list[str], where: str) -> dict[str, Any]:
    """Return the members of an object after checking their types."""
    if not isinstance(item, dict):
        raise UsageError(f"{where} is not an object")
    given = cast("dict[str, Any]", item)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UsageError(f"{where}: '{unknown[0]}' is none of {', '.join(names)}")
    for name, value in given.items():
        if name in _CHOICES:
            if not any(value == c and type(value) is type(c) for c in _CHOICES[name]):
                listed = ", ".join(map(str, _CHOICES[name])).lower()
                raise UsageError(f"{where}: {name} {value!r} is none of {listed}")
        elif name in _WHOLE:
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UsageError(f"{where}: {name} {value!r} is not an integer")
        elif name in _NUMBERS:
            if value is not None and not _is_finite(value):
                raise UsageError(f"{where}: {name} {value!r} is not a number")
        elif not isinstance(value, str):
            raise UsageError(f"{where}: {name} {value!r} is not a string")
    return given


def _is_finite(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
