"""The budget, for passes that quantize in one way: what is most harmful goes back, no more."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from passes.quantize.quantize import Quantize
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from passes.quantize.schemes.weight_only import nbits
from passes.quantize.schemes.weight_only.quantize_weights import QuantizeWeights
from passes.quantize.search import candidate_eval
from tests import ort
from tests.checks import parse
from tests.passes.fuse.constants import floats, stored, typed
from toolkit.calibrate.data import Calib
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import AnyPass
from toolkit.pass_manager.result import PassResult, Result

INT4 = QuantizeWeights("int4", 16, min_elements=1, accuracy_level=0)
DYNAMIC = QuantizeDynamic(min_elements=1)

SIGNATURE = "g (float[N, 64] x) => (float[N, 64] y)"
LAYERS = """h = Mul (x, m) a = MatMul (h, u) b = MatMul (h, v) c = MatMul (h, w) d = MatMul (h, z)
            y = Sum (a, b, c, d)"""
"""Inputs that `m` leaves out meet weights that are as large as the scales have to be."""


def weights(outlier: float = 0.0, seed: int = 0) -> Any:
    """64 x 64; with outliers every 16 inputs, beside which few bits are left for the rest."""
    made = np.random.default_rng(seed).standard_normal((64, 64))
    if outlier:
        made[::16] = outlier
    return made


def layers(c: float, b: float = 0.0) -> Model:
    """Four layers, of which `c` is harmful by so much, and `b`."""
    mask = np.ones(64)
    mask[::16] = 0
    constants = [
        stored("m", mask),
        *(stored(n, weights(seed=s)) for s, n in enumerate("uz")),
        stored("v", weights(b, 5)),
        stored("w", weights(c, 6)),
    ]
    return Model.from_proto(parse(typed(SIGNATURE, ", ".join(constants), LAYERS, 21)))


def samples(count: int = 8) -> list[Feed]:
    rng = np.random.default_rng(3)
    return [{"x": rng.standard_normal((4, 64)).astype(np.float32)} for _ in range(count)]


def run(model: Model, item: AnyPass, drop: str, **how: Any) -> tuple[Result, PassResult]:
    data = Calib(samples())
    result = Pipeline([item], max_drop=drop, metric="sqnr", calib=data, **how).run(model)
    return result, result.passes[0]


def outputs_of(model: Model, feeds: list[Feed]) -> list[Any]:
    made = model.inlined_proto()
    return [ort.run(made, feed)[0] for feed in feeds]


def in_floats(result: Result) -> set[str]:
    (plan,) = map(json.loads, result.plans)
    return {node["output"] for node in plan["nodes"] if node["scheme"] == "float"}


HARMFUL = [
    pytest.param(INT4, 20.0, "20dB", id="weights"),
    pytest.param(DYNAMIC, 100.0, "20dB", id="dynamic"),
    pytest.param(QuantizeStatic(), 100.0, "20dB", id="static"),
    pytest.param(Quantize(mode="weight_only", weights="int4"), 20.0, "20dB", id="quantize"),
]


@pytest.mark.parametrize(("item", "outlier", "drop"), HARMFUL)
def test_the_most_harmful_layer_goes_back(item: AnyPass, outlier: float, drop: str) -> None:
    subject = layers(outlier)
    result, done = run(subject, item, drop)
    assert done.status == "applied", done.reason
    assert not done.undone
    assert in_floats(result) == {"c"}
    (note,) = (note for note in done.notes if "back to float to keep the budget" in note)
    assert "MatMul 'c' (SQNR" in note
    assert result.quality is not None
    assert result.quality.ok


@pytest.mark.parametrize(("item", "outlier", "drop"), HARMFUL)
def test_what_keeps_the_budget_is_quantized_whole(item: AnyPass, outlier: float, drop: str) -> None:
    result, done = run(layers(0.0), item, drop)
    assert done.status == "applied", done.reason
    assert not in_floats(result)
    assert not any("back to float" in note for note in done.notes)


@pytest.mark.parametrize("item", [INT4, DYNAMIC, QuantizeStatic()])
def test_a_budget_that_cannot_be_kept(item: AnyPass) -> None:
    subject = layers(10.0)
    before = subject.to_proto().SerializeToString()
    result, done = run(subject, item, "130dB")
    assert done.status == "unchanged"
    assert subject.to_proto().SerializeToString() == before
    (note,) = (note for note in done.notes if "nothing is quantized" in note)
    assert "no part of it keeps the budget (output 'y': SQNR" in note
    assert "--max-drop" in note
    assert in_floats(result) == {"a", "b", "c", "d"}


@pytest.mark.parametrize(("item", "outlier", "drop"), HARMFUL)
def test_no_budget(
    monkeypatch: pytest.MonkeyPatch, item: AnyPass, outlier: float, drop: str
) -> None:
    """Nothing is tried, and what was lost is told."""
    monkeypatch.setattr(candidate_eval.Trials, "draft", lambda *_: pytest.fail("tried"))
    result = Pipeline([item], max_drop="off", calib=Calib(samples())).run(layers(outlier))
    assert not in_floats(result)
    assert result.quality is not None


def test_the_order_is_by_harm_and_not_by_place() -> None:
    """The budget holds with `b`, and breaks with `c`, but `b` is the most sensitive."""
    result, _ = run(layers(c=15.0, b=20.0), INT4, "12.5dB")
    assert in_floats(result) == {"b"}


def test_a_plan_that_a_user_wrote(tmp_path: Path) -> None:
    nodes = [{"output": o, "scheme": "dynamic", "axis": 1} for o in "abcd"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "nodes": nodes}))
    for item in (Quantize(plan=path), QuantizeDynamic(plan=path)):
        result, done = run(layers(100.0), item, "20dB")
        assert not done.undone
        assert in_floats(result) == {"c"}


# -- what tells harm


@pytest.mark.parametrize("item", [INT4, DYNAMIC])
@pytest.mark.parametrize("validate", ["each", "final", "off"])
def test_a_metric_of_a_user(item: AnyPass, validate: Any) -> None:
    """It is asked in each step of the search, on all samples."""
    feeds = samples()
    outlier = 20.0 if item is INT4 else 100.0
    floats = outputs_of(layers(outlier, outlier), feeds)

    def likeness(outputs: Iterable[dict[str, Any]]) -> float:
        pairs = zip(floats, outputs, strict=True)
        return float(np.mean([np.corrcoef(a.ravel(), o["y"].ravel())[0, 1] for a, o in pairs]))

    subject = layers(outlier, outlier)
    made = Pipeline([item], validate=validate, max_drop=0.005, metric=likeness, calib=Calib(feeds))
    result = made.run(subject)
    assert in_floats(result) == {"b", "c"}
    assert not result.passes[0].undone
    assert likeness({"y": y} for y in outputs_of(subject, feeds)) >= 0.995


@pytest.mark.parametrize(("item", "outlier"), [(INT4, 20.0), (DYNAMIC, 100.0)])
def test_outputs_that_are_integers(item: AnyPass, outlier: float) -> None:
    """They have no noise: harm is the share of the budget."""
    subject = layers(outlier)
    text = ", ".join(f"{stored(n, subject.graph.const(n))}" for n in "muvwz")
    nodes = f"{LAYERS} i = ArgMax <axis = 1> (y)"
    text = typed("g (float[N, 64] x) => (int64[N, 1] i)", text, nodes, 21)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((64, 64)).astype(np.float32)} for _ in range(8)]
    allowed = 0.15 if item is INT4 else 0.05
    made = Pipeline([item], max_drop=allowed, calib=Calib(feeds))
    result = made.run(Model.from_proto(parse(text)))
    assert in_floats(result) == {"c"}


def test_what_shows_on_later_samples_only() -> None:
    """A branch that the first samples do not take."""
    then = "then_branch = t () => (float[N, 64] p) { p = MatMul (h, w) }"
    other = "else_branch = e () => (float[N, 64] q) { q = Neg (h) }"
    nodes = f"h = Mul (x, m) a = MatMul (h, u) d = MatMul (h, z) f = If (b) <{then}, {other}> "
    nodes += "y = Sum (a, d, f)"
    subject = layers(100.0)
    constants = ", ".join(stored(n, subject.graph.const(n)) for n in "muwz")
    text = typed("g (bool b, float[N, 64] x) => (float[N, 64] y)", constants, nodes, 21)
    feeds: list[Feed] = [{"b": np.array(at >= 9), **feed} for at, feed in enumerate(samples(16))]
    made = Pipeline([DYNAMIC], max_drop="22dB", metric="sqnr", calib=Calib(feeds))
    result = made.run(Model.from_proto(parse(text)))
    assert in_floats(result) == {"p"}


def test_a_state_is_followed_to_the_end_of_its_chain() -> None:
    nodes = LAYERS.replace("(x, m)", "(s, m)").replace("y = Sum (a,", "t = Sum (x, a,")
    nodes += " y = Tanh (t) state_out = Identity (y)"
    nodes = nodes.replace("(s, m)", "(state_in, m)")
    subject = layers(100.0)
    values: dict[str, Any] = {n: subject.graph.const(n) for n in "uvwz"}
    constants = ", ".join(stored(n, 0.1 * value) for n, value in values.items())
    constants += f", {stored('m', subject.graph.const('m'))}"
    signature = "g (float[N, 64] x, float[N, 64] state_in) => (float[N, 64] state_out)"
    text = typed(signature, constants, nodes, 21)
    zero = np.zeros((4, 64), np.float32)
    feeds: list[Feed] = [{**feed, "state_in": zero} for feed in samples(16)]
    made = Pipeline([DYNAMIC], calib=Calib(feeds), max_drop="25dB", metric="sqnr")
    result = made.run(Model.from_proto(parse(text)))
    assert in_floats(result) == {"c"}


def test_what_earlier_passes_have_quantized_is_not_held_against_a_layer(tmp_path: Path) -> None:
    entry = {"scheme": "weight-only", "weight": "int4", "axis": 1, "block_size": 16}
    plans: list[QuantizeWeights] = []
    for name, outputs in (("first", "c"), ("second", "abd")):
        path = tmp_path / f"{name}.json"
        nodes = [{"output": output, "symmetric": False, **entry} for output in outputs]
        path.write_text(json.dumps({"version": 1, "nodes": nodes}))
        plans.append(QuantizeWeights(plan=path, accuracy_level=0))
    made = Pipeline(plans, max_drop="12.5dB", metric="sqnr", calib=Calib(samples()))
    result = made.run(layers(c=15.0, b=20.0))
    kept = json.loads(result.plans[1])["nodes"]
    assert {node["output"] for node in kept if node["scheme"] == "float"} == {"b"}


# -- plans that say less, or more


@pytest.mark.parametrize("op", ["MatMul", None])
def test_a_static_plan_need_not_name_operators(tmp_path: Path, op: str | None) -> None:
    subject = layers(100.0)
    written = Pipeline([QuantizeStatic()], max_drop="off", calib=Calib(samples())).run(subject)
    plan = json.loads(written.plans[0])
    if op is None:
        for node in plan["nodes"]:
            del node["op"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    result, _ = run(layers(100.0), QuantizeStatic(plan=path), "20dB")
    assert in_floats(result) == {"c"}


def test_entries_for_another_pass_are_left_to_it(tmp_path: Path) -> None:
    nodes = [{"output": o, "scheme": "dynamic", "axis": 1} for o in "ab"]
    nodes += [{"output": "c", "scheme": "weight-only", "axis": 1, "block_size": 16}]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "nodes": nodes}))
    result, done = run(layers(0.0), QuantizeDynamic(plan=path), "20dB")
    assert "not for this pass: 1 of the plan's nodes are not dynamic" in done.notes
    assert [node["output"] for node in json.loads(result.plans[0])["nodes"]] == ["a", "b"]


@pytest.mark.parametrize("item", [INT4, DYNAMIC])
def test_what_cannot_be_quantized_is_told_beside_what_goes_back(item: AnyPass) -> None:
    outlier = 20.0 if item is INT4 else 100.0
    numbers = weights()
    numbers[3, 3] = np.inf
    subject = layers(outlier)
    constants = ", ".join(stored(n, subject.graph.const(n)) for n in "mvwz")
    nodes = LAYERS.replace("MatMul (h, u)", "MatMul (k, u)").replace("a =", "k = Mul (h, n) a =")
    constants += f", {stored('n', np.zeros(64))}, {stored('u', numbers)}"
    nodes = nodes.replace("y = Sum (a,", "f = Where (o, a, b) y = Sum (f,")
    text = typed(SIGNATURE, f"{constants}, bool o = {{0}}", nodes, 21)
    drop = "20dB" if item is INT4 else "30dB"
    result, done = run(Model.from_proto(parse(text)), item, drop)
    assert in_floats(result) == {"a", "c"}
    assert any("MatMul 'a' stays float: it has infinite weights" in note for note in done.notes)
    assert any("back to float to keep the budget: MatMul 'c'" in note for note in done.notes)


def test_equal_names_in_two_bodies_that_both_cannot() -> None:
    """What was renamed for them is not what was quantized."""
    numbers = weights()
    numbers[0, 0] = np.nan
    then = "then_branch = t () => (float[N, 64] p) { p = MatMul (x, w) }"
    other = "else_branch = e () => (float[N, 64] p) { p = MatMul (x, w) }"
    signature = "g (bool b, float[N, 64] x) => (float[N, 64] y)"
    text = typed(signature, stored("w", numbers), f"y = If (b) <{then}, {other}>", 21)
    for item in (INT4, DYNAMIC, Quantize()):
        subject = Model.from_proto(parse(text))
        before = subject.to_proto().SerializeToString()
        result = Pipeline([item]).run(subject)
        assert result.passes[0].status == "unchanged"
        assert '"scheme": "float"' in result.plans[0]
        assert "weight-only" not in result.plans[0]
        assert subject.to_proto().SerializeToString() == before


# -- what goes together


def test_all_that_read_a_weight_go_back_together() -> None:
    """One of them in floats would keep the floats, and the integers come on top."""
    signature = "g (float[N, 64] x) => (float[N, 64] y)"
    nodes = "h = Mul (x, m) a = MatMul (h, w) b = MatMul (x, v) s = Add (a, b) t = Mul (s, m) "
    nodes += "c = MatMul (t, w) y = Add (s, c)"
    mask = np.ones(64)
    mask[::16] = 0
    constants = [stored("m", mask), stored("w", weights(10.0)), stored("v", weights(seed=1))]
    subject = Model.from_proto(parse(typed(signature, ", ".join(constants), nodes, 21)))
    result, _ = run(subject, INT4, "16dB")
    assert in_floats(result) == {"a", "c"}
    assert "w" in subject.graph.initializers
    assert not any(name.startswith("w_") for name in subject.graph.initializers)


@pytest.mark.parametrize(
    "item", [QuantizeWeights("int8", 16, min_elements=1, accuracy_level=0), DYNAMIC, Quantize()]
)
def test_a_table_goes_back_with_the_projection_that_is_tied_to_it(item: AnyPass) -> None:
    signature = "g (int64[N, 8] i) => (float[N, 8, 64] y)"
    table = np.random.default_rng(0).standard_normal((64, 64))
    table[:, 0] = 60.0
    nodes = """x = Gather (t, i) f = Mul (x, m) h = MatMul (f, v) g = Mul (h, m) k = Tanh (g)
               r = Reshape (k, s) p = Gemm <transB = 1> (r, t) y = Reshape (p, q)"""
    mask = np.ones(64)
    mask[0] = 0
    constants = [stored("t", table), stored("m", mask), floats("v", 64, 64)]
    constants += ["int64[2] s = {-1, 64}", "int64[3] q = {-1, 8, 64}"]
    subject = Model.from_proto(parse(typed(signature, ", ".join(constants), nodes, 21)))
    rng = np.random.default_rng(3)
    data = Calib([{"i": rng.integers(0, 64, (2, 8))} for _ in range(8)])
    made = Pipeline([item], max_drop="40dB", metric="sqnr", calib=data, measure=False)
    result = made.run(subject)
    assert {"x", "p"} <= in_floats(result)
    assert not any(name.startswith("t_") for name in subject.graph.initializers)


# -- codes are chosen once


@pytest.mark.parametrize("form", ["nbits", "qdq"])
@pytest.mark.parametrize("method", ["rtn", "hqq", "gptq"])
def test_codes_are_chosen_once(monkeypatch: pytest.MonkeyPatch, form: Any, method: Any) -> None:
    chosen: list[Any] = []
    quantize = nbits.quantize_blocks

    def counting(floats: Any, *how: Any) -> Any:
        chosen.append(floats.shape)
        return quantize(floats, *how)

    monkeypatch.setattr(nbits, "quantize_blocks", counting)
    item = QuantizeWeights("int4", 16, method=method, form=form, min_elements=1, accuracy_level=0)
    subject = layers(20.0)
    result, _ = run(subject, item, "21dB")
    assert in_floats(result) == {"c"}
    assert len(chosen) == 4
    plain = layers(20.0)
    Pipeline([QuantizeWeights(**_options(item), exclude=("c",))], calib=Calib(samples())).run(plain)
    feed = samples(1)[0]
    same = (ort.run(made.inlined_proto(), feed)[0] for made in (subject, plain))
    np.testing.assert_array_equal(*same)


def _options(item: QuantizeWeights) -> dict[str, Any]:
    names = ("weights", "block_size", "method", "form", "min_elements", "accuracy_level")
    return {name: getattr(item, name) for name in names}


def test_what_takes_the_place_of_gptq_is_told_after_trials() -> None:
    signature = "g (bool c, float[N, 64] x) => (float[N, 64] y)"
    then = "then_branch = t () => (float[N, 64] p) { h = Mul (x, m) p = MatMul (h, w) }"
    other = "else_branch = e () => (float[N, 64] q) { n = Neg (x) q = MatMul (n, v) }"
    constants = ", ".join(
        [stored("m", np.ones(64)), stored("w", weights()), stored("v", weights(seed=1))]
    )
    text = f"{signature} <{constants}> {{ y = If (c) <{then}, {other}> }}"
    feeds: list[Feed] = [{"c": np.array(at % 2 == 0), **feed} for at, feed in enumerate(samples())]
    item = QuantizeWeights("int4", 16, method="gptq", min_elements=1)
    subject = Model.from_proto(parse(text))
    done = Pipeline([item], calib=Calib(feeds)).run(subject).passes[0]
    assert any("rounded to nearest: its input is in a subgraph" in note for note in done.notes)
