# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The example of a scikit-learn model as inputs of a graph: one matrix, or one per column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError
from toolkit.extras import require
from toolkit.feeds.user_samples import Feed

Array: TypeAlias = NDArray[Any]
FloatType: TypeAlias = type[np.floating[Any]]
"""The precision that a graph computes in."""

_INPUT = "input"
_ROWS = 8
"""Rows of a synthetic example."""


def installed(package: str) -> Any:
    return require(package, "sklearn", f"scikit-learn models need {package}")


@dataclass(frozen=True, slots=True)
class InputTable:
    """The example: rows of one matrix, or of columns of different types."""

    columns: Mapping[str, Array]
    """Arrays by input name, with rows along axis 0."""
    build: Callable[[Feed], Any]
    """Converts a feed to what scikit-learn expects."""

    @classmethod
    def of(cls, model: Any, example: Any) -> InputTable:
        if isinstance(example, tuple) and len(cast("tuple[Any, ...]", example)) == 1:
            (example,) = cast("tuple[Any]", example)
        if hasattr(example, "columns") and hasattr(example, "dtypes"):
            return cls._of_frame(example)
        if isinstance(example, Mapping):
            pandas = installed("pandas")
            return cls._of_frame(pandas.DataFrame(example))
        if example is None:
            count = getattr(model, "n_features_in_", None)
            if count is None:
                raise UsageError(
                    f"the {type(model).__name__} does not declare its inputs: give an example"
                )
            example = np.random.default_rng(0).standard_normal((_ROWS, count))
        values = _array(example)
        if values.ndim == 1 and values.dtype.kind in "fiu":
            values = values.reshape(1, -1)
        return cls({_INPUT: values}, lambda feed: feed[_INPUT])

    @classmethod
    def _of_frame(cls, frame: Any) -> InputTable:
        """Return a matrix if all columns have one numeric kind, else one input per column."""
        names = [str(name) for name in frame.columns]
        kinds = {np.asarray(frame[name]).dtype.kind for name in frame.columns}
        if kinds <= set("fiub") and len(kinds) == 1:

            def matrix(feed: Feed) -> Any:
                return type(frame)(feed[_INPUT], columns=frame.columns)

            return cls({_INPUT: np.asarray(frame)}, matrix)

        def columns(feed: Feed) -> Any:
            return type(frame)({name: feed[name].reshape(-1) for name in names})

        made = {str(name): _array(frame[name]).reshape(-1, 1) for name in frame.columns}
        return cls(made, columns)

    def feed(self, kind: FloatType) -> Feed:
        """Return the example with numbers in this precision."""
        return {
            name: value.astype(kind) if value.dtype.kind in "fiu" else value
            for name, value in self.columns.items()
        }


def _array(values: Any) -> Array:
    """Return an array, of strings instead of objects."""
    array = np.asarray(values)
    return array.astype(str) if array.dtype == object else array
