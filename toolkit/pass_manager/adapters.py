"""Other people's rewriters as passes, under the same proof as our own.

    @from_graphsurgeon
    def drop_dropout(graph): ...                    # onnx_graphsurgeon.Graph, edited in place

    relu_twice = from_onnxscript([my_rule])         # onnxscript rewrite rules

    @from_function
    def tidy(proto): ...                            # onnx.ModelProto, edited or returned anew

Each of these is a pass: in Python it goes into a list of passes, on the command line it is named
`./my.py:drop_dropout`. The other tool sees the whole model with its weights inside, which ONNX
limits to 2 GiB. What comes back replaces the model in one edit, so that the proof keeps or undoes
it as a whole; weights that kept name and contents stay the bytes of the original file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from toolkit.extras import require
from toolkit.ir.model import Model
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

Editor = Callable[[ModelProto], ModelProto | None]
"""Edits a model in place and returns None, or returns another one."""

Rewriter = Callable[[ModelProto], ModelProto | None]
"""Returns the new model, or None when there is nothing to change; may spoil what it was given."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A pass around a function on a ModelProto."""

    name: str
    tolerance: Tolerance
    rewriter: Rewriter = field(repr=False)

    def run(self, model: Model, ctx: Context) -> None:
        apply(self.rewriter, model)


def from_function(function: Editor, *, name: str = "", tolerance: Tolerance = FLOAT) -> Foreign:
    """A pass from a function on an `onnx.ModelProto`; also usable as a decorator.

    The function edits the model in place and returns None, or returns another one.
    """
    return Foreign(name or _name_of(function), tolerance, observed(function))


def from_graphsurgeon(
    function: Callable[[Any], Any], *, name: str = "", tolerance: Tolerance = FLOAT
) -> Foreign:
    """A pass from a function on an `onnx_graphsurgeon.Graph`; also usable as a decorator.

    The function edits the graph in place, or returns another one. Cleaning up and sorting the
    graph is its own business.
    """

    def run(proto: ModelProto) -> ModelProto | None:
        surgeon = require("onnx_graphsurgeon", "adapters", "onnx-graphsurgeon is not installed")
        graph = surgeon.import_onnx(proto)
        # Going through the tool already changes the spelling of things: what counts as the
        # function's work is the difference to an export without it.
        untouched = _fingerprint(surgeon.export_onnx(graph))
        returned = function(graph)
        exported: ModelProto = surgeon.export_onnx(graph if returned is None else returned)
        return None if _fingerprint(exported) == untouched else _complete(exported, proto)

    return Foreign(name or _name_of(function), tolerance, run)


def from_onnxscript(
    rules: Any, *, name: str = "onnxscript", tolerance: Tolerance = FLOAT
) -> Foreign:
    """A pass from onnxscript rewrite rules: one, a sequence of them, or a RewriteRuleSet."""

    def run(proto: ModelProto) -> ModelProto | None:
        rewriter = require("onnxscript.rewriter", "adapters", "onnxscript is not installed")
        ir = require("onnxscript.ir", "adapters", "onnxscript is not installed")
        if isinstance(rules, rewriter.RewriteRuleSet):
            rule_set = rules
        else:
            many = isinstance(rules, Sequence)
            rule_set = rewriter.RewriteRuleSet(rules if many else [rules])
        model = ir.from_proto(proto)
        return ir.to_proto(model) if rule_set.apply_to_model(model) else None

    return Foreign(name, tolerance, run)


def apply(rewriter: Rewriter, model: Model) -> None:
    """Run `rewriter` over the whole model; the model that it returns becomes one edit."""
    changed = rewriter(model.inlined_proto())
    if changed is not None:
        model.replace(changed)


def observed(function: Editor) -> Rewriter:
    """A function that says nothing about its changes, watched for whether there are any."""

    def run(proto: ModelProto) -> ModelProto | None:
        before = _fingerprint(proto)
        returned = function(proto)
        result = proto if returned is None else returned
        if not isinstance(result, ModelProto):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a ModelProto or None must be returned, not {type(result).__name__}")
        return None if _fingerprint(result) == before else result

    return run


def keep_description(changed: ModelProto, original: ModelProto) -> None:
    """Let `changed` say of itself what `original` says: producer, version, metadata, training."""
    if changed is original:
        return
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        setattr(changed, name, getattr(original, name))
    for name in ("metadata_props", "training_info"):
        changed.ClearField(name)
        getattr(changed, name).extend(getattr(original, name))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _fingerprint(proto: ModelProto) -> bytes:
    """Equal for models that compute the same in the same spelling.

    Types and shapes of intermediate values are left out: most tools infer them anew.
    """
    digest = hashlib.blake2b()
    graph = proto.graph
    parts = (graph.node, graph.initializer, graph.sparse_initializer, graph.input, graph.output)
    for part in (*parts, proto.opset_import, proto.functions):
        digest.update(b"%d:" % len(part))
        for message in part:
            digest.update(message.SerializeToString(deterministic=True))
    return digest.digest()


def _complete(exported: ModelProto, original: ModelProto) -> ModelProto:
    """Give back what an onnx-graphsurgeon graph does not carry."""
    keep_description(exported, original)
    if exported.ir_version < 4:
        # There, every initializer had to be declared as an input, and the tool drops those.
        exported.ir_version = 4
    elif original.ir_version >= 4:
        stored = {tensor.name for tensor in exported.graph.initializer}
        declared = {value.name for value in exported.graph.input}
        exported.graph.input.extend(
            value
            for value in original.graph.input
            if value.name in stored and value.name not in declared
        )
    return exported
