"""The common steps of the scheme passes.

All run the same steps. Dynamic and weight-only layers have float inputs and outputs, so each is
quantized independently of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from passes.analysis.node_filter import NodeFilter
from passes.quantize import options
from passes.quantize.layers.find_layers import Weighted, users_of
from passes.quantize.layers.int8_weights import Unfit
from passes.quantize.layers.layers import Layer, Table
from passes.quantize.layers.unique_names import make_distinct
from passes.quantize.preconditions import quantized_already, too_old
from passes.quantize.search.enforce_budget import write_within_budget
from toolkit.errors import UsageError
from toolkit.ir import Graph, Model, node as nd
from toolkit.ir.op_traits import QUANTIZED_WEIGHTS
from toolkit.quantization.plan import Entry, Plan, Scheme, note_left
from toolkit.quantization.plan_json import read_plan

if TYPE_CHECKING:
    from passes.quantize.search.candidate_eval import Write
    from toolkit.pass_manager.protocol import Context

LayerT = TypeVar("LayerT", bound=Layer)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLayer(Generic[LayerT]):
    """A layer to quantize; `x` is its first input in the unmodified model."""

    graph: Graph
    layer: LayerT
    entry: Entry
    x: str


def run(
    item: Any,
    model: Model,
    ctx: Context,
    scheme: Scheme,
    prepare: Callable[[], str],
    make_plan: Callable[[], Plan],
    write: Write,
    *followed: str,
) -> None:
    """Run a pass: apply its plan, or that of its options, within the error budget.

    `prepare` readies the model for a plan, or returns the reason against it. The options `followed`
    apply to a given plan too.
    """
    start = model.journal.position
    reason = prepare()
    if reason:
        model.journal.undo_to(start)
        ctx.note(reason)
        return
    if item.plan is None:
        plan = make_plan()
        NodeFilter(item.include, item.exclude).note_idle(model, ctx)
        note_left(plan, ctx)
    else:
        plan = read_plan(item.plan, model)
        options.note_beside_plan(item, ctx, *followed)
    write_within_budget(model, plan, scheme, ctx, write, start)


def prepare_layers(item: Any, model: Model, what: str, min_opset: int) -> str:
    """Give layers unique names, or return the reason against quantizing them."""
    reason = ""
    if item.plan is None:
        reason = too_old(model, what, min_opset) or quantized_already(model, QUANTIZED_WEIGHTS)
    if not reason:
        make_distinct(model)
    return reason


def why_float(item: Any, layer: Layer, tables: bool, other: str = "") -> str:
    """Return why the options of a pass leave a layer float, or an empty string.

    `other` is a reason that takes precedence over the size.
    """
    if not NodeFilter(item.include, item.exclude).takes(layer.node):
        return "excluded"
    if isinstance(layer, Table) and not tables:
        return "a table"
    small = layer.size < item.min_elements
    return other or (f"fewer than {item.min_elements} weights" if small else "")


def leave_float_tables(found: Iterable[Weighted[Layer]], entries: dict[int, Entry]) -> None:
    """Set tables with float users to float: an int8 copy would only add to the size.

    `entries` holds the entries of all these nodes by id.
    """
    for item in found:
        if not isinstance(item.layer, Table) or entries[id(item.node)].scheme == "float":
            continue
        users = users_of(item.layer.weight)
        if users is None or any(
            id(n) not in entries or entries[id(n)].scheme == "float" for n in users
        ):
            reason = "a table with float users"
            entries[id(item.node)] = Entry.of(item.node, reason=reason)


def planned(
    found: Iterable[Weighted[LayerT]], plan: Plan, scheme: Scheme, kinds: str
) -> list[PlannedLayer[LayerT]]:
    """Return the layers with this scheme in the plan; raise UsageError if one cannot have it."""
    chosen: list[PlannedLayer[LayerT]] = []
    waiting = {id(entry): entry for entry in plan.of_scheme(scheme)}
    for item in found:
        entry = plan.find(item.node)
        if entry is None or entry.scheme != scheme:
            continue
        waiting.pop(id(entry), None)
        if item.layer is None:
            raise UsageError(f"{entry.label} cannot be {scheme}: it has {item.reason}")
        chosen.append(PlannedLayer(item.graph, item.layer, entry, item.node.input[0]))
    for entry in waiting.values():
        raise UsageError(f"{entry.label} cannot be {scheme}: it is not a {kinds}")
    return chosen


def write_or_undo(model: Model, layer: Layer, ctx: Context, write: Callable[[], None]) -> None:
    """Write a layer; undo it and note the reason if the weights cannot be quantized."""
    start = model.journal.position
    try:
        write()
    except Unfit as unfit:
        model.journal.undo_to(start)
        ctx.note(f"{nd.label(layer.node)} stays float: it has {unfit}")
