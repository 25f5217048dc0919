"""Weights alone in 4 or 8 bits, by blocks: a fraction of the bytes, computing in floats.

It pays where reading weights is what takes the time (a token at a time), and for the size. Rounding
to nearest (`rtn`) and `hqq` need no data; `gptq` takes calibration data, and is far closer in 4
bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from onnx import NodeProto

from passes.opset import Opset
from passes.quantize.arithmetic import Unfit
from passes.quantize.dynamic import (
    layers_in,
    not_for,
    read_plan,
)
from passes.quantize.gptq import Solver
from passes.quantize.gram import Gram, GramObserver
from passes.quantize.layers import Layer, Linear, Table, readers_of
from passes.quantize.nbits import BlockWriter, Form
from passes.quantize.plan import (
    BLOCK_SIZES,
    Entry,
    Plan,
    Selection,
    WeightType,
    as_applied,
    nodes_of,
    note_left,
)
from passes.quantize.plan import Method as MethodName
from passes.quantize.streaming import Compensated, HalfQuadratic, Method, Nearest
from toolkit import nodes as nd
from toolkit.errors import UsageError
from toolkit.graph import Graph
from toolkit.model import Model
from toolkit.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.context import Context

_MIN_OPSET = 11
"""The first with BitShift."""
_STANDARD_OPSET = 21
"""The first with blocks in DequantizeLinear, and int4."""
_BLOCKS: dict[str, int] = {"int4": 32, "int8": 128}
_GRAM_BYTES = 1 << 28
"""Bytes of X^T X that are gathered in one go; more take more sweeps over the data."""
_LEVELS = 4


@dataclass(frozen=True, slots=True)
class QuantizeWeights:
    """Store the weights of linear layers in 4 or 8 bits by blocks; tables by rows."""

    name: ClassVar[str] = "quantize-weights"
    tolerance: ClassVar[Tolerance] = QUANT
    weights: Literal["int4", "int8"] = field(default="int4", metadata={"help": "Bits of a weight."})
    block_size: int | None = field(
        default=None,
        metadata={"help": "Weights that share a scale: 16 to 256; none: 32 for int4, 128 for int8"},
    )
    symmetric: bool | None = field(
        default=None, metadata={"help": "Blocks without a zero; none: for int8, not for int4"}
    )
    method: MethodName = field(
        default="rtn", metadata={"help": "rtn: round to nearest; hqq; gptq: needs calibration data"}
    )
    form: Literal["auto", "nbits", "qdq"] = field(
        default="auto",
        metadata={"help": "nbits: MatMulNBits; qdq: DequantizeLinear; auto: by the target"},
    )
    accuracy_level: int = field(
        default=4, metadata={"help": "Of MatMulNBits: 0 or 1 computes in floats, 4 in int8"}
    )
    act_order: bool = field(
        default=True, metadata={"help": "gptq: inputs that matter most come first"}
    )
    embeddings: Literal["int8", "int4", "float"] = field(
        default="int8", metadata={"help": "Tables of Gather, and projections tied to them"}
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
        if self.plan is None:
            reason = not_for(model, "quantizing weights", _MIN_OPSET)
            if reason:
                ctx.note(reason)
                return
            plan = self.make_plan(model, form)
            for pattern in Selection(self.include, self.exclude).idle(nodes_of(model)):
                ctx.note(f"no node matches '{pattern}'")
            note_left(plan, ctx)
        else:
            plan = read_plan(self.plan, model)
        apply_weight_only(model, plan, ctx, form, self.accuracy_level, self.act_order)
        ctx.plans.append(as_applied(model, plan))

    def make_plan(self, model: Model, form: Form = "nbits") -> Plan:
        """What this pass would do, for every node that has weights."""
        found = list(_layers(model))
        entries = {id(item.node): self._entry(item) for item in found}
        if self.embeddings == "float":
            self._leave_tied(found, entries)
        tables = self._settle_tables(found, entries)
        for item in found:
            layer, entry = item.layer, entries[id(item.node)]
            tied = layer is not None and layer.weight.key in tables and _by_rows(layer)
            if tied and entry.scheme != "float":
                entries[id(item.node)] = self._tied(entry, form)
        return Plan(tuple(entries.values()))

    def _form(self, ctx: Context) -> Form:
        on_runtime = ctx.target.startswith("ort")
        if self.form == "nbits" and not on_runtime:
            raise UsageError(
                f"{self.name}: form=nbits is com.microsoft's MatMulNBits, which target "
                f"'{ctx.target}' does not have: take form=qdq"
            )
        if self.form == "auto":
            return "nbits" if on_runtime else "qdq"
        return self.form

    def _entry(self, item: _Weighted) -> Entry:
        node, layer = item.node, item.layer
        if layer is None:
            return Entry.of(node, reason=item.reason)
        is_table = isinstance(layer, Table)
        reason = ""
        if not Selection(self.include, self.exclude).takes(node):
            reason = "excluded"
        elif is_table and self.embeddings == "float":
            reason = "a table"
        elif layer.weight.size < self.min_elements:
            reason = f"fewer than {self.min_elements} weights"
        if reason:
            return Entry.of(node, reason=reason)
        if is_table:
            block = self._block("int4") if self.embeddings == "int4" else None
            return self._of(Entry.of(node), cast(WeightType, self.embeddings), 0, block, True)
        symmetric = self.weights == "int8" if self.symmetric is None else self.symmetric
        return self._of(
            Entry.of(node), self.weights, 1, self._block(self.weights), symmetric, self.method
        )

    def _of(
        self,
        entry: Entry,
        weight: WeightType,
        axis: int,
        block: int | None,
        symmetric: bool,
        method: MethodName = "rtn",
    ) -> Entry:
        return replace(
            entry,
            scheme="weight-only",
            weight=weight,
            axis=axis,
            block_size=block,
            symmetric=symmetric,
            method=method,
        )

    def _block(self, weight: str) -> int:
        return self.block_size or _BLOCKS[weight]

    def _leave_tied(self, found: list[_Weighted], entries: dict[int, Entry]) -> None:
        """Projections that are tied to a table are in floats as it is: bytes would come on top."""
        tables = {item.layer.weight.key for item in found if isinstance(item.layer, Table)}
        for item in found:
            if isinstance(item.layer, Linear) and item.layer.weight.key in tables:
                entries[id(item.node)] = Entry.of(item.node, reason="tied to a table")

    def _settle_tables(self, found: list[_Weighted], entries: dict[int, Entry]) -> set[object]:
        """Leave tables alone that stay as floats anyway; the others that a projection is tied to.

        A projection counts when it is to be quantized and has the rows of the table as outputs.
        """
        linear = {id(item.node) for item in found if _is_tied_linear(item.layer)}
        tied: set[object] = set()
        for item in found:
            if not isinstance(item.layer, Table) or entries[id(item.node)].scheme == "float":
                continue
            readers = readers_of(item.layer.weight)
            schemes = [
                entries[id(n)].scheme if id(n) in entries else "float" for n in readers or ()
            ]
            if readers is None or "float" in schemes:
                reason = "a table that others read as floats"
                entries[id(item.node)] = Entry.of(item.node, reason=reason)
            elif any(id(node) in linear for node in readers):
                tied.add(item.layer.weight.key)
        return tied

    def _tied(self, entry: Entry, form: Form) -> Entry:
        """One weight for a table and a projection: the same numbers for both."""
        weight: WeightType = "int4" if self.embeddings == "int4" else "int8"
        if form == "nbits":
            return self._of(entry, weight, 0, self._block(weight), True)
        return self._of(entry, "int8", 0, None, True)


def apply_weight_only(
    model: Model,
    plan: Plan,
    ctx: Context,
    form: Form = "nbits",
    accuracy_level: int = 4,
    act_order: bool = True,
) -> None:
    """Quantize what the plan calls weight-only; other schemes are for other passes."""
    entries = [entry for entry in plan.entries if entry.scheme == "weight-only"]
    if not entries:
        return
    if any(entry.method == "gptq" for entry in entries) and ctx.calibration is None:
        raise UsageError("method=gptq needs calibration data: give some, or take rtn or hqq")
    if form == "qdq" and not _lifted(model, ctx):
        return
    jobs = list(_jobs(model, plan))
    methods = _methods(model.copy(), jobs, ctx, act_order)
    writer = BlockWriter(form, accuracy_level)
    for job, method in methods:
        start = model.journal.position
        try:
            if isinstance(job.layer, Linear):
                writer.linear(job.found.graph, job.layer, job.entry, method)
            else:
                writer.table(job.found.graph, job.layer, job.entry, method)
        except Unfit as unfit:
            model.journal.undo_to(start)
            ctx.note(f"{nd.label(job.found.node)} stays float: it has {unfit}")


@dataclass(frozen=True, slots=True, eq=False)
class _Weighted:
    """A node with weights, where it is, and why it cannot be quantized, if so."""

    graph: Graph
    node: NodeProto
    layer: Layer | None
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A layer to write. `x` is what it reads before any other is written."""

    found: _Weighted
    layer: Layer
    entry: Entry
    x: str


def _layers(model: Model) -> Iterator[_Weighted]:
    """The layers of which weights alone can be quantized, and why others cannot."""
    for item in layers_in(model):
        if item.layer is None or isinstance(item.layer, Linear | Table):
            yield _Weighted(item.graph, item.node, item.layer, item.reason)
        else:
            yield _Weighted(item.graph, item.node, None, "a recurrent layer")


def _jobs(model: Model, plan: Plan) -> Iterator[_Job]:
    waiting = {id(entry): entry for entry in plan.entries if entry.scheme == "weight-only"}
    jobs: list[_Job] = []
    for item in _layers(model):
        entry = plan.find(item.node)
        if entry is None or entry.scheme != "weight-only":
            continue
        waiting.pop(id(entry), None)
        if item.layer is None:
            raise UsageError(f"{entry.label} cannot be weight-only: it has {item.reason}")
        _require_supported(entry, item.layer)
        x = item.layer.x if isinstance(item.layer, Linear) else ""
        jobs.append(_Job(item, item.layer, entry, x))
    for entry in waiting.values():
        raise UsageError(
            f"{entry.label} cannot be weight-only: it is no linear layer or table of constants"
        )
    yield from jobs


def _require_supported(entry: Entry, layer: Layer) -> None:
    if entry.weight not in _BLOCKS:
        raise UsageError(f"{entry.label} cannot be weight-only in {entry.weight}: int4 or int8")
    if entry.block_size is None and (entry.weight != "int8" or not entry.symmetric):
        raise UsageError(f"{entry.label} needs a block_size: whole rows are symmetric int8")
    if entry.block_size is None and not _by_rows(layer):
        raise UsageError(f"{entry.label} needs a block_size: its weight is not stored by rows")
    if isinstance(layer, Table) and not entry.symmetric:
        raise UsageError(f"{entry.label} is a table, and those are symmetric")


def _by_rows(layer: Layer) -> bool:
    """Whether an output of the layer is a row of the weight, as in a table."""
    return isinstance(layer, Table) or layer.weight.turned


def _is_tied_linear(layer: Layer | None) -> bool:
    return isinstance(layer, Linear) and _by_rows(layer)


def _lifted(model: Model, ctx: Context) -> bool:
    """Lift the model to the opset of the standard form, as far as the user allows it."""
    allowed = ctx.opset is None or (ctx.opset != "keep" and ctx.opset >= _STANDARD_OPSET)
    if allowed:
        Opset(to=_STANDARD_OPSET).run(model, ctx)
    reached = model.opsets.get("", 0)
    if reached < _STANDARD_OPSET:
        ctx.note(f"weights in blocks need opset {_STANDARD_OPSET}, and the model has {reached}")
    return reached >= _STANDARD_OPSET


def _methods(
    floats: Model, jobs: list[_Job], ctx: Context, act_order: bool
) -> Iterator[tuple[_Job, Method]]:
    """How each layer's codes are chosen. Grams are gathered for some inputs, used, and let go.

    `floats` is the model as it was before any of the layers was written.
    """
    plain = [job for job in jobs if job.entry.method != "gptq" or isinstance(job.layer, Table)]
    for job in plain:
        yield job, HalfQuadratic() if job.entry.method == "hqq" else Nearest()
    by_input: dict[tuple[int, str], list[_Job]] = {}
    for job in jobs:
        if job.entry.method == "gptq" and isinstance(job.layer, Linear):
            by_input.setdefault((id(job.found.graph), job.x), []).append(job)
    for group in _groups(list(by_input.values())):
        grams = _grams(floats, [same[0] for same in group], ctx)
        for same in group:
            gram = grams.pop(same[0].x, None)
            method = _compensated(gram, same[0], act_order, ctx)
            for job in same:
                yield job, method


def _groups(inputs: list[list[_Job]]) -> Iterator[list[list[_Job]]]:
    """Inputs whose Grams fit into memory together."""
    group: list[list[_Job]] = []
    room = _GRAM_BYTES
    for same in inputs:
        weight = same[0].layer.weight
        size = 4 * weight.shape[1 if weight.turned else 0] ** 2
        if group and size > room:
            yield group
            group, room = [], _GRAM_BYTES
        group.append(same)
        room -= size
    if group:
        yield group


def _grams(floats: Model, firsts: list[_Job], ctx: Context) -> dict[str, Gram]:
    """The Grams of these jobs' inputs, of those that can be observed."""
    data = ctx.calibration
    assert data is not None
    outer = [job.x for job in firsts if job.found.graph.parent is None]
    if not outer:
        return {}
    # Not kept in the cache: they are larger than the weights.
    found = replace(data, cache=None).collect(floats, {name: GramObserver() for name in outer})
    return {name: cast(Gram, statistic) for name, statistic in found.statistics.items()}


def _compensated(gram: Gram | None, job: _Job, act_order: bool, ctx: Context) -> Method:
    if gram is None or not gram.rows:
        what = "in a subgraph" if job.found.graph.parent is not None else "not seen in the data"
        ctx.note(f"{nd.label(job.found.node)} is rounded to nearest: its input is {what}")
        return Nearest()
    return Compensated(Solver.of(gram.total, act_order))
