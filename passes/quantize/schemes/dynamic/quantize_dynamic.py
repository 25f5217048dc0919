"""Dynamic int8 quantization: activations are quantized at run time. Needs no data.

Linear layers with constant weights compute in int8, and lookup tables shrink to a quarter. LSTMs
and packed attention compute in int8 on onnxruntime. Convolutions are quantized on request only,
because their dynamic kernel is slower than float.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from passes.analysis.node_filter import NodeFilter
from passes.quantize import options
from passes.quantize.diagnostics import note_hard
from passes.quantize.layers.find_layers import (
    AnyLayer,
    Weighted,
    leave_float_tables,
    planned,
    weighted_in,
)
from passes.quantize.layers.int8_weights import Unfit
from passes.quantize.layers.layers import Linear, Table
from passes.quantize.layers.packed_attention import PackedAttention, write_attention
from passes.quantize.layers.recurrent import Recurrent, write_lstm
from passes.quantize.layers.unique_names import make_distinct
from passes.quantize.preconditions import quantized_already, too_old
from passes.quantize.schemes.dynamic.conv import Convolution, write_convolution
from passes.quantize.schemes.dynamic.int8_writer import DynamicWriter
from passes.quantize.search.enforce_budget import write_within_budget
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.ir.op_traits import QUANTIZED_WEIGHTS
from toolkit.quantization.number_format import INT8
from toolkit.quantization.plan import Entry, Plan, note_left
from toolkit.quantization.plan_json import read_plan
from toolkit.targets import CONTRIB, Target
from toolkit.targets.ort_cpu import TARGET as ORT_CPU
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

DYNAMIC_OPSET = 11
"""The first opset with DynamicQuantizeLinear."""


@dataclass(frozen=True, slots=True)
class QuantizeDynamic:
    """Quantize linear layers, LSTMs and tables to int8; activations are quantized at run time."""

    name: ClassVar[str] = "quantize-dynamic"
    tolerance: ClassVar[Tolerance] = QUANT
    per_channel: bool = field(default=True, metadata=options.PER_CHANNEL)
    reduce_range: bool = field(default=False, metadata=options.REDUCE_RANGE)
    embeddings: bool = field(default=True, metadata=options.EMBEDDINGS)
    convolutions: bool = field(
        default=False, metadata={"help": "Quantize convolutions too: smaller, and slower."}
    )
    include: tuple[str, ...] = field(default=("*",), metadata=options.INCLUDE)
    exclude: tuple[str, ...] = field(default=(), metadata=options.EXCLUDE)
    min_elements: int = field(default=4096, metadata=options.MIN_ELEMENTS)
    plan: Path | Plan | None = field(default=None, metadata=options.PLAN)

    def run(self, model: Model, ctx: Context) -> None:
        start = model.journal.position
        if self.plan is None:
            reason = too_old(model, "dynamic quantization", DYNAMIC_OPSET)
            reason = reason or quantized_already(model, QUANTIZED_WEIGHTS)
            if reason:
                ctx.note(reason)
                return
            make_distinct(model)
            note_hard(model, ctx)
            plan = self.make_plan(model, ctx.target)
            NodeFilter(self.include, self.exclude).note_idle(model, ctx)
            note_left(plan, ctx)
        else:
            make_distinct(model)
            plan = read_plan(self.plan, model)
            options.note_beside_plan(self, ctx)
        write_within_budget(model, plan, "dynamic", ctx, apply_dynamic, start)

    def make_plan(self, model: Model, target: Target = ORT_CPU) -> Plan:
        """Return an entry for every node with weights."""
        found = list(weighted_in(model, self.convolutions))
        entries = {id(item.node): self._entry(item, target) for item in found}
        leave_float_tables(found, entries)
        return Plan(tuple(entries.values()))

    def _entry(self, item: Weighted[AnyLayer], target: Target) -> Entry:
        node, layer = item.node, item.layer
        if layer is None:
            return Entry.of(node, reason=item.reason)
        is_table = isinstance(layer, Table)
        reason = ""
        if not NodeFilter(self.include, self.exclude).takes(node):
            reason = "excluded"
        elif is_table and not self.embeddings:
            reason = "a table"
        elif isinstance(layer, Recurrent | PackedAttention) and not target.runs(CONTRIB):
            reason = f"{layer.kind}, and only onnxruntime has an int8 kernel"
        elif layer.size < self.min_elements:
            reason = f"fewer than {self.min_elements} weights"
        if reason:
            return Entry.of(node, reason=reason)
        axis = layer.axes[0] if is_table or self.per_channel else None
        return Entry.of(node, scheme="dynamic", reduce_range=self.reduce_range, axis=axis)


def apply_dynamic(model: Model, plan: Plan, ctx: Context) -> None:
    """Quantize the dynamic entries of the plan."""
    found = weighted_in(model, convolutions=True)
    chosen = planned(found, plan, "dynamic", "linear layer, table, LSTM, attention or Conv")
    for _, layer, entry in chosen:
        _require_supported(entry, layer)
    tables = [layer.weight.key for _, layer, _ in chosen if isinstance(layer, Table)]
    writer = DynamicWriter(frozenset(tables))
    for item, layer, entry in chosen:
        start = model.journal.position
        try:
            if isinstance(layer, Linear):
                writer.linear(item.graph, layer, entry)
            elif isinstance(layer, Recurrent):
                write_lstm(item.graph, layer, entry, writer.store)
            elif isinstance(layer, PackedAttention):
                write_attention(item.graph, layer, entry, writer.store)
            elif isinstance(layer, Convolution):
                write_convolution(item.graph, layer, entry, writer.store)
            else:
                writer.table(item.graph, layer, entry)
        except Unfit as unfit:
            model.journal.undo_to(start)
            ctx.note(f"{nd.label(item.node)} stays float: it has {unfit}")


def _require_supported(entry: Entry, layer: AnyLayer) -> None:
    if entry.weight != INT8.name or not entry.symmetric or entry.axis not in layer.axes:
        listed = " or ".join(str(axis).lower() for axis in layer.axes)
        raise UsageError(
            f"{entry.label} cannot be dynamic with these weights: they are symmetric int8, "
            f"axis {listed}"
        )
