"""Weight-only quantization: weights in 4 or 8 bits by blocks, computation in float.

The model is smaller, and faster where memory traffic of weights dominates (token by token). Round
to nearest (`rtn`) and `hqq` need no data; `gptq` needs calibration data and is far more accurate in
4 bits.

    methods     choice of codes: rounding, `hqq`, or `gptq` with `triangular` (its linear
                algebra); `blocks` has the common parts
    streaming   quantizes a weight piece by piece; `packing` lays out its codes
    nbits       writes the layers
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from passes.quantize import options
from passes.quantize.layers.find_layers import Weighted, matrices_in
from passes.quantize.layers.layers import Linear, MatrixLayer, Table
from passes.quantize.preconditions import lift
from passes.quantize.schemes import scheme_pass
from passes.quantize.schemes.weight_only.methods import methods_for
from passes.quantize.schemes.weight_only.nbits import (
    BlockWriter,
    Form,
    Known,
    form_on,
    obstacle_to_blocks,
)
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.quantization.plan import BLOCK_SIZES, Entry, Method as MethodName, Plan, WeightType
from toolkit.targets import CONTRIB
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_MIN_OPSET = 11
"""The first opset with BitShift."""
_STANDARD_OPSET = 21
"""The first opset with int4 and blocks in DequantizeLinear."""
_BLOCKS: dict[str, int] = {"int4": 32, "int8": 128}
_LEVELS = 4


@dataclass(frozen=True, slots=True)
class QuantizeWeights:
    """Store weights of linear layers in 4 or 8 bits by blocks, tables by rows."""

    name: ClassVar[str] = "quantize-weights"
    tolerance: ClassVar[Tolerance] = QUANT
    weights: Literal["int4", "int8"] = field(default="int4", metadata={"help": "Bits of a weight."})
    block_size: int | None = field(
        default=None,
        metadata={"help": "Weights per scale: 16 to 256; none: 32 for int4, 128 for int8"},
    )
    symmetric: bool | None = field(
        default=None, metadata={"help": "Blocks without a zero point; none: for int8, not for int4"}
    )
    method: MethodName = field(
        default="rtn", metadata={"help": "rtn: round to nearest; hqq; gptq: needs calibration data"}
    )
    form: Literal["auto", "nbits", "qdq"] = field(
        default="auto",
        metadata={"help": "nbits: MatMulNBits; qdq: DequantizeLinear; auto: by the target"},
    )
    accuracy_level: int = field(
        default=4, metadata={"help": "MatMulNBits: 0 or 1 computes in float, 4 in int8"}
    )
    act_order: bool = field(
        default=True, metadata={"help": "gptq: quantize the most important inputs first"}
    )
    embeddings: Literal["int8", "int4", "float"] = field(
        default="int8", metadata={"help": "Tables of Gather, and projections tied to them"}
    )
    include: tuple[str, ...] = field(default=("*",), metadata=options.INCLUDE)
    exclude: tuple[str, ...] = field(default=(), metadata=options.EXCLUDE)
    min_elements: int = field(default=4096, metadata=options.MIN_ELEMENTS)
    plan: Path | Plan | None = field(default=None, metadata=options.PLAN)

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            listed = ", ".join(map(str, BLOCK_SIZES))
            raise UsageError(f"{self.name}: block_size={self.block_size} is none of {listed}")
        if not 0 <= self.accuracy_level <= _LEVELS:
            raise UsageError(
                f"{self.name}: accuracy_level={self.accuracy_level} is not valid: 0 to {_LEVELS}"
            )

    def run(self, model: Model, ctx: Context) -> None:
        form = self._form(ctx)
        write = partial(
            apply_weight_only,
            form=form,
            accuracy_level=self.accuracy_level,
            act_order=self.act_order,
            known={},
        )
        what = "quantizing weights"
        prepare = partial(scheme_pass.prepare_layers, self, model, what, _MIN_OPSET)
        make_plan = partial(self.make_plan, model, form)
        followed = "form", "accuracy_level", "act_order"
        scheme_pass.run(self, model, ctx, "weight-only", prepare, make_plan, write, *followed)

    def make_plan(self, model: Model, form: Form = "nbits") -> Plan:
        """Return an entry for every node with weights."""
        found = list(matrices_in(model))
        entries = {id(item.node): self._entry(item) for item in found}
        if self.embeddings == "float":  # an int8 copy of a tied weight would only add to the size
            tables = {item.layer.weight.key for item in found if isinstance(item.layer, Table)}
            for item in found:
                if isinstance(item.layer, Linear) and item.layer.weight.key in tables:
                    entries[id(item.node)] = Entry.of(item.node, reason="tied to a table")
        scheme_pass.leave_float_tables(found, entries)
        # The outputs of tied projections are rows of the table.
        layers = [item.layer for item in found if entries[id(item.node)].scheme != "float"]
        turned = {x.weight.key for x in layers if isinstance(x, Linear) and x.weight.turned}
        tied = turned & {x.weight.key for x in layers if isinstance(x, Table)}
        for item in found:
            layer, entry = item.layer, entries[id(item.node)]
            if layer is None or entry.scheme == "float" or not _has_output_rows(layer):
                continue
            if layer.weight.key in tied:
                entries[id(item.node)] = self._tied(entry, form)
        return Plan(tuple(entries.values()))

    def _form(self, ctx: Context) -> Form:
        if self.form == "nbits" and not ctx.target.runs(CONTRIB):
            raise UsageError(
                f"{self.name}: form=nbits is com.microsoft's MatMulNBits, which target "
                f"'{ctx.target.name}' does not have: use form=qdq"
            )
        if self.form == "auto":
            return form_on(ctx.target, 4 if self.weights == "int4" else 8)
        return self.form

    def _entry(self, item: Weighted[MatrixLayer]) -> Entry:
        node, layer, reason = item.node, item.layer, item.reason
        if layer is not None:
            reason = scheme_pass.why_float(self, layer, self.embeddings != "float")
        if layer is None or reason:
            return Entry.of(node, reason=reason)
        if isinstance(layer, Table):
            block = self._block("int4") if self.embeddings == "int4" else None
            return _by_rows(Entry.of(node), cast(WeightType, self.embeddings), block)
        symmetric = self.weights == "int8" if self.symmetric is None else self.symmetric
        return Entry.of(
            node,
            scheme="weight-only",
            weight=self.weights,
            axis=1,
            block_size=self._block(self.weights),
            symmetric=symmetric,
            method=self.method,
        )

    def _block(self, weight: str) -> int:
        return self.block_size or _BLOCKS[weight]

    def _tied(self, entry: Entry, form: Form) -> Entry:
        """Give a table and its tied projection the same codes."""
        if form != "nbits":
            return _by_rows(entry, "int8", None)
        weight: WeightType = "int4" if self.embeddings == "int4" else "int8"
        return _by_rows(entry, weight, self._block(weight))


def _by_rows(entry: Entry, weight: WeightType, block: int | None) -> Entry:
    """Return the entry of a table, or of a projection tied to it."""
    kind = replace(entry, scheme="weight-only", weight=weight, axis=0, block_size=block)
    return replace(kind, symmetric=True, method="rtn")


def apply_weight_only(
    model: Model,
    plan: Plan,
    ctx: Context,
    form: Form = "nbits",
    accuracy_level: int = 4,
    act_order: bool = True,
    known: Known | None = None,
) -> None:
    """Quantize the weight-only entries of the plan.

    `known` caches the codes for all candidates of one model.
    """
    entries = plan.of_scheme("weight-only")
    if not entries:
        return
    if any(entry.method == "gptq" for entry in entries) and ctx.calibration is None:
        raise UsageError("method=gptq needs calibration data: add --calib, or use rtn or hqq")
    obstacle = ""
    if form == "qdq":
        obstacle = lift(model, ctx, "a weight in blocks", _STANDARD_OPSET)
        obstacle = obstacle or obstacle_to_blocks(ctx.target, model.opsets.get("", 1))
    if obstacle:
        ctx.note(obstacle)
        return
    writer = BlockWriter(form, accuracy_level, {} if known is None else known)
    kinds = "linear layer or table"
    jobs = scheme_pass.planned(matrices_in(model), plan, "weight-only", kinds)
    for job in jobs:
        _require_supported(job.entry, job.layer)
    cached = [job for job in jobs if writer.knows(job.layer, job.entry)]
    others = [job for job in jobs if not writer.knows(job.layer, job.entry)]
    methods = methods_for(others, model.copy(), ctx, act_order) if others else ()
    for job, method in chain(((job, None) for job in cached), methods):
        write = partial(writer.write, job.graph, job.layer, job.entry, method)
        scheme_pass.write_or_undo(model, job.layer, ctx, write)


def _require_supported(entry: Entry, layer: MatrixLayer) -> None:
    if entry.weight not in _BLOCKS:
        raise UsageError(f"{entry.label} cannot be weight-only in {entry.weight}: int4 or int8")
    if entry.block_size is None and (entry.weight != "int8" or not entry.symmetric):
        raise UsageError(f"{entry.label} needs a block_size: whole rows are symmetric int8")
    if entry.block_size is None and not _has_output_rows(layer):
        raise UsageError(f"{entry.label} needs a block_size: its weight is not stored by rows")
    if isinstance(layer, Table) and not entry.symmetric:
        raise UsageError(f"{entry.label} is a table, which must be symmetric")


def _has_output_rows(layer: MatrixLayer) -> bool:
    """Whether the outputs of the layer are rows of the weight, as in a table."""
    return isinstance(layer, Table) or layer.weight.turned
