"""Random models for Hypothesis: valid, with dynamic sizes, in several opsets.

A model grows step by step. A step is four small numbers, (operator, a, b, c), so that a failure
shrinks to few steps and small numbers; 0 means the latest value. Every new node runs alone in
onnxruntime at each of `SIZES`; one that is refused there is left out, so the whole is valid.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from tests import ort

Step = tuple[str, int, int, int]

OPSETS = (11, 13, 17, 21)
_IR = {11: 6, 13: 7, 17: 8, 21: 10}
SIZES = ({"B": 3, "S": 4}, {"B": 1, "S": 5})
INPUTS: dict[str, tuple[type, tuple[str | int, ...]]] = {
    "x": (np.float32, ("B", 2, 6)),
    "y": (np.float32, ("B", "S")),
    "i": (np.int64, ("B",)),
    "m": (np.bool_, ("B", 1)),
}
_MOST_ELEMENTS = 2000
_FLOAT, _INT, _BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)


def feeds() -> list[dict[str, Any]]:
    """One feed for each of SIZES."""
    random = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for sizes in SIZES:
        fed: dict[str, Any] = {}
        for name, (kind, dims) in INPUTS.items():
            shape = [sizes[d] if isinstance(d, str) else d for d in dims]
            array = random.standard_normal(shape) * 2
            fed[name] = array > 0 if kind is np.bool_ else array.astype(kind)
        found.append(fed)
    return found


class Builder:
    """A graph that grows, with the contents of every value at each of SIZES."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        fed = feeds()
        self.values: dict[str, list[Any]] = {name: [run[name] for run in fed] for name in fed[0]}
        self.serial = itertools.count()

    # -- growing

    def constant(self, value: Any, kind: type = np.int64, form: int = 0) -> str:
        """A new constant, never shared: an initializer, or a Constant node in one of its forms."""
        array = np.asarray(value, kind)
        name = f"c{next(self.serial)}"
        if form % 3 == 0:
            self.constants.append(numpy_helper.from_array(array, name))
        else:
            typed = {"f": "value_float", "i": "value_int"}.get(array.dtype.kind)
            if form % 3 == 1 and self.opset >= 12 and typed and array.ndim <= 1 and array.size:
                held: dict[str, Any] = {typed + "s" * array.ndim: array.tolist()}
            else:
                held = {"value": numpy_helper.from_array(array)}
            self.nodes.append(helper.make_node("Constant", [], [name], **held))
        self.values[name] = [array for _ in SIZES]
        return name

    def add(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str | None:
        """A node, if onnxruntime takes it at every size; its first output."""
        names = [f"v{next(self.serial)}" for _ in range(outputs)]
        node = helper.make_node(op_type, list(inputs), names, **attributes)
        reads = list(dict.fromkeys(n for n in (*inputs, *_captures(node)) if n))
        session, fed = _alone(node, {name: self.values[name] for name in reads}, self.opset)
        if session is None:
            return None
        results: list[list[Any]] = []
        for index in range(len(SIZES)):
            try:
                results.append(session.run(None, {n: a[index] for n, a in fed.items()}))
            except Exception:  # the binding raises a dozen unrelated classes
                return None
        if not all(_is_modest(array) for run in results for array in run):
            return None
        self.nodes.append(node)
        self.values.update(zip(names, map(list, zip(*results, strict=True)), strict=True))
        return names[0]

    def with_axes(self, op_type: str, since: int, value: str, axes: list[int], **rest: Any) -> None:
        """An operator whose axes moved from an attribute to an input."""
        if self.opset >= since:
            self.add(op_type, value, self.constant(axes), **rest)
        else:
            self.add(op_type, value, axes=axes, **rest)

    # -- choosing

    def pick(self, choice: int, *kinds: np.dtype, rank: int | None = None) -> str:
        """A value of one of these types, the latest first; a new constant where there is none."""
        found = [
            name
            for name, (array, *_) in self.values.items()
            if (not kinds or array.dtype in kinds) and (rank is None or array.ndim == rank)
        ]
        if not found:
            return self.constant(np.ones([2] * (rank or 0)), kinds[0].type)
        return found[-1 - choice % len(found)]

    def rank(self, value: str) -> int:
        return self.values[value][0].ndim

    def shape(self, value: str) -> tuple[int, ...]:
        return self.values[value][0].shape

    # -- the whole

    def model(self, chosen: Sequence[int], declared: bool) -> ModelProto | None:
        """The model with some of its values as outputs; None if it has no nodes."""
        made = [name for node in self.nodes for name in node.output]
        if not made:
            return None
        names = list(dict.fromkeys(made[-1 - choice % len(made)] for choice in chosen))
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(k)), dims)
            for name, (k, dims) in INPUTS.items()
        ]
        outputs = [self._output(name, declared) for name in names]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.constants)
        return _model(graph, self.opset)

    def _output(self, name: str, declared: bool) -> ValueInfoProto:
        arrays = self.values[name]
        dtype = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
        if not declared or len({array.ndim for array in arrays}) > 1:
            return helper.make_tensor_value_info(name, dtype, None)
        shape: list[str | int | None] = []
        for sizes in zip(*(array.shape for array in arrays), strict=True):
            named = [
                s for s in ("B", "S") if all(r[s] == d for r, d in zip(SIZES, sizes, strict=True))
            ]
            shape.append(sizes[0] if len(set(sizes)) == 1 else named[0] if named else None)
        return helper.make_tensor_value_info(name, dtype, shape)


def _is_modest(array: Any) -> bool:
    if array.size > _MOST_ELEMENTS or array.ndim > 5:
        return False
    return array.size == 0 or bool(np.all(np.abs(array.astype(np.float64)) < 1e4))


def _captures(node: NodeProto) -> list[str]:
    """What the subgraphs of a node read from outside."""
    found: list[str] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            inner = attribute.g
            own = {t.name for t in inner.initializer} | {o for n in inner.node for o in n.output}
            reads = [n for each in inner.node for n in (*each.input, *_captures(each))]
            reads += [o.name for o in inner.output]
            found += [name for name in reads if name and name not in own]
    return found


def _alone(
    node: NodeProto, reads: dict[str, list[Any]], opset: int
) -> tuple[Any, dict[str, list[Any]]]:
    """A session with this node alone, and its inputs; None if the runtime refuses it."""
    plain = NodeProto()
    plain.CopyFrom(node)
    if not any(a.type == AttributeProto.GRAPH for a in node.attribute):
        # The same names every time: the session is made once.
        numbered = {name: f"i{index}" for index, name in enumerate(reads)}
        plain.input[:] = [numbered.get(name, "") for name in node.input]
        plain.output[:] = [f"o{index}" for index in range(len(node.output))]
        reads = {numbered[name]: arrays for name, arrays in reads.items()}
    kinds = tuple((name, arrays[0].dtype.str) for name, arrays in reads.items())
    return _session(plain.SerializeToString(), kinds, opset), reads


@functools.lru_cache(maxsize=2048)
def _session(node: bytes, kinds: tuple[tuple[str, str], ...], opset: int) -> Any:
    parsed = NodeProto.FromString(node)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None)
        for name, kind in kinds
    ]
    outputs = [ValueInfoProto(name=name) for name in parsed.output]
    try:
        return ort.session(_model(helper.make_graph([parsed], "g", inputs, outputs), opset))
    except Exception:  # as above
        return None


def _model(graph: GraphProto, opset: int) -> ModelProto:
    imports = [helper.make_opsetid("", opset)]
    functions: list[FunctionProto] = []
    if any(node.domain == "local" for node in graph.node):
        imports.append(helper.make_opsetid("local", 1))
        body = [
            helper.make_node("Relu", ["a"], ["r"]),
            helper.make_node("Identity", ["r"], ["s"]),
            helper.make_node("Mul", ["s", "b"], ["out"]),
        ]
        functions.append(
            helper.make_function("local", "Gate", ["a", "b"], ["out"], body, imports[:1])
        )
    return helper.make_model(
        graph, opset_imports=imports, ir_version=_IR[opset], functions=functions
    )


# -- steps: each adds a node or a few, from three small numbers

_STEPS: dict[str, Callable[[Builder, int, int, int], None]] = {}


def _step(make: Callable[[Builder, int, int, int], None]) -> None:
    _STEPS[make.__name__.strip("_")] = make


def _axis(g: Builder, value: str, choice: int) -> int:
    rank = max(g.rank(value), 1)
    return (choice % (2 * rank)) - rank if choice % 2 else choice % rank


@_step
def _unary(g: Builder, a: int, b: int, c: int) -> None:
    names = ("Relu", "Neg", "Abs", "Sigmoid", "Tanh", "Identity", "Floor", "Sign", "Clip", "Sum")
    g.add(names[b % len(names)], g.pick(a, _FLOAT))


@_step
def _binary(g: Builder, a: int, b: int, c: int) -> None:
    op_type = ("Add", "Mul", "Sub", "Min", "Max", "Add")[c % 6]
    g.add(op_type, g.pick(a, _FLOAT), g.pick(b, _FLOAT))


@_step
def _with_number(g: Builder, a: int, b: int, c: int) -> None:
    """Neutral elements among them, of several shapes."""
    op_type = ("Add", "Mul", "Sub", "Div", "Pow", "Max")[b % 6]
    number = (1.0, 0.5, 2.0)[c % 3] if op_type in ("Div", "Pow") else (0.0, 1.0, -1.0)[c % 3]
    shape = ((), (1,), (1, 1), (6,), (1, 1, 1, 1))[b % 5]
    operands = [g.pick(a, _FLOAT), g.constant(np.full(shape, number), np.float32, c)]
    g.add(op_type, *(operands[::-1] if c % 5 == 4 and op_type in ("Add", "Mul") else operands))


@_step
def _whole_number(g: Builder, a: int, b: int, c: int) -> None:
    op_type = ("Add", "Mul", "Sub", "Div", "Max", "Equal")[b % 6]
    g.add(op_type, g.pick(a, _INT), g.constant([(1, 2, 3)[c % 3]][0], form=c))


@_step
def _compare(g: Builder, a: int, b: int, c: int) -> None:
    if c % 4 == 3:
        g.add("Not", g.pick(a, _BOOL))
    else:
        kind = (_FLOAT, _INT)[c % 2]
        g.add(("Less", "Greater")[b % 2], g.pick(a, kind), g.pick(b, kind))


@_step
def _where(g: Builder, a: int, b: int, c: int) -> None:
    condition = g.pick(c, _BOOL) if c % 4 < 3 else g.constant(b % 2 == 0, np.bool_, a)
    g.add("Where", condition, g.pick(a, _FLOAT), g.pick(b, _FLOAT))


@_step
def _cast(g: Builder, a: int, b: int, c: int) -> None:
    kinds = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.DOUBLE, TensorProto.BOOL)
    wide = g.add("Cast", g.pick(a), to=kinds[b % 4])
    if wide is not None and c % 2:
        g.add("Cast", wide, to=kinds[c % 4])


@_step
def _transpose(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    orders = list(itertools.permutations(range(g.rank(value))))
    if b % 7 == 6 or not g.rank(value):
        g.add("Transpose", value)
    else:
        g.add("Transpose", value, perm=list(orders[-1 - b % len(orders)]))


@_step
def _reshape(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    shape = g.shape(value)
    targets = [
        [-1],
        [0, -1],
        [0, 0, -1],
        [-1, shape[-1] if shape else 1],
        [0, -1, 2, 3],
        [1, -1],
        [0] * len(shape),
        [-1, *shape[1:]],
        [0, *shape[:0:-1]],
        [2, -1],
        [-1, 1, 6],
    ]
    g.add("Reshape", value, g.constant(targets[b % len(targets)], form=c))


@_step
def _computed_reshape(g: Builder, a: int, b: int, c: int) -> None:
    """As exporters write it: a size is taken from a shape and put between constants."""
    value = g.pick(a)
    shape = g.add("Shape", g.pick((a, b)[c % 2]))
    size = shape and g.add("Gather", shape, g.constant([(0, -1)[b % 2]][: c % 3 + 1]))
    if not size:
        return
    if g.rank(size) == 0:
        if g.opset >= 13:
            size = g.add("Unsqueeze", size, g.constant([0]))
        else:
            size = g.add("Unsqueeze", size, axes=[0])
    rest = g.constant(([-1], [-1, 6], [2, -1], [1])[b % 4], form=c)
    target = size and g.add("Concat", *((size, rest) if c % 4 else (rest, size)), axis=0)
    if target:
        g.add(("Reshape", "Reshape", "Expand")[b % 3], value, target)


@_step
def _squeeze(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    ones = [i for i, size in enumerate(g.shape(value)) if size == 1]
    if ones and c % 4:
        g.with_axes("Squeeze", 13, value, [ones[b % len(ones)]])
    else:
        g.with_axes("Unsqueeze", 13, value, [[0], [-1], [1], [0, -1]][b % 4])


@_step
def _slice(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    starts = (0, 1, -1, -2, 2)[b % 5]
    end = (2**63 - 1, 2, -1, 3, 100)[c % 5]
    step = (1, 1, 2)[(b + c) % 3]
    bounds = [[starts], [end], [_axis(g, value, b)], [step]]
    if c % 7 == 6:
        bounds = [[-1], [-(2**63) + 1], [_axis(g, value, b)], [-1]]
    g.add("Slice", value, *(g.constant(item, form=b) for item in bounds))


@_step
def _concat(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    kind = g.values[value][0].dtype
    others = [g.pick(b, kind), g.pick(c, kind)][: c % 3]
    g.add("Concat", value, *others, axis=_axis(g, value, b))


@_step
def _split(g: Builder, a: int, b: int, c: int) -> None:
    value, axis = g.pick(a), _axis(g, g.pick(a), b)
    size = g.shape(value)[axis] if g.rank(value) else 0
    sizes = [1, size - 1] if c % 2 else [size // 2, size - size // 2]
    if c % 3 == 2:
        more = {"num_outputs": 2} if g.opset >= 18 else {}
        g.add("Split", value, outputs=2, axis=axis, **more)
    elif g.opset >= 13:
        g.add("Split", value, g.constant(sizes), outputs=2, axis=axis)
    else:
        g.add("Split", value, outputs=2, axis=axis, split=sizes)


@_step
def _pieces_back(g: Builder, a: int, b: int, c: int) -> None:
    """Split and Concat, in order or not."""
    value, axis = g.pick(a, rank=3), b % 3
    parts = 2 if c % 2 else 1
    more = {"num_outputs": parts} if g.opset >= 18 else {}
    if parts == 1 and g.opset < 18:
        return
    first = g.add("Split", value, outputs=parts, axis=axis, **more)
    if first is not None:
        names = list(g.nodes[-1].output)
        g.add("Concat", *(names[::-1] if c % 3 == 2 else names), axis=axis)


@_step
def _expand(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    if c % 3 == 2:
        shape = g.add("Shape", g.pick(b))
        if shape is not None:
            g.add("Expand", value, shape)
    else:
        targets = ([1], [2, 1, 1], list(g.shape(value)[1:]) or [1], [1, 1, 1, 1], [1, 1])
        g.add("Expand", value, g.constant(targets[b % 5], form=c))


@_step
def _tile(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    counts = [1] * g.rank(value)
    if counts and c % 3:
        counts[b % len(counts)] = 2
    g.add("Tile", value, g.constant(counts, form=c))


@_step
def _pad(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a, _FLOAT)
    pads = [0] * (2 * g.rank(value))
    if pads and c % 3:
        pads[b % len(pads)] = c % 3
    more = [g.constant(0.5, np.float32)] if b % 3 == 2 else []
    mode = ("constant", "edge", "constant")[b % 3]
    g.add("Pad", value, g.constant(pads, form=c), *more, mode=mode)


@_step
def _gather(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a)
    indices = (0, [0], [0, 0], -1, [[0]], [0, 1], [1, 0])[c % 7]
    g.add("Gather", value, g.constant(indices, form=b), axis=_axis(g, value, b))


@_step
def _shape(g: Builder, a: int, b: int, c: int) -> None:
    more = {"start": c % 3 - 1} if g.opset >= 15 and b % 3 == 2 else {}
    g.add("Size" if b % 5 == 4 else "Shape", g.pick(a), **more)


@_step
def _fill(g: Builder, a: int, b: int, c: int) -> None:
    shape = g.add("Shape", g.pick(a))
    number = numpy_helper.from_array(np.array([(0.0, 1.0)[b % 2]], np.float32))
    filled = shape and g.add("ConstantOfShape", shape, value=number)
    if filled and c % 2:
        g.add(("Add", "Mul")[b % 2], filled, g.pick(c, _FLOAT))


@_step
def _reduce(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a, _FLOAT)
    op_type, since = (("ReduceSum", 13), ("ReduceMean", 18), ("ReduceMax", 18))[c % 3]
    axes = [_axis(g, value, b)] if b % 4 or g.rank(value) < 2 else [0, 1]
    g.with_axes(op_type, since, value, axes, keepdims=(b + c) % 2)


@_step
def _matmul(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a, _FLOAT)
    inner = g.shape(value)[-1] if g.rank(value) else 1
    weight = np.random.default_rng(inner).standard_normal((inner, 2 + c % 2))
    if c % 3 == 2:
        g.add("MatMul", value, g.pick(b, _FLOAT))
    else:
        g.add("MatMul", value, g.constant(weight, np.float32, b))


@_step
def _softmax(g: Builder, a: int, b: int, c: int) -> None:
    value = g.pick(a, _FLOAT)
    more = {} if c % 3 == 2 else {"axis": _axis(g, value, b)}
    g.add(("Softmax", "Softmax", "Flatten")[b % 3], value, **more)


@_step
def _dropout(g: Builder, a: int, b: int, c: int) -> None:
    g.add("Dropout", g.pick(a, _FLOAT), outputs=1 + c % 2)


@_step
def _call(g: Builder, a: int, b: int, c: int) -> None:
    if g.opset >= 17:  # functions came with IR version 8
        g.add("Gate", g.pick(a, _FLOAT), g.pick(b, _FLOAT), domain="local")


@_step
def _constants(g: Builder, a: int, b: int, c: int) -> None:
    """Something to fold."""
    left = g.constant(np.arange(6).reshape((2, 3), order="C" if a % 2 else "A"), np.float32, b)
    g.add(("Add", "Mul")[c % 2], left, g.constant([[1.0], [2.0]], np.float32, c))


@_step
def _if(g: Builder, a: int, b: int, c: int) -> None:
    """Both branches read values from outside; the condition is stored or computed."""
    if c % 3 == 0:
        condition = g.constant(bool(a % 2), np.bool_, b)
    else:
        size = g.add("Size", g.pick(b))
        condition = size and g.add("Greater", size, g.constant((1, 10)[c % 2]))
    if not condition:
        return
    captured, other = g.pick(a, _FLOAT), g.pick(b, _FLOAT)
    then = _branch(g, "then", captured, other, b)
    g.add("If", condition, then_branch=then, else_branch=_branch(g, "else", other, captured, c))


def _branch(g: Builder, name: str, captured: str, other: str, choice: int) -> GraphProto:
    serial = next(g.serial)
    inner = [f"{name}{serial}_{i}" for i in range(5)]
    weight = numpy_helper.from_array(np.array(1.0, np.float32), inner[0])
    nodes = [helper.make_node("Mul", [captured, inner[0]], [inner[1]])]
    if choice % 4 == 1:
        nodes.append(helper.make_node("Add", [inner[1], other], [inner[2]]))
    elif choice % 4 == 2:
        nodes.append(helper.make_node("Identity", [captured], [inner[2]]))
        nodes.append(helper.make_node("Neg", [inner[1]], [inner[3]]))  # nobody reads it
    elif choice % 4 == 3 and g.values[captured][0].ndim:
        nodes.append(helper.make_node("Shape", [other], [inner[3]]))
        nodes.append(helper.make_node("Expand", [inner[1], inner[3]], [inner[2]]))
    else:
        nodes.append(helper.make_node("Relu", [inner[1]], [inner[2]]))
    declared = [helper.make_tensor_value_info(inner[2], TensorProto.FLOAT, None)]
    return helper.make_graph(nodes, name, [], declared, [weight])


# -- strategies

_NUMBERS = st.integers(0, 11)


@st.composite
def models(draw: st.DrawFn, most_steps: int = 14) -> ModelProto:
    """A model that runs at each of SIZES."""
    steps = st.lists(
        st.tuples(st.sampled_from(sorted(_STEPS)), _NUMBERS, _NUMBERS, _NUMBERS),
        min_size=1,
        max_size=most_steps,
    )
    opset = draw(st.sampled_from(OPSETS))
    chosen = draw(st.lists(_NUMBERS, min_size=1, max_size=3))
    proto = build(opset, draw(steps), chosen, draw(st.booleans()))
    proto = proto if proto is not None else build(opset, [("unary", 0, 0, 0)], [0], True)
    assert proto is not None
    return proto


def build(
    opset: int, steps: Sequence[Step], chosen: Sequence[int] = (0,), declared: bool = True
) -> ModelProto | None:
    """The model that these steps make; None if all of them were refused."""
    builder = Builder(opset)
    for name, a, b, c in steps:
        _STEPS[name](builder, a, b, c)
    return builder.model(chosen, declared)
