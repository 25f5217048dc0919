"""Dynamic int8 quantization: activations are quantized at run time. Needs no data.

Linear layers with constant weights compute in int8, and lookup tables shrink to a quarter. LSTMs
and packed attention compute in int8 on onnxruntime. Convolutions are quantized on request only,
because their dynamic kernel is slower than float.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from passes.quantize import options
from passes.quantize.diagnostics import note_hard
from passes.quantize.layers.find_layers import Weighted, weighted_in
from passes.quantize.layers.layers import Layer, PackedAttention, Recurrent, Table
from passes.quantize.schemes import scheme_pass
from passes.quantize.schemes.dynamic.int8_writer import DynamicWriter
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.quantization.number_format import INT8
from toolkit.quantization.plan import Entry, Plan
from toolkit.targets import CONTRIB, Target
from toolkit.targets.ort_cpu import TARGET as ORT_CPU
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

DYNAMIC_OPSET = 11
"""The first opset with DynamicQuantizeLinear."""


@dataclass(frozen=True, slots=True)
class QuantizeDynamic:
    """Quantize linear layers, LSTMs and tables to int8, and activations at run time."""

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
        def make_plan() -> Plan:
            note_hard(model, ctx)
            return self.make_plan(model, ctx.target)

        what = "dynamic quantization"
        prepare = partial(scheme_pass.prepare_layers, self, model, what, DYNAMIC_OPSET)
        scheme_pass.run(self, model, ctx, "dynamic", prepare, make_plan, apply_dynamic)

    def make_plan(self, model: Model, target: Target = ORT_CPU) -> Plan:
        """Return an entry for every node with weights."""
        found = list(weighted_in(model, self.convolutions))
        entries = {id(item.node): self._entry(item, target) for item in found}
        scheme_pass.leave_float_tables(found, entries)
        return Plan(tuple(entries.values()))

    def _entry(self, item: Weighted[Layer], target: Target) -> Entry:
        layer, reason = item.layer, item.reason
        if layer is not None:
            no_kernel = isinstance(layer, Recurrent | PackedAttention) and not target.runs(CONTRIB)
            other = f"{layer.kind}, with an int8 kernel in onnxruntime only" if no_kernel else ""
            reason = scheme_pass.why_float(self, layer, self.embeddings, other)
        if layer is None or reason:
            return Entry.of(item.node, reason=reason)
        axis = layer.axes[0] if isinstance(layer, Table) or self.per_channel else None
        return Entry.of(item.node, scheme="dynamic", reduce_range=self.reduce_range, axis=axis)


def apply_dynamic(model: Model, plan: Plan, ctx: Context) -> None:
    """Quantize the dynamic entries of the plan."""
    found = weighted_in(model, convolutions=True)
    kinds = "linear layer, table, LSTM, attention or Conv"
    chosen = scheme_pass.planned(found, plan, "dynamic", kinds)
    for job in chosen:
        _require_supported(job.entry, job.layer)
    tables = [job.layer.weight.key for job in chosen if isinstance(job.layer, Table)]
    writer = DynamicWriter(frozenset(tables))
    for job in chosen:
        write = partial(writer.write, job.graph, job.layer, job.entry)
        scheme_pass.write_or_undo(model, job.layer, ctx, write)


def _require_supported(entry: Entry, layer: Layer) -> None:
    if entry.weight != INT8.name or not entry.symmetric or entry.axis not in layer.axes:
        listed = " or ".join(str(axis).lower() for axis in layer.axes)
        raise UsageError(
            f"{entry.label} cannot be dynamic with these weights: they are symmetric int8, "
            f"axis {listed}"
        )
