"""One `check` for every rule and pass: models as text in, models as text out.

A model is written in ONNX's text syntax. The header may be left out (opset 21 and com.microsoft are
then imported), and `after` may be the nodes alone, between the same inputs and outputs:

    check(gelu, "agraph (float[N] x) => (float[N] y) { y = ... }", "y = Gelu (x)")
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    TensorProto,
    helper,
    numpy_helper,
    parser,
    printer,
)

from tests import ort
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.node import graphs_of
from toolkit.pass_manager.protocol import Context
from toolkit.symbolic import Expr

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'
_SYMBOL_SIZES = (3, 5, 2, 4)


def model(text: str) -> Model:
    """A Model from text."""
    return Model.from_proto(parse(text))


def parse(text: str) -> ModelProto:
    text = text.strip()
    return parser.parse_model(text if text.startswith("<") else HEADER + text)


def check(
    rule_or_pass: Any,
    before: str,
    after: str | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    atol: float = 1e-5,
    near_miss: bool = False,
    run: bool = True,
) -> Model:
    """Run a rule or a pass on a model and assert all that must hold; the changed model.

    The result is `after` up to the names of values in between. Without it something must have
    changed, or nothing at all for a near miss. The index stays true, onnxruntime computes the same
    from random feeds (or `inputs`) unless `run` is off, a second run changes nothing, and a
    rollback restores the model as it was, and what is known of its values.
    """
    original = parse(before)
    subject = Model.from_proto(original)
    stored, known = written(subject), knowledge(subject)

    _run(rule_or_pass, subject)
    if near_miss:
        assert not len(subject.journal), f"it matched:\n{text_of(subject)}"
    elif after is None:
        assert len(subject.journal), f"nothing changed:\n{text_of(subject)}"
    assert_rollback(subject, stored, known, restated=True)

    _run(rule_or_pass, subject)
    subject.commit()
    if after is not None:
        assert_same_structure(subject, Model.from_proto(_completed(after, original)))
    if run:
        fed = dict(inputs) if inputs is not None else random_feeds(subject)
        assert_same_outputs(original, subject, [fed], atol)
    _run(rule_or_pass, subject)
    assert not len(subject.journal), f"a second run changes more:\n{text_of(subject)}"
    return subject


def assert_rollback(
    subject: Model, stored: bytes, known: Mapping[Fact, Any], restated: bool = False
) -> None:
    """Undo all edits: the model is `stored` again, and all that was `known` still holds.

    `restated`: a pass that infers may have found another expression for a symbolic size.
    """
    subject.rollback()
    subject.graph.verify()
    assert written(subject) == stored, f"rollback leaves a trace:\n{text_of(subject)}"
    now = knowledge(subject)
    lost = {
        key: (old, now.get(key))
        for key, old in known.items()
        if not _holds(old, now.get(key), restated)
    }
    assert not lost, f"rollback changes what is known: {lost}"


class Fact(NamedTuple):
    """What is known of which value; value names are unique but for those in sibling subgraphs."""

    about: str
    graph: str
    value: str


def knowledge(subject: Model) -> dict[Fact, tuple[Any, Any]]:
    """Type and symbolic contents of every value of every graph, where they are known."""
    found: dict[Fact, tuple[Any, Any]] = {}
    for graph in subject.graphs():
        owner = graph.owner.output[0] if graph.owner is not None else ""
        made = [name for node in graph.nodes for name in node.output if name]
        for name in (*graph.inputs, *graph.initializers, *made):
            type_, data = graph.type(name), graph.data(name)
            if type_ is not None:
                found[Fact("type", owner + graph.name, name)] = (type_.dtype, type_.shape)
            if data is not None:
                found[Fact("contents", owner + graph.name, name)] = (data.shape, tuple(data.flat))
    return found


def _holds(old: tuple[Any, Any], new: tuple[Any, Any] | None, restated: bool) -> bool:
    """Whether `new` says all that `old` did; it may say more of what had no name."""
    if new is None or (old[0] and old[0] != new[0]):
        return False
    if old[1] is None:
        return True
    return new[1] is not None and all(
        a == b or (isinstance(a, Expr) and (restated or a.anonymous))
        for a, b in itertools.zip_longest(old[1], new[1])
    )


def text_of(subject: Model) -> str:
    return printer.to_text(subject.to_proto())


def random_feeds(subject: Model, seed: int = 0) -> dict[str, Any]:
    """Seeded inputs; dimensions of one name have one size, unnamed ones are 2."""
    random = np.random.default_rng(seed)
    sizes: dict[str, int] = {}
    choice = itertools.cycle(_SYMBOL_SIZES)
    feeds: dict[str, Any] = {}
    for declared in subject.graph.interface_inputs(feeds_only=True):
        tensor = declared.type.tensor_type
        shape: list[int] = []
        for dim in tensor.shape.dim:
            if dim.dim_param and dim.dim_param not in sizes:
                sizes[dim.dim_param] = next(choice)
            shape.append(sizes[dim.dim_param] if dim.dim_param else dim.dim_value or 2)
        feeds[declared.name] = _random(random, tensor.elem_type, shape)
    return feeds


def assert_same_structure(found: Model, wanted: Model) -> None:
    """Equal graphs, but for the names of values in between; constants by content."""
    same = _signature(found.graph, {}) == _signature(wanted.graph, {})
    assert same, f"found:\n{text_of(found)}\n\nwanted:\n{text_of(wanted)}"


def assert_same_outputs(
    original: ModelProto, changed: Model, feeds: Sequence[Mapping[str, Any]], atol: float = 1e-5
) -> None:
    """Onnxruntime computes the same from both: types and shapes exactly, numbers within `atol`."""
    names = [output.name for output in original.graph.output]
    assert changed.graph.outputs == names
    before, after = ort.session(original), ort.session(changed.inlined_proto())
    for fed in feeds:
        results: Any = zip(
            names, before.run(None, dict(fed)), after.run(None, dict(fed)), strict=True
        )
        for name, old, new in results:
            assert old.dtype == new.dtype, f"output '{name}' is {new.dtype}, was {old.dtype}"
            assert old.shape == new.shape, f"output '{name}' is {new.shape}, was {old.shape}"
            np.testing.assert_allclose(new, old, atol=atol, rtol=atol, err_msg=f"output '{name}'")


def written(subject: Model) -> bytes:
    """The whole model as bytes; initializers and attributes by name: their order means nothing."""
    proto = subject.to_proto()
    pending = [proto.graph]
    while pending:
        graph = pending.pop()
        graph.initializer.sort(key=lambda tensor: tensor.name)
        for node in graph.node:
            node.attribute.sort(key=lambda attribute: attribute.name)
            pending.extend(graphs_of(node))
    return proto.SerializeToString(deterministic=True)


def _run(rule_or_pass: Any, subject: Model) -> None:
    rule_or_pass.run(subject, Context())
    subject.graph.verify()


def _completed(after: str, original: ModelProto) -> ModelProto:
    """`after` as a model: with the signature and initializers of the original if it has none."""
    if "=>" in after:
        return parse(after)
    proto = ModelProto()
    proto.CopyFrom(original)
    del proto.graph.node[:]
    del proto.graph.value_info[:]
    proto.graph.node.extend(parse(f"g () => () {{ {after} }}").graph.node)
    for domain in {node.domain for node in proto.graph.node} - {"", "com.microsoft"}:
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return proto


def _random(random: np.random.Generator, dtype: int, shape: Sequence[int]) -> Any:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    if dtype == TensorProto.BOOL:
        return np.asarray(random.random(shape) < 0.5)
    if kind.kind in "iu":
        return np.asarray(random.integers(0, 3, shape), dtype=kind)
    return np.asarray(random.standard_normal(shape), dtype=kind)


# Structure ---------------------------------------------------------------------------------------


def _signature(graph: Graph, outer: dict[str, Any]) -> Any:
    """The graph as nested tuples: equal exactly when the graphs are, names in between aside."""
    known = dict(outer)
    known.update((name, ("input", i)) for i, name in enumerate(graph.inputs))
    for name in graph.initializers:
        if name not in graph.inputs:
            known[name] = _contents(graph.const(name))
    nodes: list[int] = []
    interned: dict[Any, int] = {}
    for node in graph.nodes:
        reads = tuple(known[name] if name else None for name in node.input)
        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = tuple(sorted(_attribute(a) for a in node.attribute if not _is_graph(a)))
        inner = tuple(_signature(child, known) for child in graph.subgraphs(node))
        if node.op_type == "Constant" and not node.domain:
            known[node.output[0]] = _contents(graph.const(node.output[0]))
            continue
        key = (domain, node.op_type, reads, attributes, inner)
        number = interned.setdefault(key, len(interned))
        nodes.append(number)
        for index, name in enumerate(node.output):
            known[name] = ("node", hash(key), index)
    listed = sorted((hash(key), nodes.count(number)) for key, number in interned.items())
    return tuple(graph.inputs), tuple(known[name] for name in graph.outputs), tuple(listed)


def _contents(array: Any) -> Any:
    if array.dtype.kind in "OSU":
        return ("constant", "string", array.shape, tuple(map(str, array.reshape(-1))))
    rounded = np.round(array.astype(np.float64), 6)
    return ("constant", str(array.dtype), array.shape, tuple(rounded.reshape(-1).tolist()))


def _attribute(attribute: AttributeProto) -> tuple[str, str]:
    if attribute.type == AttributeProto.TENSOR:
        return attribute.name, repr(_contents(numpy_helper.to_array(attribute.t)))
    return attribute.name, repr(helper.get_attribute_value(attribute))


def _is_graph(attribute: AttributeProto) -> bool:
    return isinstance(helper.get_attribute_value(attribute), GraphProto)
