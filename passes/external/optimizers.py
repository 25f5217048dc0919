"""Run third-party optimizers as passes: onnxsim, and onnxruntime's offline optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from onnx import GraphProto, ModelProto

from toolkit.errors import ToolkitError, UsageError
from toolkit.extras import require
from toolkit.ir import Model, node as nd
from toolkit.pass_manager.adapters import Editor, apply, keep_description, observed
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

Level = Literal["basic", "extended", "all"]


@dataclass(frozen=True, slots=True)
class OnnxSim:
    """Run onnxsim over the whole model."""

    name: ClassVar[str] = "onnxsim"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model: Model, ctx: Context) -> None:
        onnxsim = require("onnxsim", "adapters", "onnxsim is not installed")
        if len(ctx.settings.custom_ops) > 1:
            raise UsageError("onnxsim takes one --custom-ops library, not several")
        library = ctx.settings.custom_ops[0] if ctx.settings.custom_ops else None

        def simplify(proto: ModelProto) -> ModelProto:
            # The pipeline verifies the result, so onnxsim's own checks stay off.
            return onnxsim.simplify(proto, check_n=0, custom_lib=library, certify=False)[0]

        _run(self.name, simplify, model, ctx)


@dataclass(frozen=True, slots=True)
class OrtOptimizer:
    """Run onnxruntime's offline optimizer over the whole model."""

    name: ClassVar[str] = "onnxruntime"
    tolerance: ClassVar[Tolerance] = FLOAT
    level: Level = field(
        default="basic",
        metadata={
            "help": "basic: standard operators; extended: also onnxruntime's own operators; "
            "all: also layouts for this machine."
        },
    )

    def run(self, model: Model, ctx: Context) -> None:
        from toolkit.runtime.session import optimize_offline

        def optimize(proto: ModelProto) -> ModelProto:
            return optimize_offline(proto, self.level, ctx.settings.custom_ops)

        _run(self.name, optimize, model, ctx)


def _run(name: str, optimizer: Editor, model: Model, ctx: Context) -> None:
    """Replace the model with the optimizer's result; restore its imports and metadata."""

    def optimize(proto: ModelProto) -> ModelProto:
        changed = optimizer(proto) or proto
        known = {entry.domain for entry in proto.opset_import}
        new = set(_domains(changed.graph)) - known
        foreign = [domain for domain in sorted(new) if not ctx.target.runs(domain)]
        if foreign:
            listed, target = ", ".join(foreign), ctx.target.name
            raise ToolkitError(
                f"{name} wrote operators of {listed}, which target {target} does not support"
            )
        imports = [e for e in changed.opset_import if e.domain in known | new]
        changed.ClearField("opset_import")  # onnxruntime imports every domain it knows
        changed.opset_import.extend(imports)
        keep_description(changed, proto)
        return changed

    apply(observed(optimize), model)


def _domains(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield nd.domain_of(node)
        for inner in nd.graphs_of(node):
            yield from _domains(inner)
