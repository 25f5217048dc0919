"""What `shapes` says of ONNX's own conformance cases is what they expect.

Each case is inferred with nothing declared about its outputs: as it is, with every input dimension
a symbol, and with small integer inputs (axes, shapes) as constants besides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import ModelProto

from tests.conformance.suite import Case, cases
from tests.soundness import Report, compare, infer, strip_outputs, symbolic_inputs

pytestmark = pytest.mark.conformance


def forms(case: Case) -> Iterator[ModelProto]:
    plain = ModelProto()
    plain.CopyFrom(case.model)
    strip_outputs(plain)
    yield plain
    yield symbolic_inputs(case.model, {})
    names = [declared.name for declared in case.model.graph.input]
    small = {
        name: value
        for name, value in zip(names, case.inputs, strict=False)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim <= 1
    }
    if small:
        yield symbolic_inputs(case.model, small)


def test_everything_claimed_is_expected() -> None:
    compared = 0
    wrong: list[str] = []
    for name, case in cases().items():
        inputs = [declared.name for declared in case.model.graph.input]
        outputs = [declared.name for declared in case.model.graph.output]
        fed = dict(zip(inputs, case.inputs, strict=False))
        values = fed | dict(zip(outputs, case.expected, strict=False))
        for proto in forms(case):
            report = Report()
            compare(infer(proto), values, report, [*inputs, *outputs])
            compared += report.sizes
            wrong += [f"{name}: {text}" for text in report.wrong]
    assert compared > 30_000
    assert not wrong, "\n".join(wrong)
