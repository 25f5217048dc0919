"""Dynamic int8: weights are quantized now, activations as they come. It needs no data.

Linear layers with constant weights compute in integers, and tables that rows are taken from hold a
quarter of the bytes. LSTMs compute in integers on onnxruntime. Convolutions are left alone unless
somebody asks for them: their dynamic kernel is slower than floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from onnx import NodeProto

from passes.quantize.arithmetic import Unfit
from passes.quantize.dynamic_conv import Convolution, ConvolutionWriter, convolution_of
from passes.quantize.layers import Layer, Linear, Table, layer_of, readers_of
from passes.quantize.plan import Entry, Plan, Selection, as_applied, nodes_of, note_left
from passes.quantize.recurrent import Recurrent, RecurrentWriter, recurrent_of
from passes.quantize.troubles import note_hard
from passes.quantize.writing import Writer
from toolkit import nodes as nd
from toolkit.errors import UsageError
from toolkit.graph import Graph
from toolkit.misses import Miss
from toolkit.model import Model
from toolkit.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.context import Context

_MIN_OPSET = 11
"""The first with DynamicQuantizeLinear."""

_QUANTIZED = frozenset(
    (
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
        *("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "QGemm", "QAttention"),
        *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLSTM"),
        *("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized"),
    )
)
"""Operators of which one is enough to know that somebody has quantized the model."""


Dynamic: TypeAlias = Layer | Recurrent | Convolution


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A layer with weights, where it is, and why it cannot be quantized, if so."""

    graph: Graph
    node: NodeProto
    layer: Dynamic | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QuantizeDynamic:
    """Compute linear layers and LSTMs in int8, activations on the fly; tables by rows."""

    name: ClassVar[str] = "quantize-dynamic"
    tolerance: ClassVar[Tolerance] = QUANT
    per_channel: bool = field(
        default=True, metadata={"help": "A scale for each output of a layer, or one for all."}
    )
    reduce_range: bool = field(
        default=False, metadata={"help": "Weights in -64..64, for x86 processors without VNNI."}
    )
    embeddings: bool = field(
        default=True, metadata={"help": "Quantize the tables of Gather too, by rows."}
    )
    convolutions: bool = field(
        default=False, metadata={"help": "Quantize convolutions too: smaller, and slower."}
    )
    include: tuple[str, ...] = field(
        default=("*",), metadata={"help": "Patterns of operators, nodes or outputs to quantize."}
    )
    exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Patterns of operators, nodes or outputs to leave float."}
    )
    min_elements: int = field(
        default=4096, metadata={"help": "Layers with fewer weights stay float: they do not pay."}
    )
    plan: Path | None = field(
        default=None, metadata={"help": "A plan (JSON) to follow, in place of the options above."}
    )

    def run(self, model: Model, ctx: Context) -> None:
        if self.plan is None:
            reason = not_for(model, "dynamic quantization", _MIN_OPSET)
            if reason:
                ctx.note(reason)
                return
            note_hard(model, ctx)
            plan = self.make_plan(model, on_runtime=ctx.target.startswith("ort"))
            for pattern in Selection(self.include, self.exclude).idle(nodes_of(model)):
                ctx.note(f"no node matches '{pattern}'")
            note_left(plan, ctx)
        else:
            plan = read_plan(self.plan, model)
        apply_plan(model, plan, ctx)
        ctx.plans.append(as_applied(model, plan))

    def make_plan(self, model: Model, on_runtime: bool = True) -> Plan:
        """What this pass would do, for every node that has weights."""
        found = list(layers_in(model, self.convolutions))
        entries = {id(item.node): self._entry(item, on_runtime) for item in found}
        for item in found:
            if isinstance(item.layer, Table) and entries[id(item.node)].scheme == "dynamic":
                readers = readers_of(item.layer.weight)
                others = readers is None or any(
                    id(n) not in entries or entries[id(n)].scheme == "float" for n in readers
                )
                if others:
                    reason = "a table that others read as floats"
                    entries[id(item.node)] = Entry.of(item.node, reason=reason)
        return Plan(tuple(entries.values()))

    def _entry(self, item: Found, on_runtime: bool) -> Entry:
        node, layer = item.node, item.layer
        if layer is None:
            return Entry.of(node, reason=item.reason)
        is_table = isinstance(layer, Table)
        size = layer.weight.size if isinstance(layer, Linear | Table) else layer.size
        reason = ""
        if not Selection(self.include, self.exclude).takes(node):
            reason = "excluded"
        elif is_table and not self.embeddings:
            reason = "a table"
        elif isinstance(layer, Recurrent) and not on_runtime:
            reason = "a recurrent layer, and only onnxruntime has an int8 kernel"
        elif size < self.min_elements:
            reason = f"fewer than {self.min_elements} weights"
        if reason:
            return Entry.of(node, reason=reason)
        axis = _axes(layer)[0] if is_table or self.per_channel else None
        return Entry.of(node, scheme="dynamic", reduce_range=self.reduce_range, axis=axis)


def read_plan(path: Path, model: Model) -> Plan:
    """A plan from a file, about nodes of this model; UsageError for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"'{path}' cannot be read: {error}") from error
    plan = Plan.from_json(text, f"'{path}'")
    plan.require_known(model, f"'{path}'")
    return plan


def apply_plan(model: Model, plan: Plan, ctx: Context) -> None:
    """Quantize what the plan calls dynamic; other schemes are for other passes."""
    chosen: list[tuple[Found, Dynamic, Entry]] = []
    waiting = {id(entry): entry for entry in plan.entries if entry.scheme == "dynamic"}
    for item in layers_in(model, convolutions=True):
        entry = plan.find(item.node)
        if entry is None or entry.scheme != "dynamic":
            continue
        waiting.pop(id(entry), None)
        if item.layer is None:
            raise UsageError(f"{entry.label} cannot be dynamic: it has {item.reason}")
        _require_supported(entry, item.layer)
        chosen.append((item, item.layer, entry))
    for entry in waiting.values():
        raise UsageError(
            f"{entry.label} cannot be dynamic: it is no linear layer, table or LSTM of constants, "
            "nor a convolution"
        )
    tables = [layer.weight.key for _, layer, _ in chosen if isinstance(layer, Table)]
    writer, recurrent = Writer(frozenset(tables)), RecurrentWriter()
    convolutions = ConvolutionWriter()
    for item, layer, entry in chosen:
        start = model.journal.position
        try:
            if isinstance(layer, Linear):
                writer.linear(item.graph, layer, entry)
            elif isinstance(layer, Recurrent):
                recurrent.write(item.graph, layer, entry)
            elif isinstance(layer, Convolution):
                convolutions.write(item.graph, layer, entry)
            else:
                writer.table(item.graph, layer, entry)
        except Unfit as unfit:
            model.journal.undo_to(start)
            ctx.note(f"{nd.label(item.node)} stays float: it has {unfit}")


def _axes(layer: Dynamic) -> tuple[int | None, ...]:
    """Along which scales may lie; first the one that outputs are along."""
    if isinstance(layer, Table):
        return (0,)
    return (0, None) if isinstance(layer, Convolution) else (1, None)


def _require_supported(entry: Entry, layer: Dynamic) -> None:
    axes = _axes(layer)
    if entry.weight != "int8" or not entry.symmetric or entry.axis not in axes:
        listed = " or ".join(str(axis).lower() for axis in axes)
        raise UsageError(
            f"{entry.label} cannot be dynamic with these weights: they are symmetric int8, "
            f"axis {listed}"
        )


def layers_in(model: Model, convolutions: bool = False) -> Iterator[Found]:
    """The nodes with constant weights, in all graphs; those of convolutions for who asks."""
    for graph in list(model.graphs()):
        for node in list(graph.nodes):
            try:
                layer = layer_of(graph, node) or recurrent_of(graph, node)
                if layer is None and convolutions:
                    layer = convolution_of(graph, node)
            except Miss as miss:
                yield Found(graph, node, None, str(miss))
            else:
                if layer is not None:
                    yield Found(graph, node, layer)


def not_for(model: Model, what: str, min_opset: int) -> str:
    """Why nothing in this model is to be quantized, if so."""
    opset = model.opsets.get("", 0)
    if opset < min_opset:
        return f"{what} needs opset {min_opset}, and the model has {opset}"
    made = next((node for node in nodes_of(model) if node.op_type in _QUANTIZED), None)
    return f"the model is quantized already: it has {nd.label(made)}" if made is not None else ""
