"""The pass manager: keep what holds, undo what does not, and say so."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import toolkit
from passes.analysis.shapes import Shapes
from passes.simplify.dce import RemoveDead
from toolkit import (
    EXACT,
    FLOAT,
    QUANT,
    Calib,
    Context,
    Model,
    NotProven,
    Pipeline,
    Tolerance,
    ToolkitError,
    UsageError,
    op,
    rewrite,
    var,
)
from toolkit.calibrate.observers import MinMax
from toolkit.errors import PostconditionFailed, PreconditionFailed
from toolkit.runtime.session import Session
from toolkit.verification.reference import Reference

LAYERS = 12


def tower(layers: int = LAYERS) -> Model:
    """x -> (Relu, Mul by w_i) * layers, with named values r0, m0, r1, ..."""
    body = "\n".join(
        f"r{i} = Relu({'x' if not i else f'm{i - 1}'})  m{i} = Mul(r{i}, w{i})"
        for i in range(layers)
    )
    weights = ", ".join(f"float w{i} = {{{1 + i / 10}}}" for i in range(layers))
    return Model.from_proto(
        parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[batch, 4] x) => (float[batch, 4] y) <{weights}>
        {{ {body}  y = Identity(m{layers - 1}) }}
    """)
    )


@dataclass(frozen=True)
class Spoil:
    """Swap the operands of every Mul, which is right, but spoil the ones at `sites`."""

    sites: tuple[str, ...]
    name: ClassVar[str] = "spoil"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model: Model, ctx: Context) -> None:
        graph = model.graph
        for node in graph.nodes:
            if node.op_type != "Mul" or not graph.begin("swap", node):
                continue
            left, right = node.input
            if left.startswith("w"):
                continue
            graph.set_inputs(node, [right, left])
            if node.output[0] in self.sites:
                graph.set_op(node, "Add")


def run(model: Model, *passes: Any, **options: Any) -> toolkit.Result:
    return Pipeline(list(passes), **options).run(model)


def swapped(model: Model) -> list[str]:
    return [n.output[0] for n in model.graph.nodes if n.input[0].startswith("w")]


@pytest.mark.parametrize("site", ["m0", "m5", "m11"])
def test_one_bad_rewrite_costs_itself(site: str) -> None:
    model = tower()
    [result] = run(model, Spoil((site,))).passes
    assert result.status == "applied"
    assert [(u.rule, u.site) for u in result.undone] == [("swap", site)]
    assert result.undone[0].error > 1e-3
    assert site in result.to_json()["reason"]
    assert set(swapped(model)) == {f"m{i}" for i in range(LAYERS)} - {site}
    assert all(n.op_type != "Add" for n in model.graph.nodes)
    model.graph.verify()


def test_several_bad_rewrites_are_found_one_by_one() -> None:
    model = tower()
    [result] = run(model, Spoil(("m2", "m9"))).passes
    assert sorted(u.site for u in result.undone) == ["m2", "m9"]
    assert result.rewrites == LAYERS - 2


def test_a_rule_that_is_wrong_everywhere_is_dropped() -> None:
    model = tower()
    before = model.to_proto()
    [result] = run(model, Spoil(tuple(f"m{i}" for i in range(LAYERS)))).passes
    assert len(result.undone) == 3
    assert result.status == "reverted"
    assert "swap disabled after 3" in result.notes[0]
    assert model.to_proto() == before


def test_a_pass_of_one_edit_is_reverted_whole() -> None:
    class Wrong:
        name = "wrong"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            proto = model.inlined_proto()
            proto.graph.node[0].op_type = "Abs"
            model.replace(proto)

    model = tower()
    before = model.to_proto()
    result = run(model, Wrong(), RemoveDead())
    assert [p.status for p in result.passes] == ["reverted", "unchanged"]
    assert "output 'y'" in result.passes[0].reason
    assert model.to_proto() == before


def test_a_pass_that_ignores_its_veto_is_reverted() -> None:
    runs = []

    class Stubborn:
        name = "stubborn"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            runs.append(1)
            node = model.graph.nodes[0]
            model.graph.begin("abs", node)
            model.graph.set_op(node, "Abs")

    [result] = run(tower(), Stubborn()).passes
    assert result.status == "reverted"
    assert "output 'y'" in result.reason
    assert len(runs) == 2


def test_a_planted_rule_is_caught_and_named() -> None:
    @rewrite(op.Relu(var("x")))
    def relu_as_max(g: Any, x: str, node: Any) -> str:
        floor = 0.5 if node.output[0] == "r7" else 0.0
        return g.op("Max", x, g.constant(np.float32(floor)))

    result = toolkit.optimize(tower(), [relu_as_max])
    [outcome] = result.passes
    assert outcome.status == "applied"
    assert outcome.rules == {"relu-as-max": LAYERS - 1}
    assert [(u.rule, u.site) for u in outcome.undone] == [("relu-as-max", "r7")]
    assert [n.output[0] for n in result.model.graph.nodes if n.op_type == "Relu"] == ["r7"]


def test_a_pass_that_raises_is_rolled_back_and_the_rest_goes_on() -> None:
    class Broken:
        name = "broken"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            model.graph.op("Relu", "x")
            raise KeyError("surprise")

    model = tower()
    result = run(model, Broken(), Spoil(()))
    assert [p.status for p in result.passes] == ["reverted", "applied"]
    assert "KeyError" in result.passes[0].reason
    assert len(model.graph) == 2 * LAYERS + 1


def test_an_invalid_graph_is_not_kept() -> None:
    class Invalid:
        name = "invalid"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            node = model.graph.nodes[0]
            if model.graph.begin("break", node):
                model.graph.set_op(node, "NoSuchOperator")

    result = run(tower(), Invalid())
    assert [u.rule for u in result.passes[0].undone] == ["break"]
    assert "NoSuchOperator" in result.passes[0].undone[0].reason


def test_validate_final_does_not_pass_a_wrong_model() -> None:
    with pytest.raises(NotProven, match="output 'y'"):
        run(tower(), Spoil(("m3",)), validate="final")


def test_validate_off_says_so() -> None:
    result = run(tower(), Spoil(("m3",)), validate="off")
    assert result.passes[0].status == "applied"
    assert result.proof == "not validated"


def test_an_idempotent_pass_is_skipped_when_nothing_changed() -> None:
    result = run(tower(), Shapes(annotate=False), RemoveDead(), Shapes(annotate=False))
    assert [p.status for p in result.passes] == ["unchanged", "unchanged", "skipped"]
    twice = run(tower(), Spoil(()), Spoil(()))
    assert [p.status for p in twice.passes] == ["applied", "unchanged"]


def test_a_pass_is_skipped_when_its_precondition_fails() -> None:
    @dataclass(frozen=True)
    class OnlyForSmall(Spoil):
        def requires(self, model: Model, ctx: Context) -> None:
            raise PreconditionFailed("more than 3 nodes")

    (skipped,) = run(tower(), OnlyForSmall(())).passes
    assert (skipped.status, skipped.reason) == ("skipped", "more than 3 nodes")


def test_a_pass_is_undone_when_its_postcondition_fails() -> None:
    @dataclass(frozen=True)
    class Broken(Spoil):
        def ensures(self, model: Model, ctx: Context) -> None:
            raise PostconditionFailed(f"{len(swapped(model))} products are swapped")

    before = tower()
    result = run(before.copy(), Broken(()))
    assert result.passes[0].status == "reverted"
    assert "products are swapped" in result.passes[0].reason
    assert not swapped(result.model)


def test_a_model_that_does_not_run_is_checked_in_structure_only() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Mystery", ["x"], ["a"], domain="my.ops"),
            helper.make_node("Identity", ["a"], ["b"]),
            helper.make_node("Relu", ["b"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.ops", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    result = toolkit.optimize(proto)
    assert [n.op_type for n in result.model.graph.nodes] == ["Mystery", "Relu"]
    assert "structure only" in result.proof


def test_random_outputs_are_named_and_the_others_compared() -> None:
    proto = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[4] x) => (float[4] y, float[4] z)
        { n = RandomNormalLike(x)  i = Identity(x)  y = Add(i, n)  z = Relu(i) }
    """)
    result = toolkit.optimize(proto)
    assert "'y'" in result.proof
    assert len(result.model.graph) == 3


def test_the_source_is_left_alone() -> None:
    model = tower()
    before = model.to_proto()
    result = toolkit.optimize(model, [Spoil(())])
    assert model.to_proto() == before
    assert swapped(result.model)


def test_samples_are_used() -> None:
    class OnlyForNegatives:
        """Right on everything but inputs below -100, which only the user's sample has."""

        name = "negatives"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            graph = model.graph
            first = graph.nodes[0]
            if graph.begin("clip", first):
                clipped = graph.op("Max", "x", graph.constant(np.array(-100, np.float32)))
                graph.set_input(first, 0, clipped)

    text = """
        <ir_version: 8, opset_import: ["" : 17]> main (float[4] x) => (float[4] y) { y = Neg(x) }
    """
    proto = parser.parse_model(text)
    assert toolkit.optimize(proto, [OnlyForNegatives()]).passes[0].status == "applied"
    sample = {"x": np.full(4, -1000, np.float32)}
    caught = toolkit.optimize(proto, [OnlyForNegatives()], samples=[sample]).passes[0]
    assert [u.rule for u in caught.undone] == ["clip"]


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="validate"):
        Pipeline([], validate="sometimes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="target"):
        Pipeline([], target="abacus")
    with pytest.raises(UsageError, match="not a pass"):
        Pipeline([42])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="write RemoveDead"):
        Pipeline([RemoveDead])  # type: ignore[list-item]
    for source in (42, b"model.onnx"):
        with pytest.raises(UsageError, match="a path, a ModelProto or a Model"):
            toolkit.optimize(source)  # type: ignore[arg-type]


def test_passes_and_their_names_mix() -> None:
    result = toolkit.optimize(tower(2), ["fold,cleanup", Spoil(()), "dead"])
    assert [p.name for p in result.passes] == ["fold", "cleanup", "spoil", "dead"]


def test_a_model_that_is_not_proven_tells_what_led_to_it() -> None:
    with pytest.raises(NotProven) as caught:
        run(tower(), Spoil(("m3",)), validate="final")
    assert [p.name for p in caught.value.passes] == ["spoil"]


def test_a_failing_pass_says_where() -> None:
    class Broken:
        name = "broken"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            raise ZeroDivisionError("division\nby zero")

    [result] = run(tower(2), Broken()).passes
    assert result.reason.startswith("ZeroDivisionError: division by zero (test_pipeline.py, line ")


def test_report_as_json(tmp_path: Any) -> None:
    weights = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    model = tower()
    model.graph.put_initializer(weights)
    model.commit()
    model.save(tmp_path / "in.onnx")
    result = toolkit.optimize(tmp_path / "in.onnx", "dead")
    result.save(tmp_path / "out.onnx")
    report = result.to_json()
    assert report["input"]["path"] == str(tmp_path / "in.onnx")
    assert report["input"]["bytes"] == (tmp_path / "in.onnx").stat().st_size
    assert report["output"]["bytes"] == (tmp_path / "out.onnx").stat().st_size
    assert report["output"]["nodes"] == 2 * LAYERS + 1
    assert report["output"]["ops"] == {"Relu": LAYERS, "Mul": LAYERS, "Identity": 1}
    [entry] = report["passes"]
    assert {"name", "status", "rewrites", "seconds", "error", "reason"} <= set(entry)
    assert entry["status"] == "applied"


@pytest.mark.parametrize("validate", ["each", "off"])
def test_a_graph_that_hangs_in_the_air_is_never_kept(validate: str) -> None:
    class Cut:
        name = "cut"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            model.graph.set_inputs(model.graph.nodes[0], ["nowhere"])

    class Loop:
        name = "loop"
        tolerance = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            model.graph.set_inputs(model.graph.nodes[0], ["m1"])

    result = run(tower(2), Cut(), Loop(), validate=validate)
    assert [p.status for p in result.passes] == ["reverted", "reverted"]
    assert "'nowhere', which is not defined" in result.passes[0].reason
    assert "cycle" in result.passes[1].reason


def test_passes_know_the_opset_limit():
    seen: list[object] = []

    @dataclass(frozen=True)
    class Look:
        name: ClassVar[str] = "look"
        tolerance: ClassVar[Tolerance] = EXACT

        def run(self, model: Model, ctx: Context) -> None:
            seen.append(ctx.settings.opset)

    for limit in (None, 13, "keep"):
        toolkit.optimize(tower(), [Look()], validate="off", opset=limit)
    assert seen == [None, 13, "keep"]


@pytest.mark.parametrize("limit", [0, 27, "newest", 1.5, True])
def test_opset_limits_that_are_none(limit: Any):
    with pytest.raises(UsageError, match="opset"):
        toolkit.optimize(tower(), [], opset=limit)


def test_a_result_says_where_rewrites_were_made():
    x = var("x")

    @rewrite(op.Relu(x), name="relu-as-max")
    def relu_as_max(g, x):
        return g.op("Max", x, g.constant(np.zeros((), np.float32)))

    result = toolkit.optimize(tower(3), [relu_as_max], validate="off")
    assert result.passes[0].places == {"relu-as-max": ["r0", "r1", "r2"]}
    assert result.passes[0].rules == {"relu-as-max": 3}


@dataclass(frozen=True)
class Nudge:
    """Multiply a weight by 1 + `share`, once."""

    weight: str
    share: float
    tolerance: Tolerance
    name: str = "nudge"

    def run(self, model: Model, ctx: Context) -> None:
        graph = model.graph
        array = graph.const(self.weight)
        assert array is not None
        changed = np.asarray(array * np.float32(1 + self.share), np.float32)
        graph.put_initializer(numpy_helper.from_array(changed, self.weight))


def test_a_pass_answers_for_what_it_adds() -> None:
    """Behind a pass that moved the outputs by 2e-5, an exact one may still change nothing."""
    moved = Nudge("w1", 2e-5, FLOAT)
    result = run(tower(), moved, Nudge("w2", 1e-7, EXACT), Nudge("w3", 1e-5, EXACT))
    assert [done.status for done in result.passes] == ["applied", "applied", "reverted"]
    # Those that may do the same mathematics in another order share one allowance.
    result = run(tower(), *(Nudge(f"w{i}", 3e-5, FLOAT) for i in range(5)))
    assert [done.status for done in result.passes] == ["applied"] * 3 + ["reverted"] * 2


# Calibration data


@dataclass(frozen=True)
class Observing:
    """Writes what it is given into its context's notes, and moves the output by nothing."""

    name: str = "observing"
    tolerance: Tolerance = QUANT

    def run(self, model: Model, ctx: Context) -> None:
        assert ctx.calibration is not None
        assert ctx.reference is not None
        (made,) = ctx.reference.graph.nodes
        found = ctx.calibration.collect(ctx.reference, {made.output[0]: MinMax()})
        ctx.note(f"{made.op_type} reaches {found.range(made.output[0]).high:.0f}")


def doubled() -> Model:
    return Model.from_proto(
        parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[batch, 2] x) => (float[batch, 2] y) { y = Add(x, x) }
    """)
    )


def test_calibration_reaches_the_passes() -> None:
    model = doubled()
    feeds = [{"x": np.full((1, 2), value, np.float32)} for value in (1, 4, 3)]
    pipeline = Pipeline([Observing(), Observing()], calib=Calib(feeds))
    first, second = pipeline.run(model).passes
    assert first.notes == second.notes == ["Add reaches 8"]


def test_a_calibration_source_that_is_none() -> None:
    model = doubled()
    with pytest.raises(UsageError, match="does not exist"):
        Pipeline([Observing()], calib=Calib("nowhere.npz")).run(model)


@dataclass(frozen=True)
class Twice:
    """Double the output on purpose, and say that it is `told` times what it was, or by a call."""

    told: Any
    name: ClassVar[str] = "twice"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        graph = model.graph
        last = graph.producer("y")
        assert last is not None
        graph.begin("twice", last)
        graph.set_op(last, "Add")
        graph.set_inputs(last, [last.input[0], last.input[0]])
        times = self.told
        ctx.redefined["y"] = times if callable(times) else lambda feed, answer: times * answer


@pytest.mark.parametrize("validate", ["each", "final"])
def test_what_a_pass_redefines_is_proven_as_such(validate: Any) -> None:
    result = run(tower(), Twice(2.0), Spoil(()), validate=validate)
    assert [r.status for r in result.passes] == ["applied", "applied"]
    assert "redefined by a pass: 'y'" in result.proof


def test_what_is_not_as_redefined_is_reverted_as_a_whole() -> None:
    before = tower()
    result = run(before.copy(), Twice(3.0), Spoil(()))
    assert [r.status for r in result.passes] == ["reverted", "applied"]
    assert "off by" in result.passes[0].reason
    assert "has made of it" not in result.proof
    with pytest.raises(NotProven):
        run(before, Twice(3.0), validate="final")


def test_a_pass_behind_one_that_redefines_answers_for_its_own() -> None:
    result = run(tower(), Twice(2.0), Spoil(("m3",)))
    assert [r.status for r in result.passes] == ["applied", "applied"]
    assert [u.rule for u in result.passes[1].undone] == ["swap"]


def _boom(feed: Any, answer: Any) -> Any:
    raise ValueError("no such thing")


def _in_place(feed: Any, answer: Any) -> Any:
    for value in feed.values():
        value[:] = 0
    answer *= 2
    return answer


def test_a_redefinition_that_raises_is_a_pass_that_does_not_hold() -> None:
    result = run(tower(), Twice(_boom))
    assert [r.status for r in result.passes] == ["reverted"]
    expected = "output 'y' cannot be redefined: ValueError: no such thing"
    assert result.passes[0].reason == expected
    with pytest.raises(ToolkitError, match=expected):
        run(tower(), Twice(_boom), validate="final")


def test_a_redefinition_works_on_copies() -> None:
    """It is asked more than once, and what the original has answered is read by others."""
    result = run(tower(), Twice(_in_place), Spoil(("m3",)))
    assert result.passes[0].status == "applied"
    assert [u.rule for u in result.passes[1].undone] == ["swap"]
    assert "error 0.0e+00 as written, 0.0e+00 as deployed" in result.proof


def test_what_the_original_does_by_itself_is_redefined_too() -> None:
    """What it gives at places that are 0 now says nothing of the others."""
    before = tower()
    plain = Reference.of(before)
    assert plain.differences(Session(before), True, perturbed=True)["y"].relative > 0
    zeros = plain.redefined({"y": lambda feed, answer: 0 * answer})
    assert zeros.differences(Session(before), True, perturbed=True)["y"].relative == 0
    assert zeros.differences(Session(before, True), original=True)["y"].relative == 0
    assert zeros.differences(Session(before, True))["y"].relative > 0


class Quantized(Spoil):
    """What is evaluated from here on."""

    name: ClassVar[str] = "quantized"
    tolerance: ClassVar[Tolerance] = QUANT


@pytest.mark.parametrize("validate", ["each", "final"])
def test_outputs_are_redefined_before_anything_is_quantized(validate: Any) -> None:
    """What quantizing costs is told beside floats that are what they were."""
    result = run(tower(), Quantized(()), Twice(2.0), validate=validate)
    assert [r.status for r in result.passes] == ["applied", "reverted"]
    assert "before anything is quantized" in result.passes[1].reason
    result = run(tower(), Twice(2.0), Quantized(()), validate=validate)
    assert [r.status for r in result.passes] == ["applied", "applied"]
