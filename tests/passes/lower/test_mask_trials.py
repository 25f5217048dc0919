"""Trial runs that decide which masks get a floor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, shape_inference

import toolkit
from passes.lower import mask_floor, mask_trials
from passes.lower.cost_query import CostQuery
from passes.lower.lower import Lower
from tests import ort
from tests.checks import model, parse, text_of
from tests.passes.lower.mask_cases import (
    CAUSAL,
    HEADS,
    QKV,
    SIGNATURE,
    STORED,
    TWO,
    feeds,
    low_at,
)
from tests.passes.lower.tables import HEADER, candidate, choice, table, typed
from toolkit.ir.journal import Rewrite
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.rule import Rules
from toolkit.runtime.cost_table import cache_path


class Runs:
    """Returns whether the outputs on these feeds stay the same; counts its calls."""

    def __init__(self, original: str, *feeds: dict[str, Any]) -> None:
        self.proto, self.feeds, self.asked = parse(original), feeds, 0
        self.wanted = [ort.run(self.proto, feed) for feed in feeds]

    def __call__(self, trial: Model) -> bool:
        self.asked += 1
        return all(
            np.allclose(one, other, atol=1e-4)
            for feed, wanted in zip(self.feeds, self.wanted, strict=True)
            for one, other in zip(ort.run(trial.inlined_proto(), feed), wanted, strict=True)
        )


FASTER: CostQuery = choice("finite")
BEFORE = typed(f"{SIGNATURE} {{ {TWO} }}")


def shown(text: str, *feeds: dict[str, Any]) -> tuple[list[str], mask_trials.MaskTrials, Runs]:
    runs = Runs(text, *feeds)
    subject = model(text)
    trials = mask_trials.MaskTrials(subject, FASTER, runs)
    found = trials.passed()
    assert not len(subject.journal)
    return found, trials, runs


def test_a_mask_that_is_in_use_and_enough_at_half_the_depth() -> None:
    found, trials, runs = shown(BEFORE, feeds(low_at(CAUSAL, -1e4)))
    assert sorted(found) == ["y", "z"]
    assert not trials.unmasked
    assert runs.asked == 2


def test_inputs_that_mask_nothing_show_nothing() -> None:
    found, trials, _ = shown(BEFORE, feeds(np.zeros((4, 4), np.float32)))
    assert found == []
    assert trials.unmasked == 2


def test_a_bias_is_no_mask_that_is_in_use() -> None:
    """It makes a difference but masks nothing, so it proves nothing about other inputs."""
    bias = np.random.default_rng(1).uniform(-20, 20, (4, 4)).astype(np.float32)
    found, trials, _ = shown(BEFORE, feeds(bias))
    assert found == []
    assert trials.unmasked == 2


CAUSAL_PAIR = f"""g (float[N, S, 8] q, float[N, S, 8] k, float[N, S, 8] v)
    => (float[N, S, 8] y, float[N, S, 8] z) {{
    {TWO.replace("2>", "2, is_causal = 1>").replace(", m)", ")")} }}"""


@pytest.mark.parametrize(("length", "count"), [(1, 0), (3, 2)])
def test_what_is_to_come_has_to_be_there(length: int, count: int) -> None:
    text = typed(CAUSAL_PAIR)
    fed = {name: array[:, :length] for name, array in feeds(None).items() if name != "m"}
    found, trials, _ = shown(text, fed)
    assert len(found) == count
    assert trials.unmasked == 2 - count


@pytest.mark.parametrize(("taken", "sites"), [(True, ["a", "z"]), (False, ["z"])])
@pytest.mark.parametrize("mask", ["float[4, 4] m) =>", STORED])
def test_a_branch_has_to_be_taken(taken: bool, sites: list[str], mask: str) -> None:
    signature = f"g ({QKV}, bool c, {mask} (float[N, 4, 8] y, float[N, 4, 8] z)"
    if mask == STORED:
        signature = f"g ({QKV}, bool c) => (float[N, 4, 8] y, float[N, 4, 8] z) <{STORED}>"
    text = f"""{signature} {{
        y = If (c) <then_branch = t () => (float[N, 4, 8] a)
            {{ a = Attention <{HEADS}> (q, k, v, m) }},
            else_branch = e () => (float[N, 4, 8] b) {{ b = Neg (q) }}>
        z = Attention <{HEADS}> (q, k, v, m) }}"""
    fed = feeds(low_at(CAUSAL, -1e4), c=np.array(taken))
    if mask == STORED:
        del fed["m"]
    found, trials, _ = shown(typed(text), fed)
    assert sorted(found) == sites
    assert trials.unmasked == 2 - len(sites)


def scaled(sign: float, low: float = -1e4) -> dict[str, Any]:
    """Masked scores right of the diagonal are 30 higher than the others."""
    fed = feeds(low_at(CAUSAL, low))
    q, k = np.zeros((2, 2, 4, 8), np.float32)
    q[..., :2], k[:, 1:, :2] = 4.0, sign * 7.0
    return fed | {"q": q, "k": k}


@pytest.mark.parametrize(("sign", "kept"), [(-1.0, ["y"]), (1.0, [])])
def test_masked_scores_that_are_large_are_left_alone(sign: float, kept: list[str]) -> None:
    """Masked keys with scores 30 higher weigh exp(30 - 25), but nothing with a floor of 50."""
    nodes = f"y = Attention <{HEADS}> (q, k, v, m) z = Attention <{HEADS}> (q, w, v, m)"
    signature = SIGNATURE.replace("float[4, 4] m", "float[N, 4, 8] w, float[4, 4] m")
    text = typed(f"{signature} {{ {nodes} }}")
    fed = scaled(sign)
    found, _, runs = shown(text, fed | {"w": np.abs(fed["k"])})
    assert found == kept
    deep = model(text)
    masks_at_50 = Rules("test", mask_floor.rules())
    masks_at_50.run(deep, Context())
    assert runs(deep), text_of(deep)


def layers(count: int) -> str:
    """Attentions with masks of their own."""
    many = [
        f"m{i} = Mul (m, f{i}) a{i} = Attention <{HEADS}> (q, k, v, m{i})" for i in range(count)
    ]
    factors = ", ".join(f"float f{i} = {{{i + 1}}}" for i in range(count))
    ends = f"y = Sum ({', '.join(f'a{i}' for i in range(count))}) z = Neg (y)"
    return typed(f"{SIGNATURE} <{factors}> {{ {' '.join(many)} {ends} }}")


def test_many_masks() -> None:
    found, trials, runs = shown(layers(20), feeds(low_at(CAUSAL, -1e4)))
    assert len(found) == 20
    assert runs.asked == 21
    assert not trials.unmasked


@pytest.mark.parametrize(("count", "answer"), [(20, False), (40, False), (40, True)])
def test_trials_come_to_an_end(count: int, answer: bool) -> None:
    asked = 0

    def always(trial: Model) -> bool:
        nonlocal asked
        asked += 1
        return answer

    trials = mask_trials.MaskTrials(model(layers(count)), FASTER, always)
    assert trials.passed() == []
    assert asked == 32
    assert trials.unmasked == (32 if answer else 0)


def test_a_veto_is_not_taken_for_a_mask_that_is_not_in_use() -> None:
    subject = model(BEFORE)
    for site in "yz":
        node: Any = subject.graph.producer(site)
        subject.graph.begin("mask-floor", node)
        subject.journal.veto(Rewrite("mask-floor", site, 0))
    trials = mask_trials.MaskTrials(subject, FASTER, lambda trial: True)
    assert trials.passed() == []
    assert not trials.unmasked


# -- as a pass

NETWORK = """g (int64[N, S] ids, int64[N, S] attention_mask) => (float[N, S, 8] y) {
    x = Gather (table, ids)
    f = Cast <to = 1> (attention_mask)
    g = Sub (one, f)
    h = Mul (g, low)
    m = Unsqueeze (h, axes)
    s = Shape (ids)
    n = Gather (s, zero)
    l = Gather (s, unit)
    shape = Concat <axis = 0> (n, unit, l, l)
    e = Expand (m, shape)
    y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x, e)
}"""


def network() -> Any:
    table = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    proto = parse(HEADER + NETWORK)
    for name, array in {
        "table": table,
        "one": np.float32(1),
        "low": np.float32(-1e4),
        "axes": np.array([1, 2]),
        "zero": np.array([0]),
        "unit": np.array([1]),
    }.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return shape_inference.infer_shapes(proto)


def costs(cost: float) -> None:
    one = (candidate("attention", 1.0), candidate("finite", cost))
    table(masked_attention=one).save(cache_path())


def floors(result: Any) -> int:
    return result.after.ops.get("ReduceMax", 0)


def test_it_is_done_where_it_is_faster_and_shown() -> None:
    costs(0.5)
    result = toolkit.optimize(network(), "lower")
    assert result.passes[0].rules == {"mask-floor": 1}
    assert floors(result) == 1
    assert result.passes[0].notes == []


def test_it_is_left_where_it_is_not_faster() -> None:
    costs(1.0)
    result = toolkit.optimize(network(), "lower")
    assert result.passes[0].status == "unchanged"
    assert result.passes[0].notes == []


@pytest.mark.parametrize("validate", ["off", "final"])
def test_it_is_left_where_nothing_is_run_behind_it(validate: Any) -> None:
    costs(0.5)
    result = toolkit.optimize(network(), "lower", validate=validate)
    assert floors(result) == 0
    assert "lower:mask=fast" in result.passes[0].notes[0]


@pytest.mark.parametrize(("mask", "count"), [("keep", 0), ("fast", 1)])
def test_on_demand(mask: Any, count: int) -> None:
    costs(0.5 if mask == "keep" else 1.0)
    for validate in ("each", "off"):
        result = toolkit.optimize(network(), [Lower(mask=mask)], validate=validate)
        assert floors(result) == count
        assert result.passes[0].notes == []


def test_once_is_enough() -> None:
    costs(0.5)
    assert [done.status for done in toolkit.optimize(network(), "lower,lower").passes] == [
        "applied",
        "skipped",
    ]
