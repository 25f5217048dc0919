"""Every case of ONNX's own suite computes the same in newer opsets and in older ones.

Cases are written in the opset that last changed their operator: 1 to 26 and later.
"""

import numpy as np
import pytest

from passes.opset.lowering_table import LOWEST
from passes.opset.opset import Opset
from tests.conformance.suite import agree, cases, feeds, loadable
from tests.ort import run
from toolkit.ir.model import Model
from toolkit.ir.op_traits import is_random
from toolkit.pass_manager.protocol import Context
from toolkit.runtime import MAX_OPSET
from toolkit.targets.ort_cpu import TARGET as ORT_CPU

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", sorted(cases()))
def test_same_outputs_when_lifted(name: str) -> None:
    case = cases()[name]
    if any(e.version > MAX_OPSET for e in case.model.opset_import if not e.domain):
        pytest.skip("newer than anything the runtime loads")
    model = loadable(case.model)
    fed = feeds(model, case.inputs)
    try:
        reference, rtol, atol = run(model, fed), 1e-6, 1e-6
    except Exception:
        # Too old for the runtime, or not for it at all: what ONNX expects has to do.
        reference, rtol, atol = case.expected, case.rtol, max(case.atol, 1e-6)
    runs = reference is not case.expected
    for to in (13, 18, 23, 26):
        if to < max((e.version for e in model.opset_import if not e.domain), default=0):
            continue
        lifted, ctx = Model.from_proto(model), Context()
        Opset(to=to).run(lifted, ctx)
        lifted.graph.verify()
        if not lifted.journal.rewrites:
            continue
        kept_back = any("no kernel" in note for note in ctx.notes)
        assert kept_back or lifted.opsets[""] == to, ctx.notes
        try:
            results = run(lifted.inlined_proto(), fed)
        except Exception:
            if runs:
                raise
            continue
        if _is_random(model):
            continue
        assert agree(results, reference, rtol, atol), f"opset {to}: outputs differ"


EMPTY_BY_SHAPE = ("test_reshape_allowzero_reordered",)
"""Cases whose shape has a 0 that older opsets cannot express; lowering assumes there is none."""


@pytest.mark.parametrize("name", sorted(set(cases()) - set(EMPTY_BY_SHAPE)))
def test_same_outputs_at_the_oldest_opset_that_can_express_it(name: str) -> None:
    case = cases()[name]
    if any(e.version > MAX_OPSET for e in case.model.opset_import if not e.domain):
        pytest.skip("newer than anything the runtime loads")
    model = loadable(case.model)
    fed = feeds(model, case.inputs)
    lowered, ctx = Model.from_proto(model), Context()
    Opset(to=LOWEST).run(lowered, ctx)
    lowered.graph.verify()
    reached = lowered.opsets.get("", 0)
    assert reached <= LOWEST or any("stays at" in note for note in ctx.notes)
    if not lowered.journal.rewrites or _is_random(model):
        return
    try:
        reference = run(model, fed)
    except Exception:
        return
    results = run(lowered.inlined_proto(), fed)
    half = any(np.asarray(r).dtype == np.float16 for r in reference if not isinstance(r, list))
    rtol, atol = (2e-2, 2e-3) if half else (1e-5, 2e-6)
    same = agree(results, reference, rtol, atol)
    # for the scores of Attention, onnxruntime returns the lowest number instead of -inf
    assert same or agree(results, case.expected, rtol, atol), f"opset {reached}: outputs differ"


def _is_random(model) -> bool:
    return any(is_random(node) for node in model.graph.node)


def test_operators_without_kernels_are_in_the_suite() -> None:
    occurring = {n.op_type for case in cases().values() for n in case.model.graph.node}
    assert any(
        ORT_CPU.loses_kernel(op, version) for op in occurring for version in range(2, MAX_OPSET + 1)
    )
