"""Static int8 quantization: activations have fixed scales from calibration data.

The pass makes a plan (nodes, number formats, ranges of tensors), then applies it. Subgraphs of If,
Loop and Scan are included; nodes that never run on the data stay float.

    quantizable_ops, int8_region   operators with int8 kernels, and connected regions of them
    shared_scales,                 scales of activations: from ranges, shared, and narrowed to the
    range_narrowing                part that users distinguish
    weights                        scales and codes of weights and biases
    apply                          writes a plan by `qdq` (Q/DQ pairs) and `qop` (operators)
    ort_fusion_guards              guards against onnxruntime's own fusions
    pointwise_conv                 1x1 convolutions as matrix products, with `channels_last`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from onnx import NodeProto

from passes.analysis.node_filter import NodeFilter
from passes.analysis.shapes import Shapes
from passes.quantize import options
from passes.quantize.diagnostics import note_hard, note_troubles, range_troubles
from passes.quantize.layers.layers import is_fused
from passes.quantize.layers.unique_names import make_all_distinct
from passes.quantize.preconditions import quantized_already
from passes.quantize.schemes import scheme_pass
from passes.quantize.schemes.static.apply import Format, apply_static, lift_for_static
from passes.quantize.schemes.static.int8_region import (
    Int8Region,
    connected_region,
    limited_results,
)
from passes.quantize.schemes.static.quantizable_ops import (
    CARRIERS,
    COMBINERS,
    PRODUCTS,
    Int8Site,
    site_of,
)
from passes.quantize.schemes.static.range_narrowing import needed_range
from passes.quantize.schemes.static.shared_scales import tied_sites
from toolkit.calibrate.observers import ObserverName, Percentile, observer_named
from toolkit.calibrate.statistics import Range
from toolkit.calibrate.subgraph_values import inner_values, obstacle
from toolkit.errors import UsageError
from toolkit.ir import Graph, Model, node as nd
from toolkit.messages import suggestion
from toolkit.quantization.number_format import UINT8
from toolkit.quantization.plan import ActivationType, Entry, Plan, TensorEntry
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.calibrate.collector import Calibration
    from toolkit.pass_manager.protocol import Context

__all__ = ["DEFAULT_OPS", "QuantizeStatic", "apply_static"]


DEFAULT_OPS = (
    *("Conv", "Gemm", "MatMul"),
    *("Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "Relu", "Clip", "GlobalAveragePool"),
    *("MaxPool", "Resize", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice"),
    *("Split", "Gather", "Expand", "Identity", "DepthToSpace"),
)
"""Operators whose int8 kernels pay off between int8 neighbors."""


_NO_KERNEL = ("ConvTranspose",)
"""Operators that have a Q/DQ form but no int8 kernel, quantized on request only."""

_PERCENT = 99.99
_NEVER_RAN = "it never ran on the calibration data"


@dataclass(frozen=True, slots=True)
class QuantizeStatic:
    """Quantize convolutions and linear layers to int8 with ranges from calibration data."""

    name: ClassVar[str] = "quantize-static"
    tolerance: ClassVar[Tolerance] = QUANT
    format: Format = field(
        default="qdq", metadata={"help": "Q/DQ pairs around operators, or quantized operators."}
    )
    observer: ObserverName = field(
        default="minmax",
        metadata={"help": "The observer of activation ranges."},
    )
    percent: float = field(
        default=_PERCENT, metadata={"help": "The share of values that observer=percentile keeps."}
    )
    activations: ActivationType = field(
        default="uint8", metadata={"help": "The type of activations."}
    )
    symmetric: bool = field(
        default=False, metadata={"help": "Symmetric activations, without a zero point."}
    )
    weights: Literal["int8", "uint8"] = field(
        default="int8", metadata={"help": "The type of weights."}
    )
    per_channel: bool = field(default=True, metadata=options.PER_CHANNEL)
    reduce_range: bool = field(default=False, metadata=options.REDUCE_RANGE)
    products: bool = field(
        default=False, metadata={"help": "Quantize a MatMul of two activations too."}
    )
    ops: tuple[str, ...] = field(
        default=DEFAULT_OPS, metadata={"help": "The operators to quantize."}
    )
    include: tuple[str, ...] = field(default=("*",), metadata=options.INCLUDE)
    exclude: tuple[str, ...] = field(default=(), metadata=options.EXCLUDE)
    min_elements: int = field(default=0, metadata={"help": "Layers with fewer weights stay float."})
    plan: Path | Plan | None = field(default=None, metadata=options.PLAN)

    def __post_init__(self) -> None:
        Percentile(self.percent)  # raises UsageError for an invalid one
        if self.percent != _PERCENT and self.observer != "percentile":
            raise UsageError(f"{self.name}: percent is for observer=percentile")
        if self.activations == "int8" and self.weights == "uint8":
            raise UsageError(f"{self.name}: no kernel supports activations=int8 with weights=uint8")
        known = [*PRODUCTS, *COMBINERS, *CARRIERS]
        strange = next((op for op in self.ops if op not in known), None)
        if strange is not None:
            hint = suggestion(strange, known) or f": choose from {', '.join(known)}"
            raise UsageError(f"{self.name}: '{strange}' is not an operator to quantize{hint}")

    def run(self, model: Model, ctx: Context) -> None:
        def prepare() -> str:
            reason = quantized_already(model) if self.plan is None else ""
            if reason:
                return reason
            make_all_distinct(model)  # before a plan names its nodes
            return lift_for_static(model, ctx)

        def make_plan() -> Plan:
            Shapes(annotate=False).run(model, ctx)  # only 32-bit floats are quantized
            note_hard(model, ctx)
            return self.make_plan(model, ctx)

        write = partial(apply_static, form=self.format)
        scheme_pass.run(self, model, ctx, "static", prepare, make_plan, write, "format")

    def make_plan(self, model: Model, ctx: Context) -> Plan:
        """Return an entry for every layer, and the range of every tensor."""
        if ctx.calibration is None:
            raise UsageError("static quantization needs calibration data: --calib SOURCE")
        sites, left = self.candidates(model)

        def results(site: Int8Site) -> list[str]:
            return nd.outputs_of(site.node) if self.symmetric else limited_results(site)

        region = connected_region(sites, results)
        tensors = region.scopes()
        # The result of a site shows that it ran; all its operands may be captured.
        results_inside = (site.node.output[0] for site in region.sites if site.is_inner)
        names = (*tensors, *results_inside)
        by_percent = self.observer == "percentile"
        observer = Percentile(self.percent) if by_percent else observer_named(self.observer)
        observers = dict.fromkeys(names, observer)
        found = ctx.calibration.collect(model, observers, recorder=ctx.evaluator)
        note_troubles((t for t in range_troubles(found) if t.tensor in tensors), ctx)
        while True:
            missing = [(s, why) for s in region.sites if (why := _without_range(s, region, found))]
            left.update((id(site.node), why) for site, why in missing)
            if not missing:
                break
            region = connected_region([s for s in region.sites if id(s.node) not in left], results)
        return self._plan(model, region, found, left)

    def candidates(self, model: Model) -> tuple[list[Int8Site], dict[int, str]]:
        """Return the sites that can be quantized, and the reasons against others by node id."""
        sites: list[Int8Site] = []
        left: dict[int, str] = {}
        selection = NodeFilter(self.include, self.exclude)
        inner = inner_values(model)
        for graph, node in model.places():
            if not self._takes(node):
                if nd.is_op(node, *_NO_KERNEL) and self.ops == DEFAULT_OPS:
                    left[id(node)] = "onnxruntime has no int8 kernel for it"
                continue
            try:
                site = site_of(graph, node)
            except MatchFailure as failure:
                left[id(node)] = str(failure)
                continue
            if site is None:
                continue
            reason = self._refusal(site, selection) or _unobservable(site, inner)
            if not reason:
                sites.append(site)
            elif site.kind == "product":
                left[id(node)] = reason
        return sites, left

    def _takes(self, node: NodeProto) -> bool:
        return nd.is_op(node, *self.ops) or (is_fused(node) and "MatMul" in self.ops)

    def _refusal(self, site: Int8Site, selection: NodeFilter) -> str:
        if not selection.takes(site.node):
            return "excluded"
        if site.kind == "product":
            if site.weight is None:
                return "" if self.products else "a product of two activations"
            small = site.weight.size < self.min_elements
            return f"fewer than {self.min_elements} weights" if small else ""
        if site.kind == "combine" and _follows_linear(site):
            return "after a linear layer"
        return ""

    def _plan(
        self, model: Model, region: Int8Region, found: Calibration, left: Mapping[int, str]
    ) -> Plan:
        tensors: dict[str, TensorEntry] = {}
        for name, graph in region.scopes().items():
            used = needed_range(graph, name, _range(region, name, found))
            entry = TensorEntry(name, self.activations, self.symmetric, used.low, used.high)
            tensors[name] = entry
        tied = tied_sites(region, tensors)
        chosen = {id(site.node): site for site in region.sites}
        entries: list[Entry] = []
        for node in model.nodes():
            site = chosen.get(id(node))
            if site is not None and site.weight is None:
                entries.append(Entry.of(node, scheme="static", tied=id(node) in tied))
            elif site is not None and site.weight is not None:
                axis = site.weight.kernel.axis if self.per_channel else None
                how = {"weight": self.weights, "reduce_range": self.reduce_range, "axis": axis}
                entries.append(Entry.of(node, scheme="static", **how))
            elif id(node) in left:
                entries.append(Entry.of(node, reason=left[id(node)]))
        return Plan(tuple(entries), tuple(tensors.values()))


def _range(region: Int8Region, name: str, found: Calibration) -> Range:
    """Return the calibration range of a tensor; for Softmax always [0, 1) in steps of 1 / 256.

    onnxruntime's kernel overflows with smaller steps and needs an integer number of steps for 1.
    """
    producer = region.producers.get(name)
    if producer is not None and nd.is_op(producer.node, "Softmax"):
        return Range(0.0, UINT8.steps / (UINT8.steps + 1))
    return found.range(name)


def _without_range(site: Int8Site, region: Int8Region, found: Calibration) -> str:
    """Return why a tensor of the site has no range, or an empty string."""
    names = (*site.activations, *region.stored_results(site))
    failed = next((name for name in names if name in found.failed), None)
    if failed is not None:
        return found.failed[failed]
    return _NEVER_RAN if found.unseen.intersection((*names, site.node.output[0])) else ""


def _unobservable(site: Int8Site, inner: Mapping[str, Graph]) -> str:
    """Return why the tensors of a site in a subgraph cannot be observed, or an empty string."""
    if not site.is_inner:
        return ""
    for name in (*site.activations, *nd.outputs_of(site.node)):
        scope = site.graph.scope_of(name)
        if scope is not None and scope.parent is not None and name not in inner:
            return obstacle(scope) or f"in a subgraph, and others define '{name}' too"
    return ""


def _follows_linear(site: Int8Site) -> bool:
    """Whether a linear layer produces an operand, before data movement, Relu and Clip."""
    pending = list(site.activations)
    seen: set[str] = set()
    while pending:
        value = pending.pop()
        scope = site.graph.scope_of(value)
        producer = scope.producer(value) if scope is not None else None
        if producer is None or value in seen:
            continue
        seen.add(value)
        if nd.is_op(producer, "Relu", "Clip", *CARRIERS):
            pending.append(producer.input[0])
        elif nd.is_op(producer, "MatMul", "Gemm") or is_fused(producer):
            return True
    return False
