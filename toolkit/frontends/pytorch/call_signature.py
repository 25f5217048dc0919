# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A module and the arguments of one call, as a function of named arrays.

Arguments may nest (lists, tuples, dicts); every tensor in them is an input of the graph, named
after its parameter (`x`, `states_0`, `past_key`). Everything else is a constant.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError, summarize
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.request import Request
from toolkit.frontends.signature import new_names
from toolkit.messages import first_of

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor among the arguments: its name, its parameter, and its path within the parameter."""

    name: str
    parameter: str
    path: tuple[Any, ...]
    tensor: Any


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module, the arguments of its example, and the names of its input and output tensors."""

    module: Any
    arguments: Mapping[str, Any]
    """By parameter; `*args` and `**kwargs` under their own names."""
    kinds: Mapping[str, Any]
    """The `inspect` kind of each parameter with an argument."""
    leaves: Sequence[Leaf]
    outputs: Sequence[str]
    plain: bool = False
    """Whether all arguments are positional tensors and the result is a tensor or tuple of them."""

    @property
    def inputs(self) -> list[str]:
        return [leaf.name for leaf in self.leaves]

    def feed(self) -> Feed:
        """Return the example as arrays."""
        return {leaf.name: to_numpy(leaf.tensor) for leaf in self.leaves}

    def tensors(self, feed: Feed) -> list[Any]:
        """Return the feed as tensors, in the order of the leaves."""
        return [to_torch(feed[leaf.name], leaf.tensor) for leaf in self.leaves]

    def parameters_with(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments by parameter, with the example's tensors replaced by these."""
        made = dict(self.arguments)
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            made[leaf.parameter] = _put(made[leaf.parameter], leaf.path, tensor)
        return made

    def arguments_with(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs, with the example's tensors replaced by these."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = self._positional()
        for name, value in self.parameters_with(tensors).items():
            kind = self.kinds[name]
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args += value
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs |= value
            elif name in positional:
                args.append(value)
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def _positional(self) -> list[str]:
        """Return the parameters to pass by position: up to the first without an argument."""
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        parameters = _signature(self.module).parameters
        return list(takewhile(lambda n: self.kinds.get(n, by_name[0]) not in by_name, parameters))

    def run(self, tensors: Sequence[Any]) -> Any:
        """Run the module, in eval mode and without gradients."""
        args, kwargs = self.arguments_with(tensors)
        with evaluating(self.module), _torch().no_grad():
            return self.module(*args, **kwargs)

    def __call__(self, feed: Feed) -> dict[str, Any]:
        """Run the module and return its outputs under the graph's names."""
        pairs = zip(self.outputs, tensors_in(self.run(self.tensors(feed))), strict=True)
        return {name: to_numpy(tensor) for name, (_, tensor) in pairs}


def bind(module: Any, request: Request) -> ModuleCall:
    """Return the call that the example describes; raise UsageError if it does not fit `forward`."""
    args, kwargs = _as_arguments(module, request.example)
    try:
        return bind_arguments(module, args, kwargs, request)
    except UsageError as error:
        if not args or not isinstance(request.example, Mapping):
            raise
        # a dict of unknown names was tried as a single argument
        shown = ", ".join(_signature(module).parameters)
        given = ", ".join(map(str, cast("Mapping[Any, Any]", request.example)))
        message = f"the example does not fit forward({shown}): it names {given}"
        raise UsageError(f"{message}; as one argument, {error}") from error


def bind_arguments(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> ModuleCall:
    """Return the call with these arguments; raise UsageError if they do not fit `forward`."""
    signature = _signature(module)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        shown = f"forward({', '.join(signature.parameters)})"
        raise UsageError(f"the example does not fit {shown}: {error}") from error
    kinds = {name: signature.parameters[name].kind for name in bound}
    arguments = {name: _with_tensors(value) for name, value in bound.items()}
    leaves = [
        Leaf(_joined([name, *path]), name, path, tensor)
        for name, value in arguments.items()
        for path, tensor in tensors_in(value)
    ]
    if not leaves:
        raise UsageError("the example contains no tensor: a graph needs at least one input")
    renamed = new_names("input", [leaf.name for leaf in leaves], request.input_names)
    leaves = [replace(leaf, name=renamed.get(leaf.name, leaf.name)) for leaf in leaves]
    call = ModuleCall(module, arguments, kinds, leaves, ())
    tensors = [leaf.tensor for leaf in leaves]
    try:
        result = call.run(tensors)
    except Exception as error:  # the user's own code runs here
        message = f"the model does not run on the example: {summarize(error)}"
        raise UsageError(message) from error
    names = _output_names(result)
    names = [new_names("output", names, request.output_names).get(name, name) for name in names]
    outputs = tuple(f"{name}_out" if name in call.inputs else name for name in names)
    args, kwargs = call.arguments_with(tensors)
    is_tuple = type(result) is tuple and len(tensors_in(result)) == len(result)
    returns_tensors = is_tuple or isinstance(result, _torch().Tensor)
    plain = not kwargs and len(args) == len(leaves) and returns_tensors
    return replace(call, outputs=outputs, plain=plain)


def _output_names(result: Any) -> list[str]:
    found = tensors_in(result)
    if not found:
        raise UsageError(f"the model returns a {type(result).__name__} without any tensor")
    if len(found) == 1 and not found[0][0]:
        return ["output"]
    return [_joined(path if isinstance(path[0], str) else ["output", *path]) for path, _ in found]


# The example -------------------------------------------------------------------------------------


def _as_arguments(module: Any, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        raise UsageError(
            f"a {type(module).__name__} needs an example to be exported: give one with --example, "
            "or let the factory return (module, example)"
        )
    if isinstance(example, tuple):
        return cast("tuple[Any, ...]", example), {}
    if isinstance(example, Mapping):
        named = dict(cast("Mapping[str, Any]", example))
        parameters = _signature(module).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if len(parameters) == 1 and not takes_any and not set(named) & set(parameters):
            return (named,), {}  # the single argument is a dict
        return (), named
    return (example,), {}


def _signature(module: Any) -> inspect.Signature:
    """Return the signature of `forward`; for TorchScript, the one that its schema declares."""
    if not isinstance(module, _torch().jit.ScriptModule):
        return inspect.signature(module.forward)
    parameter = inspect.Parameter
    return inspect.Signature(
        [
            parameter(
                argument.name,
                parameter.KEYWORD_ONLY if argument.kwarg_only else parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value if argument.has_default_value() else parameter.empty,
            )
            for argument in module.forward.schema.arguments[1:]
        ]
    )


# Nested values -----------------------------------------------------------------------------------


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Return all tensors in a nested value with their paths of keys and indices."""
    if isinstance(value, _torch().Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        items: Any = cast("Mapping[Any, Any]", value).items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(cast("Any", value)._fields, cast("tuple[Any, ...]", value), strict=True)
    elif isinstance(value, (list, tuple)):
        items = enumerate(cast("Sequence[Any]", value))
    else:
        return []
    return [found for key, inner in items for found in tensors_in(inner, (*path, key))]


def _with_tensors(value: Any) -> Any:
    """Convert the arrays in a nested value to tensors."""
    if isinstance(value, np.ndarray):
        return _torch().from_numpy(np.ascontiguousarray(value))
    if isinstance(value, dict):
        return {key: _with_tensors(each) for key, each in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each) for each in value)
    return value


def _put(value: Any, path: tuple[Any, ...], tensor: Any) -> Any:
    """Return a copy of the nested value with the tensor at a path replaced."""
    if not path:
        return tensor
    key = path[0]
    if isinstance(value, Mapping):
        changed = {**cast("Mapping[Any, Any]", value), key: _put(value[key], path[1:], tensor)}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast("Any", value)._replace(**{key: _put(getattr(value, key), path[1:], tensor)})
    listed = list(value)
    listed[key] = _put(listed[key], path[1:], tensor)
    return listed if isinstance(value, list) else tuple(listed)


def _joined(path: Sequence[Any]) -> str:
    return "_".join(str(part) for part in path).replace(".", "_")


def to_numpy(tensor: Any, copy: bool = True) -> Array:
    """Return a tensor's contents; bfloat16, which numpy lacks, by reinterpreting its bits."""
    torch = _torch()
    tensor = tensor.detach().cpu()
    if tensor.is_sparse or tensor.is_quantized:
        tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    tensor = tensor.resolve_conj().contiguous()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy(), order="C", copy=copy or None)


def to_torch(array: Any, like: Any) -> Any:
    """Return the array as a tensor on the device of `like`, in bfloat16 if `like` is."""
    torch = _torch()
    if like.dtype == torch.bfloat16:
        made = torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(np.array(array, order="C"))
    return made.to(like.device)


# Modes -------------------------------------------------------------------------------------------


@contextmanager
def evaluating(module: Any) -> Generator[None]:
    """Put the module into eval mode for the context, then restore the mode of each submodule."""
    if not hasattr(module, "modules") or not hasattr(module, "eval"):
        yield
        return
    before = [(part, part.training) for part in module.modules()]
    if not any(training for _, training in before):
        yield
        return
    try:
        for part, _ in before:
            part.training = False
        yield
    finally:
        for part, training in before:
            part.training = training


def training_notes(module: Any) -> list[str]:
    """Return a note on the layers that behave differently in training mode, if any is in it."""
    if not hasattr(module, "named_modules"):
        return []
    active = [
        f"{name or 'the model'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if part.training and _differs_in_training(part)
    ]
    if not active:
        return []
    changes = f"which changes {first_of(active, 5)}"
    return [f"the model was in training mode and is exported in eval mode, {changes}"]


def _differs_in_training(part: Any) -> bool:
    nn = _torch().nn
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
    rate = getattr(part, "dropout", 0)  # of layers with built-in dropout, such as nn.LSTM
    return isinstance(part, kinds) or (isinstance(rate, (int, float)) and rate > 0)


def _torch() -> Any:
    return importlib.import_module("torch")
