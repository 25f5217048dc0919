"""16-bit floats: half the bytes, and half the memory traffic where the processor computes in them.

A model is converted node by node. What would lose its numbers stays in 32 bits: see `choice`. Casts
stand only where the two meet: see `writing`. On most CPUs the runtime has no kernels for 16 bits
and casts back and forth: there `storage=true` has the smaller file without slower computing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from onnx import TensorProto

from passes.analysis.node_filter import Selection
from passes.analysis.shapes import Shapes
from passes.precision.half_selection import Choice, choose
from passes.precision.half_writer import Halves, store_weights
from toolkit.calibrate.observers import MinMax
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.messages import by_reason
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.calibrate.statistics import Range
    from toolkit.pass_manager.protocol import Context


@dataclass(frozen=True, slots=True)
class Float16:
    """Compute in 16-bit floats, or only store weights in them."""

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
        default=1024, metadata={"help": "storage: smaller weights stay as they are."}
    )

    def __post_init__(self) -> None:
        if self.storage and self.io == "fp16":
            raise UsageError("fp16: storage=true only stores weights so, io=fp16 is not for it")

    @property
    def incomparable(self) -> str:
        """Why its result cannot be compared with the original; empty where it can."""
        return "io=fp16 changes the types of inputs and outputs" if self.io == "fp16" else ""

    def run(self, model: Model, ctx: Context) -> None:
        Selection(exclude=self.keep).note_idle(model, ctx)
        if self.storage:
            for name, reason in store_weights(model, self.keep, self.min_elements):
                ctx.note(f"weight '{name}' stays in 32 bits: it has {reason}")
            return
        Shapes(annotate=False).run(model, ctx)
        choice = choose(model, self.keep, _ranges(model, ctx))
        _note_kept(choice, ctx)
        halves = Halves(model)
        if self.io == "fp16":
            halves.take_inputs()
        for graph in list(model.graphs()):
            for node in graph.nodes:
                if id(node) in choice.halves:
                    halves.convert(graph, node, choice.halves[id(node)])
        halves.settle()
        if self.io == "fp16":
            for name in halves.give_outputs():
                ctx.note(f"output '{name}' stays in 32 bits: its node computes in them")


def _ranges(model: Model, ctx: Context) -> dict[str, Range] | None:
    """The range of every 32-bit value of the main graph on the user's data, if there are any."""
    if ctx.calibration is None:
        return None
    graph = model.graph
    made = [name for node in graph.nodes for name in nd.outputs_of(node)]
    floats = [n for n in (*graph.feeds, *made) if graph.dtype(n) == TensorProto.FLOAT]
    return ctx.calibration.collect(model, {name: MinMax() for name in floats}).ranges()


def _note_kept(choice: Choice, ctx: Context) -> None:
    """One line for each reason, with the first of the nodes that it is about."""
    for line in by_reason(choice.kept):
        ctx.note(f"kept in 32 bits: {line}")
