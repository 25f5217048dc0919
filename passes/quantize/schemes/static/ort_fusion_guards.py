"""Guards against onnxruntime's own rewrites around Q/DQ pairs. All follow from one fact:

onnxruntime fuses and moves Q and DQ by local patterns, even if the result is slower or invalid.
Each guard is an equivalent graph that such a pattern does not match.

    pattern                                   effect without the guard              guard
    Conv, Gemm, AveragePool, Softmax of       float weights in int8 with one        `Sum` of one
    floats between a DQ and a Q               scale; kernels slower than floats     operand before Q
    MaxPool of floats before a Q              Q moves up; a uint8 pool takes 10     the same
                                              to 50 times as long
    int8 MatMul whose float result has a Q    not fused at all                      the same
    among its users
    int8 MatMul, then Add of a bias           a float Gemm (of matrices and static  Add becomes Sum
                                              shapes); from opset 21 on, a model
                                              that does not load if signed
    x Sigmoid(x) of floats after a DQ         one DQ for each of its two users      one QuickGelu
    data movement after a DQ                  a second pair after it; from opset    that pair,
                                              21 on without its type if signed      written here
                                              (microsoft/onnxruntime#25526), and
                                              a crash before a subgraph that
                                              captures the result
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.quantize.schemes.static.qdq import QdqWriter
from passes.quantize.schemes.static.quantizable_ops import bounds_of
from toolkit.ir import Graph, Model, node as nd
from toolkit.quantization.number_format import INT8
from toolkit.quantization.plan import Plan
from toolkit.quantization.qparams import QParams

_FUSED_BETWEEN_QDQ = ("Conv", "ConvTranspose", "Gemm", "AveragePool", "Softmax")
"""Float operators that onnxruntime fuses between a DQ and a Q."""
_OVERTAKEN_BY_Q = ("MaxPool",)
"""Float operators past which onnxruntime moves a Q, to their operands."""
_MOVEMENT_BEFORE_Q = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice")
"""Data movement past which onnxruntime moves a Q at no cost; a subset of MOVEMENT."""
_MOVEMENT_BEHIND_DQ = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
"""Data movement past which onnxruntime moves a DQ, to the results."""
_OUTPUT_TYPE_OPSET = 21
"""The first opset whose QuantizeLinear has an output type."""


def join_silu(model: Model, plan: Plan) -> None:
    """Replace each x Sigmoid(x) that the plan leaves in float by one QuickGelu.

    The result keeps its name, which the plan maps to its range.
    """
    for g, node in list(model.places()):
        if not nd.is_op(node, "Mul") or _is_quantized(plan, node):
            continue
        gate = _gate(g, node)
        if gate is None or _is_quantized(plan, gate):
            continue
        x = gate.input[0]
        if g.dtype(x) != TensorProto.FLOAT or not g.begin("join-silu", node):
            continue
        g.set_op(node, "QuickGelu", "com.microsoft")
        g.set_inputs(node, [x])
        g.set_attr(node, "alpha", 1.0)
        g.prune(gate)


def guard(model: Model, writer: QdqWriter, written: set[int], fuses_qdq: bool) -> None:
    """Write the guards around the nodes `written` in int8.

    Pairs after data movement and signed products are guarded for every target, since any may hand
    the model to onnxruntime. Outer graphs come first: onnxruntime inlines a subgraph that always
    runs into the graph around it before anything else.
    """
    moved: dict[str, QParams] = {}
    for g in list(model.graphs()):
        _write_pairs_behind_movement(g, writer, moved)
        for node in list(g.nodes):
            if node not in g:
                continue
            if id(node) in written and nd.is_op(node, "MatMul", "Gemm"):
                if fuses_qdq:
                    _separate_quantizers(g, node)
                if fuses_qdq or (g.opset() >= _OUTPUT_TYPE_OPSET and _is_signed(g, node.input[0])):
                    _separate_bias(g, node)
            elif fuses_qdq and id(node) not in written:
                dequantized = _is_dequantized(g, given(node, 0))
                if nd.is_op(node, *(_FUSED_BETWEEN_QDQ if dequantized else _OVERTAKEN_BY_Q)):
                    _keep_float(g, node)


def _write_pairs_behind_movement(g: Graph, writer: QdqWriter, moved: dict[str, QParams]) -> None:
    """Write Q/DQ pairs after data movement where onnxruntime's own would fail."""
    for node in list(g.nodes):
        moves = nd.is_op(node, *_MOVEMENT_BEHIND_DQ)
        if not moves and not _is_no_op(node):
            continue
        result = node.output[0]
        params = writer.views.get(node.input[0]) or moved.get(node.input[0])
        if params is None:
            continue
        moved[result] = params
        rule = "carry-captured" if _is_captured(g, result) else ""
        if not rule and moves and params.format == INT8 and g.opset() >= _OUTPUT_TYPE_OPSET:
            rule = "" if _is_quantized_by_all(g, result) else "carry-signed"
        if rule and g.begin(rule, node):
            writer.store(g, result, params)


def _is_no_op(node: NodeProto) -> bool:
    """Whether onnxruntime removes a node as a no-op."""
    if nd.is_op(node, "Cast"):
        return nd.attr(node, "to") == TensorProto.FLOAT
    return nd.is_op(node, "Identity", "Dropout")


def _is_captured(g: Graph, value: str) -> bool:
    """Whether subgraphs capture a value, or the result of an If that returns it."""
    if g.is_captured(value):
        return True
    if g.parent is None or g.owner is None or not nd.is_op(g.owner, "If"):
        return False
    made = zip(g.outputs, g.owner.output, strict=False)
    return any(_is_captured(g.parent, name) for inner, name in made if inner == value)


def _is_quantized_by_all(g: Graph, value: str) -> bool:
    """Whether a value has users, all of them QuantizeLinear."""
    quantizers = [user for user in g.users(value) if nd.is_op(user, "QuantizeLinear")]
    return 0 < g.use_count(value) == len(quantizers)


def _gate(g: Graph, product: NodeProto) -> NodeProto | None:
    """Return the Sigmoid of one factor that produces the other factor."""
    for slot in (0, 1):
        producer, other = g.producer(product.input[slot]), product.input[1 - slot]
        if producer is not None and nd.is_op(producer, "Sigmoid") and producer.input[0] == other:
            return producer
    return None


def _is_quantized(plan: Plan, node: NodeProto) -> bool:
    entry = plan.find(node)
    return entry is not None and entry.scheme != "float"


def _is_signed(g: Graph, value: str) -> bool:
    producer = g.producer(value)
    zero = given(producer, 2) if producer is not None and _is_dequantized(g, value) else ""
    return bool(zero) and g.dtype(zero) == TensorProto.INT8


def _is_dequantized(g: Graph, value: str) -> bool:
    return nd.is_op(g.producer(value), "DequantizeLinear")


def _keep_float(g: Graph, node: NodeProto) -> None:
    result = _last(g, node)
    users = g.users(result)  # a graph output may be quantized too
    if users and all(_leads_to_q(g, user) for user in users) and g.begin("keep-float", node):
        _insert(g, result, users)


def _separate_quantizers(g: Graph, node: NodeProto) -> None:
    result = node.output[0]
    quantizers = [user for user in g.users(result) if nd.is_op(user, "QuantizeLinear")]
    if quantizers and g.use_count(result) > 1 and g.begin("keep-float", node):
        _insert(g, result, quantizers)


def _separate_bias(g: Graph, node: NodeProto) -> None:
    result = node.output[0]
    users = g.users(result)
    if not nd.is_op(node, "MatMul") or len(users) != 1 or not nd.is_op(users[0], "Add"):
        return
    (bias,) = users
    shape = g.shape(result)
    if shape is not None and len(shape) > 2 and not all(isinstance(size, int) for size in shape):
        return  # onnxruntime does not fuse these
    users = g.users(_last(g, bias))
    if users and all(_leads_to_q(g, user) for user in users):
        return  # product, bias and Q become one int8 kernel
    if g.begin("keep-bias", bias):
        g.set_op(bias, "Sum")


def _insert(g: Graph, value: str, users: Iterable[NodeProto]) -> None:
    kept = g.op("Sum", value)
    for user in users:
        g.set_inputs(user, [kept if name == value else name for name in user.input])


def _last(g: Graph, node: NodeProto) -> str:
    """Return the result of a node, or that of the last Relu or Clip in a chain of sole users."""
    value = node.output[0]
    while (user := g.sole_user(value)) is not None and bounds_of(g, user) is not None:
        value = user.output[0]
    return value


def _leads_to_q(g: Graph, node: NodeProto) -> bool:
    """Whether the node is a Q, or data movement with one sole user that leads to a Q."""
    while nd.is_op(node, *_MOVEMENT_BEFORE_Q) or bounds_of(g, node) is not None:
        user = g.sole_user(node.output[0])
        if user is None:
            return False
        node = user
    return nd.is_op(node, "QuantizeLinear")
