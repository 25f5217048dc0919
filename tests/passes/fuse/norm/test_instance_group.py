"""Instance and group norms between Reshapes."""

from __future__ import annotations

import pytest

from passes.fuse.norm.instance_group import group_norm, reshaped_instance_norm
from tests.checks import check, model
from tests.passes.fuse.constants import typed
from toolkit.ir.node import attr
from toolkit.pass_manager.protocol import Context

WEIGHTS = "float[4] w = {1.5, -2.0, 0.5, 3.0}, float[4] b = {0.1, 0.2, -0.3, 0.4}"
PER_GROUP = "float[2] w = {1.5, -2.0}, float[2] b = {0.1, 0.2}"


def between(
    norm: str, inner: str, shape: str = "2,4,3,6", back: str = "", weights: str = ""
) -> str:
    """Return a model that reshapes x to `inner`, normalizes it as `r`, and reshapes it back."""
    back = back or shape
    ranks = [len(sizes.split(",")) for sizes in (inner, back)]
    constants = f"int64[{ranks[0]}] to = {{{inner}}}, int64[{ranks[1]}] back = {{{back}}}"
    nodes = f"r = Reshape (x, to) n = {norm} y = Reshape (n, back)"
    signature = f"g (float[{shape}] x) => (float[{back}] y)"
    return typed(signature, f"{constants}, {weights or WEIGHTS}", nodes)


# -- instance norm

INSTANCE = "InstanceNormalization <epsilon = 0.25> (r, w, b)"


@pytest.mark.parametrize(
    ("shape", "inner"),
    [("2,4,3,6", "2,4,18"), ("2,4,18", "2,4,3,6"), ("2,4,3,2,3", "0,0,-1"), ("2,4,3,6", "2,4,6,3")],
)
def test_instance_norms_take_any_rank(shape: str, inner: str) -> None:
    after = "y = InstanceNormalization <epsilon = 0.25> (x, w, b)"
    check(reshaped_instance_norm, between(INSTANCE, inner, shape), after)


@pytest.mark.parametrize(
    ("shape", "inner", "back"),
    [
        ("4,2,3,6", "2,4,18", "4,2,3,6"),  # other channels
        ("1,8,3,6", "2,4,18", "1,8,3,6"),  # a batch of groups
        ("2,4,3,6", "2,4,18", "2,4,6,3"),  # not reshaped back
        ("8,3", "2,4,3", "8,3"),  # batch and channels alone
    ],
)
def test_instance_norms_of_other_channels_stay(shape: str, inner: str, back: str) -> None:
    check(reshaped_instance_norm, between(INSTANCE, inner, shape, back), near_miss=True)


def test_an_instance_norm_between_reshapes_of_unknown_shape_stays() -> None:
    text = f"""g (float[N,4,H,W] x, int64[4] back) => (float[A,B,C,D] y)
        <int64[3] to = {{0, 0, -1}}, {WEIGHTS}>
        {{ r = Reshape (x, to) n = {INSTANCE} y = Reshape (n, back) }}"""
    subject = model(text)
    reshaped_instance_norm.run(subject, Context())
    assert not len(subject.journal)


# -- group norm


def test_a_scale_per_group_is_repeated_per_channel() -> None:
    after = """w2 = Constant <value = float[4] {1.5, 1.5, -2.0, -2.0}> ()
        b2 = Constant <value = float[4] {0.1, 0.1, 0.2, 0.2}> ()
        y = GroupNormalization <epsilon = 0.25, num_groups = 2> (x, w2, b2)"""
    check(group_norm, between(INSTANCE, "2,2,36", weights=PER_GROUP), after)


LAYER = "LayerNormalization <axis = 2, epsilon = 0.25> (r, w, b)"
SAME = "float[36] w = {" + ", ".join(["1.5"] * 36) + "}, float[36] b = {" + ", ".join(["2"] * 36)
SAME += "}"
ONE = "float[1] w = {1.5}, float[1] b = {2}"


@pytest.mark.parametrize("weights", [SAME, ONE])
@pytest.mark.parametrize("axis", [2, -1])
def test_layer_norms_of_groups_with_one_scale(weights: str, axis: int) -> None:
    norm = LAYER.replace("axis = 2", f"axis = {axis}")
    changed = check(group_norm, between(norm, "2,2,36", weights=weights))
    [node] = changed.graph.nodes
    assert (node.op_type, attr(node, "num_groups")) == ("GroupNormalization", 2)
    assert changed.graph.const(node.input[1]).tolist() == [1.5] * 4
    assert changed.graph.const(node.input[2]).tolist() == [2.0] * 4


def test_a_layer_norm_without_bias_gets_zeros() -> None:
    norm = "LayerNormalization <axis = 2> (r, w)"
    changed = check(group_norm, between(norm, "2,2,36", weights=ONE))
    [node] = changed.graph.nodes
    assert changed.graph.const(node.input[2]).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("norm", "inner", "weights"),
    [
        (LAYER, "2,2,36", SAME.replace("1.5", "1.25", 1)),  # varies within a group
        (LAYER.replace("axis = 2", "axis = 1"), "2,2,36", ONE),  # over all groups
        (LAYER.replace("axis = 2", "axis = 3"), "2,2,2,18", ONE),  # over a part of a group
        (LAYER, "2,3,24", ONE),  # a group has 4/3 channels
        (LAYER, "1,4,36", ONE),  # a group has channels of one image alone, counted across images
    ],
)
def test_norms_of_anything_but_whole_groups_stay(norm: str, inner: str, weights: str) -> None:
    check(group_norm, between(norm, inner, weights=weights), near_miss=True)


def test_a_norm_with_a_computed_scale_stays() -> None:
    text = """g (float[2,4,3,6] x, float[2] w, float[2] b) => (float[2,4,3,6] y)
        <int64[3] to = {2, 2, 36}, int64[4] back = {2, 4, 3, 6}>"""
    nodes = f"{{ r = Reshape (x, to) n = {INSTANCE} y = Reshape (n, back) }}"
    check(group_norm, text + nodes, near_miss=True)


def test_group_norms_need_opset_21() -> None:
    text = between(INSTANCE, "2,2,36", weights=PER_GROUP)
    check(group_norm, text.replace('"" : 23', '"" : 20'), near_miss=True)
