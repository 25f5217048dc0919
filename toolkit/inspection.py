"""The data behind `toolkit inspect`: the contents of a model, and why it does not run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import NodeProto, TensorProto, TypeProto, ValueInfoProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import dtype_name
from toolkit.pass_manager.result import count_ops
from toolkit.runtime.diagnose import find_obstacles
from toolkit.storage import serialize
from toolkit.storage.weights import is_external, nbytes, reference
from toolkit.targets.releases import Needs, find_release, needs_of, obstacles

Dimension = int | str | None
"""A size, the name of a dynamic dimension, or None if unknown."""


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """An input or output. `shape` is None if the rank is unknown."""

    name: str
    type: str
    shape: tuple[Dimension, ...] | None
    has_default: bool = False


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One stored tensor and the operators that use it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    ops: tuple[str, ...]
    file: str | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The contents of a model, as `toolkit inspect` shows them."""

    path: str | None
    bytes: int
    ir_version: int
    opsets: dict[str, int]
    producer: str
    metadata: dict[str, str]
    inputs: list[ValueFacts]
    outputs: list[ValueFacts]
    dynamic: dict[str, list[str]]
    nodes: int
    subgraphs: int
    functions: list[str]
    ops: dict[str, int]
    parameters: int
    weight_bytes: int
    bytes_by_dtype: dict[str, int]
    bytes_by_op: dict[str, int]
    tensors: list[TensorFacts]
    external_files: dict[str, int]
    loads_on: Needs
    runtime: str
    """The runtime that `obstacles` are about."""
    obstacles: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain data for `json.dump`."""
        return dataclasses.asdict(self) | {"loads_on": self.loads_on.to_json()}


def inspect(model: Model, custom_ops: Sequence[str] = (), runtime: str | None = None) -> ModelFacts:
    """Return the facts about a model.

    Tries to load it in onnxruntime; for another release, a table says what that lacks.
    """
    release = find_release(runtime) if runtime is not None else None
    shell = model.to_proto()
    graphs = list(model.graphs())
    tensors = sorted(_stored(model, graphs), key=lambda t: (-t.bytes, t.name))
    inputs = [_value(v, v.name in model.graph.initializers) for v in model.graph.interface_inputs()]
    outputs = [_value(v) for v in model.graph.interface_outputs()]
    external = _external_files(model)
    return ModelFacts(
        path=str(model.path) if model.path else None,
        bytes=_file_bytes(model, external),
        ir_version=model.ir_version,
        opsets={domain or "ai.onnx": version for domain, version in model.opsets.items()},
        producer=f"{shell.producer_name} {shell.producer_version}".strip(),
        metadata={entry.key: entry.value for entry in shell.metadata_props},
        inputs=inputs,
        outputs=outputs,
        dynamic=_dynamic(inputs, outputs),
        nodes=model.node_count(),
        subgraphs=len(graphs) - 1,
        functions=[
            nd.qualified(NodeProto(domain=f.domain, op_type=f.name)) for f in model.functions
        ],
        ops=count_ops(model),
        parameters=sum(math.prod(t.shape) for t in tensors),
        weight_bytes=sum(t.bytes for t in tensors),
        bytes_by_dtype=_total(tensors, lambda t: t.dtype),
        bytes_by_op=_total(tensors, lambda t: t.ops[0] if t.ops else "(unused)"),
        tensors=tensors,
        external_files=external,
        loads_on=needs_of(model),
        runtime=str(release or "onnxruntime on this machine"),
        obstacles=obstacles(model, release) if release else find_obstacles(model, custom_ops),
    )


def _stored(model: Model, graphs: list[Graph]) -> Iterator[TensorFacts]:
    """Yield the initializers of all graphs and the tensors of Constant nodes."""
    for graph in graphs:
        constants = (node.output[0] for node in graph.nodes if nd.is_op(node, "Constant"))
        for name in (*graph.initializers, *constants):
            tensor = graph.tensor(name)
            if tensor is not None:
                yield TensorFacts(
                    name=name,
                    dtype=dtype_name(tensor.data_type),
                    shape=tuple(tensor.dims),
                    bytes=nbytes(tensor),
                    ops=tuple(dict.fromkeys(map(nd.qualified, graph.users(name)))),
                    file=_data_file(model, tensor),
                )


def _data_file(model: Model, tensor: TensorProto) -> str | None:
    """Return the external data file that contains a tensor, or None."""
    if not is_external(tensor) or model.weights.overlaid(tensor) is not None:
        return None
    location = reference(tensor)[0]
    return location if model.path is None or location != model.path.name else None


def _total(tensors: list[TensorFacts], key: Callable[[TensorFacts], str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for tensor in tensors:
        sums[key(tensor)] += tensor.bytes
    return dict(sums.most_common())


def _external_files(model: Model) -> dict[str, int]:
    """Return the model's external data files with their sizes."""
    folder = model.weights.folder or Path()
    named = {_data_file(model, tensor) for tensor in model.tensors()}
    return {name: (folder / name).stat().st_size for name in sorted(filter(None, named))}


def _file_bytes(model: Model, external: dict[str, int]) -> int:
    if model.path is None:
        return serialize.size_of(serialize.inflate(model.to_proto(), model.weights))
    return model.path.stat().st_size + sum(external.values())


# Values ------------------------------------------------------------------------------------------


def _value(declared: ValueInfoProto, has_default: bool = False) -> ValueFacts:
    kind, shape = describe_type(declared.type)
    return ValueFacts(declared.name, kind, shape, has_default)


def describe_type(declared: TypeProto) -> tuple[str, tuple[Dimension, ...] | None]:
    """Return a type in words, and its shape if it is a tensor."""
    kind = declared.WhichOneof("value")
    if kind == "tensor_type":
        return dtype_name(declared.tensor_type.elem_type), _shape(declared.tensor_type)
    if kind == "sparse_tensor_type":
        sparse = declared.sparse_tensor_type
        return f"sparse {dtype_name(sparse.elem_type)}", _shape(sparse)
    if kind == "sequence_type":
        return f"sequence of {describe_type(declared.sequence_type.elem_type)[0]}", None
    if kind == "optional_type":
        return f"optional {describe_type(declared.optional_type.elem_type)[0]}", None
    if kind == "map_type":
        entry = declared.map_type
        return f"map of {dtype_name(entry.key_type)} to {describe_type(entry.value_type)[0]}", None
    return "unknown", None


def _shape(
    tensor: TypeProto.Tensor | TypeProto.SparseTensor,
) -> tuple[Dimension, ...] | None:
    if not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
    )


def _dynamic(inputs: list[ValueFacts], outputs: list[ValueFacts]) -> dict[str, list[str]]:
    """Return the axes of each dynamic dimension by its name; unnamed ones under `?`."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for value in (*inputs, *outputs):
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int):
                places[size or "?"].append(f"{value.name}[{axis}]")
    return dict(places)
