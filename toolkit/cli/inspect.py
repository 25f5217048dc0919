"""`toolkit inspect`: show a model's contents, and why it does not run."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli import arguments as args
from toolkit.cli.inputs import read_model, require_apart
from toolkit.cli.outputs import JsonReport


def inspect(
    model: args.ModelPath,
    top: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many of the largest tensors to list.")
    ] = 10,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Name what this onnxruntime release lacks, as in 1.18."
        ),
    ] = None,
    custom_ops: args.CustomOps = None,
    json_file: args.JsonFile = None,
) -> None:
    """Show inputs, outputs, opsets, operators and weights, and what does not run and why."""
    report = JsonReport(json_file)
    report.side_file.require()

    from toolkit.inspection import inspect as look
    from toolkit.report.console import console
    from toolkit.report.facts import print_facts

    loaded = read_model(model)
    require_apart(report.files, [loaded], None, custom_ops)
    facts = look(loaded, args.libraries(custom_ops), runtime)
    report.write(facts.to_json())
    if not report.on_stdout:
        print_facts(console(), facts, top)
