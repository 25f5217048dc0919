"""Subgraphs that use a name again are read as onnxruntime reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import ModelProto

import toolkit
from toolkit.errors import ModelError
from toolkit.ir.model import Model
from toolkit.ir.unshadow import without_shadows

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
LOOP = f"""{HEADER}
g (float[2] x, int64 n) => (float[2] y, float[2] z)
<float[2] w = {{1.0, 2.0}}, bool go = {{1}}>
{{
    y, v = Loop <body = b (int64 i, bool c, float[2] a, float[2] w)
                        => (bool k, float[2] s, float[2] w)
        {{ k = Identity (c) s = Add (a, w) }}> (n, go, w, x)
    z = Mul (v, w)
}}"""
NESTED = f"""{HEADER}
g (float[2] x, int64 n) => (float[2] y)
<float[2] w = {{1.0, 2.0}}, bool go = {{1}}>
{{
    y, v = Loop <body = b (int64 i, bool c, float[2] a, float[2] w)
                        => (bool k, float[2] s, float[2] t)
        {{
            k = Identity (c) s = Add (a, w) odd = Cast <to = 9> (i)
            t = If <then_branch = u () => (float[2] p) {{ p = Mul (w, w) }},
                    else_branch = e () => (float[2] q) {{
                        q = Loop <body = d (int64 j, bool l, float[2] w) => (bool m, float[2] r)
                            {{ m = Identity (l) r = Sub (w, a) }}> (n, c, s)
                    }}> (odd)
        }}> (n, go, w, x)
}}"""


def run(proto: ModelProto, feed: dict[str, Any]) -> Any:
    return ort.InferenceSession(proto.SerializeToString()).run(None, feed)


@pytest.mark.parametrize(
    ("text", "feed"),
    [(LOOP, {"n": np.array(3)}), (NESTED, {"n": np.array(3)}), (NESTED, {"n": np.array(1)})],
)
def test_the_inner_name_is_meant_inside(text, feed):
    proto = onnx.parser.parse_model(text)
    before = proto.SerializeToString()
    feed = {"x": np.array([1.5, -2.0], np.float32), **feed}
    model = Model.from_proto(proto)
    model.graph.verify()
    for found, wanted in zip(run(model.to_proto(), feed), run(proto, feed), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert proto.SerializeToString() == before


def test_it_is_optimized_like_any_other(tmp_path):
    path = tmp_path / "loop.onnx"
    onnx.save(onnx.parser.parse_model(LOOP), path)
    result = toolkit.optimize(path, "simplify")
    assert result.proof.startswith("error 0")


def test_distinct_names_stay():
    text = LOOP.replace("float[2] w)", "float[2] u)").replace("(a, w)", "(a, u)")
    proto = onnx.parser.parse_model(text)
    assert without_shadows(proto) is proto


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("k = Identity (c)", "x = Identity (c) k = Identity (x)", "'x' is defined twice"),
        (
            "float[2] s, float[2] w)\n",
            "float[2] s, float[2] w) <float n = {1}>\n",
            "'n' is defined in",
        ),
    ],
)
def test_what_onnxruntime_does_not_read_so_is_an_error(old, new, message):
    proto = onnx.parser.parse_model(LOOP.replace(old, new))
    with pytest.raises(ModelError, match=message):
        Model.from_proto(proto)
