"""`fuse` keeps the meaning of ONNX's own conformance suite.

Many of its cases are functions written out, LayerNormalization and Attention among them, by hands
that have never seen our rules. Rows of attention that are masked as a whole may turn from NaN to 0.
"""

import numpy as np
import pytest

import toolkit
from tests.conformance.suite import cases, feeds, loadable, reason_to_skip
from tests.ort import run

pytestmark = pytest.mark.conformance

TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2}


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
@pytest.mark.parametrize("name", sorted(cases()))
def test_same_meaning(name: str, target: str) -> None:
    case = cases()[name]
    if reason := reason_to_skip(case):
        pytest.skip(f"onnxruntime: {reason}")
    model = loadable(case.model)
    given = feeds(model, case.inputs)
    reference = run(model, given)
    result = toolkit.optimize(model, "fuse", validate="off", target=target)
    for found, wanted in zip(run(result.model.inlined_proto(), given), reference, strict=True):
        assert_close(found, wanted)


def assert_close(found: object, wanted: object) -> None:
    if isinstance(wanted, list):
        assert isinstance(found, list)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
        return
    new, old = np.asarray(found), np.asarray(wanted)
    assert new.dtype == old.dtype
    assert new.shape == old.shape
    if old.dtype.kind not in "fV":
        assert np.array_equal(new, old)
        return
    new, old = new.astype(np.float64), old.astype(np.float64)
    known = ~np.isnan(old)
    finite = old[np.isfinite(old)]
    share = TOLERANCE.get(str(np.asarray(wanted).dtype), 1e-4)
    scale = float(np.abs(finite).max()) if finite.size else 1.0
    np.testing.assert_allclose(new[known], old[known], rtol=share, atol=share * scale)
