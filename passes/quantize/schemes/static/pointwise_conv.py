"""Pointwise (1x1) convolutions as int8 matrix products with float results.

    y[n, h, w, :] = s_x s_w (q[n, h, w, :] - z_x) Q + b        Q [inputs, outputs] in int8

The int8 convolution kernel has an 8-bit result. Before an activation without an int8 kernel (SiLU),
that result is dequantized, then quantized again. A matrix product with a float result saves one
rounding, and its user may be a float convolution, such as a depthwise one, which is slow and
inaccurate in int8. In return it needs channels last (see `channels_last`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from onnx import NodeProto

from passes.analysis.shapes import Shapes
from passes.quantize.layers.channel_means import ChannelMeans
from passes.quantize.layers.int8_weights import Unfit
from passes.quantize.layers.weight_storage import drop_unused
from passes.quantize.schemes.static.channels_last import ChannelsLast, channels_last_nodes
from passes.quantize.schemes.static.ort_fusion_guards import join_silu
from passes.quantize.schemes.static.qdq import QdqWriter
from passes.quantize.schemes.static.quantizable_ops import Int8Site, planned_site
from passes.quantize.schemes.static.shared_scales import Ties, qparams_of
from passes.quantize.schemes.static.weights import encode
from toolkit.errors import UsageError
from toolkit.ir import Graph, Model, node as nd
from toolkit.pass_manager.protocol import Context, PassReport
from toolkit.quantization.plan import Entry, Plan
from toolkit.targets import CONTRIB

_KERNEL = "MatMulIntegerToFloat"


def is_pointwise(g: Graph, node: NodeProto) -> bool:
    """Whether a node is a 1x1 Conv without groups, strides or padding."""
    if not nd.is_op(node, "Conv") or nd.attr(node, "group", 1) != 1:
        return False
    shape = g.shape(node.input[1])
    if shape is None or len(shape) < 3 or any(size != 1 for size in shape[2:]):
        return False
    moves = (*nd.attr(node, "strides", ()), *(1 + pad for pad in nd.attr(node, "pads", ())))
    return all(size == 1 for size in moves)


def apply_pointwise(model: Model, plan: Plan, ctx: Context, means: ChannelMeans) -> None:
    """Write the static entries of the plan that have float results."""
    g = model.graph
    found = {id(node): (node, entry) for node in model.nodes() if (entry := _entry_of(plan, node))}
    if not found:
        return
    for node, entry in found.values():
        if node not in g:
            raise UsageError(f"{entry.label} cannot have a float result: it is in a subgraph")
    if not ctx.target.runs(CONTRIB):
        raise UsageError(f"{next(iter(found.values()))[1].label} cannot have a float result: "
                         "only onnxruntime has such a kernel (--target ort-cpu)")  # fmt: skip
    join_silu(model, plan)
    sites = {key: _site(g, node, entry) for key, (node, entry) in found.items()}
    # a candidate model has no inferred shapes
    Shapes(annotate=False).run(model, replace(ctx, report=PassReport()))
    agnostic = channels_last_nodes(g, sites)
    writer = _PointwiseWriter(g, plan, means, sites)
    for node in list(g.nodes):
        if id(node) in sites:
            try:
                writer.write(sites[id(node)], found[id(node)][1])
            except Unfit as unfit:
                ctx.note(f"{nd.label(node)} stays float: it has {unfit}")
        elif id(node) in agnostic:
            writer.turned.move(node)
    writer.turned.sweep()


def _entry_of(plan: Plan, node: NodeProto) -> Entry | None:
    entry = plan.find(node)
    return entry if entry is not None and entry.scheme == "static" and entry.float_result else None


def _site(g: Graph, node: NodeProto, entry: Entry) -> Int8Site:
    site = planned_site(g, node, entry) if is_pointwise(g, node) else None
    if site is None or entry.weight != "int8":
        raise UsageError(f"{entry.label} cannot have a float result: it is not a 1x1 Conv "
                         "with int8 weights")  # fmt: skip
    return site


class _PointwiseWriter:
    """Writes sites in graph order."""

    def __init__(
        self, g: Graph, plan: Plan, means: ChannelMeans, sites: Mapping[int, Int8Site]
    ) -> None:
        self._g, self._plan, self._means = g, plan, means
        inputs = {name for site in sites.values() for name in site.activations}
        self._private = {name for name in inputs if _is_used_by(g, name, sites)}
        """Activations whose users are all matrix products."""
        self._shared = QdqWriter({})
        self._codes: dict[str, str] = {}
        self.turned = ChannelsLast(g)

    def write(self, site: Int8Site, entry: Entry) -> None:
        """Replace the convolution by a matrix product. Raises Unfit."""
        g, node = self._g, site.node
        x, result = node.input[0], node.output[0]
        tensor = self._plan.tensor(x)
        if tensor is None:
            raise UsageError(f"{entry.label} cannot be static: the plan has no tensor '{x}'")
        params = qparams_of([tensor], Ties())[x]
        assert site.weight is not None
        coded = encode(site.weight, entry, float(params.scale), self._means.get(x))
        if not g.begin("quantize-pointwise", node):
            return
        codes = coded.weight.codes
        matrix = np.ascontiguousarray(np.transpose(codes.reshape(codes.shape[:2])))
        scale, zero = self._shared.parameters(g, params)
        operand = self._quantized(x, codes.ndim, scale, zero)
        inputs = [operand, g.constant(matrix, "weight_int8"), scale]
        inputs += [self._shared.constant(g, coded.weight.params.scale, "scale"), zero]
        if coded.bias is not None:
            inputs += ["", self._shared.constant(g, coded.bias[:], "bias")]
        made = g.add(_KERNEL, inputs, [g.fresh(result)], domain="com.microsoft", name=node.name)
        old = list(nd.inputs_of(node))[1:]
        g.set_outputs(node, [g.fresh(result)])
        g.remove(node)
        self.turned.put(result, made.output[0], codes.ndim)
        for name in old:
            drop_unused(g, name)

    def _quantized(self, x: str, rank: int, scale: str, zero: str) -> str:
        """Return the quantized operand; a Concat used by products alone is computed in 8 bits."""
        if x not in self._codes:
            g, floats = self._g, self.turned.of(x, rank)
            producer = g.producer(floats)
            if producer is not None and nd.is_op(producer, "Concat") and x in self._private:
                parts = [g.op("QuantizeLinear", part, scale, zero) for part in producer.input]
                self._codes[x] = g.op("Concat", *parts, axis=nd.attr(producer, "axis"))
            else:
                self._codes[x] = g.op("QuantizeLinear", floats, scale, zero)
        return self._codes[x]


def _is_used_by(g: Graph, name: str, sites: Mapping[int, Int8Site]) -> bool:
    """Whether all users of a value are among the sites."""
    if g.is_output(name) or g.is_captured(name):
        return False
    return all(id(user) in sites for user in g.users(name))
