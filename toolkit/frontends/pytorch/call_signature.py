# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A module with an example of its arguments: as a function of named arrays.

Arguments may nest (lists, tuples, dicts); every tensor in them is an input of the graph, called
after the parameter it is in (`x`, `states_0`, `past_key`). Everything else is a constant.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """A tensor among the arguments: its name, the parameter that it is in, and where in it."""

    name: str
    parameter: str
    path: tuple[Any, ...]
    tensor: Any


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module, the arguments of its example, and the names of all tensors in and out."""

    module: Any
    arguments: Mapping[str, Any]
    """By parameter; `*args` and `**kwargs` under their own names."""
    kinds: Mapping[str, Any]
    leaves: Sequence[Leaf]
    outputs: Sequence[str]
    plain: bool = False
    """Whether only tensors go in, by position, and a tensor or a tuple of them comes out."""

    @property
    def inputs(self) -> list[str]:
        return [leaf.name for leaf in self.leaves]

    def feed(self) -> Feed:
        """The example as arrays."""
        return {leaf.name: to_numpy(leaf.tensor) for leaf in self.leaves}

    def tensors(self, feed: Feed) -> list[Any]:
        """The feed as tensors, in the order of the leaves."""
        return [to_torch(feed[leaf.name], leaf.tensor) for leaf in self.leaves]

    def placed(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The arguments by parameter, with these tensors in their places."""
        made = dict(self.arguments)
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            made[leaf.parameter] = _put(made[leaf.parameter], leaf.path, tensor)
        return made

    def arranged(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same as positional and keyword arguments."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, value in self.placed(tensors).items():
            kind = self.kinds[name]
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args += value
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs |= value
            elif name in self.positional:
                args.append(value)
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    @property
    def positional(self) -> list[str]:
        """Parameters that go by position: all that may, up to one that is left out."""
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        found: list[str] = []
        for name in _parameters(self.module):
            if name not in self.kinds or self.kinds[name] in by_name:
                break
            found.append(name)
        return found

    def __call__(self, feed: Feed) -> dict[str, Any]:
        """What the module answers, under the graph's output names."""
        torch = _torch()
        args, kwargs = self.arranged(self.tensors(feed))
        with evaluating(self.module), torch.no_grad():
            found = tensors_in(self.module(*args, **kwargs))
        pairs = zip(self.outputs, found, strict=True)
        return {name: to_numpy(tensor) for name, (_, tensor) in pairs}


def bind(module: Any, request: Request) -> ModuleCall:
    """The call that the example stands for; raises UsageError when it does not fit `forward`."""
    args, kwargs = _as_arguments(module, request.example)
    try:
        return bind_arguments(module, args, kwargs, request)
    except UsageError as error:
        if not args or not isinstance(request.example, Mapping):
            raise
        # names that no parameter has were taken for one argument that is a dict
        shown = ", ".join(_parameters(module))
        given = ", ".join(map(str, cast("Mapping[Any, Any]", request.example)))
        message = f"the example does not fit forward({shown}): it names {given}"
        raise UsageError(f"{message}; as one argument, {error}") from error


def bind_arguments(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> ModuleCall:
    """The same for arguments that are known to be by position or by name."""
    arguments, kinds = _bound(module, args, kwargs)
    arguments = {name: _with_tensors(value) for name, value in arguments.items()}
    leaves = [
        Leaf(_joined([name, *path]), name, path, tensor)
        for name, value in arguments.items()
        for path, tensor in tensors_in(value)
    ]
    if not leaves:
        raise UsageError("the example holds no tensor: a graph needs an input")
    renamed = new_names("input", [leaf.name for leaf in leaves], request.input_names)
    leaves = [
        Leaf(renamed.get(leaf.name, leaf.name), leaf.parameter, leaf.path, leaf.tensor)
        for leaf in leaves
    ]
    call = ModuleCall(module, arguments, kinds, leaves, ())
    result = _answer(call)
    names = _output_names(result)
    given = new_names("output", names, request.output_names)
    outputs = tuple(_apart(given.get(name, name), call.inputs) for name in names)
    return ModuleCall(module, arguments, kinds, leaves, outputs, _is_plain(call, result))


def _is_plain(call: ModuleCall, result: Any) -> bool:
    args, kwargs = call.arranged([leaf.tensor for leaf in call.leaves])
    goes_in = not kwargs and len(args) == len(call.leaves)
    comes_out = type(result) is tuple and len(tensors_in(result)) == len(result)
    return goes_in and (comes_out or isinstance(result, _torch().Tensor))


def _answer(call: ModuleCall) -> Any:
    """What the module returns for the example."""
    torch = _torch()
    args, kwargs = call.arranged([leaf.tensor for leaf in call.leaves])
    try:
        with evaluating(call.module), torch.no_grad():
            return call.module(*args, **kwargs)
    except Exception as error:  # the user's own code runs here
        message = f"the model does not run on the example: {summarize(error)}"
        raise UsageError(message) from error


def _output_names(result: Any) -> list[str]:
    found = tensors_in(result)
    if not found:
        raise UsageError(f"the model returns no tensor, but a {type(result).__name__}")
    if len(found) == 1 and not found[0][0]:
        return ["output"]
    return [_joined(path if isinstance(path[0], str) else ["output", *path]) for path, _ in found]


def _apart(name: str, inputs: Sequence[str]) -> str:
    """An output must not be called like an input."""
    return f"{name}_out" if name in inputs else name


# The example -------------------------------------------------------------------------------------


def _as_arguments(module: Any, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        raise UsageError(
            f"a {type(module).__name__} needs an example to be exported with: give one "
            "(--example), or let the factory return (module, example)"
        )
    if isinstance(example, tuple):
        return cast("tuple[Any, ...]", example), {}
    if isinstance(example, Mapping):
        named = dict(cast("Mapping[str, Any]", example))
        parameters = _parameters(module)
        open_ended = inspect.Parameter.VAR_KEYWORD in parameters.values()
        if len(parameters) == 1 and not open_ended and not set(named) & set(parameters):
            return (named,), {}  # a forward of one dict
        return (), named
    return (example,), {}


def _parameters(module: Any) -> dict[str, Any]:
    """The parameters of `forward` with their kinds."""
    if _is_scripted(module):
        listed = module.forward.schema.arguments[1:]
        return {each.name: inspect.Parameter.POSITIONAL_OR_KEYWORD for each in listed}
    return {n: p.kind for n, p in inspect.signature(module.forward).parameters.items()}


def _bound(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters = _parameters(module)
    shown = f"forward({', '.join(parameters)})"
    try:
        if _is_scripted(module):
            bound = _bind_schema(module, args, kwargs)
        else:
            bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise UsageError(f"the example does not fit {shown}: {error}") from error
    return bound, {name: parameters[name] for name in bound}


def _bind_schema(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    wanted = module.forward.schema.arguments[1:]
    if len(args) > len(wanted):
        raise TypeError(f"it has {len(args)} arguments")
    bound = {each.name: value for each, value in zip(wanted, args, strict=False)}
    unknown = [name for name in kwargs if name not in {each.name for each in wanted}]
    if unknown:
        raise TypeError(f"got an unexpected keyword argument '{unknown[0]}'")
    bound |= kwargs
    missing = [e.name for e in wanted if e.name not in bound and not e.has_default_value()]
    if missing:
        raise TypeError(f"missing a required argument: '{missing[0]}'")
    return {each.name: bound[each.name] for each in wanted if each.name in bound}


def _is_scripted(module: Any) -> bool:
    return isinstance(module, _torch().jit.ScriptModule)


# Nested values -----------------------------------------------------------------------------------


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """All tensors in a nested value, with the keys and indices that lead to them."""
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
    """The same with arrays turned into tensors."""
    if isinstance(value, np.ndarray):
        return _torch().from_numpy(np.ascontiguousarray(value))
    if isinstance(value, dict):
        return {key: _with_tensors(each) for key, each in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each) for each in value)
    return value


def _put(value: Any, path: tuple[Any, ...], tensor: Any) -> Any:
    """The nested value with the tensor at a path replaced; what was there is left alone."""
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
    """A tensor's contents; bfloat16, which numpy does not know, through its bits."""
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
    """The array as a tensor where the example's is."""
    torch = _torch()
    if like.dtype == torch.bfloat16:
        made = torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(np.array(array, order="C"))
    return made.to(like.device)


# Modes -------------------------------------------------------------------------------------------


@contextmanager
def evaluating(module: Any) -> Generator[None]:
    """The module in eval mode meanwhile; every part of it gets its own mode back."""
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
    """What would behave otherwise in training, if the module came in training mode."""
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
    return [f"it came in training mode and was exported in eval mode, {changes}"]


def _differs_in_training(part: Any) -> bool:
    nn = _torch().nn
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
    rate = getattr(part, "dropout", 0)  # of layers that drop on their own, as nn.LSTM
    return isinstance(part, kinds) or (isinstance(rate, (int, float)) and rate > 0)


def _torch() -> Any:
    return importlib.import_module("torch")


Run = Callable[[Feed], Mapping[str, Any]]
