"""Outputs that are 0 at padding, where a model gives numbers that nobody means.

    output = Where(mask, output, 0)

A model that gives a vector for each token gives one for those of padding too, and must compute
them: what comes out there is no more than what attention makes of a filler, and whoever pools, tags
or searches leaves it out. Once it is said to be 0, `unpad` has nothing to compute there.

That changes what the model gives, so it is done when asked for and not by `fuse`; from then on the
proof expects the original's answers with zeros at padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from onnx import TensorProto, helper

from passes.analysis.intervals import ZERO
from passes.analysis.operands import unsqueeze
from passes.analysis.shapes import Shapes
from passes.motion.remove_padding.masked_values import MaskedValues
from toolkit.errors import UsageError
from toolkit.ir.graph import Array, Graph
from toolkit.ir.model import Model
from toolkit.messages import suggestion
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.feeds import Feed
    from toolkit.pass_manager.protocol import Context

_NUMBERS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_WHERE_OPSET = 9
_RANK = 3
"""A vector for each token. A single number is a choice among the tokens, as where an answer begins,
and 0 may be a better one than what is real."""


@dataclass(frozen=True, slots=True)
class MaskOutputs:
    """Give 0 for tokens of padding, so that they need not be computed."""

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
            ctx.note(f"opset {g.opset()} knows no Where: lift the model first, by the pass opset")
            return
        if not any(_has_rows(g, name, mask) for name in g.outputs):
            ctx.note(f"no output has a vector for each token of '{mask}'")
        for output in computed_at_padding(MaskedValues(g, mask, g.shape(mask) or ())):
            maker = g.producer(output)
            if maker is None or g.is_captured(output):
                ctx.note(f"'{output}' stays as it is: no node of the main graph alone has it")
            elif g.begin("mask-outputs", maker):
                _write(g, output, mask)
                ctx.redefined[output] = partial(_zero_at_padding, mask)
                ctx.note(f"'{output}' is 0 wherever '{mask}' is, and compared as such")

    def _mask_of(self, g: Graph) -> str:
        if self.mask and self.mask not in g.feeds:
            hint = suggestion(self.mask, g.feeds) or f": there are {', '.join(g.feeds)}"
            raise UsageError(f"{self.name}: '{self.mask}' is no input{hint}")
        found = [self.mask] if self.mask else list(filter(_is_called_mask, g.feeds))
        fitting = [name for name in found if g.rank(name) == 2]
        if len(fitting) == 1:
            return fitting[0]
        if self.mask:
            raise UsageError(f"{self.name}: '{self.mask}' is not of shape [batch, length]")
        of = f"these are: {', '.join(fitting)}" if fitting else f"there are {', '.join(g.feeds)}"
        raise UsageError(
            f"{self.name}: not one input of shape [batch, length] is called a mask: name it by "
            f"{self.name}:mask=NAME ({of})"
        )


def _is_called_mask(name: str) -> bool:
    """Not PyTorch's `src_key_padding_mask`, say, which is true at padding."""
    return "mask" in name.lower() and "pad" not in name.lower()


def computed_at_padding(padding: MaskedValues) -> list[str]:
    """The outputs that have a vector for each token, and more than 0 for those of padding."""
    g, place = padding.g, padding.padded(-3, -2)
    rows = (name for name in g.outputs if _has_rows(g, name, padding.mask))
    return [name for name in rows if padding.bounds(name, place) != ZERO]


def _has_rows(g: Graph, output: str, mask: str) -> bool:
    shape = g.shape(output) or ()
    if len(shape) != _RANK or g.dtype(output) not in _NUMBERS:
        return False
    return shape[:2] == g.shape(mask)


def _write(g: Graph, output: str, mask: str) -> None:
    """What the model itself reads of the output stays what it was."""
    maker = g.producer(output)
    assert maker is not None
    plain, type_ = g.fresh(output), g.type(output)
    g.set_outputs(maker, [plain if name == output else name for name in maker.output])
    for reader in g.users(output):
        g.set_inputs(reader, [plain if name == output else name for name in reader.input])
    if type_ is not None:
        g.learn_type(plain, type_)
    real = mask if g.dtype(mask) == TensorProto.BOOL else g.op("Cast", mask, to=TensorProto.BOOL)
    zero = np.zeros((), helper.tensor_dtype_to_np_dtype(g.dtype(plain)))
    g.add("Where", [unsqueeze(g, real, [2]), plain, g.constant(zero, "zero")], [output])


def _zero_at_padding(mask: str, feed: Feed, answer: Any) -> Array:
    real = np.asarray(feed[mask]).astype(bool)
    return np.where(real[:, :, None], answer, np.zeros((), np.asarray(answer).dtype))
