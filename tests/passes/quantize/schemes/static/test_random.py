"""Random convolutional graphs, with random nodes left float: valid, and about the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import checker

from passes.quantize.schemes.static.apply import Format
from passes.quantize.schemes.static.quantize_static import QuantizeStatic, apply_static
from tests import ort
from tests.checks import model, parse, random_feeds, written
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.schemes.static.checks import context
from toolkit.pass_manager.protocol import Context
from toolkit.runtime.session import Session

WEIGHTS = (
    *("float lo = {0}, float hi = {2}, float[4] scales = {1, 1, 1, 1}",),
    *("int64[4] back = {0, 4, 6, 6}, int64[3] flat = {0, 4, 36}",),
    *("bool on = {1}, int64 two = {2}, int64[1] first = {0}",),
    *(floats("k", 4, 8, 1, 1), floats("c", 4, 1, 1), floats("b", 4)),
    *(floats("w", 4, 4, 3, 3, low=-0.3, high=0.3), floats("d", 4, 1, 3, 3)),
)
SAME = "pads = [1, 1, 1, 1]"
IMAGE = "float[N, 4, 6, 6]"


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
    listed = ", ".join(f"{IMAGE} {name}" for name in outputs)
    assert_about_the_same(f"g ({IMAGE} x) => ({listed})", " ".join(nodes), random)


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan", "both"])
@pytest.mark.parametrize("seed", range(8))
def test_random_bodies(kind: str, seed: int) -> None:
    """The nodes behind some place are in a body, and read what is made in front of it."""
    random = np.random.default_rng([seed, ord(kind[0])])
    nodes, values = nodes_of(random, 14)
    at = int(random.integers(0, 10))
    inner = f"{' '.join(nodes[at:])} z = Identity ({values[-1]})"
    if kind in ("If", "both"):
        taken = inner.replace("z =", "t =")
        inner = f"""z = If (yes) <then_branch = t () => ({IMAGE} t) {{ {taken} }},
                                 else_branch = e () => ({IMAGE} e) {{ e = Neg (x) }}>"""
    if kind in ("Loop", "both"):
        step = inner.replace("z =", "u =", 1).replace("(x", "(h")
        inner = f"""z = Loop (two, on, x) <body = l (int64 i, bool go, {IMAGE} h)
            => (bool so, {IMAGE} u) {{ so = Identity (go) {step} }}>"""
    if kind == "Scan":
        inner = f"""s = Unsqueeze (x, first) o = Scan <num_scan_inputs = 1,
            body = l ({IMAGE} r) => ({IMAGE} z) {{ {inner.replace("(x", "(r")} }}> (s)
            y = Squeeze (o, first)"""
    else:
        inner += " y = Identity (z)"
    signature = f"g ({IMAGE} x) => ({IMAGE} y, {IMAGE} w_)"
    middle = values[at - 1] if at else "x"
    known = "top = ReduceMax <keepdims = 0> (x) yes = Greater (top, lo)"  # at run time only
    outer = f"{known} {' '.join(nodes[:at])}"
    assert_about_the_same(signature, f"{outer} {inner} w_ = Neg ({middle})", random)


def assert_about_the_same(signature: str, nodes: str, random: np.random.Generator) -> None:
    """In both forms, with some nodes left float: as written, and as the runtime makes it."""
    text = typed(signature, ", ".join(WEIGHTS), nodes, 21)
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
        results[f"{form} deployed"] = Session(subject, optimize=True).run(random_feeds(subject))
        subject.rollback()
        subject.graph.verify()
        assert written(subject) == before
    floats_ = ort.run(parse(text), random_feeds(model(text)))
    for at, reference in enumerate(floats_):
        size = np.sqrt(np.mean(reference**2)) + 1e-6
        for found in results.values():
            assert np.sqrt(np.mean((found[at] - reference) ** 2)) < 0.2 * size
            assert np.sqrt(np.mean((found[at] - results["qdq"][at]) ** 2)) < 0.1 * size
