# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The TensorFlow front end, by tf2onnx: Keras models and files, SavedModels, TFLite files.

    source                         names of inputs and outputs
    a Keras model, .keras, .h5     the model's own, else `input` and `output`
    a SavedModel folder            its signature's (`serving_default`, or the only one)
    a .tflite file                 its signature's, else those of its tensors

Unknown sizes are dynamic: `batch` for axis 0, others named by input and axis. Sizes that the model
requires to be equal, such as those of ids and their mask, share a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError, summarize
from toolkit.extras import require
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import AttemptList, Draft, ExportFailed, ExportPlan
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.signature import example_values, new_names, renamed, with_axes
from toolkit.frontends.silence import silence
from toolkit.frontends.tensorflow.tflite import InputSpec, TfliteModel, plain_names
from toolkit.frontends.test_inputs import accepts, cases_from, output_axes, sizes_in
from toolkit.ir.model import Model

Array = NDArray[Any]

_KERAS_FILES = (".keras", ".h5", ".hdf5")
_PACKAGES = ("keras", "tensorflow", "tf_keras")
_SIGNATURE = "serving_default"
_DEFAULT_OPSET, _NEWEST_OPSET = 17, 18
"""The opsets of tf2onnx 1.17; the toolkit converts to newer ones."""
_BATCH_SIZE, _OTHER_SIZE = 2, 8
"""Unknown sizes of a synthetic example."""


class TensorFlowFrontEnd:
    """Exports TensorFlow, Keras and TFLite models."""

    name = "tensorflow"
    supports = ()

    def takes(self, source: object) -> bool:
        if isinstance(source, Path):
            if source.is_dir():
                return (source / "saved_model.pb").is_file()
            return source.suffix.lower() in (*_KERAS_FILES, ".tflite")
        packages = {each.__module__.split(".")[0] for each in type(source).__mro__}
        return not packages.isdisjoint(_PACKAGES)

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """Plan one graph, with the requested dynamic axes or the model's own."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with silence():
            tensorflow, tf2onnx = _require("tensorflow"), _require("tf2onnx")
            model = _open(tensorflow, tf2onnx, source, request.example)
        feed, axes = _example(model, request)

        def draft() -> Draft:
            return _draft(model, feed, axes, request, scratch)

        return ExportPlan([AttemptList("model", [draft])])


FRONT_END = TensorFlowFrontEnd()


def _require(package: str) -> Any:
    return require(package, "tensorflow", f"TensorFlow models need {package}")


# Models ------------------------------------------------------------------------------------------


class _Model(Protocol):
    """A model as a function of arrays that tf2onnx can convert."""

    @property
    def inputs(self) -> Sequence[InputSpec]: ...

    @property
    def outputs(self) -> Sequence[str]: ...

    def __call__(self, feed: Feed) -> Mapping[str, Any]: ...

    def write(self, opset: int, fixed: Mapping[str, tuple[int | None, ...]]) -> Any:
        """Return the ModelProto; `fixed` are the declared input shapes."""
        ...


def _open(tensorflow: Any, tf2onnx: Any, source: Any, example: Any) -> _Model:
    if isinstance(source, Path):
        if source.suffix.lower() == ".tflite":
            return TfliteModel(tensorflow, tf2onnx, source)
        try:
            if source.is_dir():
                return _of_signature(tensorflow, tf2onnx, tensorflow.saved_model.load(str(source)))
            source = tensorflow.keras.models.load_model(source, compile=False)
        except UsageError:
            raise
        except Exception as error:  # loaders of three formats may raise anything
            raise UsageError(f"'{source}' cannot be read: {summarize(error)}") from error
    if hasattr(source, "signatures") and not hasattr(source, "layers"):
        return _of_signature(tensorflow, tf2onnx, source)
    return _of_keras(tensorflow, tf2onnx, source, example)


@dataclass(frozen=True, slots=True)
class _Function:
    """A callable of TensorFlow tensors."""

    tensorflow: Any
    tf2onnx: Any
    owner: Any
    """The owner of the variables, kept alive because TensorFlow frees them with it."""
    call: Callable[..., list[Any]]
    inputs: Sequence[InputSpec]
    outputs: Sequence[str]

    def __call__(self, feed: Feed) -> Mapping[str, Any]:
        values = [self.tensorflow.constant(feed[value.name]) for value in self.inputs]
        with silence():
            found = self.call(*values)
        return {n: np.asarray(value.numpy()) for n, value in zip(self.outputs, found, strict=True)}

    def write(self, opset: int, fixed: Mapping[str, tuple[int | None, ...]]) -> Any:
        tf = self.tensorflow
        signature = [
            tf.TensorSpec(fixed[value.name], value.dtype, name=value.name) for value in self.inputs
        ]
        function = tf.function(self.call, input_signature=signature)
        made, _ = self.tf2onnx.convert.from_function(
            function,
            input_signature=signature,
            opset=opset,
            custom_op_handlers={"Erfc": (_write_erfc, [])},
        )
        return made


def _write_erfc(ctx: Any, node: Any, name: str, _arguments: Any) -> None:
    """erfc(x) = 1 - erf(x), which TensorFlow's GELU uses and tf2onnx 1.17 lacks."""
    outputs = node.output
    dtype, shape = ctx.get_dtype(outputs[0]), ctx.get_shape(outputs[0])
    one = ctx.make_const(f"{name}_one", np.array(1, np.float32)).output[0]
    if dtype != 1:
        one = ctx.make_node("Cast", [one], attr={"to": dtype}).output[0]
    ctx.remove_node(node.name)
    erf = ctx.make_node("Erf", node.input, shapes=[shape], dtypes=[dtype])
    ctx.make_node("Sub", [one, erf.output[0]], outputs=outputs, shapes=[shape], dtypes=[dtype])


def _of_keras(tensorflow: Any, tf2onnx: Any, model: Any, example: Any) -> _Function:
    tensors = getattr(model, "inputs", None)
    given = _as_list(example)
    if tensors:
        names = plain_names([tensor.name for tensor in tensors], "input")
        values = [
            InputSpec(name, tuple(tensor.shape), np.dtype(tensor.dtype))
            for name, tensor in zip(names, tensors, strict=True)
        ]
    elif given and callable(model):
        names = plain_names([], "input", len(given))
        values = [
            InputSpec(name, (None, *array.shape[1:]), array.dtype)
            for name, array in zip(names, map(np.asarray, given), strict=True)
        ]
    else:
        raise UsageError(
            f"the {type(model).__name__} does not declare its inputs: give an example, or let the "
            "factory return (model, example)"
        )
    flatten = tensorflow.nest.flatten

    def call(*inputs: Any) -> list[Any]:
        one = inputs[0] if len(inputs) == 1 else list(inputs)
        try:
            found = model(one, training=False)
        except TypeError:  # a plain tf.Module has no such argument
            found = model(*inputs)
        return flatten(found)

    sample = [tensorflow.zeros([_size(v, a) for a in range(len(v.shape))], v.dtype) for v in values]
    count = len(call(*sample))
    names = plain_names(list(getattr(model, "output_names", []) or []), "output", count)
    return _Function(tensorflow, tf2onnx, model, call, values, names)


def _of_signature(tensorflow: Any, tf2onnx: Any, loaded: Any) -> _Function:
    signatures = dict(loaded.signatures)
    if _SIGNATURE not in signatures and len(signatures) != 1:
        known = ", ".join(signatures) or "none"
        raise UsageError(f"the SavedModel has no signature '{_SIGNATURE}'; signatures: {known}")
    signature = signatures.get(_SIGNATURE) or next(iter(signatures.values()))
    specs: dict[str, Any] = signature.structured_input_signature[1]
    keys = list(specs)
    values = [
        InputSpec(name, tuple(specs[key].shape), np.dtype(specs[key].dtype.as_numpy_dtype))
        for name, key in zip(plain_names(keys, "input"), keys, strict=True)
    ]
    outputs = list(signature.structured_outputs)

    def call(*inputs: Any) -> list[Any]:
        found = signature(**dict(zip(keys, inputs, strict=True)))
        return [found[name] for name in outputs]

    names = plain_names(["" if o == "output_0" else o for o in outputs], "output", len(outputs))
    return _Function(tensorflow, tf2onnx, loaded, call, values, names)


# The example -------------------------------------------------------------------------------------


def _as_list(example: Any) -> list[Any]:
    if isinstance(example, (tuple, list)):
        return list(cast("Sequence[Any]", example))
    return [] if example is None else [example]


def _example(model: _Model, request: Request) -> tuple[Feed, Axes]:
    """Return the example as a feed, and the dynamic axes."""
    given = request.example is not None
    feed = _feed_of(model, request.example) if given else _random_feed(model, request.seed)
    asked = request.axes_of(feed)
    if asked is not None:
        return feed, asked
    axes = {
        value.name: {
            axis: "batch" if not axis else f"{value.name}_{axis}"
            for axis, size in enumerate(value.shape)
            if size is None
        }
        for value in model.inputs
    }
    _share_names(model, feed, axes)
    return feed, {name: dims for name, dims in axes.items() if dims}


def _share_names(model: _Model, feed: Feed, axes: dict[str, dict[int, str]]) -> None:
    """Give one name to unknown sizes that the model requires to be equal."""
    if isinstance(model, TfliteModel):  # a failed resize would leave the interpreter unusable
        return
    places = [(name, axis) for name, dims in axes.items() for axis in dims if axis]
    left = [place for place in places if not _runs(model, feed, [place])]
    while left and _runs(model, feed, left):
        together = list(left)
        for place in left[1:]:
            fewer = [other for other in together if other != place]
            if _runs(model, feed, fewer):
                together = fewer
        first, axis = together[0]
        for name, other in together:
            axes[name][other] = axes[first][axis]
        left = [place for place in left if place not in together]


def _runs(model: _Model, feed: Feed, longer: Sequence[tuple[str, int]]) -> bool:
    """Return whether the model supports inputs longer by one along these axes."""
    changed = dict(feed)
    for name, axis in longer:
        last = np.take(changed[name], [-1], axis=axis)
        changed[name] = np.concatenate([changed[name], last], axis=axis)
    return accepts(model, changed)


def _feed_of(model: _Model, example: Any) -> Feed:
    names = [value.name for value in model.inputs]
    several = example if isinstance(example, Mapping) else tuple(_as_list(example))
    feed: Feed = {}
    values = map(np.asarray, example_values(several, names))
    for value, array in zip(model.inputs, values, strict=True):
        sizes = zip(value.shape, array.shape, strict=False)
        if array.ndim != len(value.shape) or any(s is not None and s != n for s, n in sizes):
            wanted = ", ".join("?" if size is None else str(size) for size in value.shape)
            raise UsageError(
                f"the example's '{value.name}' has shape {list(array.shape)}; the model expects "
                f"[{wanted}]"
            )
        feed[value.name] = array.astype(value.dtype)
    return feed


def _random_feed(model: _Model, seed: int) -> Feed:
    random = np.random.default_rng(seed)

    def draw(value: InputSpec) -> Array:
        shape = [_size(value, axis) for axis in range(len(value.shape))]
        if value.dtype.kind == "f":
            return random.standard_normal(shape).astype(value.dtype)
        high = 2 if value.dtype.kind in "iub" else 1  # ids valid in any embedding table
        return random.integers(0, high, shape).astype(value.dtype)

    return {value.name: draw(value) for value in model.inputs}


def _size(value: InputSpec, axis: int) -> int:
    size = value.shape[axis]
    return size if size is not None else _OTHER_SIZE if axis else _BATCH_SIZE


# The graph ---------------------------------------------------------------------------------------


def _draft(model: _Model, feed: Feed, axes: Axes, request: Request, scratch: Path) -> Draft:
    fixed = {
        name: tuple(
            None if axis in axes.get(name, {}) else size for axis, size in enumerate(v.shape)
        )
        for name, v in feed.items()
    }
    request.progress("exporting with tf2onnx")
    opset = min(request.opset or _DEFAULT_OPSET, _NEWEST_OPSET)
    try:
        with silence():
            made = model.write(opset, fixed)
    except UsageError:
        raise
    except Exception as error:  # converters may raise anything
        raise ExportFailed("tf2onnx", summarize(error)) from error
    path = Model.from_proto(made).save(scratch / "model.onnx")
    graph = Model.load(path).graph
    given = [value.name for value in model.inputs]
    inputs = dict(zip(given, request.input_names or given, strict=False))
    outputs = dict(zip(model.outputs, request.output_names or model.outputs, strict=False))
    names = {
        **new_names("input", _in_order(list(graph.feeds), given), list(inputs.values())),
        **new_names("output", list(graph.outputs), list(outputs.values())),
    }
    new_names("input", given, request.input_names)
    back = {new: old for old, new in inputs.items()}

    def reference(values: Feed) -> dict[str, Any]:
        found = model({back[name]: value for name, value in values.items()})
        return {outputs[name]: value for name, value in found.items()}

    named = {inputs[name]: value for name, value in feed.items()}
    named_axes = {inputs[name]: dims for name, dims in axes.items()}
    path = with_axes(renamed(path, names), named_axes, output_axes(reference, named, named_axes))
    cases = cases_from(named, named_axes, request.seed)
    return Draft(path, reference, cases, "tf2onnx", named_axes, sizes_in(named, named_axes))


def _in_order(have: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the graph's inputs in the order of the model's, if their names are the same."""
    return list(wanted) if set(have) == set(wanted) else list(have)
