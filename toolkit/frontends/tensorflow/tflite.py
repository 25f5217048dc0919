# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A TFLite file as a function of arrays that tf2onnx can convert, run by its interpreter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError, summarize
from toolkit.feeds.user_samples import Feed

Array = NDArray[Any]

_NAMELESS = re.compile(r"^keras_tensor(_\d+)?$")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input: its name in the graph, its type, and its shape, with None for unknown sizes."""

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def plain_names(names: Sequence[str], kind: str, count: int | None = None) -> list[str]:
    """Return valid, distinct names: the model's own, else `kind`, or `kind_0`, `kind_1`, ..."""
    wanted = len(names) if count is None else count
    listed = list(names) if len(names) == wanted else [""] * wanted
    plain = [kind] if wanted == 1 else [f"{kind}_{index}" for index in range(wanted)]
    clean = ["" if _NAMELESS.match(name) else re.sub(r"\W", "_", name) for name in listed]
    chosen = [name or other for name, other in zip(clean, plain, strict=True)]
    return chosen if len(set(chosen)) == wanted else plain


class TfliteModel:
    """A TFLite file, run by its interpreter."""

    def __init__(self, tensorflow: Any, tf2onnx: Any, path: Path) -> None:
        self._tf2onnx, self._path = tf2onnx, path
        try:
            self._interpreter: Any = tensorflow.lite.Interpreter(model_path=str(path))
            self._interpreter.allocate_tensors()
        except Exception as error:
            raise UsageError(f"'{path}' cannot be read: {summarize(error)}") from error
        self._in = list(self._interpreter.get_input_details())
        self._out = list(self._interpreter.get_output_details())
        names = self._signature_names()
        inputs = plain_names([names.get(d["index"], "") for d in self._in], "input", len(self._in))
        self.inputs: Sequence[InputSpec] = [
            InputSpec(name, _open_sizes(detail), np.dtype(detail["dtype"]))
            for name, detail in zip(inputs, self._in, strict=True)
        ]
        found = [
            "" if names.get(d["index"]) == "output_0" else names.get(d["index"], "")
            for d in self._out
        ]
        self.outputs: Sequence[str] = plain_names(found, "output", len(self._out))

    def _signature_names(self) -> dict[int, str]:
        """Return the names in the file's signature by tensor index."""
        if not self._interpreter.get_signature_list():
            return {}
        runner = self._interpreter.get_signature_runner()
        details = {**runner.get_input_details(), **runner.get_output_details()}
        return {detail["index"]: name for name, detail in details.items()}

    def __call__(self, feed: Feed) -> Mapping[str, Any]:
        run = self._interpreter
        for value, detail in zip(self.inputs, self._in, strict=True):
            run.resize_tensor_input(detail["index"], feed[value.name].shape)
        run.allocate_tensors()
        for value, detail in zip(self.inputs, self._in, strict=True):
            run.set_tensor(detail["index"], feed[value.name])
        run.invoke()
        pairs = zip(self.outputs, self._out, strict=True)
        return {name: np.array(run.get_tensor(detail["index"])) for name, detail in pairs}

    def write(self, opset: int, fixed: Mapping[str, tuple[int | None, ...]]) -> Any:
        names = [detail["name"] for detail in self._in], [detail["name"] for detail in self._out]
        lost: list[str] = []

        def note(_: Any, node: Any, *__: Any) -> None:
            lost.append(node.name)

        made, _ = self._tf2onnx.convert.from_tflite(
            str(self._path),
            input_names=names[0],
            output_names=names[1],
            opset=opset,
            custom_op_handlers={"TFL_READ_VARIABLE": (note, []), "TFL_VAR_HANDLE": (note, [])},
        )
        if lost:
            # as from a Keras model saved by tf.saved_model.save in TensorFlow 2.21
            raise UsageError(
                f"'{self._path}' reads uninitialized variables such as '{lost[0]}': its conversion "
                "lost the weights; export the SavedModel or the Keras model instead"
            )
        return made


def _open_sizes(detail: Mapping[str, Any]) -> tuple[int | None, ...]:
    return tuple(None if size < 0 else int(size) for size in detail["shape_signature"])
