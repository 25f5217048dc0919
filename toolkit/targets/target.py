"""The interface of a target: the operators, limits and costs that passes ask about.

Passes query capabilities (`ctx.target.runs("com.microsoft")`), never the name. The defaults run and
time models in onnxruntime on this machine; a target with a runtime of its own overrides
`open_session` and `latency`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from toolkit.targets.releases import Release, Use, installed_release

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

    @property
    def releases(self) -> tuple[Release, ...]:
        """The releases that have to load the result: the oldest, and the installed one."""
        return tuple(dict.fromkeys((self.release, installed_release())))

    def obstacle(self, use: Use) -> str:
        """Return why a node does not load, at an opset that the releases take; empty if it does."""
        for release in self.releases:
            opset = use.opset if use.domain else min(use.opset, release.max_opset)
            reason = release.obstacle(replace(use, opset=opset))
            if reason:
                return reason
        return "" if self.runs(use.domain) else f"{use}: {self.name} has no such domain"

    def has_kernel(
        self, op_type: str, opset: int, domain: str = "", inputs: Sequence[str] = ()
    ) -> bool:
        """Return whether it runs an operator on operands of these types, empty if unknown.

        Types have numpy's names, as "float32".
        """
        return not self.obstacle(Use(op_type, domain, opset, tuple(inputs)))

    def loses_kernel(self, op_type: str, opset: int, inputs: Sequence[str] = ()) -> bool:
        """Return whether the installed runtime has a kernel up to this opset, and none from it."""
        return _loses_kernel(op_type, opset, tuple(inputs))

    @property
    def max_opset(self) -> int:
        """The newest opset it loads."""
        return self.release.max_opset

    @property
    def max_ir(self) -> int:
        """The newest IR version it loads."""
        return self.release.max_ir

    def missing(self) -> str:
        """Return what this machine lacks to run and time models there, or an empty string."""
        return "" if find_spec("onnxruntime") else "onnxruntime is not installed"

    def to_json(self) -> dict[str, Any]:
        """Return the capabilities as plain data for `json.dump`."""
        return {
            "name": self.name,
            "summary": self.summary,
            "domains": [domain or "ai.onnx" for domain in self.domains],
            "opset": self.max_opset,
            "ir_version": self.max_ir,
            "number_formats": list(self.number_formats),
            "has_costs": self.has_costs,
            "missing": self.missing(),
        }

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


@cache
def _loses_kernel(op_type: str, opset: int, inputs: tuple[str, ...]) -> bool:
    old, new = (Use(op_type, "", version, inputs) for version in (opset - 1, opset))
    return not installed_release().obstacle(old) and bool(installed_release().obstacle(new))
