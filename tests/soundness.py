"""Is everything that `shapes` says true? Inferred facts against values of real runs.

A run gives numbers: the sizes of inputs bind the named dimensions, and an anonymous one is bound
where it is first seen. Every other inferred size and element is then evaluated and compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper, parser

from passes.analysis.shapes import Shapes
from tests import ort
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.symbolic import Dim, Expr, floordiv, maximum, minimum, mod
from toolkit.symbolic.polynomial import CALL, Atom

_OPS = {"floor": floordiv, "mod": mod, "min": minimum, "max": maximum}


@dataclass
class Report:
    """What was compared; `wrong` must stay empty."""

    wrong: list[str] = field(default_factory=list)
    sizes: int = 0
    elements: int = 0
    open: list[str] = field(default_factory=list)


class Sizes:
    """The numbers behind symbols and anonymous sizes in one run."""

    def __init__(self) -> None:
        self._numbers: dict[Atom, int] = {}

    def explain(self, dim: Dim, actual: int) -> int | None:
        """What `dim` comes to; a lone unbound size is bound to `actual`. None: cannot be told."""
        if not isinstance(dim, Expr):
            return dim
        try:
            return self._value(dim)
        except KeyError:
            atom = dim.atom
            if atom is None or atom.kind == CALL:
                return None
            self._numbers[atom] = actual
            return actual

    def _value(self, dim: Dim) -> Any:
        if not isinstance(dim, Expr):
            return dim
        total: Any = 0
        for monomial, factor in dim.terms.items():
            term = factor
            for atom in monomial:
                if atom.kind == CALL:
                    term *= reduce(_OPS[atom.op], [self._value(arg) for arg in atom.args])
                else:
                    term *= self._numbers[atom]
            total += term
        return total


def compare(model: Model, values: Mapping[str, Any], report: Report, order: Iterable[str]) -> None:
    """Compare what the main graph knows with the values of one run."""
    sizes = Sizes()
    graph = model.graph
    for name in order:
        value = values.get(name)
        if not isinstance(value, np.ndarray | np.generic):
            continue
        value = np.asarray(value)
        type_ = graph.type(name)
        if type_ is None or type_.shape is None:
            report.open.append(name)
        if type_ is None:
            continue
        found = "" if value.dtype.kind in "OUS" else _dtype(value)
        if type_.dtype and found and found != type_.dtype:
            report.wrong.append(f"{name}: element type {type_.dtype}, not {found}")
        if type_.shape is not None:
            if len(type_.shape) != value.ndim:
                report.wrong.append(f"{name}: {_show(type_.shape)}, but it is {value.shape}")
                continue
            for dim, actual in zip(type_.shape, value.shape, strict=True):
                told = sizes.explain(dim, actual)
                report.sizes += 1
                if told is not None and told != actual:
                    report.wrong.append(f"{name}: {_show(type_.shape)}, but it is {value.shape}")
        data = graph.data(name)
        if data is not None and value.dtype.kind in "iub":
            if data.shape != value.shape:
                report.wrong.append(f"{name}: contents {data}, but it is {value}")
                continue
            for dim, actual in zip(data.flat, value.flat, strict=True):
                told = sizes.explain(dim, int(actual))
                report.elements += 1
                if told is not None and told != int(actual):
                    report.wrong.append(f"{name}: contents {_show(data)}, but it is {value}")


def _dtype(value: np.ndarray) -> int:
    try:
        return helper.np_dtype_to_tensor_dtype(value.dtype)
    except (KeyError, ValueError):
        return 0


def _show(dims: Iterable[Dim]) -> str:
    return "[" + ", ".join(str(d) for d in np.asarray(dims, dtype=object).flat) + "]"


def infer(proto: ModelProto) -> Model:
    """The model after `shapes`, which must be idempotent and keep the index true."""
    model = Model.from_proto(proto)
    Shapes().run(model, Context())
    model.journal.commit()
    Shapes().run(model, Context())
    assert len(model.journal) == 0, "a second run changed something"
    model.graph.verify()
    return model


def run_everything(
    proto: ModelProto, runs: Iterable[Mapping[str, Any]]
) -> Iterable[dict[str, Any]]:
    """Every value of the main graph in onnxruntime, as the graph is written, for each feed."""
    exposed = ModelProto()
    exposed.CopyFrom(proto)
    shown = {o.name for o in exposed.graph.output}
    for node in exposed.graph.node:
        for name in node.output:
            if name and name not in shown:
                exposed.graph.output.append(ValueInfoProto(name=name))
                shown.add(name)
    session = ort.session(exposed)
    names = [o.name for o in session.get_outputs()]
    for feeds in runs:
        yield {**feeds, **dict(zip(names, session.run(names, dict(feeds)), strict=True))}


def check_sound(proto: ModelProto, runs: Iterable[Mapping[str, Any]]) -> tuple[Model, Report]:
    """Infer, run at every feed, compare everything. The report's `wrong` is asserted empty."""
    model = infer(proto)
    report = Report()
    for values in run_everything(proto, runs):
        order = [*model.graph.inputs, *(o for n in model.graph.nodes for o in n.output if o)]
        compare(model, values, report, order)
    assert not report.wrong, "\n".join(report.wrong)
    return model, report


def symbolic_inputs(proto: ModelProto, constants: Mapping[str, np.ndarray]) -> ModelProto:
    """A copy whose inputs have a named size in every dimension and whose outputs say nothing.

    The inputs in `constants` become initializers.
    """
    copy = ModelProto()
    copy.CopyFrom(proto)
    strip_outputs(copy)
    kept = [i for i in copy.graph.input if i.name not in constants]
    for declared in kept:
        if declared.type.WhichOneof("value") == "tensor_type":
            for axis, dim in enumerate(declared.type.tensor_type.shape.dim):
                dim.Clear()
                dim.dim_param = f"{declared.name}_{axis}"
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    for name, array in constants.items():
        copy.graph.initializer.append(_tensor(name, array))
    return copy


def strip_outputs(proto: ModelProto) -> None:
    """Leave nothing but names in the declarations of outputs and inner values."""
    for output in proto.graph.output:
        output.ClearField("type")
    del proto.graph.value_info[:]


def _tensor(name: str, array: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(np.asarray(array), name)


# -- models as text

SIZES = (
    {"b": 2, "s": 5, "h": 9, "w": 12},
    {"b": 1, "s": 1, "h": 8, "w": 8},
    {"b": 3, "s": 4, "h": 15, "w": 7},
)


def parse(text: str, opset: int = 17) -> ModelProto:
    text = text.strip()
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "custom" : 1]>\n'
    return parser.parse_model(text if text.startswith("<") else header + text)


def feeds(proto: ModelProto, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """Random floats and zeros and ones, at these sizes; unnamed dimensions are 3."""
    random = np.random.default_rng(seed)
    stored = {t.name for t in proto.graph.initializer}
    found: dict[str, Any] = {}
    for declared in proto.graph.input:
        if declared.name in stored:
            continue
        tensor = declared.type.tensor_type
        shape = [
            sizes[d.dim_param] if d.dim_param else d.dim_value if d.HasField("dim_value") else 3
            for d in tensor.shape.dim
        ]
        kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if kind.kind in "iub":
            found[declared.name] = np.asarray(random.integers(0, 2, shape)).astype(kind)
        else:
            found[declared.name] = np.asarray(random.standard_normal(shape)).astype(kind)
    return found


def sound(text: str, opset: int = 17, sizes: Sequence[Mapping[str, int]] = SIZES) -> Model:
    """The model after `shapes`, with everything it says compared to runs at several sizes."""
    proto = parse(text, opset)
    model, report = check_sound(proto, [feeds(proto, each) for each in sizes])
    assert report.sizes or report.elements
    return model


def shape(model: Model, value: str = "y") -> str:
    found = model.graph.shape(value)
    return "?" if found is None else f"[{', '.join(map(str, found))}]"


def contents(model: Model, value: str) -> str:
    found = model.graph.data(value)
    return "?" if found is None else f"[{', '.join(str(item) for item in found.flat)}]"


def is_anonymous(model: Model, value: str, axis: int) -> bool:
    found = model.graph.shape(value)
    assert found is not None
    return str(found[axis]).startswith("?")
