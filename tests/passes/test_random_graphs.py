"""Every pass on random models: same outputs, true index, one run is enough, rollback is exact."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import ModelProto

from passes import CATALOGUE
from tests import ort
from tests.checks import assert_rollback, assert_same_outputs, knowledge, text_of, written
from tests.random_graphs import feeds, models
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes

EXTERNAL = ("onnxsim", "onnxruntime")
NEED_DATA = ("smooth", "correct-bias", "quantize-static")
REDEFINING = ("mask-outputs",)
"""It needs a mask, and changes what outputs are."""
COARSE = ("fp16",)
"""Held to the precision of 16 bits in tests of its own; here numbers have to agree to 1e-5."""
PASSES = [
    name
    for name, place in CATALOGUE.items()
    if isinstance(place, str) and name not in (*EXTERNAL, *NEED_DATA, *REDEFINING, *COARSE)
]
INFORMED = "inline,constants,shapes:annotate=false"
"""What the others count on in the pipeline: constants in sight, and types known."""

# Given here, not in a profile: the same models in every run and on every machine.
steady = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def run(passes: str, subject: Model) -> None:
    for item in parse_passes(passes):
        item.run(subject, Context())
        subject.graph.verify()


def assume_it_runs(proto: ModelProto) -> None:
    """Nodes were tried one by one; as a whole, the runtime infers more and refuses some models."""
    try:
        session = ort.session(proto)
        for fed in feeds():
            session.run(None, fed)
    except Exception:  # the binding raises a dozen unrelated classes
        assume(False)


@pytest.mark.parametrize("name", PASSES)
@settings(steady, max_examples=100)
@given(proto=models(), informed=st.booleans())
def test_a_pass(name: str, proto: ModelProto, informed: bool) -> None:
    assume_it_runs(proto)
    subject = Model.from_proto(proto)
    if informed:
        run(INFORMED, subject)
        subject.commit()
    # What nobody has inferred yet, a pass may infer.
    stored, known = written(subject), knowledge(subject) if informed else {}
    run(name, subject)
    if len(subject.journal):
        assert_rollback(subject, stored, known)
        run(name, subject)
        subject.commit()
        assert_same_outputs(proto, subject, feeds())
        run(name, subject)
        assert not len(subject.journal), f"a second run changes more:\n{text_of(subject)}"


@settings(steady, max_examples=100)
@given(proto=models(most_steps=20))
def test_simplify(proto: ModelProto) -> None:
    assume_it_runs(proto)
    subject = Model.from_proto(proto)
    stored = written(subject)
    run("simplify", subject)
    assert_rollback(subject, stored, {})
    run("simplify", subject)
    subject.commit()
    assert_same_outputs(proto, subject, feeds())
    nodes = subject.node_count()
    assert nodes <= Model.from_proto(proto).node_count()
    run("simplify", subject)
    assert subject.node_count() <= nodes
    assert_same_outputs(proto, subject, feeds())
