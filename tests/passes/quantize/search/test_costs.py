"""What nodes take: the shipped table, interpolation, shapes of a feed, and regions of a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from passes.lower.candidates import Computation
from passes.lower.measure import chain, contents, load
from passes.quantize.search.costs import INT8_SHIPPED, TOPIC, Kernels, Times
from passes.quantize.search.int8_kernels import INT8_COMPUTATIONS
from passes.quantize.search.problem import Problem, problem_of
from passes.quantize.search.value_shapes import sizes_on
from tests.checks import model, parse, random_feeds
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan
from toolkit.runtime.cost_table import (
    Candidate,
    Costs,
    Regime,
    cache_path,
    costs_in_use,
    nearest_table,
    shipped_path,
)

TABLES = sorted(INT8_SHIPPED.glob("*.json"))
KERNELS = Kernels.of_costs(nearest_table(INT8_SHIPPED, "AMD"))


def table(**computations: dict[str, dict[str, float]]) -> Kernels:
    made = {
        name.replace("_", "-"): tuple(
            Candidate(kind, (), False, {}, {Regime.parse(r): t for r, t in times.items()})
            for kind, times in candidates.items()
        )
        for name, candidates in computations.items()
    }
    return Kernels.of_costs(Costs("1", "any", "none", made))


# -- the table


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_everything_measured_is_in_the_shipped_tables(path: Path) -> None:
    shipped = Costs.load(path)
    listed = {name: [s.name for s in found] for name, found in shipped.computations.items()}
    assert listed == {one.name: list(one.candidates) for one in INT8_COMPUTATIONS}
    assert not any(s.undone for found in shipped.computations.values() for s in found)
    assert shipped_path(INT8_SHIPPED, shipped.cpu) == path
    assert json.loads(path.read_text())["script"] == "benchmarks/kernel_forms.py"


SMALL = [(c, name) for c in INT8_COMPUTATIONS for name in c.candidates]


@pytest.mark.parametrize(("computation", "name"), SMALL, ids=lambda v: getattr(v, "name", v))
def test_runtime_accepts_the_candidate_forms(computation: Computation, name: str) -> None:
    regime = Regime(*min(computation.regimes, key=lambda r: r[0] * r[1] ** 2), 1)
    session, operators = load(chain(computation, name, regime), threads=1)
    feeds = contents(computation, computation.inputs, regime)
    read = {value.name: feeds[value.name] for value in session.get_inputs()}
    assert np.all(np.isfinite(session.run(None, read)[0]))
    assert set(operators) == set(computation.kept.get(name, operators))
    if name == "int8" and computation.name != "linear":
        assert "com.microsoft:QLinearConv" in operators
    if name == "float":
        assert not any("Quantize" in operator for operator in operators)


def test_this_machines_own_table_is_preferred() -> None:
    assert costs_in_use(INT8_SHIPPED, TOPIC)[1].startswith("the shipped table")
    Costs.load(TABLES[0]).save(cache_path("int8"))
    assert "measured on this machine" in costs_in_use(INT8_SHIPPED, TOPIC)[1]
    cache_path("int8").write_text("{")
    assert "measure again" in costs_in_use(INT8_SHIPPED, TOPIC)[1]


# -- rates


def test_a_time_is_work_by_rate() -> None:
    kernels = table(conv_1x1={"float": {"100x10@1": 20.0}, "int8": {"100x10@1": 5.0}})
    assert kernels.times("conv-1x1", 10_000, 100, 10) == Times(20.0, 5.0)
    assert kernels.times("conv-1x1", 20_000, 200, 10).saving == pytest.approx(30.0)
    assert kernels.times("unknown", 1, 1, 1) == Times(0.0, 0.0)


def test_near_regimes_count_more() -> None:
    times = {"100x16@1": 1.0, "100x256@1": 1.0}
    kernels = table(conv_1x1={"float": times, "int8": times})

    def rate(width: float) -> float:
        return kernels.times("conv-1x1", 1, 100, width).in_float

    assert rate(16) == pytest.approx(1 / 100 / 16**2, rel=0.01)
    assert rate(256) == pytest.approx(1 / 100 / 256**2, rel=0.05)
    assert rate(16) > rate(32) > rate(128) > rate(256)


def test_only_one_thread_counts() -> None:
    kernels = table(conv_1x1={"float": {"9x9@2": 1.0}, "int8": {"9x9@2": 1.0}})
    assert kernels.times("conv-1x1", 1, 9, 9) == Times(0.0, 0.0)


def test_an_operator_behind_a_convolution_takes_the_difference() -> None:
    kernels = table(
        conv_1x1={"float": {"100x10@1": 20.0}, "int8": {"100x10@1": 5.0}},
        add={"float": {"100x10@1": 21.0}, "int8": {"100x10@1": 8.0}},
    )
    found = kernels.times("add", 1000, 100, 10)
    assert (found.in_float, found.in_int8) == pytest.approx((1.0, 3.0))


def test_boundary_is_half_the_difference_of_mixed_and_pure_chains() -> None:
    at = "100x10@1"
    kernels = table(boundary={"float": {at: 20.0}, "int8": {at: 5.0}, "mixed": {at: 35.0}})
    assert kernels.crossing(1000, 10) == pytest.approx(5.0)


# -- nodes, with the shipped table: what a person knows of the target

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'


def of(signature: str, node: str) -> Times:
    text = f"{HEADER}g ({signature}) => (float[N, C, H, W] y) {{ {node} }}"
    subject = model(text)
    found = KERNELS.of(subject.graph.nodes[0], sizes_on(subject, random_feeds(subject)))
    assert found is not None
    return found


def conv(inputs: int, outputs: int, kernel: int, side: int, group: int = 1) -> Times:
    signature = (
        f"float[1, {inputs}, {side}, {side}] x, "
        f"float[{outputs}, {inputs // group}, {kernel}, {kernel}] w"
    )
    return of(signature, f"y = Conv <group = {group}> (x, w)")


def test_wide_convolutions_win_and_depthwise_ones_lose() -> None:
    assert conv(128, 128, 1, 28).saving > 0
    assert conv(64, 64, 3, 28).saving > 0
    assert conv(256, 512, 3, 14).saving > conv(64, 64, 3, 14).saving
    assert conv(32, 32, 3, 56, group=32).saving < 0
    assert conv(64, 64, 5, 56, group=64).saving < 0
    assert conv(3, 32, 3, 112).saving < 0


def test_pools_and_elementwise() -> None:
    image = "float[1, 128, 28, 28] x"
    assert of(image, "y = AveragePool <kernel_shape = [3, 3]> (x)").saving < 0
    assert of(f"{image}, float[1, 128, 28, 28] z", "y = Mul (x, z)").in_int8 > 0
    assert of(image, "y = com.microsoft.QuickGelu (x)").in_int8 > 0


def test_unknown_operators_have_no_times() -> None:
    subject = model("g (float[2] x) => (float[2] y) { y = Erf (x) }")
    assert KERNELS.of(subject.graph.nodes[0], {"x": (2,), "y": (2,)}) is None
    known = model("g (float[2] x, float[2] z) => (float[2] y) { y = Add (x, z) }")
    assert KERNELS.of(known.graph.nodes[0], {}) is None


def test_shapes_follow_from_those_of_the_feed() -> None:
    subject = model("g (float[N, 3, H, W] x, float[8, 3, 3, 3] w) => (y) { y = Conv (x, w) }")
    feed = {"x": np.zeros((2, 3, 10, 20), np.float32), "w": np.zeros((8, 3, 3, 3), np.float32)}
    assert sizes_on(subject, feed)["y"] == (2, 8, 8, 18)
    assert subject.graph.shape("x") != (2, 3, 10, 20)
    assert not len(subject.journal)


# -- a model as a problem of regions

NETWORK = """g (float[1, 3, 64, 64] x, float[16, 3, 3, 3] a, float[16, 1, 3, 3] b,
    float[256, 16, 1, 1] c, float[256, 256, 3, 3] d, float[256, 256, 3, 3] e)
    => (float[1, 256, 16, 16] y) {
    a1 = Conv <strides = [4, 4], pads = [1, 1, 1, 1]> (x, a)
    a2 = Relu (a1)
    b1 = Conv <group = 16, pads = [1, 1, 1, 1]> (a2, b)
    c1 = Conv (b1, c)
    d1 = Conv <pads = [1, 1, 1, 1]> (c1, d)
    d2 = Clip (d1)
    s = Add (d2, c1)
    e1 = Conv <pads = [1, 1, 1, 1]> (s, e)
    y = Neg (e1)
}"""


def network() -> tuple[Model, Plan]:
    proto = parse(NETWORK)
    weights = proto.graph.input[1:]
    del proto.graph.input[1:]
    for value in weights:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        zeros = np.zeros(shape, np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(zeros, value.name))
    subject = Model.from_proto(proto)
    static = [n for n in subject.graph.nodes if n.op_type in ("Conv", "Add")]
    return subject, Plan(tuple(Entry.of(node, scheme="static") for node in static))


def surveyed(kernels: Kernels = KERNELS) -> Problem:
    subject, plan = network()
    sizes = sizes_on(subject, {"x": np.zeros((1, 3, 64, 64), np.float32)})
    return problem_of(subject, plan, sizes, kernels)


def names(plan: Plan) -> list[str]:
    return [entry.output for entry in plan.quantized()]


def test_costs_give_a_float_prefix() -> None:
    found = surveyed()
    assert len(found.items) == 7  # the Relu and the Clip belong to what they read
    chosen = found.best()
    assert names(chosen)[-3:] == ["d1", "s", "e1"]
    assert not {"a1", "b1"} & set(names(chosen))
    nothing = found.plan.turned(found.plan.entries)
    assert found.time(chosen) < found.time(nothing)
    assert found.time(chosen) <= found.time(found.plan)


def test_combining_operator_does_not_start_a_region() -> None:
    found = surveyed()
    allowed = [entry for entry in found.plan.quantized() if entry.output in ("s", "e1")]
    assert "s" not in names(found.best(dict.fromkeys(allowed, 0.0)))  # its operands are floats


def test_high_price_of_noise_makes_sensitive_layers_float() -> None:
    found = surveyed()
    harm = {entry: float(entry.output == "e1") for entry in found.plan.quantized()}
    assert "e1" in names(found.best(harm, price=1.0))
    assert "e1" not in names(found.best(harm, price=1e6))
    assert "d1" in names(found.best(harm, price=1e6))
    assert "d1" not in names(found.best({e: h for e, h in harm.items() if e.output != "d1"}))


def test_layers_without_times_save_one_unit() -> None:
    found = surveyed(Kernels({}))
    assert {"a1", "b1", "c1", "d1", "e1"} <= set(names(found.best()))


def test_dynamic_layers_are_chosen_independently() -> None:
    text = "g (float[N, 8] x, float[8, 8] w) => (float[N, 8] y) { y = MatMul (x, w) }"
    subject = model(text)
    (node,) = subject.graph.nodes
    plan = Plan((Entry.of(node, scheme="dynamic"),))
    found = problem_of(subject, plan, {}, KERNELS)
    assert names(found.best()) == ["y"]
    assert names(found.best({plan.entries[0]: 1.0}, price=0.5)) == ["y"]
    assert names(found.best({plan.entries[0]: 1.0}, price=2.0)) == []
    assert found.time(plan) < found.time(plan.turned(plan.entries))


def test_shape_of_a_name_in_two_subgraphs_is_unknown() -> None:
    text = """g (bool c, float[N, 4] x) => (float[N, 4] y) {
        y = If (c) <then_branch = t () => (float[N, 4] p) <float k = {1}> { p = Mul (x, k) },
                    else_branch = e () => (float[N, 4] q) { k = Neg (x) q = Abs (k) }> }"""
    found = sizes_on(model(text), {"c": np.array(True), "x": np.zeros((3, 4), np.float32)})
    assert "k" not in found
    assert found["p"] == found["q"] == (3, 4)
