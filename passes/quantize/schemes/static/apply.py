"""Apply the static entries of a plan.

Only the plan and the graph are used: setting nodes back to float needs no new calibration.
Operators that combine or carry values (Add, Concat, MaxPool) stay float where their neighbours do.
Each node is one rewrite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from passes.quantize.layers.channel_means import ChannelMeans
from passes.quantize.layers.int8_weights import Unfit
from passes.quantize.preconditions import lift, lower_for_qdq
from passes.quantize.schemes.static.int8_region import Int8Region, connected_region, limited_results
from passes.quantize.schemes.static.ort_fusion_guards import guard, join_silu
from passes.quantize.schemes.static.qdq import QdqWriter
from passes.quantize.schemes.static.qop import write_operators
from passes.quantize.schemes.static.quantizable_ops import Int8Site, planned_site
from passes.quantize.schemes.static.shared_scales import Ties, qparams_of
from passes.quantize.schemes.static.weights import require_supported
from toolkit.errors import UsageError
from toolkit.ir import Model, node as nd
from toolkit.quantization.plan import Entry, Plan
from toolkit.targets import CONTRIB

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

Format = Literal["qdq", "qop"]

STATIC_OPSET = 13
"""The first opset with per-channel scales in DequantizeLinear."""


def lift_for_static(model: Model, ctx: Context) -> str:
    obstacle = lift(model, ctx, "static quantization", STATIC_OPSET)
    if not obstacle:
        lower_for_qdq(model, ctx)
    return obstacle


def apply_static(
    model: Model, plan: Plan, ctx: Context, form: Format = "qdq", means: ChannelMeans | None = None
) -> None:
    """Quantize the static entries of the plan.

    With the `means` of the layers' inputs, biases compensate the mean shift of rounded weights.
    """
    if not any(map(_is_own, plan.entries)):
        return
    obstacle = lift_for_static(model, ctx)
    if obstacle:
        ctx.note(obstacle)
        return
    if ctx.target.fuses_qdq:
        join_silu(model, plan)
    region, entries = _planned(model, plan)
    ties = Ties()
    for site in region.sites:
        if entries[id(site.node)].tied:
            ties.tie([*site.activations, *region.stored_results(site)])
    needed = [plan.tensor(name) for name in region.scopes()]
    writer = QdqWriter(qparams_of([entry for entry in needed if entry is not None], ties))
    # Resolved before the first edit: writing a site changes the operands and users of others.
    pending = [
        (site, region.stored_results(site), (means or {}).get(site.node.input[0]))
        for site in region.sites
    ]
    written: set[int] = set()
    for site, results, mean in pending:
        try:
            if writer.write(site, entries[id(site.node)], results, mean):
                written.add(id(site.node))
        except Unfit as unfit:
            ctx.note(f"{nd.label(site.node)} stays float: it has {unfit}")
    if form == "qop":
        sites = [site for site in region.sites if id(site.node) in written]
        write_operators(sites, standard=not ctx.target.runs(CONTRIB))
        for g in model.graphs():
            writer.drop_unused_constants(g)
    guard(model, writer, written, ctx.target.fuses_qdq)


def _planned(model: Model, plan: Plan) -> tuple[Int8Region, dict[int, Entry]]:
    """Return the region of static entries, and the entries by node id.

    Raises UsageError for a node that cannot be static.
    """
    entries: dict[int, Entry] = {}
    sites: list[Int8Site] = []
    waiting = {id(entry): entry for entry in plan.entries if _is_own(entry)}
    for g, node in model.places():
        entry = plan.find(node)
        if entry is None or not _is_own(entry):
            continue
        waiting.pop(id(entry), None)
        site = planned_site(g, node, entry)
        if site is None:
            raise UsageError(f"{entry.label} cannot be static: it has no int8 kernel")
        if site.weight is not None:
            require_supported(entry, site.weight)
        if site.kind == "carry" and not entry.tied:
            raise UsageError(f"{entry.label} cannot be static unless it is tied")
        entries[id(node)] = entry
        sites.append(site)
    for entry in waiting.values():
        raise UsageError(f"{entry.label} cannot be static: it is not in the model")

    def results(site: Int8Site) -> list[str]:
        own = nd.outputs_of(site.node)
        return own if plan.tensor(own[0]) is not None else limited_results(site)

    region = connected_region(sites, results)
    for site in region.sites:
        label = entries[id(site.node)].label
        kinds: set[str] = set()
        for name in (*site.activations, *region.stored_results(site)):
            tensor = plan.tensor(name)
            if tensor is None:
                raise UsageError(f"{label} cannot be static: the plan has no tensor '{name}'")
            kinds.add(tensor.dtype)
        if len(kinds) > 1:
            raise UsageError(f"{label} cannot be static: its tensors are int8 and uint8")
    return region, entries


def _is_own(entry: Entry) -> bool:
    """Whether `apply_static` writes the entry; `pointwise_conv` writes those with float results."""
    return entry.scheme == "static" and not entry.float_result
