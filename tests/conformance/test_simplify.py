"""The default pipeline changes no result of ONNX's own conformance suite.

Every case that onnxruntime runs counts; a case is left out only where onnxruntime itself refuses
it or disagrees with the expected output, which is found by running it, not listed.
"""

from collections import Counter

import pytest

import toolkit
from tests.conformance.suite import agree, cases, feeds, loadable, reason_to_skip, variants
from tests.ort import run

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", sorted(cases()))
def test_same_outputs(name: str) -> None:
    case = cases()[name]
    if reason := reason_to_skip(case):
        pytest.skip(f"onnxruntime: {reason}")
    model = loadable(case.model)
    for form, variant, rest in variants(model, feeds(model, case.inputs)):
        try:
            reference = run(variant, rest)
        except Exception:
            assert form != "as is"
            continue  # the runtime wants this input fed
        result = toolkit.optimize(variant, validate="off")
        optimized = result.model.inlined_proto()
        assert agree(run(optimized, rest), reference, 1e-6, 1e-7), f"{form}: outputs differ"


def test_most_cases_count() -> None:
    """A broken runtime would skip them all, and nothing would be tested."""
    reasons = Counter(reason_to_skip(case).split(" ")[0] for case in cases().values())
    assert reasons[""] >= 1600, reasons
    assert reasons["disagrees"] <= 30, reasons
