#!/usr/bin/env python3
# pyright: basic
"""Record what each onnxruntime release loads on a CPU, for `toolkit.targets.releases`.

    python benchmarks/ort_releases.py 1.18.1 1.20.1 1.23.2 --environments DIR

Every release is installed from the package index into an environment of its own below
`--environments`, unless it is there already, and asked for its kernels, its schemas and the newest
opset and IR version of a model that it loads. The result is written to
`toolkit/targets/data/ort-cpu.json`, by intervals of releases: give all releases at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import TensorProto, defs, helper

DATA = Path(__file__).parents[1] / "toolkit" / "targets" / "data" / "ort-cpu.json"

COLLECT = """
import json, sys
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as state

ort.set_default_logger_severity(4)

def loads(model):
    try:
        ort.InferenceSession(bytes.fromhex(model), providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True

models = json.load(sys.stdin)
kernels = [
    [k.domain, k.op_name, *k.version_range, {n: sorted(t) for n, t in k.type_constraints.items()}]
    for k in state.get_all_opkernel_def() if k.provider == "CPUExecutionProvider"
]
schemas = [
    [
        s.domain, s.name, s.since_version,
        [[i.name, i.typeStr] for i in s.inputs], [[o.name, o.typeStr] for o in s.outputs],
        s.max_input > len(s.inputs),
        sorted(s.attributes),
    ]
    for s in state.get_all_operator_schema()
]
json.dump({
    "version": ort.__version__,
    "opset": max(n for n, model in enumerate(models["opset"], 1) if loads(model)),
    "ir": max(n for n, model in enumerate(models["ir"], 3) if loads(model)),
    "kernels": kernels, "schemas": schemas,
}, sys.stdout)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what onnxruntime releases load on a CPU.")
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    collected: dict[str, Any] = {}
    for version in sorted(given.versions, key=_numbers):
        collected[version] = collect(environment(version, given.environments))
        print(version, *(f"{key} {collected[version][key]}" for key in ("opset", "ir")))
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(_written(collected), encoding="utf-8")
    print(f"{DATA}: {DATA.stat().st_size:,} bytes")


def environment(version: str, folder: Path) -> Path:
    """Return the Python of an environment with this onnxruntime, made if it does not exist."""
    path = folder / f"ort{version}"
    python = path / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
        numpy = "numpy<2" if _numbers(version) < (1, 19) else "numpy"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"onnxruntime=={version}", numpy], check=True)
    return python


def collect(python: Path) -> dict[str, Any]:
    """Return the kernels, schemas and limits of the onnxruntime in an environment."""
    models = {
        "opset": [_trivial(opset, 3).hex() for opset in range(1, 40)],
        "ir": [_trivial(7, ir).hex() for ir in range(3, 25)],
    }
    done = subprocess.run(
        [python, "-c", COLLECT],
        input=json.dumps(models),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _trivial(opset: int, ir: int) -> bytes:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", value[:1], value[1:])
    if opset < 6:  # Abs had another attribute
        graph.node[0].op_type = "Not"
        for info in value:
            info.type.tensor_type.elem_type = TensorProto.BOOL
        graph.ClearField("input")
        graph.ClearField("output")
        graph.input.append(value[0])
        graph.output.append(value[1])
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, ir_version=ir, opset_imports=imports).SerializeToString()


# The table, by intervals of releases -------------------------------------------------------------


def _written(collected: Mapping[str, Any]) -> str:
    """Return the table: one operator per line, its entries as [first, last release, ...]."""
    versions = list(collected)
    kernels: dict[str, list[list[str]]] = defaultdict(lambda: [[] for _ in versions])
    schemas: dict[str, list[list[str]]] = defaultdict(lambda: [[] for _ in versions])
    standard = {(s.domain, s.name, s.since_version) for s in defs.get_all_schemas_with_history()}
    for at, found in enumerate(collected.values()):
        ranges = defaultdict(list)
        for domain, op, first, last, types in found["kernels"]:
            short = {name: sorted(map(_short, kinds)) for name, kinds in types.items()}
            ranges[domain, op, first, last if last < 1 << 30 else 0].append(short)
        for (domain, op, first, last), types in ranges.items():
            for merged in _merged(types):
                entry = [first, last, {name: " ".join(kinds) for name, kinds in merged.items()}]
                kernels[f"{domain}:{op}"][at].append(json.dumps(entry, sort_keys=True))
        for domain, op, since, *signature, repeats, attributes in found["schemas"]:
            if (domain, op, since) not in standard:
                if repeats:  # the last operand
                    signature[0][-1][0] += "*"
                formals = [" ".join(f"{n}:{t}" for n, t in listed) for listed in signature]
                entry = [since, *formals, " ".join(attributes)]
                schemas[f"{domain}:{op}"][at].append(json.dumps(entry))
    lines = [
        f'"releases": {json.dumps(versions)}',
        f'"opset": {json.dumps([found["opset"] for found in collected.values()])}',
        f'"ir": {json.dumps([found["ir"] for found in collected.values()])}',
        f'"kernels": {{\n{_table(kernels)}\n}}',
        f'"schemas": {{\n{_table(schemas)}\n}}',
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _table(entries: Mapping[str, Sequence[Sequence[str]]]) -> str:
    lines = []
    for name, by_release in sorted(entries.items()):
        texts = [
            json.dumps([first, last, *json.loads(entry)], separators=(",", ":"))
            for entry in dict.fromkeys(e for found in by_release for e in found)
            for first, last in _runs(at for at, found in enumerate(by_release) if entry in found)
        ]
        lines.append(f"{json.dumps(name)}: [{','.join(texts)}]")
    return ",\n".join(lines)


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers as (first, last)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def _merged(kernels: list[dict[str, list[str]]]) -> list[dict[str, list[str]]]:
    """Join kernels that differ in the types of one constraint."""
    rest = list(kernels)
    for name in sorted({name for kernel in kernels for name in kernel}):
        groups: dict[str, dict[str, list[str]]] = {}
        for kernel in rest:
            others = json.dumps({n: k for n, k in kernel.items() if n != name}, sort_keys=True)
            if name not in kernel:
                groups.setdefault(f"without {others}", kernel)
            elif others in groups:
                kinds = {*groups[others][name], *kernel[name]}
                groups[others] = {**kernel, name: sorted(kinds)}
            else:
                groups[others] = kernel
        rest = list(groups.values())
    return rest


def _short(kind: str) -> str:
    """Return a type without `tensor()`, which is the usual one."""
    return kind[len("tensor(") : -1] if kind.startswith("tensor(") else kind


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    main()
