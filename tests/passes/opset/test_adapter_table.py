"""The adapter table matches the schemas of onnx and the kernels of onnxruntime."""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any

from onnx import defs

from passes.opset.adapter_table import ADAPTERS, EXPERIMENTAL, NEEDS_TYPES, adapters_of
from tests.passes.opset.compatible_changes import COMPATIBLE
from toolkit.runtime import MAX_OPSET
from toolkit.targets.ort_cpu import TARGET as ORT_CPU


def transitions() -> set[tuple[str, int]]:
    """Return (operator, opset) for every change of an operator up to the newest supported opset."""
    return {(op, new) for op, versions in schemas().items() for new in sorted(versions)[1:]}


def schemas() -> dict[str, dict[int, defs.OpSchema]]:
    found: dict[str, dict[int, defs.OpSchema]] = defaultdict(dict)
    for schema in defs.get_all_schemas_with_history():
        if not schema.domain and schema.since_version <= MAX_OPSET:
            found[schema.name][schema.since_version] = schema
    return found


def test_every_operator_change_has_an_adapter_or_is_listed_as_compatible() -> None:
    adapted = {(op, version) for version, ops in ADAPTERS.items() for op in ops}
    compatible = {(op, version) for version, ops in COMPATIBLE.items() for op in ops.split()}
    assert not adapted & compatible
    assert adapted | compatible == transitions()


def losses(old: defs.OpSchema, new: defs.OpSchema) -> list[str]:
    """Return the features of `old` that `new` drops or interprets differently."""
    found = ["it is deprecated"] if new.deprecated else []
    for name, attribute in old.attributes.items():
        now = new.attributes.get(name)
        if now is None or now.type != attribute.type:
            found.append(f"attribute {name}")
        elif now.default_value != attribute.default_value or (now.required > attribute.required):
            found.append(f"default of {name}")
    found += [n for n, a in new.attributes.items() if a.required and n not in old.attributes]
    for before, after in ((old.inputs, new.inputs), (old.outputs, new.outputs)):
        found += [
            f"types of {a.name}"
            for a, b in zip(before, after, strict=False)
            if not set(a.types) <= set(b.types)
        ]
        found += [a.name for a in before[len(after) :]]
        required = defs.OpSchema.FormalParameterOption.Single
        found += [b.name for b in after[len(before) :] if b.option == required]
        found += [
            b.name for a, b in zip(before, after, strict=False) if b.option == required != a.option
        ]
    return found


def test_compatible_changes_take_nothing_away() -> None:
    table = schemas()
    misspelt = {("GRU", 3): ["default of direction"]}  # "foward" was a typo in the schema
    for version, ops in COMPATIBLE.items():
        for op in ops.split():
            before = max(v for v in table[op] if v < version)
            lost = losses(table[op][before], table[op][version])
            assert lost == misspelt.get((op, version), []), (op, version)


def test_operators_that_need_types_have_adapters() -> None:
    known = {op for table in (ADAPTERS, EXPERIMENTAL) for ops in table.values() for op in ops}
    assert known >= set(NEEDS_TYPES.split())


def test_kernels_that_onnxruntime_has_lost_are_known() -> None:
    """Compare it with the kernels that end where a new version of an operator begins."""
    state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    kernels: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider" and not kernel.domain:
            kernels[kernel.op_name].add(kernel.version_range)

    def has_kernel(op: str, since: int) -> bool:
        # An open-ended range only covers the version it starts with.
        ranges = kernels[op]
        return any(a == since or (a < since <= b < 1 << 30) for a, b in ranges)

    known: dict[str, dict[int, Any]] = schemas()
    lost = {
        (op, version)
        for op, versions in known.items()
        for before, version in zip(sorted(versions), sorted(versions)[1:], strict=False)
        if has_kernel(op, before)
        and not has_kernel(op, version)
        and not versions[version].deprecated
        and not versions[version].has_function
        and not versions[version].has_context_dependent_function
    }
    # Functions, which the runtime expands and runs as far as it can.
    functions = {("Bernoulli", 22), ("Swish", 25)}
    listed = {
        (op, version)
        for op, versions in known.items()
        for version in range(2, MAX_OPSET + 1)
        if op not in adapters_of(version) and ORT_CPU.loses_kernel(op, version)
        if any(since < version for since in versions)
    }
    assert lost | functions == listed
