"""Applying a plan: what it calls static is written in 8 bits.

Nothing but the plan and the graph is looked at, so that a plan of which some nodes were turned to
float is applied without a new calibration. What only combines or carries (Add, Concat, MaxPool)
follows its neighbours: it stays in floats where they do. Every node is a rewrite of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from passes.quantize.layers.channel_means import ChannelMeans
from passes.quantize.layers.int8_weights import Unfit
from passes.quantize.preconditions import lift
from passes.quantize.schemes.static.int8_region import Region, as_made, behind_limits, settle
from passes.quantize.schemes.static.ort_fusion_guards import fence, part_signed
from passes.quantize.schemes.static.qdq import QdqWriter
from passes.quantize.schemes.static.qop import write_operators
from passes.quantize.schemes.static.qparams import Ties, grids_of
from passes.quantize.schemes.static.quantizable_ops import Site, site_of
from passes.quantize.schemes.static.weights import require_supported
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan
from toolkit.rewriting.match_failure import Miss

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

Format = Literal["qdq", "qop"]

STATIC_OPSET = 13
"""The first whose DequantizeLinear knows a scale for each channel."""


def lift_for_static(model: Model, ctx: Context) -> str:
    return lift(model, ctx, "static quantization", STATIC_OPSET)


def apply_static(
    model: Model, plan: Plan, ctx: Context, form: Format = "qdq", means: ChannelMeans | None = None
) -> None:
    """Quantize what the plan calls static; other schemes are for other passes.

    By the means of what layers read, where they are known, biases take back what rounding shifts.
    """
    if not any(map(_is_ours, plan.entries)):
        return
    obstacle = lift_for_static(model, ctx)
    if obstacle:
        ctx.note(obstacle)
        return
    region, entries = _planned(model, plan)
    ties = Ties()
    for site in region.sites:
        if entries[id(site.node)].tied:
            ties.tie([*site.activations, *region.makes(site)])
    needed = [plan.tensor(name) for name in region.tensors()]
    writer = QdqWriter(grids_of([entry for entry in needed if entry is not None], ties))
    made = {id(site.node): region.makes(site) for site in region.sites}
    mean = {id(site.node): (means or {}).get(site.node.input[0]) for site in region.sites}
    written: set[int] = set()
    for site in region.sites:
        try:
            key = id(site.node)
            if writer.write(site, entries[key], made[key], mean[key]):
                written.add(key)
        except Unfit as unfit:
            ctx.note(f"{nd.label(site.node)} stays float: it has {unfit}")
    if form == "qop":
        sites = [site for site in region.sites if id(site.node) in written]
        write_operators(sites, standard=ctx.target == "onnx")
        for g in model.graphs():
            writer.drop_unread(g)
    for g in list(model.graphs()):
        writer.carry(g)
        part_signed(g, written)
        if ctx.on_runtime:
            fence(g, written)


def _planned(model: Model, plan: Plan) -> tuple[Region, dict[int, Entry]]:
    """The sites that the plan is about; UsageError for what cannot be static."""
    entries: dict[int, Entry] = {}
    sites: list[Site] = []
    waiting = {id(entry): entry for entry in plan.entries if _is_ours(entry)}
    for g, node in model.places():
        entry = plan.find(node)
        if entry is None or not _is_ours(entry):
            continue
        waiting.pop(id(entry), None)
        try:
            site = site_of(g, node)
        except Miss as miss:
            raise UsageError(f"{entry.label} cannot be static: it has {miss}") from miss
        if site is None:
            raise UsageError(f"{entry.label} cannot be static: there is no such kernel")
        if site.weight is not None:
            require_supported(entry, site.weight)
        if site.kind == "carry" and not entry.tied:
            raise UsageError(f"{entry.label} cannot be static unless it is tied")
        entries[id(node)] = entry
        sites.append(site)
    for entry in waiting.values():
        raise UsageError(f"{entry.label} cannot be static: it is not in the model")

    def results(site: Site) -> list[str]:
        made = as_made(site)
        return made if plan.tensor(made[0]) is not None else behind_limits(site)

    region = settle(sites, results)
    for site in region.sites:
        label = entries[id(site.node)].label
        kinds: set[str] = set()
        for name in (*site.activations, *region.makes(site)):
            tensor = plan.tensor(name)
            if tensor is None:
                raise UsageError(f"{label} cannot be static: the plan has no tensor '{name}'")
            kinds.add(tensor.dtype)
        if len(kinds) > 1:
            raise UsageError(f"{label} cannot be static: its tensors are of int8 and of uint8")
    return region, entries


def _is_ours(entry: Entry) -> bool:
    """Results in floats are for `pointwise`."""
    return entry.scheme == "static" and not entry.float_result
