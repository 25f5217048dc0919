"""Operators of `torch.library`: translated, declared, or listed with where they are."""

from __future__ import annotations

from typing import Any

import pytest

import toolkit
from toolkit.errors import UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.export


@pytest.fixture(scope="module")
def model():
    """`inner` inverts matrices, the model itself scales them, both with custom operators."""

    @torch.library.custom_op("toolkit_tests::inverse", mutates_args=())
    def inverse(x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportInvalidTypeForm]
        return torch.linalg.inv(x)

    @inverse.register_fake
    def _(x):
        return torch.empty_like(x)

    @torch.library.custom_op("toolkit_tests::scale", mutates_args=())
    def scale(
        x: torch.Tensor,  # pyright: ignore[reportInvalidTypeForm]
        alpha: float,
        times: int = 2,
    ) -> torch.Tensor:  # pyright: ignore[reportInvalidTypeForm]
        return x * (alpha * times)

    @scale.register_fake
    def _(x, alpha, times=2):
        return torch.empty_like(x)

    class Inner(torch.nn.Module):
        def forward(self, x):
            return torch.ops.toolkit_tests.inverse(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return torch.ops.toolkit_tests.scale(self.inner(x), 2.5)

    return Model()


EXAMPLE = torch.eye(3) * 2 + torch.tensor([[0.0, 0.3, 0], [0.1, 0, 0.2], [0, 0, 0.1]])


def scale_as_onnx(x, alpha: float, times: int = 2):
    op: Any = pytest.importorskip("onnxscript").opset18
    return op.Mul(x, op.Constant(value_float=alpha * times))


def test_all_operators_without_a_translation_are_listed_at_once(model):
    with pytest.raises(UsageError) as caught:
        toolkit.export(model, EXAMPLE, dynamic={})
    message = str(caught.value)
    assert "2 operators have no translation" in message
    assert "toolkit_tests.inverse.default at inner (test_custom_ops.py, line " in message
    assert "toolkit_tests.scale.default at the model (test_custom_ops.py, line" in message
    assert "--translate" in message


def test_the_same_of_a_trace(model):
    with pytest.raises(UsageError, match="2 operators have no translation") as caught:
        toolkit.export(model, EXAMPLE, dynamic={}, exporter="torchscript")
    assert "toolkit_tests::inverse" in str(caught.value)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_custom_domain_runs_with_the_users_library(model, exporter):
    extensions = pytest.importorskip("onnxruntime_extensions")
    from toolkit.frontends.pytorch import CustomOp

    class Only(torch.nn.Module):
        def forward(self, x):
            return torch.ops.toolkit_tests.inverse(x) + 1

    table = {"toolkit_tests::inverse": CustomOp("ai.onnx.contrib", "Inverse")}
    options: dict[str, Any] = {"translations": table, "exporter": exporter, "dynamic": {}}
    library = extensions.get_library_path()
    graph = toolkit.export(Only(), EXAMPLE, custom_ops=[library], **options).only
    assert graph.model.opsets["ai.onnx.contrib"] == 1
    assert graph.proof.error < 1e-5
    with pytest.raises(UsageError, match=r"Inverse: the domain .* --custom-ops LIB may define it"):
        toolkit.export(Only(), EXAMPLE, **options)


def test_a_function_and_a_domain_side_by_side(model):
    extensions = pytest.importorskip("onnxruntime_extensions")
    from toolkit.frontends.pytorch import CustomOp

    exported = toolkit.export(
        model,
        EXAMPLE,
        dynamic={},
        custom_ops=[extensions.get_library_path()],
        translations={
            torch.ops.toolkit_tests.scale: scale_as_onnx,
            torch.ops.toolkit_tests.inverse.default: CustomOp("ai.onnx.contrib", "Inverse"),
        },
    )
    assert exported.only.exporter == "dynamo"
    assert exported.only.proof.ok


def test_what_pytorch_can_decompose_needs_no_translation():
    library = torch.library.Library("toolkit_decomposed", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: torch.mul(x, 2.0), "CompositeImplicitAutograd")

    class Twice(torch.nn.Module):
        def forward(self, x):
            return torch.ops.toolkit_decomposed.twice(x)

    graph = toolkit.export(Twice(), torch.randn(2, 3), exporter="dynamo").only
    assert [node.op_type for node in graph.model.graph.nodes] == ["Mul"]


def test_attributes_come_from_the_schema(model):
    from toolkit.frontends.pytorch.custom_ops import CustomOp, declared_schema

    made = declared_schema(
        torch.ops.toolkit_tests.scale.default,
        CustomOp("com.mine", "Scale", 3, attributes={"alpha": "factor"}),
    )
    assert [i.name for i in made.inputs] == ["x"]
    assert {n: a.required for n, a in made.attributes.items()} == {"factor": True, "times": False}
    assert (made.domain, made.name, made.since_version) == ("com.mine", "Scale", 3)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("toolkit_tests::nothing", scale_as_onnx, "no such operator"),
        ("nonsense", scale_as_onnx, "no such operator"),
        ("toolkit_tests::scale.other", scale_as_onnx, "no overload 'other'"),
        (7, scale_as_onnx, "name an operator"),
        ("toolkit_tests::scale", "Scale", "is a str: give a function or a CustomOp"),
    ],
)
def test_tables_that_say_nothing(model, key, value, message):
    with pytest.raises(UsageError, match=message):
        toolkit.export(model, EXAMPLE, translations={key: value})
