"""The collector: observations, sweeps, the cache, and constant memory."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from tests.checks import model, parse
from toolkit.calibrate import cache
from toolkit.calibrate.collector import collect, observable, sweeps_of
from toolkit.calibrate.observers import (
    Entropy,
    MinMax,
    MovingAverage,
    Mse,
    Percentile,
)
from toolkit.calibrate.readers import ReaderOptions, reader_for
from toolkit.calibrate.statistics import NotFinite, Range
from toolkit.errors import SaveError, UsageError
from toolkit.ir.model import Model
from toolkit.runtime.session import Session

CHAIN = """g (float[N,T] x) => (float[N,T] y)
<float two = {2.0}> { a = Mul(x, two) b = Neg(a) c = Relu(b) s = Shape(c) y = Exp(c) }"""


def feeds(count=4, length=3, seed=0):
    random = np.random.default_rng(seed)
    return [{"x": random.uniform(-1, 1, (2, length)).astype(np.float32)} for _ in range(count)]


def reader(samples, text=CHAIN):
    return reader_for(samples, model(text))


def observe(samples, observers, text=CHAIN, **options):
    return collect(model(text), reader(samples, text), observers, **options)


def test_every_kind_of_value():
    samples = feeds()
    names = observable(model(CHAIN))
    assert names == ["x", "a", "b", "c", "s", "y"]
    found = observe(samples, dict.fromkeys(names, MinMax()))
    x = np.concatenate([sample["x"] for sample in samples])
    low, high = float((2 * x).min()), float((2 * x).max())
    assert found.range("x") == Range(float(x.min()), float(x.max()))
    assert found.range("a") == Range(low, high)
    assert found.range("b") == Range(-high, -low)
    assert found.range("c") == Range(0.0, -low)
    assert found.range("s") == Range(0.0, 1.0)  # integers are not counted
    assert found.range("y").high == pytest.approx(np.exp(-low))
    assert found.sweeps == 1
    assert not found.failed


OBSERVERS = (MinMax(), MovingAverage(), Percentile(), Entropy(), Mse())


@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: o.name)
def test_lengths_that_vary(observer):
    samples = [feeds(1, length, length)[0] for length in (3, 8, 1, 5)]
    found = observe(samples, {"b": observer}).range("b")
    assert -2 <= found.low < 0 < found.high <= 2


def test_unobservable_values_are_refused():
    with pytest.raises(UsageError, match="'two' cannot be observed"):
        observe(feeds(), {"two": MinMax()})
    with pytest.raises(UsageError, match="'q' cannot be observed"):
        observe(feeds(), {"q": MinMax()})
    with pytest.raises(UsageError, match="are empty"):
        observe([], {"a": MinMax()})
    with pytest.raises(UsageError, match="'x' has rank 1"):
        observe([{"x": np.ones(2, np.float32)}], {"a": MinMax()})


def test_a_feed_on_which_the_model_fails():
    text = "g (float[N,T] x) => (float[N,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,1,2,3}>"
    text += " { y = MatMul(x, w) }"
    samples = [*feeds(1, 3), *feeds(1, 5)]
    with pytest.raises(UsageError, match="the model fails on calibration feed 1"):
        observe(samples, {"y": MinMax()}, text)


def test_nonfinite_tensors_are_named_and_others_are_observed(tmp_path):
    text = "g (float[N] x) => (float[N] y) { a = Log(x) y = Abs(x) }"
    samples = [{"x": np.array([1.0], np.float32)}, {"x": np.array([-2.0], np.float32)}]
    for sweeps in (1, 0):
        found = observe(samples, {"a": MinMax(), "y": MinMax()}, text, cache=tmp_path)
        assert found.sweeps == sweeps
        assert found.ranges() == {"y": Range(0.0, 2.0)}
        assert list(found.failed) == ["a"]
        with pytest.raises(NotFinite, match="tensor 'a' holds NaN"):
            found.range("a")


def test_float16():
    text = "g (float16[N] x) => (float16[N] y) { a = Neg(x) y = Relu(a) }"
    samples = [{"x": np.array([1, -3], np.float16)}]
    assert observe(samples, {"a": Mse()}, text).range("a").high == pytest.approx(3, rel=0.02)


def test_the_model_is_not_modified():
    subject = model(CHAIN)
    before = subject.to_proto().SerializeToString()
    collect(subject, reader(feeds()), {"a": MinMax()})
    assert subject.to_proto().SerializeToString() == before
    assert not len(subject.journal)


def test_merged_shards_equal_the_whole():
    samples = feeds(6)
    names = dict.fromkeys("abcy", Percentile())
    whole = observe(samples, names)
    merged = observe(samples[:2], names).merge(observe(samples[2:], names))
    assert merged.ranges() == whole.ranges()


def test_merged_calibrations_keep_failures():
    text = "g (float[N] x) => (float[N] y) { a = Log(x) y = Abs(x) }"
    names = {"a": MinMax(), "y": MinMax()}
    one = observe([{"x": np.array([1.0], np.float32)}], names, text)
    other = observe([{"x": np.array([-2.0], np.float32)}], names, text)
    for merged in (one.merge(other), other.merge(one)):
        assert list(merged.failed) == ["a"]
        assert merged.ranges() == {"y": Range(0.0, 2.0)}
    with pytest.raises(UsageError, match="different observers"):
        one.merge(observe([{"x": np.ones(1, np.float32)}], {"y": MinMax()}, text))


# Sweeps, cache and progress ----------------------------------------------------------------------


def test_a_small_budget_takes_several_sweeps():
    names = dict.fromkeys(("x", "a", "b", "c", "y"), Percentile())
    whole = observe(feeds(), names)
    told = []
    small = observe(
        feeds(), names, budget=50, progress=lambda done, total, what: told.append((done, total))
    )
    assert small.sweeps == 3  # 24 bytes each
    assert small.ranges() == whole.ranges()
    assert told == [(n, 12) for n in range(1, 13)]
    assert observe(feeds(), names, budget=1).sweeps == 5


def test_sizes_are_known_after_one_run(monkeypatch):
    runs = []
    run = Session.run

    def counted(self, feed, outputs=None):
        runs.append(outputs)
        return run(self, feed, outputs)

    monkeypatch.setattr(Session, "run", counted)
    assert sweeps_of(model(CHAIN), feeds(), list("xabcy"), 50, ()) == [
        ["x", "a"],
        ["b", "c"],
        ["y"],
    ]
    assert len(runs) == 1


def test_a_sequence_does_not_prevent_observation():
    text = """g (float[2] x) => (float[2] y)
        { s = SequenceConstruct (x, x) i = Constant <value_int = 1> () y = SequenceAt (s, i) }"""
    found = observe([{"x": np.ones(2, np.float32)}], dict.fromkeys("xsy", MinMax()), text)
    assert found.range("y") == Range(0, 1)


def test_a_second_run_is_instant(tmp_path, monkeypatch):
    names = {"a": Percentile(), "c": MinMax()}
    first = observe(feeds(), names, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr("toolkit.runtime.session.Session.run", None)
    second = observe(feeds(), names, cache=tmp_path)
    assert second.sweeps == 0
    assert second.ranges() == first.ranges()
    # Another observer that reads the same statistic
    assert observe(feeds(), {"a": Mse()}, cache=tmp_path).sweeps == 0


def test_the_cache_knows_model_and_data(tmp_path):
    names = {"a": MinMax()}
    for samples, text in (
        (feeds(), CHAIN),
        (feeds(seed=1), CHAIN),
        (feeds(), CHAIN.replace("2.0", "3.0")),
    ):
        assert observe(samples, names, text, cache=tmp_path).sweeps == 1
        assert observe(samples, names, text, cache=tmp_path).sweeps == 0
    assert observe(feeds(), {**names, "b": MinMax()}, cache=tmp_path).sweeps == 1


def test_large_weights_count_too(tmp_path):
    def subject(value):
        proto = parse("g (float[N,T] x) => (float[N,T] y) { y = Relu(x) }")
        made = Model.from_proto(proto)
        name = made.graph.constant(np.full(5000, value, np.float32))
        made.graph.add("Add", ["y", name], ["z"])
        made.commit()
        return made

    for value in (1.0, 2.0):
        samples = [{"x": np.ones((1, 5000), np.float32)}]
        data = reader_for(samples, subject(value))
        found = collect(subject(value), data, {"z": MinMax()}, cache=tmp_path)
        assert found.range("z").high == 1 + value


def test_a_damaged_cache_is_collected_again(tmp_path):
    observe(feeds(), {"a": MinMax()}, cache=tmp_path)
    next(tmp_path.iterdir()).write_bytes(b"PK nothing")
    assert observe(feeds(), {"a": MinMax()}, cache=tmp_path).sweeps == 1
    assert observe(feeds(), {"a": MinMax()}, cache=tmp_path).sweeps == 0


def test_an_unwritable_cache_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cache '.*file/inside' is not writable"):
        observe(feeds(), {"a": MinMax()}, cache=tmp_path / "file" / "inside")


def test_a_full_disk_costs_nothing_but_the_cache(tmp_path, monkeypatch):
    def full(files):
        raise SaveError("no space left on device")

    monkeypatch.setattr(cache, "write_files", full)
    found = observe(feeds(), {"a": MinMax()}, cache=tmp_path)
    assert found.sweeps == 1
    assert found.ranges() == observe(feeds(), {"a": MinMax()}).ranges()
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_costs_one_sweep(tmp_path):
    names = dict.fromkeys(("a", "b", "c"), MinMax())

    def stop(done, total, what):
        if done == 10:  # in the third sweep
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(feeds(), names, budget=24, cache=tmp_path, progress=stop)
    rest = observe(feeds(), names, budget=24, cache=tmp_path)
    assert rest.sweeps == 1
    assert rest.ranges() == observe(feeds(), names).ranges()


@pytest.mark.parametrize("observer", [MinMax(), Percentile(), MovingAverage()])
def test_an_interrupted_sweep_is_resumed(tmp_path, monkeypatch, observer):
    monkeypatch.setattr("toolkit.calibrate.collector.PAUSE_SECONDS", 0.0)
    names = dict.fromkeys(("a", "b", "c"), observer)
    data = feeds(20)
    stopped = len(list(data)) - 1

    def stop(done, total, what):
        if done == stopped:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(data, names, cache=tmp_path, progress=stop)
    assert [path.name.endswith(".part.npz") for path in tmp_path.iterdir()] == [True]
    ran: list[object] = []
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda *a: (ran.append(1), run(*a))[1])
    rest = observe(data, names, cache=tmp_path)
    # a few to plan the sweep, and the feeds not counted yet
    assert len(ran) <= 5
    assert rest.ranges() == observe(data, names).ranges()
    assert not list(tmp_path.glob("*.part.npz"))


def test_a_sweep_of_other_tensors_starts_over(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.calibrate.collector.PAUSE_SECONDS", 0.0)

    def stop(done, total, what):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(feeds(), {"a": MinMax()}, cache=tmp_path, progress=stop)
    names = {"a": MinMax(), "b": MinMax()}
    found = observe(feeds(), names, cache=tmp_path)
    assert found.ranges() == observe(feeds(), names).ranges()


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_samples(tmp_path, save):
    def peak(count):
        path = tmp_path / f"{count}.npz"
        # repeated values, since the number of bins depends on the extremes
        values = np.random.default_rng(0).normal(size=(16, 20_000)).astype(np.float32)
        values = np.tile(values, (count // 16, 1))
        save(path, x=values)
        del values
        text = CHAIN.replace("N,T", "N,20000")
        gc.collect()
        tracemalloc.start()
        collect(model(text), reader(path, text), dict.fromkeys("abcy", Percentile()))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(16)  # imports
    assert peak(512) <= 1.1 * peak(16)


def test_one_time_feeds_are_not_held_in_memory(tmp_path):
    def peak(count):
        random = np.random.default_rng(0)
        made = ({"x": random.normal(size=(1, 20_000)).astype(np.float32)} for _ in range(count))
        gc.collect()
        tracemalloc.start()
        collect(model(CHAIN), reader(made), {"a": MinMax()})
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(2)
    assert peak(512) <= 1.1 * peak(16)


def test_random_feeds_run():
    subject = model(CHAIN)
    data = reader_for("random", subject, ReaderOptions(random_feeds=3))
    assert collect(subject, data, {"a": MinMax()}).range("a").high > 0
