"""Dynamic int8: weights are quantized now, activations as they come. It needs no data.

Linear layers with constant weights compute in integers, and tables that rows are taken from hold a
quarter of the bytes. LSTMs and packed attention compute in integers on onnxruntime. Convolutions
are left alone unless somebody asks for them: their dynamic kernel is slower than floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from passes.analysis.node_filter import Selection
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
from passes.quantize.layers.packed_attention import PackedAttention, PackedAttentionWriter
from passes.quantize.layers.recurrent import Recurrent, RecurrentWriter
from passes.quantize.layers.unique_names import make_distinct
from passes.quantize.preconditions import FROM_INTEGERS, quantized_already, too_old
from passes.quantize.schemes.dynamic.conv import Convolution, ConvolutionWriter
from passes.quantize.schemes.dynamic.int8_writer import Writer
from passes.quantize.search.keep_within import write_within_budget
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan, note_left
from toolkit.quantization.plan_json import read_plan
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

DYNAMIC_OPSET = 11
"""The first with DynamicQuantizeLinear."""


@dataclass(frozen=True, slots=True)
class QuantizeDynamic:
    """Compute linear layers and LSTMs in int8, activations on the fly; tables by rows."""

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
    plan: Path | None = field(default=None, metadata=options.PLAN)

    def run(self, model: Model, ctx: Context) -> None:
        start = model.journal.position
        if self.plan is None:
            reason = too_old(model, "dynamic quantization", DYNAMIC_OPSET)
            reason = reason or quantized_already(model, FROM_INTEGERS)
            if reason:
                ctx.note(reason)
                return
            make_distinct(model)
            note_hard(model, ctx)
            plan = self.make_plan(model, on_runtime=ctx.on_runtime)
            Selection(self.include, self.exclude).note_idle(model, ctx)
            note_left(plan, ctx)
        else:
            make_distinct(model)
            plan = read_plan(self.plan, model)
            options.note_beside_plan(self, ctx)
        write_within_budget(model, plan, "dynamic", ctx, apply_dynamic, start)

    def make_plan(self, model: Model, on_runtime: bool = True) -> Plan:
        """What this pass would do, for every node that has weights."""
        found = list(weighted_in(model, self.convolutions))
        entries = {id(item.node): self._entry(item, on_runtime) for item in found}
        leave_float_tables(found, entries)
        return Plan(tuple(entries.values()))

    def _entry(self, item: Weighted[AnyLayer], on_runtime: bool) -> Entry:
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
        elif isinstance(layer, Recurrent | PackedAttention) and not on_runtime:
            what = "a recurrent layer" if isinstance(layer, Recurrent) else "packed attention"
            reason = f"{what}, and only onnxruntime has an int8 kernel"
        elif size < self.min_elements:
            reason = f"fewer than {self.min_elements} weights"
        if reason:
            return Entry.of(node, reason=reason)
        axis = _axes(layer)[0] if is_table or self.per_channel else None
        return Entry.of(node, scheme="dynamic", reduce_range=self.reduce_range, axis=axis)


def apply_dynamic(model: Model, plan: Plan, ctx: Context) -> None:
    """Quantize what the plan calls dynamic; other schemes are for other passes."""
    found = weighted_in(model, convolutions=True)
    chosen = planned(found, plan, "dynamic", "linear layer, table, LSTM, attention or Conv")
    for _, layer, entry in chosen:
        _require_supported(entry, layer)
    tables = [layer.weight.key for _, layer, _ in chosen if isinstance(layer, Table)]
    writer, recurrent = Writer(frozenset(tables)), RecurrentWriter()
    attention, convolutions = PackedAttentionWriter(), ConvolutionWriter()
    for item, layer, entry in chosen:
        start = model.journal.position
        try:
            if isinstance(layer, Linear):
                writer.linear(item.graph, layer, entry)
            elif isinstance(layer, Recurrent):
                recurrent.write(item.graph, layer, entry)
            elif isinstance(layer, PackedAttention):
                attention.write(item.graph, layer, entry)
            elif isinstance(layer, Convolution):
                convolutions.write(item.graph, layer, entry)
            else:
                writer.table(item.graph, layer, entry)
        except Unfit as unfit:
            model.journal.undo_to(start)
            ctx.note(f"{nd.label(item.node)} stays float: it has {unfit}")


def _axes(layer: AnyLayer) -> tuple[int | None, ...]:
    """Along which scales may lie; first the one that outputs are along."""
    if isinstance(layer, Table):
        return (0,)
    return (0, None) if isinstance(layer, Convolution) else (1, None)


def _require_supported(entry: Entry, layer: AnyLayer) -> None:
    axes = _axes(layer)
    if entry.weight != "int8" or not entry.symmetric or entry.axis not in axes:
        listed = " or ".join(str(axis).lower() for axis in axes)
        raise UsageError(
            f"{entry.label} cannot be dynamic with these weights: they are symmetric int8, "
            f"axis {listed}"
        )
