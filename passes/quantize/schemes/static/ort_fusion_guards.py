"""What onnxruntime must be kept from, and helped to, between layers in 8 bits.

It fuses whatever stands between a DQ and a Q, asked or not: a Conv or Gemm with float weights gets
weights in int8 with one scale for all of them, and an AveragePool or a Softmax a kernel that is
many times slower than floats. A Q behind a MaxPool of floats is moved in front of it, and a pool
of bytes with the channels first takes 10 to 50 times as long. A `Sum` of one operand in front of
the Q, which the runtime neither removes nor fuses, keeps them as they are.

A MatMul in 8 bits with a float result is not fused at all when a Q is among its readers; behind a
`Sum`, it is. Of matrices, and of tensors whose sizes are all known, it is fused with an `Add` of a
bias or a residual into a Gemm of floats, but not with a `Sum`. x Sigmoid(x) of floats behind a DQ
would get a DQ for each of its two readers: as one operator it needs one.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.fuse.linear.affine import only_reader
from passes.quantize.schemes.static.qdq import OUTPUT_TYPES
from passes.quantize.schemes.static.quantizable_ops import bounds_of
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph

_FUSED = ("Conv", "ConvTranspose", "Gemm", "AveragePool", "Softmax")
_ENTERED = ("MaxPool",)
"""What reads floats, and bytes instead once there is a Q behind it."""
_PASSING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice")


def fence(g: Graph, written: set[int]) -> None:
    """Put fences where the runtime would misread what is there; `written` are nodes in 8 bits."""
    for node in list(g.nodes):
        if node not in g:
            continue
        reads_bytes = _is_view(g, given(node, 0))
        if id(node) in written:
            if nd.is_op(node, "MatMul", "Gemm"):
                _part_from_quantizers(g, node)
                _part_from_bias(g, node)
        elif nd.is_op(node, *(_FUSED if reads_bytes else _ENTERED)):
            _keep_float(g, node)
        elif nd.is_op(node, "Sigmoid") and reads_bytes:
            _join_silu(g, node)


def part_signed(g: Graph, written: set[int]) -> None:
    """Keep biases apart from products of int8, for any target.

    From opset 21 on the runtime does not load what it makes of both (see `qdq`).
    """
    if g.opset() < OUTPUT_TYPES:
        return
    for node in list(g.nodes):
        if id(node) in written and nd.is_op(node, "MatMul") and _is_signed(g, node.input[0]):
            _part_from_bias(g, node)


def _is_signed(g: Graph, value: str) -> bool:
    maker = g.producer(value)
    zero = given(maker, 2) if maker is not None and _is_view(g, value) else ""
    return bool(zero) and g.dtype(zero) == TensorProto.INT8


def _is_view(g: Graph, value: str) -> bool:
    return nd.is_op(g.producer(value), "DequantizeLinear")


def _keep_float(g: Graph, node: NodeProto) -> None:
    result = _last(g, node)
    readers = g.users(result)  # where it is an output too, that reads what the Q leaves of it
    if readers and all(_leads_to_q(g, user) for user in readers) and g.begin("keep-float", node):
        _insert(g, result, readers)


def _part_from_quantizers(g: Graph, node: NodeProto) -> None:
    result = node.output[0]
    quantizers = [user for user in g.users(result) if nd.is_op(user, "QuantizeLinear")]
    if quantizers and g.use_count(result) > 1 and g.begin("keep-float", node):
        _insert(g, result, quantizers)


def _part_from_bias(g: Graph, node: NodeProto) -> None:
    result = node.output[0]
    users = g.users(result)
    if not nd.is_op(node, "MatMul") or len(users) != 1 or not nd.is_op(users[0], "Add"):
        return
    (bias,) = users
    shape = g.shape(result)
    if shape is not None and len(shape) > 2 and not all(isinstance(size, int) for size in shape):
        return  # these are not fused
    readers = g.users(_last(g, bias))
    if readers and all(_leads_to_q(g, user) for user in readers):
        return  # in front of a Q they become one kernel on bytes
    if g.begin("keep-bias", bias):
        g.set_op(bias, "Sum")


def _join_silu(g: Graph, sigmoid: NodeProto) -> None:
    x, gate = sigmoid.input[0], sigmoid.output[0]
    product = only_reader(g, gate)
    if product is None or not nd.is_op(product, "Mul"):
        return
    if x in product.input and g.begin("join-silu", product):
        joined = g.op("QuickGelu", x, domain="com.microsoft", at=product, alpha=1.0)
        g.replace(product.output[0], joined)
        g.prune(product)


def _insert(g: Graph, value: str, readers: Iterable[NodeProto]) -> None:
    kept = g.op("Sum", value)
    for reader in readers:
        g.set_inputs(reader, [kept if name == value else name for name in reader.input])


def _last(g: Graph, node: NodeProto) -> str:
    """What the node makes, behind Relus and Clips that alone read it."""
    value = node.output[0]
    while (reader := only_reader(g, value)) is not None and bounds_of(g, reader) is not None:
        value = reader.output[0]
    return value


def _leads_to_q(g: Graph, node: NodeProto) -> bool:
    """Whether the node is a Q, or passes on to one alone what it reads, so that the Q moves up."""
    while nd.is_op(node, *_PASSING) or bounds_of(g, node) is not None:
        reader = only_reader(g, node.output[0])
        if reader is None:
            return False
        node = reader
    return nd.is_op(node, "QuantizeLinear")
