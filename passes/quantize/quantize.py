"""The pass `quantize`: quantize the layers that get faster on the target, within the error budget.

Linear layers are dynamic. Convolutions are static if there are calibration data for their ranges;
otherwise they stay float. The options give a plan, which is reduced first to the layers that get
faster, by cost table and timing, then to the error budget, and then applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from passes.analysis.node_filter import NodeFilter
from passes.analysis.shapes import Shapes
from passes.opset.opset import Opset
from passes.quantize import options
from passes.quantize.apply_plan import apply_all
from passes.quantize.bias_correction.correct_bias import is_correctable
from passes.quantize.diagnostics import note_hard
from passes.quantize.layers.channel_means import input_means
from passes.quantize.layers.saturation import has_vnni, saturating
from passes.quantize.layers.unique_names import make_all_distinct
from passes.quantize.missing_kernels import leave_unsupported
from passes.quantize.preconditions import lower_for_qdq, may_not_lift, quantized_already
from passes.quantize.rescale.smooth import Smooth
from passes.quantize.schemes.dynamic.quantize_dynamic import DYNAMIC_OPSET, QuantizeDynamic
from passes.quantize.schemes.static.apply import STATIC_OPSET, Format
from passes.quantize.schemes.static.quantize_static import DEFAULT_OPS, QuantizeStatic
from passes.quantize.schemes.weight_only.quantize_weights import QuantizeWeights
from passes.quantize.search.candidate_eval import Trials, keeps_budget
from passes.quantize.search.costs import INT8_SHIPPED, TOPIC, Kernels
from passes.quantize.search.enforce_budget import enforce_budget
from passes.quantize.search.notes import note_fallbacks, note_what
from passes.quantize.search.paired_timing import keep_what_pays, keep_what_shrinks
from passes.quantize.search.problem import pointwise_problem, problem_of
from passes.quantize.search.range_search import with_least_noise
from passes.quantize.search.search import likely, search
from passes.quantize.search.value_shapes import sizes_on
from toolkit.calibrate.observers import ObserverName
from toolkit.errors import UsageError
from toolkit.ir import Model, node as nd
from toolkit.quantization.plan import Entry, Plan, as_applied
from toolkit.quantization.plan_json import read_plan
from toolkit.runtime.cost_table import Costs, Progress, costs_in_use
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

Mode = Literal["auto", "dynamic", "static", "weight_only"]
AnyObserver = Literal["auto", ObserverName]

_LINEAR = ("MatMul", "Gemm")
_CONVOLUTIONS = ("Conv", "ConvTranspose")


@dataclass(frozen=True, slots=True)
class Quantize:
    """Quantize to int8 where it is faster: linear layers dynamically, convolutions statically."""

    name: ClassVar[str] = "quantize"
    tolerance: ClassVar[Tolerance] = QUANT
    topic: ClassVar[str] = TOPIC
    mode: Mode = field(
        default="auto", metadata={"help": "auto: linear layers dynamic, convolutions static."}
    )
    format: Format = field(
        default="qdq",
        metadata={"help": "Static layers as Q/DQ pairs, or as integer operators."},
    )
    observer: AnyObserver = field(
        default="auto",
        metadata={"help": "The method for activation ranges; auto: the one with the least noise."},
    )
    weights: Literal["int8", "int4"] = field(
        default="int8", metadata={"help": "The type of weights; int4 with mode=weight_only."}
    )
    reduce_range: Literal["auto", "true", "false"] = field(
        default="auto",
        metadata={"help": "Weights in -64..64; auto: where this processor has no VNNI."},
    )
    embeddings: bool = field(default=True, metadata=options.EMBEDDINGS)
    smooth: bool = field(
        default=False,
        metadata={"help": "Move the scales of activations into weights first, see smooth."},
    )
    correct_bias: bool = field(
        default=True,
        metadata={"help": "Compensate mean errors of static layers in their biases."},
    )
    include: tuple[str, ...] = field(default=("*",), metadata=options.INCLUDE)
    exclude: tuple[str, ...] = field(default=(), metadata=options.EXCLUDE)
    threads: int = field(default=1, metadata={"help": "Threads to time with; 0: all cores."})
    plan: Path | Plan | None = field(default=None, metadata=options.PLAN)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise UsageError(f"quantize: threads={self.threads} is not valid: 0 or more")
        if self.weights == "int4" and self.mode != "weight_only":
            raise UsageError("quantize: weights=int4 is for mode=weight_only")
        if self.smooth and self.mode == "weight_only":
            raise UsageError("quantize: smooth is for activations, not for mode=weight_only")
        if self.observer != "auto" and self.mode in ("dynamic", "weight_only"):
            raise UsageError(
                f"quantize: observer={self.observer} is for static layers, not for mode={self.mode}"
            )
        if self.format == "qop" and self.mode in ("dynamic", "weight_only"):
            raise UsageError(f"quantize: format=qop is for static layers, not for mode={self.mode}")

    def run(self, model: Model, ctx: Context) -> None:
        start = model.journal.position
        if self.plan is not None:
            make_all_distinct(model)
            plan = read_plan(self.plan, model)
            options.note_beside_plan(self, ctx, "format", "correct_bias")
            Shapes(annotate=False).run(model, ctx)  # subgraph values are observed by their type
            trials = self._trials(model, plan, ctx)
            self._write(trials, enforce_budget(trials, plan, self.correct_bias), start)
            return
        if self.mode == "weight_only":
            self._weight_only().run(model, ctx)
            return
        reason = quantized_already(model)
        if reason:
            ctx.note(reason)
            return
        NodeFilter(self.include, self.exclude).note_idle(model, ctx)
        make_all_distinct(model)
        self._lift(model, ctx)
        if self.smooth:
            Smooth().run(model, ctx)
        Shapes(annotate=False).run(model, ctx)
        note_hard(model, ctx)
        plan = self.make_plan(model, ctx)
        trials = self._trials(model, plan, ctx)
        plan = leave_unsupported(trials, plan)
        if plan.quantized():
            plan = self._chosen(trials, plan)
        self._write(trials, plan, start)

    def _trials(self, model: Model, plan: Plan, ctx: Context) -> Trials:
        means = input_means(model, plan, ctx) if self.correct_bias else None
        write = partial(apply_all, form=self.format, means=means, known={})
        return Trials(model, ctx, write, self.threads)

    def _write(self, trials: Trials, plan: Plan, start: int) -> None:
        """Apply a plan and report the result; undo everything if no layer was quantized."""
        model, ctx = trials.model, trials.ctx
        trials.write(model, plan, ctx)
        done = as_applied(model, plan)
        ctx.report.plans.append(done)
        if not done.quantized():
            model.journal.undo_to(start)  # drop the opset lift, renamed outputs and smoothing
        if self.correct_bias and is_correctable(done, ctx):
            self._correct_biases(trials)
        note_what(done, plan, ctx)
        if done.quantized():
            self._note_saturation(model, ctx)

    def _correct_biases(self, trials: Trials) -> None:
        """Correct biases, if the error budget still holds.

        Correction lowers the error over all outputs, which may raise that of a single one.
        """
        model, ctx = trials.model, trials.ctx
        ctx.progress("correcting biases", 0.0)
        before = model.journal.position
        trials.corrections.make(model, ctx)
        if model.journal.position == before or ctx.evaluator is None:
            return
        if not keeps_budget(model, ctx.evaluator):
            model.journal.undo_to(before)
            ctx.note("biases stay: the budget does not hold with corrected ones")

    def _weight_only(self) -> QuantizeWeights:
        return QuantizeWeights(
            weights=self.weights,
            embeddings="int8" if self.embeddings else "float",
            include=self.include,
            exclude=self.exclude,
        )

    # -- the plan

    def make_plan(self, model: Model, ctx: Context) -> Plan:
        """Return a plan with everything that the options allow."""
        plan = Plan()
        if self.mode in ("auto", "dynamic"):
            plan = plan.merged(self._dynamic().make_plan(model, ctx.target))
        if self._plans_static(ctx):
            plan = plan.merged(self._static().make_plan(model, ctx))
        elif self.mode == "auto":
            plan = plan.merged(self._without_data(model, ctx))
        return plan

    def _plans_static(self, ctx: Context) -> bool:
        return self.mode == "static" or (self.mode == "auto" and ctx.calibration is not None)

    def _dynamic(self) -> QuantizeDynamic:
        return QuantizeDynamic(
            reduce_range=self._reduces(),
            embeddings=self.embeddings,
            include=self.include,
            exclude=self.exclude,
        )

    def _static(self) -> QuantizeStatic:
        excluded = () if self.mode == "static" else _LINEAR
        return QuantizeStatic(
            format=self.format,
            observer="minmax" if self.observer == "auto" else self.observer,
            reduce_range=self._reduces(),
            ops=tuple(op for op in DEFAULT_OPS if op not in excluded),
            include=self.include,
            exclude=self.exclude,
        )

    def _reduces(self) -> bool:
        if self.reduce_range == "auto":
            return has_vnni() is False
        return self.reduce_range == "true"

    def _chosen(self, trials: Trials, plan: Plan) -> Plan:
        """Return the part of the plan that is faster and within the error budget."""
        model, ctx = trials.model, trials.ctx
        feeds = trials.feeds()
        sizes = sizes_on(model, feeds[0]) if feeds else {}
        by_speed = ctx.target.has_costs and ctx.settings.prefer == "speed"
        kernels = Kernels.in_use() if by_speed else Kernels({})
        problem = problem_of(model, plan, sizes, kernels)
        pointwise = pointwise_problem(model, plan, sizes, kernels) if by_speed else None
        if self.observer == "auto":
            tried = likely(trials, problem, pointwise)
            problem = with_least_noise(trials, problem, tried)
            pointwise = pointwise and replace(
                pointwise, plan=replace(pointwise.plan, tensors=problem.plan.tensors)
            )
        found = search(trials, problem, self.correct_bias, pointwise)
        note_fallbacks(found, trials, ctx)
        kept = found.plan
        if ctx.settings.prefer == "size":
            kept = keep_what_shrinks(trials, kept)
        kept = keep_what_pays(trials, kept)
        if kept == found.plan or trials.holds(kept):
            return kept
        # The removed layers had corrected biases, which compensated errors of the others.
        by_themselves = any(entry.float_result for entry in kept.quantized())
        make = pointwise_problem if by_themselves else problem_of
        left = make(model, kept, sizes, kernels) or problem
        found = search(trials, left, self.correct_bias)
        note_fallbacks(found, trials, ctx)
        return found.plan

    def _lift(self, model: Model, ctx: Context) -> None:
        """Upgrade to the opset that the schemes need, or as far as possible.

        Layers for which the reached opset suffices are quantized then.
        """
        needed = STATIC_OPSET if self._plans_static(ctx) else DYNAMIC_OPSET
        reason = may_not_lift(model, ctx, self.name, needed)
        if reason:
            raise UsageError(reason)
        if model.opsets.get("", 1) < needed:
            Opset(to=needed).run(model, ctx)
        convolves = any(nd.is_op(node, *_CONVOLUTIONS) for node in model.nodes())
        if self._plans_static(ctx) and (convolves or self.mode == "static"):
            lower_for_qdq(model, ctx)

    # -- costs, for `toolkit tune`

    def costs_in_use(self) -> tuple[Costs, str]:
        """Return the cost table in use, and its origin."""
        return costs_in_use(INT8_SHIPPED, TOPIC)

    def measure(self, progress: Progress, seconds: float) -> Costs:
        """Measure the costs on this machine."""
        from passes.lower.measure import measure
        from passes.quantize.search.int8_kernels import INT8_COMPUTATIONS

        return measure(progress, seconds, (1,), INT8_COMPUTATIONS)

    # -- notes

    def _without_data(self, model: Model, ctx: Context) -> Plan:
        """Return a plan with all convolutions in float, and note how many samples would help."""
        sites, left = self._static().candidates(model)
        count = sum(nd.is_op(site.node, *_CONVOLUTIONS) for site in sites)
        if count:
            many = f"{count} convolutions stay float: their"
            what = "1 convolution stays float: its" if count == 1 else many
            ctx.note(f"{what} int8 ranges need samples, name some with --calib SOURCE")
        stay = [node for node in model.nodes() if id(node) in left]
        return Plan(tuple(Entry.of(node, reason=left[id(node)]) for node in stay))

    def _note_saturation(self, model: Model, ctx: Context) -> None:
        if self._reduces():
            if self.reduce_range == "auto":
                ctx.note("weights are in -64..64, since this processor has no VNNI")
            return
        layers = saturating(model)
        if not layers:
            return
        where = "this one has none" if has_vnni() is False else "this one has it"
        known = f" ({where})" if has_vnni() is not None else ""
        sums = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        ctx.note(
            f"int8 sums of {sums} may overflow on x86 processors without VNNI{known}; for those: "
            "quantize:reduce_range=true"
        )
