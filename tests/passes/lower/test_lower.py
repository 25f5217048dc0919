"""`lower` as a pass: its target, its table, and candidates that the runtime keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import toolkit
from passes.lower.candidates import COMPUTATIONS, Computation
from passes.lower.cost_query import SHIPPED
from passes.lower.lower import Lower
from passes.lower.measure import chain, contents, load, measure
from tests.checks import check, model, parse
from tests.passes.lower.tables import candidate, table, typed
from toolkit.errors import UsageError
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.runtime.cost_table import (
    Costs,
    Regime,
    Tunable,
    cache_path,
    costs_in_use,
    nearest_table,
    shipped_path,
)
from toolkit.settings import Settings

POST_NORM = """g (float[N, S, 8] x, float[N, S, 8] r, float[8] w) => (float[N, S, 8] y) {
    s = Add (x, r)
    n = LayerNormalization <axis = -1> (s, w)
    y = Mish (n)
}"""


def test_standard_operators_are_left_alone() -> None:
    subject = model(typed(POST_NORM))
    Lower().run(subject, Context(Settings(target="onnx")))
    assert not len(subject.journal)


def test_the_shipped_table_lowers_what_every_processor_is_slow_with() -> None:
    for threads in (0, 1, 2, 64):
        changed = check(Lower(threads=threads), typed(POST_NORM))
        used = [node.op_type for node in changed.graph.nodes]
        assert "Sum" in used
        assert "Mish" not in used


def test_this_machines_own_table_is_preferred() -> None:
    own = table(mish=(candidate("mish", 1.0), candidate("rational", 2.0)))
    assert costs_in_use(SHIPPED)[1].startswith("the shipped table")
    own.save(cache_path())
    assert costs_in_use(SHIPPED)[0] == own
    check(Lower(), typed(POST_NORM), near_miss=True)


def test_a_broken_table_is_ignored() -> None:
    cache_path().parent.mkdir(parents=True)
    cache_path().write_text("{")
    found, origin = costs_in_use(SHIPPED)
    assert found == nearest_table(SHIPPED, "AMD")
    assert "measure again" in origin


def test_it_is_proven_like_any_pass() -> None:
    result = Pipeline([Lower(), Lower()]).run(model(typed(POST_NORM)))
    assert [done.status for done in result.passes] == ["applied", "skipped"]
    assert result.passes[0].rules == {"residual-sum": 1, "mish-by-exp": 1}


# -- candidates

ALL = [(one, name) for one in COMPUTATIONS for name in one.candidates]


@pytest.mark.parametrize(("computation", "name"), ALL, ids=lambda v: getattr(v, "name", v))
def test_candidates_are_equivalent_and_not_undone(computation: Computation, name: str) -> None:
    tokens, width = min(computation.regimes)
    regime = Regime(tokens, width, 1)
    feeds = contents(computation, computation.inputs, regime)
    results = []
    for one in (next(iter(computation.candidates)), name):
        session, operators = load(chain(computation, one, regime), threads=1)
        read = {value.name: feeds[value.name] for value in session.get_inputs()}
        results.append(session.run(None, read)[0])
    assert np.all(np.isfinite(results[0]))
    scale = np.abs(results[0]).max()
    np.testing.assert_allclose(results[1] / scale, results[0] / scale, atol=1e-4)
    assert set(operators) == set(computation.kept.get(name, operators))


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_every_candidate_is_in_the_shipped_tables(path: Path) -> None:
    shipped = Costs.load(path)
    listed = {name: [s.name for s in found] for name, found in shipped.computations.items()}
    assert listed == {one.name: list(one.candidates) for one in COMPUTATIONS}
    assert not any(s.undone for found in shipped.computations.values() for s in found)
    assert shipped_path(SHIPPED, shipped.cpu) == path
    assert json.loads(path.read_text())["script"] == "benchmarks/kernel_forms.py"


def test_measuring() -> None:
    told: list[str] = []
    mish = next(one for one in COMPUTATIONS if one.name == "mish")
    found = measure(lambda done, total, what: told.append(what), 0.1, (1,), [mish])
    assert told == ["mish 8x768@1", "mish 128x384@1", "mish 128x768@1", "done"]
    usual, other = found.computations["mish"]
    assert set(usual.cost.values()) == {1.0}
    assert all(microseconds > 0 for microseconds in other.microseconds.values())
    assert other.runs == ("Add", "Div", "Exp", "Min", "Mul")


def test_a_candidate_that_the_runtime_changes_is_marked() -> None:
    fused = Computation(
        "fused",
        {"usual": "y = Neg (x)", "sum": "s = Sigmoid (x) y = Mul (x, s)"},
        regimes=((2, 8),),
        kept={"sum": ("Mul", "Sigmoid")},
    )
    (_, other) = measure(seconds=0.01, threads=(1,), computations=[fused]).computations["fused"]
    assert other.undone
    assert other.runs == ("com.microsoft:QuickGelu",)


def test_it_can_be_tuned() -> None:
    assert isinstance(Lower(), Tunable)


def test_a_negative_number_of_threads_is_rejected() -> None:
    with pytest.raises(UsageError, match="threads=-1"):
        Lower(threads=-1)


def test_a_candidate_leaves_no_factors_beside_a_matmul() -> None:
    """The SiLU of 1.702 x, by 1.702: both factors go into weights, in the same run of the group."""
    table(quick_gelu=(candidate("quick", 1.0), candidate("silu", 0.5))).save(cache_path())
    weights = ", ".join(str(i % 7 - 3) for i in range(32))
    text = f"""g (float[N, S, 4] x) => (float[N, S, 4] y)
        <float[4, 8] a = {{{weights}}}, float[8] b = {{1, 2, 3, 4, 5, 6, 7, 8}},
         float[8, 4] c = {{{weights}}}, float k = {{1.702}}> {{
        m = MatMul (x, a) h = Add (m, b) z = Mul (h, k) s = Sigmoid (z) g = Mul (h, s)
        y = MatMul (g, c)
    }}"""
    once = toolkit.optimize(parse(text), "fuse")
    assert once.after.ops == {"MatMul": 2, "Add": 1, "Sigmoid": 1, "Mul": 1}
