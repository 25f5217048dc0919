"""Adapters: rewriters of other tools as passes, verified like any other pass.

    @from_graphsurgeon
    def drop_dropout(graph): ...                    # onnx_graphsurgeon.Graph, edited in place

    relu_twice = from_onnxscript([my_rule])         # onnxscript rewrite rules

    @from_function
    def tidy(proto): ...                            # onnx.ModelProto, edited in place or returned

Each of these is a pass, usable in Python and as `./my.py:drop_dropout` on the command line. The
tool gets the whole model including its weights, which protobuf limits to 2 GiB. Its result replaces
the model as one edit, which is kept or undone as a whole. Weights with unchanged name and contents
remain references to the original file.
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
"""Returns the new model, or None if unchanged; may modify its argument."""


@dataclass(frozen=True, slots=True)
class AdapterPass:
    """A pass that runs a function on a ModelProto."""

    name: str
    tolerance: Tolerance
    rewriter: Rewriter = field(repr=False)

    def run(self, model: Model, ctx: Context) -> None:
        apply(self.rewriter, model)


def from_function(function: Editor, *, name: str = "", tolerance: Tolerance = FLOAT) -> AdapterPass:
    """Wrap a function on an `onnx.ModelProto` as a pass; also a decorator.

    The function edits the model in place and returns None, or returns another one.
    """
    return AdapterPass(name or _name_of(function), tolerance, observed(function))


def from_graphsurgeon(
    function: Callable[[Any], Any], *, name: str = "", tolerance: Tolerance = FLOAT
) -> AdapterPass:
    """Wrap a function on an `onnx_graphsurgeon.Graph` as a pass; also a decorator.

    The function edits the graph in place, or returns another one. It must clean up and sort the
    graph itself, if necessary.
    """

    def run(proto: ModelProto) -> ModelProto | None:
        surgeon = require("onnx_graphsurgeon", "adapters", "onnx-graphsurgeon is not installed")
        graph = surgeon.import_onnx(proto)
        # Importing and exporting alone changes the protobuf: compare with an export of the
        # unmodified graph.
        untouched = _fingerprint(surgeon.export_onnx(graph))
        returned = function(graph)
        exported: ModelProto = surgeon.export_onnx(graph if returned is None else returned)
        return None if _fingerprint(exported) == untouched else _complete(exported, proto)

    return AdapterPass(name or _name_of(function), tolerance, run)


def from_onnxscript(
    rules: Any, *, name: str = "onnxscript", tolerance: Tolerance = FLOAT
) -> AdapterPass:
    """Wrap onnxscript rewrite rules as a pass: one, a sequence, or a RewriteRuleSet."""

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

    return AdapterPass(name, tolerance, run)


def apply(rewriter: Rewriter, model: Model) -> None:
    """Run `rewriter` on the whole model; its result replaces the model as one edit."""
    changed = rewriter(model.inlined_proto())
    if changed is not None:
        model.replace(changed)


def observed(function: Editor) -> Rewriter:
    """Wrap an editor as a rewriter, which detects whether the model changed."""

    def run(proto: ModelProto) -> ModelProto | None:
        before = _fingerprint(proto)
        returned = function(proto)
        result = proto if returned is None else returned
        if not isinstance(result, ModelProto):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"expected a ModelProto or None, not {type(result).__name__}")
        return None if _fingerprint(result) == before else result

    return run


def keep_description(changed: ModelProto, original: ModelProto) -> None:
    """Copy the producer, version, metadata and training info of `original` to `changed`."""
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
    """Return a digest of nodes, initializers, interface, opsets and functions.

    Types of intermediate values are excluded, because most tools infer them again.
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
    """Restore the parts of a model that an onnx-graphsurgeon graph does not have."""
    keep_description(exported, original)
    if exported.ir_version < 4:
        # Every initializer must be an input there, and the tool drops those inputs.
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
