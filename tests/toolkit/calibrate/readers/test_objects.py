"""Feeds from Python objects and functions, and random feeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.checks import model
from tests.toolkit.calibrate.readers.reading import (
    DYNAMIC,
    ramp,
    read,
    refused,
)
from toolkit.calibrate.readers import ReaderOptions, reader_for
from toolkit.calibrate.readers.objects import feeds_in
from toolkit.calibrate.readers.reader import Reader
from toolkit.calibrate.readers.synthetic import RandomFeeds
from toolkit.errors import UsageError


class Convention:
    """onnxruntime's CalibrationDataReader: can be read once."""

    def __init__(self, count=3):
        self.left = iter([{"x": np.full((1, 3), i, np.float32)} for i in range(count)])

    def get_next(self):
        return next(self.left, None)


class Rewinding(Convention):
    def rewind(self):
        self.__init__()


@pytest.mark.parametrize("kind", [Convention, Rewinding])
def test_an_object_with_get_next(kind):
    reader = reader_for(kind(), model(DYNAMIC))
    for _ in range(2):
        assert [float(feed["x"][0, 0]) for feed in reader] == [0, 1, 2]
    assert reader.digest() == reader_for(kind(), model(DYNAMIC)).digest()
    assert reader.digest() != reader_for(Convention(2), model(DYNAMIC)).digest()


def test_an_iterator_that_is_left_early():
    reader = reader_for(iter([{"x": ramp(1, 3)}, {"x": ramp(2, 3)}]), model(DYNAMIC))
    next(iter(reader))
    assert [len(feed["x"]) for feed in reader] == [1, 2]
    assert [len(feed["x"]) for feed in reader] == [1, 2]


def test_iterables():
    assert len(read([{"x": ramp(1, 3)}, {"x": ramp(5, 3)}])) == 2
    assert "are empty" in refused([])
    assert "feed 0 is list; it must be a dict" in refused([[1]])


def test_a_function(tmp_path):
    path = tmp_path / "data.py"
    path.write_text(
        "import numpy as np\n"
        "def feeds():\n"
        "    for n in (1, 2):\n"
        "        yield {'x': np.ones((n, 3), np.float32), 'extra': 1}\n"
        "def broken():\n"
        "    yield {'x': np.ones((1, 3), np.float32)}\n"
        "    raise RuntimeError('disk gone')\n"
        "def number():\n"
        "    return 3\n"
        "value = 1\n"
    )
    assert [len(feed["x"]) for feed in read(f"{path}:feeds")] == [1, 2]
    assert "failed: RuntimeError: disk gone" in refused(f"{path}:broken")
    assert "returns int; it must be an iterable" in refused(f"{path}:number")
    assert "is not a function" in refused(f"{path}:value")
    assert "has no object 'feed': did you mean 'feeds'" in refused(f"{path}:feed")
    assert "cannot import nowhere_at_all" in refused("nowhere_at_all:f")
    assert f"{path}:function" in refused(path)
    assert "name a source" in refused("")


def test_an_object_of_a_module(tmp_path):
    path = tmp_path / "data.py"
    path.write_text(
        "import numpy as np\n"
        "listed = [{'x': np.ones((n, 3), np.float32)} for n in (1, 2)]\n"
        "class Convention:\n"
        "    left = iter(listed)\n"
        "    def get_next(self):\n"
        "        return next(self.left, None)\n"
        "reader = Convention()\n"
        "words = 'text'\n"
    )
    for name in ("listed", "reader"):
        reader = reader_for(f"{path}:{name}", model(DYNAMIC))
        for _ in range(2):
            assert [len(feed["x"]) for feed in reader] == [1, 2]
    assert "is not a function" in refused(f"{path}:words")


def test_random():
    feeds = read("random", random_feeds=10)
    assert len(feeds) == 10
    assert not np.array_equal(feeds[0]["x"], feeds[9]["x"])
    reader = reader_for("random", model(DYNAMIC))
    assert "say little" in reader.notes[0]
    assert reader.digest() != reader_for("random", model(DYNAMIC), ReaderOptions(seed=1)).digest()


def test_feeds_of_user_code_are_counted_if_they_have_a_length():
    assert feeds_in([{"x": 1}, {"x": 2}]).count() == 2
    assert feeds_in(iter([{"x": 1}])).count() is None
    assert feeds_in("text") is None
    assert feeds_in({"x": 1}) is None


def test_an_iterable_that_fails_is_named_in_one_line():
    def broken():
        yield {"x": 1}
        raise OSError("disk gone")

    with pytest.raises(UsageError, match="the calibration data failed: OSError: disk gone"):
        list(feeds_in(broken()) or ())


def test_random_feeds_are_reproducible():
    one, other = (RandomFeeds(model(DYNAMIC), seed=3, count=2) for _ in range(2))
    for (_, a), (_, b) in zip(one, other, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
    assert one.count() == 2


def test_the_digest_of_feeds_is_that_of_their_contents():
    def digest(*values):
        feeds: Any = feeds_in([{"x": np.full((1, 3), value, np.float32)} for value in values])
        return Reader(feeds, model(DYNAMIC)).digest()

    assert digest(1, 2) == digest(1, 2) != digest(2, 1)
