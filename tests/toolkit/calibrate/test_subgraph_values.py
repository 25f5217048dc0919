"""Values observed in the subgraphs of If, Loop and Scan."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from tests.checks import model
from toolkit.calibrate.collector import Calibration, Run, collect, observable, sweeps_of
from toolkit.calibrate.observers import MinMax, Observer
from toolkit.calibrate.readers import reader_for
from toolkit.calibrate.statistics import ChannelExtremes, Range
from toolkit.calibrate.subgraph_values import inner_values, obstacle
from toolkit.errors import UsageError

BRANCHES = """g (bool c, float[N] x) => (float[N] y) {
    y = If (c) <then_branch = t () => (float[N] p) { p = Neg (x) },
                else_branch = e () => (float[N] q) { a = Abs (x) q = Exp (a) }> }"""

GROWING = """g (int64 n, float[N, 2] x) => (float[M, 2] y, float[K, 2] z)
<bool t = {1}, float[1, 2] row = {10, 20}> {
    y, z = Loop (n, t, x) <body = b (int64 i, bool go, float[P, 2] v)
        => (bool on, float[Q, 2] u, float[1, 2] s)
        { on = Identity (go) d = Add (v, v) u = Concat <axis = 0> (d, row) s = Neg (row) }> }"""

SCANNED = """g (float[2] h, float[T, 2] x) => (float[2] f, float[2, T] y) {
    f, y = Scan <num_scan_inputs = 1, scan_output_axes = [1],
        body = b (float[2] s, float[2] r) => (float[2] e, float[2] o)
        { m = Mul (r, r) e = Add (s, m) o = Neg (e) }> (h, x) }"""

NESTED = """g (int64 n, bool c, float[2] x) => (float[2] y)
<bool t = {1}, int64 two = {2}, float[1] one = {1}> {
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[2] v) => (bool on, float[2] u) {
        on = Identity (go) odd = Mod (i, two) k = Cast <to = 9> (odd)
        u = If (k) <then_branch = a () => (float[2] p) { p = Add (v, one) },
            else_branch = o () => (float[2] q) {
                q = Loop (two, t, v) <body = w (int64 j, bool so, float[2] r)
                    => (bool om, float[2] l) {
                        om = Identity (so) m = Mul (r, r) l = Identity (m) }> }> }> }"""


def observe(text: str, samples: list[Any], *names: str, **options: Any) -> Calibration:
    subject = model(text)
    observer: Observer = options.pop("observer", MinMax())
    return collect(subject, reader_for(samples, subject), dict.fromkeys(names, observer), **options)


def pieces(text: str, feed: dict[str, Any], name: str) -> list[Any]:
    ((found, values),) = Run(model(text), [name], ())(feed, 0)
    assert found == name
    return [np.asarray(value).tolist() for value in values]


def floats(*values: Any) -> Any:
    return np.array(values, np.float32)


def test_only_the_executed_branch_is_seen() -> None:
    samples = [{"c": np.array(True), "x": floats(1, 2)}, {"c": np.array(True), "x": floats(-3)}]
    found = observe(BRANCHES, samples, "y", "p", "a", "q")
    assert found.range("p") == Range(-2.0, 3.0)
    assert found.range("y") == Range(-2.0, 3.0)
    assert found.unseen == {"a", "q"}
    assert not found.failed
    assert set(found.statistics) == {"y", "p"}
    both = observe(BRANCHES, [*samples, {"c": np.array(False), "x": floats(-7)}], "p", "a")
    assert both.range("p") == Range(-2.0, 3.0)
    assert both.range("a") == Range(0.0, 7.0)
    assert not both.unseen


def test_all_steps_of_a_loop_whose_shapes_change() -> None:
    feed = {"n": np.array(3), "x": floats([1, 2])}
    assert pieces(GROWING, feed, "v") == [
        [[1, 2]],
        [[2, 4], [10, 20]],
        [[4, 8], [20, 40], [10, 20]],
    ]
    found = observe(GROWING, [feed, {"n": np.array(0), "x": floats([500, 1])}], "v", "d", "u", "s")
    assert found.range("v") == Range(0.0, 40.0)
    assert found.range("d") == Range(0.0, 80.0)
    assert found.range("s") == Range(-20.0, 0.0)


def test_a_loop_without_iterations_is_unseen() -> None:
    found = observe(GROWING, [{"n": np.array(0), "x": floats([1, 2])}], "d", "y")
    assert found.unseen == {"d"}
    assert found.range("y") == Range(0.0, 2.0)


def test_all_steps_of_a_scan() -> None:
    feed = {"h": floats(0, 0), "x": floats([1, 2], [3, 4])}
    assert pieces(SCANNED, feed, "r") == [[1, 2], [3, 4]]
    assert pieces(SCANNED, feed, "m") == [[1, 4], [9, 16]]
    assert pieces(SCANNED, feed, "o") == [[-1, -4], [-10, -20]]
    found = observe(SCANNED, [feed], "m", "s", "f")
    assert found.range("m") == Range(0.0, 16.0)
    assert found.range("s") == Range(0.0, 4.0)
    assert found.range("f") == Range(0.0, 20.0)


def test_a_loop_in_a_branch_in_a_loop() -> None:
    feed = {"n": np.array(4), "c": np.array(True), "x": floats(1, 2)}
    # steps 0 and 2 square twice, steps 1 and 3 add one
    assert pieces(NESTED, feed, "p") == [[2, 17], [17, 83522]]
    assert pieces(NESTED, feed, "m") == [[1, 4], [1, 16], [4, 289], [16, 83521]]
    assert pieces(NESTED, feed, "v") == [[1, 2], [1, 16], [2, 17], [16, 83521]]
    found = observe(NESTED, [{**feed, "n": np.array(1)}], "p", "m")
    assert found.unseen == {"p"}
    assert found.range("m") == Range(0.0, 16.0)


def test_channels_of_each_step() -> None:
    class Channels:
        name: ClassVar[str] = "channels"

        def start(self, tensor: str) -> ChannelExtremes:
            return ChannelExtremes(tensor, 1)

        def range(self, statistic: Any) -> Range:
            raise NotImplementedError

    observer: Observer = Channels()
    feed = {"n": np.array(3), "x": floats([1, 2])}
    found = observe(GROWING, [feed], "v", observer=observer).statistics["v"]
    assert isinstance(found, ChannelExtremes)
    assert (found.low.tolist(), found.high.tolist()) == ([1, 2], [20, 40])


def test_observable_values() -> None:
    assert observable(model(BRANCHES)) == ["c", "x", "y", "p", "q"]  # `a` may be anything
    assert set(inner_values(model(BRANCHES))) == {"p", "a", "q"}
    twice = BRANCHES.replace("a =", "p =").replace("(a)", "(p)")
    assert set(inner_values(model(twice))) == {"q"}
    samples = [{"c": np.array(True), "x": floats(1, 2)}]
    with pytest.raises(UsageError, match="'p' cannot be observed: it has no producer, or several"):
        observe(twice, samples, "p")


def test_obstacles_to_observation() -> None:
    inside = """g (bool c, float[T, 2] x) => (float[T, 2] y) {
        y = Scan <num_scan_inputs = 1, body = b (float[2] r) => (float[2] o) {
            m = Neg (r)
            o = If (c) <then_branch = a () => (float[2] p) { p = Neg (m) },
                        else_branch = e () => (float[2] q) { q = Abs (m) }> }> (x) }"""
    assert set(inner_values(model(inside))) == {"r", "m", "o"}
    bodies = list(model(inside).graphs())[1:]
    assert [obstacle(body)[:33] for body in bodies] == [
        "",
        *["in a subgraph nested in a Scan, w"] * 2,
    ]
    old = f'<ir_version: 8, opset_import: ["" : 12]>\n{BRANCHES}'
    assert not inner_values(model(old))
    assert "below opset 13" in obstacle(list(model(old).graphs())[1])


def test_a_scan_that_cannot_be_stacked() -> None:
    text = """g (float[T, 3] x) => (float[T] y) {
        y = Scan <num_scan_inputs = 1, body = b (float[3] r) => (float o) {
            k = Cast <to = 9> (r) m = Compress (r, k)
            o = ReduceSum <keepdims = 0> (m) }> (x) }"""
    feed = {"x": floats([1, 0, 2], [0, 0, 3])}
    found = observe(text, [feed], "m", "o")
    assert "'m' changes its shape between iterations" in found.failed["m"]
    assert found.range("o") == Range(0.0, 3.0)


@pytest.mark.parametrize(("budget", "sweeps"), [(1 << 20, 1), (1, 4)])
def test_all_iterations_count_for_the_memory_budget(budget: int, sweeps: int) -> None:
    feed = {"n": np.array(3), "x": floats([1, 2])}
    found = observe(GROWING, [feed], "v", "d", "u", "y", budget=budget)
    assert found.sweeps == sweeps
    assert found.range("u") == Range(0.0, 80.0)
    # 2 + 4 + 6 floats of v and d, 4 + 6 + 8 of u
    names = ["v", "d", "u"]
    assert sweeps_of(model(GROWING), [feed], names, 96, ()) == [["v", "d"], ["u"]]
    assert sweeps_of(model(GROWING), [feed], names, 95, ()) == [["v"], ["d"], ["u"]]


def test_cached_values_are_not_collected_again(tmp_path: Any) -> None:
    samples = [{"c": np.array(True), "x": floats(1, 2)}]
    first = observe(BRANCHES, samples, "p", "a", cache=tmp_path)
    again = observe(BRANCHES, samples, "p", "a", cache=tmp_path)
    assert (first.sweeps, again.sweeps) == (1, 0)
    assert first.unseen == again.unseen == {"a"}
    assert again.range("p") == Range(-2.0, 0.0)
    other = BRANCHES.replace("p = Neg", "p = Exp")
    assert observe(other, samples, "p", cache=tmp_path).sweeps == 1


def test_half_precision_and_unknown_types() -> None:
    text = """g (bool c, float16[N] x) => (float16[N] y) {
        y = If (c) <then_branch = t () => (p) { a = Neg (x) p = Neg (a) },
                    else_branch = e () => (q) { q = Abs (x) }> }"""
    samples = [{"c": np.array(True), "x": np.array([1, 2], np.float16)}]
    assert observe(text, samples, "a", "p").range("a") == Range(-2.0, 0.0)


def test_a_feed_on_which_the_model_fails() -> None:
    text = BRANCHES.replace("a = Abs (x)", "a = Add (x, three)").replace(
        "float[N] y) {", "float[N] y) <float[3] three = {1, 2, 3}> {"
    )
    samples = [{"c": np.array(False), "x": floats(1, 2)}]
    with pytest.raises(UsageError, match="the model fails on calibration feed 0"):
        observe(text, samples, "a")


def test_the_model_is_not_modified() -> None:
    subject = model(NESTED)
    before = subject.to_proto().SerializeToString(deterministic=True)
    feed = {"n": np.array(2), "c": np.array(True), "x": floats(1, 2)}
    collect(subject, reader_for([feed], subject), {"m": MinMax(), "p": MinMax(), "v": MinMax()})
    assert subject.to_proto().SerializeToString(deterministic=True) == before
    assert not len(subject.journal)
