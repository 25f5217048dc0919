# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Patch torch during tracing: equivalents that export at any size, and labels of node origins.

Some of torch's functions are replaced by equivalent operators that the exporters translate for
dynamic sizes; the proof would catch a difference. The TorchScript exporter labels every node with
its operator; `move_labels` turns the labels into metadata.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import onnx

from toolkit.frontends.operator_map import Origin, note_origin, origin_of
from toolkit.frontends.pytorch.errors import user_line

_LABEL = "toolkit_label"
_NOT_LABELLED = ("onnx::Constant", "prim::", "aten::")
"""Constants have no origin, and labels on lists and tuples would keep them from being removed."""
_MISSING = object()


@contextlib.contextmanager
def traceable() -> Generator[None]:
    """Apply the replacements and labels for the TorchScript exporter."""
    torch = importlib.import_module("torch")
    fused = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        # nn.MultiheadAttention: its fused kernel has no translation
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(capturable())
        for owner, name, make in (
            (torch.nn.functional, "scaled_dot_product_attention", _attention),
            (torch, "permute", _permute),
            (torch.Tensor, "permute", _permute),
            (torch, "as_strided", _as_strided),
            (torch.Tensor, "as_strided", _as_strided),
            (torch.Tensor, "stride", _stride),
        ):
            stack.enter_context(replaced(owner, name, make))
        stack.enter_context(_labelled())
        yield


@contextlib.contextmanager
def capturable() -> Generator[None]:
    """Apply the replacements for dynamo, which needs torch's own memory layout functions."""
    torch = importlib.import_module("torch")
    with (
        replaced(torch, "repeat_interleave", _repeat_interleave),
        replaced(torch.Tensor, "repeat_interleave", _repeat_interleave),
    ):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Generator[None]:
    """Set `owner.name` to `make(original)` for the context."""
    before, own = getattr(owner, name), vars(owner).get(name, _MISSING)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if own is _MISSING:  # the original is inherited
            delattr(owner, name)
        else:
            setattr(owner, name, own)


# Equivalent operators ----------------------------------------------------------------------------


def _attention(original: Any) -> Any:
    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: Any = 0.0,
        is_causal: Any = False,
        **more: Any,
    ) -> Any:
        """Convert `is_causal`, which is a tensor while tracing, to the bool that torch expects."""
        return original(query, key, value, attn_mask, dropout_p, bool(is_causal), **more)

    return attention


def _repeat_interleave(original: Any) -> Any:
    torch = importlib.import_module("torch")

    def repeat_interleave(tensor: Any, repeats: Any = None, dim: Any = None, **more: Any) -> Any:
        """Expand a view: torch's translation fixes a computed number of repeats."""
        count = isinstance(repeats, (int, torch.SymInt))
        single = count or (torch.is_tensor(repeats) and repeats.ndim == 0)
        if not single or dim is None:
            given = () if repeats is None else (repeats,)
            return original(tensor, *given, **({} if dim is None else {"dim": dim}), **more)
        after = dim % tensor.ndim + 1
        sizes = tensor.shape
        wide = tensor.unsqueeze(after).expand(*sizes[:after], repeats, *sizes[after:])
        return wide.flatten(after - 1, after)

    return repeat_interleave


def _permute(original: Any) -> Any:
    def permute(tensor: Any, *dims: Any, **named: Any) -> Any:
        """Make negative axes positive: the exporter would pass them on, and ONNX has none."""
        listed = named.get("dims", dims if not dims or isinstance(dims[0], int) else dims[0])
        return original(tensor, [axis % tensor.ndim for axis in listed])

    return permute


def _stride(original: Any) -> Any:
    def stride(tensor: Any, dim: int | None = None) -> Any:
        """Compute strides of contiguous memory as products of sizes, which stay symbolic."""
        order = _memory_order(original(tensor))
        if not tensor.ndim or not tensor.permute(order).is_contiguous():
            return original(tensor) if dim is None else original(tensor, dim)
        steps: dict[int, Any] = {}
        step: Any = 1
        for axis in reversed(order):
            steps[axis] = step
            step = step * tensor.shape[axis]
        listed = tuple(steps[axis] for axis in range(tensor.ndim))
        return listed if dim is None else listed[dim]

    return stride


def _memory_order(steps: Any) -> list[int]:
    """Return the axes in order of decreasing stride."""
    return sorted(range(len(steps)), key=lambda axis: -steps[axis])


def _as_strided(original: Any) -> Any:
    torch = importlib.import_module("torch")
    strides = torch.Tensor.stride  # before it is replaced: plain numbers

    def as_strided(tensor: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        """Gather by computed indices from contiguous memory.

        torch's translation reads values in axis order, which is wrong after a transpose, and fixes
        the strides.
        """
        memory = tensor.permute(_memory_order(strides(tensor)))
        start = 0 if storage_offset is None else storage_offset - tensor.storage_offset()
        if not memory.is_contiguous() or start < 0:
            return original(tensor, size, stride, storage_offset)
        index: Any = start
        for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
            places = torch.arange(count, device=tensor.device) * step
            index = index + places.reshape([-1] + [1] * (len(size) - 1 - axis))
        return memory.reshape(-1)[index]

    return as_strided


# Node origins ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _labelled() -> Generator[None]:
    """Label every ONNX node with an attribute of its operator, call and line.

    This patches private parts of torch; in versions without them, nodes have no labels.
    """
    try:
        utils, jit, public = map(
            importlib.import_module,
            (
                "torch.onnx._internal.torchscript_exporter.utils",
                "torch.onnx._internal.torchscript_exporter.jit_utils",
                "torch.onnx.utils",
            ),
        )
        internals: Any = importlib.import_module("torch")._C
        run, create, check = "_run_symbolic_function", "_create_node", "_check_onnx_proto"
        for owner, name in ((utils, run), (public, run), (jit, create), (internals, check)):
            getattr(owner, name)
    except (ImportError, AttributeError):
        yield
        return
    calls: list[str] = []
    current: list[str] = []

    def running(original: Any) -> Any:
        def run_symbolic(graph: Any, block: Any, node: Any, *rest: Any, **more: Any) -> Any:
            calls.append(node.kind())
            current.append(f"{node.kind()}|{len(calls)}|{user_line(node.sourceRange())}")
            try:
                return original(graph, block, node, *rest, **more)
            finally:
                current.pop()

        return run_symbolic

    def creating(original: Any) -> Any:
        def create_node(*args: Any, **more: Any) -> Any:
            node = original(*args, **more)
            if current and not node.kind().startswith(_NOT_LABELLED):
                node.s_(_LABEL, current[-1])
            return node

        return create_node

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(utils, run, running))
        stack.enter_context(replaced(public, run, running))
        stack.enter_context(replaced(jit, create, creating))
        # torch's check would reject the labels; the proof checks the file without them
        stack.enter_context(replaced(internals, check, _unchecked))
        yield


def _unchecked(_: Any) -> Any:
    def check(*_: Any) -> None:
        pass

    return check


def move_labels(path: Path, module: Any) -> None:
    """Turn the labels in a file into metadata, with the class of each node's module."""
    proto = onnx.load(path, load_external_data=False)
    classes = {name: type(part).__name__ for name, part in module.named_modules()}
    pending = [proto.graph]
    while pending:
        graph = pending.pop()
        for node in graph.node:
            pending += [each.g for each in node.attribute if each.HasField("g")]
            inside, operator, call, line = origin_of(node).module, "", node.name, ""
            label = next((each for each in node.attribute if each.name == _LABEL), None)
            if label is not None:
                operator, call, line = label.s.decode().replace("::", ".", 1).split("|", 2)
                node.attribute.remove(label)
            if inside or operator:
                note_origin(node, Origin(inside, classes.get(inside, ""), operator, call, line))
    path.write_bytes(proto.SerializeToString())
