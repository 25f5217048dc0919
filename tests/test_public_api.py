"""The public API as plain lists: a change here is a change that users notice (see CHANGELOG)."""

from __future__ import annotations

import typer.main

import passes
import toolkit
from toolkit.cli.app import app
from toolkit.pass_manager.registry import catalogue

PYTHON_NAMES = """
EXACT
FLOAT
QUANT
Calib
Context
Exported
Graph
MatchFailure
Miss
Model
ModelError
NotProven
Pass
PassResult
Pipeline
Result
Rule
Rules
SaveError
TensorType
Tolerance
ToolkitError
UsageError
const
explain
export
load
maybe_cast
number
op
optimize
optional
product
rewrite
total
var
verify
"""

PASSES = """
inline
constants
shapes
    annotate
fold
    max_bytes
branches
reshape
layout
cleanup
cse
share
    hoist_bytes
dead
opset
    to
    temporary
minimize-opset
    floor
fuse-activations
fuse-norms
fuse-arithmetic
fuse-conv
fuse-linear
fuse-rotary
fuse-attention
mask-outputs
    mask
rows
unpad
compact
    max_bytes
lower
    threads
    mask
legalize
    opset
smooth
    alpha
    insert
    include
    exclude
equalize
    slack
    rounds
    include
    exclude
clip-weights
    bits
    per_channel
    include
    exclude
quantize
    mode
    format
    observer
    weights
    reduce_range
    embeddings
    smooth
    correct_bias
    include
    exclude
    threads
    plan
quantize-dynamic
    per_channel
    reduce_range
    embeddings
    convolutions
    include
    exclude
    min_elements
    plan
quantize-static
    format
    observer
    percent
    activations
    symmetric
    weights
    per_channel
    reduce_range
    products
    ops
    include
    exclude
    min_elements
    plan
quantize-weights
    weights
    block_size
    symmetric
    method
    form
    accuracy_level
    act_order
    embeddings
    include
    exclude
    min_elements
    plan
fp16
    storage
    io
    keep
    min_elements
fp32
    io
correct-bias
    samples
onnxsim
onnxruntime
    level
"""

GROUPS = """
simplify
tidy
fuse
"""

PASS_CLASSES = """
Cleanup
ClipWeights
CommonSubexpressions
Compact
CorrectBias
Equalize
Float16
Float32
Fold
FuseActivations
FuseArithmetic
FuseAttention
FuseConv
FuseLinear
FuseNorms
FuseRotary
InlineBranches
InlineFunctions
Layout
Legalize
LiftConstants
Lower
MaskOutputs
MinimizeOpset
OnnxSim
Opset
OrtOptimizer
Quantize
QuantizeDynamic
QuantizeStatic
QuantizeWeights
RemoveDead
Reshape
Rows
Shapes
ShareInitializers
Smooth
Unpad
"""

COMMANDS = """
demo
    --out
explain
    --json
    --opset
    --passes
    --rule
    --runtime
    --target
    model
export
    --custom-ops
    --dynamic
    --example
    --exporter
    --external-data
    --framework
    --input-names
    --json
    --map
    --opset
    --output
    --output-names
    --passes
    --quantize
    --quiet
    --runtime
    --seed
    --task
    --tolerance
    --translate
    --trust-remote-code
    --weights
    -o
    -q
    source
inspect
    --custom-ops
    --json
    --runtime
    --top
    model
optimize
    --calib
    --calib-cache
    --calib-option
    --calib-samples
    --custom-ops
    --external-data
    --fix
    --freeze
    --html
    --json
    --max-drop
    --metric
    --no-measure
    --opset
    --output
    --passes
    --plan
    --prefer
    --quiet
    --runtime
    --sample
    --seed
    --target
    --time
    --tokenizer
    --validate
    -o
    -q
    model
passes
    --json
    name
sensitivity
    --calib
    --calib-cache
    --calib-option
    --calib-samples
    --compare
    --custom-ops
    --json
    --passes
    --seed
    --tokenizer
    --top
    model
targets
    --json
tune
    --json
    --seconds
    --show
    name
verify
    --custom-ops
    --json
    --sample
    --seed
    --time
    --tolerance
    other
    reference
"""


def test_python_names() -> None:
    assert toolkit.__all__ == PYTHON_NAMES.split()
    for name in toolkit.__all__:
        assert getattr(toolkit, name) is not None


def test_pass_names_and_options() -> None:
    found: list[str] = []
    for row in catalogue():
        if row.kind == "pass":
            found += [row.name, *(f"    {option.name}" for option in row.options)]
    assert found == PASSES.strip().splitlines()


def test_group_names() -> None:
    assert [row.name for row in catalogue() if row.kind == "group"] == GROUPS.split()


def test_pass_classes_are_imported_from_passes() -> None:
    assert sorted(dir(passes)) == sorted(["CATALOGUE", *PASS_CLASSES.split()])
    for name in PASS_CLASSES.split():
        assert isinstance(getattr(passes, name), type)


def test_commands_and_their_options() -> None:
    found: list[str] = []
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        options = sorted(text for parameter in command.params for text in parameter.opts)
        found += [name, *(f"    {option}" for option in options)]
    assert found == COMMANDS.strip().splitlines()
