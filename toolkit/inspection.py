"""The facts behind `toolkit inspect`: what a model holds, and what would not run."""

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

Dimension = int | str | None
"""A size, the name of a dynamic dimension, or None where the model says nothing."""


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """An input or output. `shape` is None when even the rank is open."""

    name: str
    type: str
    shape: tuple[Dimension, ...] | None
    has_default: bool = False


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One stored tensor and the operators that read it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    ops: tuple[str, ...]
    file: str | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Everything that `toolkit inspect` knows."""

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
    obstacles: list[str]

    def to_json(self) -> dict[str, Any]:
        """The facts as plain data for `json.dump`."""
        return dataclasses.asdict(self)


def inspect(model: Model, custom_ops: Sequence[str] = ()) -> ModelFacts:
    """Look at a model without changing it; tries to load it in onnxruntime."""
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
        obstacles=find_obstacles(model, custom_ops),
    )


def _stored(model: Model, graphs: list[Graph]) -> Iterator[TensorFacts]:
    """Initializers of all graphs, and what Constant nodes hold."""
    for graph in graphs:
        for name, tensor in graph.initializers.items():
            yield _tensor(model, name, tensor, _readers(graph, name))
        for node in graph.nodes:
            if nd.is_op(node, "Constant"):
                name = node.output[0]
                tensor = graph.tensor(name)
                if tensor is not None:
                    yield _tensor(model, name, tensor, _readers(graph, name))


def _tensor(model: Model, name: str, tensor: TensorProto, ops: tuple[str, ...]) -> TensorFacts:
    return TensorFacts(
        name=name,
        dtype=dtype_name(tensor.data_type),
        shape=tuple(tensor.dims),
        bytes=nbytes(tensor),
        ops=ops,
        file=_data_file(model, tensor),
    )


def _data_file(model: Model, tensor: TensorProto) -> str | None:
    """The file beside the model that holds the tensor's bytes, if it is in one."""
    if not is_external(tensor) or model.weights.overlaid(tensor) is not None:
        return None
    location = reference(tensor)[0]
    return location if model.path is None or location != model.path.name else None


def _readers(graph: Graph, value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(nd.qualified, graph.users(value))))


def _total(tensors: list[TensorFacts], key: Callable[[TensorFacts], str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for tensor in tensors:
        sums[key(tensor)] += tensor.bytes
    return dict(sums.most_common())


def _external_files(model: Model) -> dict[str, int]:
    """Data files beside the model, with their sizes."""
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
    """The type in words, and the shape where it has one."""
    kind = declared.WhichOneof("value")
    if kind == "tensor_type":
        return dtype_name(declared.tensor_type.elem_type), _shape(declared.tensor_type)
    if kind == "sparse_tensor_type":
        sparse = declared.sparse_tensor_type
        return f"sparse {dtype_name(sparse.elem_type)}", _shape(sparse)
    if kind == "sequence_type":
        return f"sequence of {_in_words(declared.sequence_type.elem_type)}", None
    if kind == "optional_type":
        return f"optional {_in_words(declared.optional_type.elem_type)}", None
    if kind == "map_type":
        entry = declared.map_type
        return f"map of {dtype_name(entry.key_type)} to {_in_words(entry.value_type)}", None
    return "unknown", None


def _in_words(declared: TypeProto) -> str:
    return describe_type(declared)[0]


def _shape(
    tensor: TypeProto.Tensor | TypeProto.SparseTensor,
) -> tuple[Dimension, ...] | None:
    if not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
    )


def _dynamic(inputs: list[ValueFacts], outputs: list[ValueFacts]) -> dict[str, list[str]]:
    """Each named dynamic dimension and where it occurs; those without a name under `?`."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for value in (*inputs, *outputs):
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int):
                places[size or "?"].append(f"{value.name}[{axis}]")
    return dict(places)
