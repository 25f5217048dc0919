"""The interface of a target: the operators, limits and costs that passes ask about.

Passes query capabilities (`ctx.target.runs("com.microsoft")`), never the name. The defaults run and
time models in onnxruntime on this machine; a target with a runtime of its own overrides
`open_session` and `latency`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.targets.releases import Release, installed_release

if TYPE_CHECKING:
    from toolkit.feeds import Feed
    from toolkit.ir.model import Model
    from toolkit.runtime.latency import Effort, Timing
    from toolkit.runtime.session import Session

CONTRIB = "com.microsoft"
"""The domain of onnxruntime's contrib operators."""


@dataclass(frozen=True, slots=True)
class Target:
    """A runtime that models are written for."""

    name: str
    """The name on the command line."""
    summary: str
    domains: tuple[str, ...]
    """The operator domains it runs; the empty string is ONNX's own."""
    release: Release
    """The oldest onnxruntime that loads what is written, by default the installed one."""
    number_formats: tuple[str, ...]
    """The number formats that its kernels compute in."""
    fuses_qdq: bool = False
    """Whether it fuses Q/DQ pairs into int8 kernels at load time, by its own patterns."""
    opset_pass: str = "opset"
    """The registry name of the pass that converts a model to the opset in its option `to`."""
    final_passes: tuple[str, ...] = ("minimize-opset",)
    """Registry names of the passes that finish a model whose opset was lifted."""
    release_passes: tuple[str, ...] = ("legalize",)
    """Registry names of the passes that write operators which an older release lacks."""
    has_costs: bool = False
    """Whether operator costs were measured: passes choose by speed, else fewer operators win."""

    def runs(self, domain: str) -> bool:
        """Return whether the target has the operators of this domain."""
        return domain in self.domains

    def has_kernel(
        self, op_type: str, opset: int, domain: str = "", inputs: Sequence[str] = ()
    ) -> bool:
        """Return whether it runs an operator, for operands of these types as far as known.

        Types are numpy's names, "float32"; the runtime's release and the installed one, which
        proves the result, must both have the kernel.
        """
        needed = (self.release, installed_release())
        return self.runs(domain) and all(
            release.has_kernel(op_type, min(opset, release.max_opset), domain, inputs)
            for release in needed
        )

    def loses_kernel(self, op_type: str, opset: int) -> bool:
        """Return whether the installed runtime has a kernel up to this opset, and none from it."""
        has_kernel = installed_release().has_kernel
        return has_kernel(op_type, opset - 1) and not has_kernel(op_type, opset)

    @property
    def max_opset(self) -> int:
        """The newest opset it loads."""
        return self.release.max_opset

    @property
    def max_ir(self) -> int:
        """The newest IR version it loads."""
        return self.release.max_ir

    @property
    def standard_only(self) -> bool:
        """Whether the target has no operators but those of the ONNX standard."""
        return set(self.domains) <= {"", "ai.onnx.ml"}

    def open_session(
        self, model: Model, optimize: bool = False, custom_ops: Sequence[str] = ()
    ) -> Session:
        """Open the model as written, or with the runtime's own optimizations (`optimize`)."""
        from toolkit.runtime.session import Session

        return Session(model, optimize=optimize, custom_ops=custom_ops)

    def latency(
        self,
        models: Mapping[str, Model],
        feeds: Sequence[Feed],
        threads: int,
        effort: Effort,
        custom_ops: Sequence[str] = (),
    ) -> dict[str, Timing]:
        """Time the models in turn, each relative to the first."""
        from toolkit.runtime.latency import latency

        return latency(models, feeds, threads, effort, custom_ops)
