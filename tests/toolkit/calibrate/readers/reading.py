"""Helpers to read calibration data, or to be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.checks import model
from toolkit.calibrate.readers import ReaderOptions, reader_for
from toolkit.errors import UsageError

DYNAMIC = "g (float[N,3] x) => (float[N,3] y) { y = Relu(x) }"
BATCH_OF_2 = "g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }"
TWO = "g (float[N,3] x, int64[N] k) => (float[N,3] y, int64[N] z) { y = Relu(x) z = Identity(k) }"
LENGTHS = "g (float[N,T] x) => (float[N,T] y) { y = Relu(x) }"


def read(source, graph=DYNAMIC, **options):
    """The feeds, which are the same when they are read again."""
    reader = reader_for(source, model(graph), ReaderOptions(**options))
    first, second = list(reader), list(reader)
    assert len(first) == len(second)
    assert reader.count() in (None, len(first))
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
    assert reader.digest() == reader_for(source, model(graph), ReaderOptions(**options)).digest()
    return first


def refused(source, graph=DYNAMIC, **options):
    with pytest.raises(UsageError) as caught:
        list(reader_for(source, model(graph), ReaderOptions(**options)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ramp(*shape, dtype: Any = np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)
