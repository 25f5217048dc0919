"""Zero the outputs of a model at padding.

    output = Where(mask, output, 0)

A model that outputs a vector per token outputs one for each token of padding too and must compute
it, although users who pool, tag or search ignore it. Once these outputs are 0 by definition,
`unpad` can skip their computation.

This changes the outputs, so `fuse` does not include it; from then on verification expects the
original's outputs with zeros at padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.intervals import ZERO
from passes.analysis.operands import unsqueeze
from passes.analysis.shapes import Shapes
from passes.motion.remove_padding.masked_values import MaskedValues
from toolkit.errors import UsageError
from toolkit.ir import Array, Graph, Model
from toolkit.messages import suggestion
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.feeds import Feed
    from toolkit.pass_manager.protocol import Context

_NUMBERS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_WHERE_OPSET = 9
_RANK = 3
"""Rank of an output with a vector per token. A number per token may be a score by which one token
is chosen, such as the start of an answer, and 0 may be the highest score."""


@dataclass(frozen=True, slots=True)
class MaskOutputs:
    """Zero the outputs at padded positions so that padding can be skipped."""

    name: ClassVar[str] = "mask-outputs"
    tolerance: ClassVar[Tolerance] = EXACT
    idempotent: ClassVar[bool] = True
    mask: str = field(
        default="",
        metadata={
            "help": "The input that is 0 at padding; by default the one called a mask, "
            "but not one called a padding mask, which often is 1 there."
        },
    )

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        g = model.graph
        mask = self._mask_of(g)
        if g.opset() < _WHERE_OPSET:
            ctx.note(f"opset {g.opset()} has no Where: lift the model first, with the pass opset")
            return
        if not any(_has_rows(g, name, mask) for name in g.outputs):
            ctx.note(f"no output has a vector for each token of '{mask}'")
        for output in computed_at_padding(MaskedValues(g, mask, g.shape(mask) or ())):
            producer = g.producer(output)
            if producer is None or g.is_captured(output):
                ctx.note(f"'{output}' stays as it is: it is an input or used by a subgraph")
            elif g.begin("mask-outputs", producer):
                _zero_padding(g, producer, output, mask)
                ctx.redefined[output] = partial(_zeroed, mask)
                ctx.note(f"'{output}' is 0 wherever '{mask}' is, and compared as such")

    def _mask_of(self, g: Graph) -> str:
        if self.mask and self.mask not in g.feeds:
            hint = suggestion(self.mask, g.feeds) or f"; the inputs are {', '.join(g.feeds)}"
            raise UsageError(f"{self.name}: '{self.mask}' is not an input{hint}")
        found = [self.mask] if self.mask else list(filter(_is_called_mask, g.feeds))
        fitting = [name for name in found if g.rank(name) == 2]
        if len(fitting) == 1:
            return fitting[0]
        if self.mask:
            raise UsageError(f"{self.name}: '{self.mask}' is not of shape [batch, length]")
        listed = f"candidates: {', '.join(fitting)}" if fitting else f"inputs: {', '.join(g.feeds)}"
        raise UsageError(
            f"{self.name}: exactly one input of shape [batch, length] must be called a mask; "
            f"select it with {self.name}:mask=NAME ({listed})"
        )


def _is_called_mask(name: str) -> bool:
    """Whether it is a mask, unlike PyTorch's `src_key_padding_mask`, which is true at padding."""
    return "mask" in name.lower() and "pad" not in name.lower()


def computed_at_padding(values: MaskedValues) -> list[str]:
    """Return the outputs with a vector per token that are not 0 at padding."""
    g, axes = values.g, values.padded(-3, -2)
    rows = (name for name in g.outputs if _has_rows(g, name, values.mask))
    return [name for name in rows if values.bounds(name, axes) != ZERO]


def _has_rows(g: Graph, output: str, mask: str) -> bool:
    shape = g.shape(output) or ()
    if len(shape) != _RANK or g.dtype(output) not in _NUMBERS:
        return False
    return shape[:2] == g.shape(mask)


def _zero_padding(g: Graph, producer: NodeProto, output: str, mask: str) -> None:
    """Zero an output at padding; users within the model keep the original value."""
    plain, type_ = g.fresh(output), g.type(output)
    g.set_outputs(producer, [plain if name == output else name for name in producer.output])
    for user in g.users(output):
        g.set_inputs(user, [plain if name == output else name for name in user.input])
    if type_ is not None:
        g.learn_type(plain, type_)
    real = mask if g.dtype(mask) == TensorProto.BOOL else g.op("Cast", mask, to=TensorProto.BOOL)
    zero = np.zeros((), helper.tensor_dtype_to_np_dtype(g.dtype(plain)))
    g.add("Where", [unsqueeze(g, real, [2]), plain, g.constant(zero, "zero")], [output])


def _zeroed(mask: str, feed: Feed, output: Any) -> Array:
    real = np.asarray(feed[mask]).astype(bool)
    return np.where(real[:, :, None], output, np.zeros((), np.asarray(output).dtype))
