"""Convert a model to float16: half the bytes, and half the memory traffic on hardware with float16.

`half_selection` keeps nodes in float32 that would overflow or lose precision, and `half_writer`
converts the others one by one, with Casts in between. On most CPUs onnxruntime has no float16
kernels and casts back and forth: there, `storage=true` shrinks the file without the slowdown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from onnx import TensorProto

from passes.analysis.node_filter import NodeFilter
from passes.analysis.shapes import Shapes
from passes.precision.half_selection import select_nodes
from passes.precision.half_writer import Halves, store_weights
from toolkit.calibrate.observers import MinMax
from toolkit.errors import UsageError
from toolkit.ir import Model, node as nd
from toolkit.messages import by_reason
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.calibrate.statistics import Range
    from toolkit.pass_manager.protocol import Context


@dataclass(frozen=True, slots=True)
class Float16:
    """Convert to float16, or only store the weights in float16."""

    name: ClassVar[str] = "fp16"
    tolerance: ClassVar[Tolerance] = QUANT
    storage: bool = field(
        default=False, metadata={"help": "Only store weights in 16 bits; compute in 32."}
    )
    io: Literal["keep", "fp16"] = field(
        default="keep", metadata={"help": "fp16: inputs and outputs too, with --validate off."}
    )
    keep: tuple[str, ...] = field(
        default=(), metadata={"help": "Patterns of operators, nodes or outputs to keep in 32 bits."}
    )
    min_elements: int = field(
        default=1024, metadata={"help": "storage: the fewest elements of a converted weight."}
    )

    def __post_init__(self) -> None:
        if self.storage and self.io == "fp16":
            raise UsageError("fp16: storage=true converts weights only and excludes io=fp16")

    @property
    def incomparable(self) -> str:
        """The reason why the result cannot be compared with the original, or blank."""
        return "io=fp16 changes the types of inputs and outputs" if self.io == "fp16" else ""

    def run(self, model: Model, ctx: Context) -> None:
        NodeFilter(exclude=self.keep).note_idle(model, ctx)
        if self.storage:
            for name, reason in store_weights(model, self.keep, self.min_elements):
                ctx.note(f"weight '{name}' stays in 32 bits: {reason}")
            return
        Shapes(annotate=False).run(model, ctx)
        selected = select_nodes(model, self.keep, _ranges(model, ctx))
        for line in by_reason(selected.kept):
            ctx.note(f"kept in 32 bits: {line}")
        halves = Halves(model)
        if self.io == "fp16":
            halves.take_inputs()
        for graph in list(model.graphs()):
            for node in graph.nodes:
                if id(node) in selected.halves:
                    halves.convert(graph, node, selected.halves[id(node)])
        halves.settle()
        if self.io == "fp16":
            for name in halves.give_outputs():
                ctx.note(f"output '{name}' stays in 32 bits, like its node")


def _ranges(model: Model, ctx: Context) -> dict[str, Range] | None:
    """Return the range of every float32 value of the main graph on calibration data, if any."""
    if ctx.calibration is None:
        return None
    graph = model.graph
    results = [name for node in graph.nodes for name in nd.outputs_of(node)]
    floats = [n for n in (*graph.feeds, *results) if graph.dtype(n) == TensorProto.FLOAT]
    return ctx.calibration.collect(model, {name: MinMax() for name in floats}).ranges()
