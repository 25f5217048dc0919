"""Random convolutional graphs, with random nodes left float: valid, and about the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import checker

from passes.quantize.static import QuantizeStatic, apply_static
from passes.quantize.static.apply import Format
from tests import ort
from tests.checks import model, parse, random_feeds, written
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.static.checks import context
from toolkit.context import Context

WEIGHTS = (
    *("float lo = {0}, float hi = {2}, float[4] scales = {1, 1, 1, 1}",),
    *("int64[4] back = {0, 4, 6, 6}, int64[3] flat = {0, 4, 36}",),
    *(floats("k", 4, 8, 1, 1), floats("c", 4, 1, 1), floats("b", 4)),
    *(floats("w", 4, 4, 3, 3, low=-0.3, high=0.3), floats("d", 4, 1, 3, 3)),
)
SAME = "pads = [1, 1, 1, 1]"


def nodes_of(random: np.random.Generator, count: int) -> tuple[list[str], list[str]]:
    """Nodes on values of one shape; each reads some that were made before."""
    values, nodes = ["x"], list[str]()
    for at in range(count):
        one, other = (values[max(0, len(values) - 1 - int(random.integers(0, 4)))] for _ in "ab")
        new = f"v{at}"
        nodes.append(
            str(
                random.choice(
                    [
                        f"[n{at}] {new} = Conv <{SAME}> ({one}, w, b)",
                        f"[n{at}] {new} = Conv <{SAME}> ({one}, w)",
                        f"[n{at}] {new} = Conv <group = 4, {SAME}> ({one}, d, b)",
                        f"[n{at}] {new} = Relu ({one})",
                        f"[n{at}] {new} = Clip ({one}, lo, hi)",
                        f"[n{at}] {new} = Sigmoid ({one})",
                        f"[n{at}] {new} = Add ({one}, {other})",
                        f"[n{at}] {new} = Mul ({one}, {other})",
                        f"[n{at}] {new} = Add ({one}, c)",
                        f"[n{at}] {new} = MaxPool <kernel_shape = [3, 3], {SAME}> ({one})",
                        f"{new}_j = Concat <axis = 1> ({one}, {other}) {new} = Conv ({new}_j, k)",
                        f"{new}_s = Sigmoid ({one}) {new} = Mul ({new}_s, {one})",
                        f"{new}_f = Reshape ({one}, flat) {new} = Reshape ({new}_f, back)",
                        f"{new}_p, {new}_q = Split <axis = 1, num_outputs = 2> ({one}) "
                        f"{new} = Concat <axis = 1> ({new}_q, {new}_p)",
                        f"[n{at}] {new} = Tanh ({one})",
                    ]
                )
            )
        )
        values.append(new)
    return nodes, values[1:]


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs(seed: int) -> None:
    random = np.random.default_rng(seed)
    nodes, values = nodes_of(random, 14)
    outputs = list(dict.fromkeys([values[-1], *random.choice(values, 2).tolist()]))
    listed = ", ".join(f"float[N, 4, 6, 6] {name}" for name in outputs)
    signature = f"g (float[N, 4, 6, 6] x) => ({listed})"
    text = typed(signature, ", ".join(WEIGHTS), " ".join(nodes), 21)
    left = tuple(f"n{at}" for at in random.integers(0, 14, 3))
    results: dict[str, list[Any]] = {}
    forms: tuple[Format, ...] = ("qdq", "qop")
    for form in forms:
        subject = model(text)
        before = written(subject)
        ctx = context(subject)
        plan = QuantizeStatic(exclude=left).make_plan(subject, ctx)
        apply_static(subject, plan, Context(), form)
        subject.graph.verify()
        proto = subject.inlined_proto()
        checker.check_model(proto, full_check=form == "qdq")
        results[form] = ort.run(proto, random_feeds(subject))
        subject.rollback()
        subject.graph.verify()
        assert written(subject) == before
    floats_ = ort.run(parse(text), random_feeds(model(text)))
    for reference, one, other in zip(floats_, results["qdq"], results["qop"], strict=True):
        size = np.sqrt(np.mean(reference**2)) + 1e-6
        assert np.sqrt(np.mean((one - reference) ** 2)) < 0.2 * size
        assert np.sqrt(np.mean((one - other) ** 2)) < 0.1 * size
