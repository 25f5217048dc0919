"""Select the nodes of a pass by the patterns in its options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from onnx import NodeProto

from toolkit.ir import Model, node as nd

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """Patterns that include and exclude nodes by operator, node name or first output."""

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    def takes(self, node: NodeProto) -> bool:
        return matches(node, self.include) and not matches(node, self.exclude)

    def idle(self, nodes: Iterable[NodeProto]) -> list[str]:
        """Return the patterns that match no node, most likely mistyped."""
        waiting = dict.fromkeys((*self.include, *self.exclude))
        for node in nodes:
            for pattern in [p for p in waiting if p == "*" or matches(node, (p,))]:
                del waiting[pattern]
            if not waiting:
                break
        return [pattern for pattern in waiting if pattern != "*"]

    def note_idle(self, model: Model, ctx: Context) -> None:
        for pattern in self.idle(model.nodes()):
            ctx.note(f"no node matches '{pattern}'")


def matches(node: NodeProto, patterns: Iterable[str]) -> bool:
    """Return whether a pattern (`Gemm`, `*/attention/*`) matches the operator, name or output."""
    names = [nd.qualified(node), node.name, *nd.outputs_of(node)[:1]]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names if name)
