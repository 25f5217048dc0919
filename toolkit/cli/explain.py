"""`toolkit explain`: show what fused in a model, and why the rest did not."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from toolkit.cli import arguments as args
from toolkit.cli.inputs import read_model, require_apart
from toolkit.cli.outputs import JsonReport
from toolkit.targets import DEFAULT_TARGET


def explain(
    model: args.ModelPath,
    rule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show only this rule and its variants, as in attention."),
    ] = None,
    passes: Annotated[
        str,
        typer.Option(metavar="PASSES", help="Passes in order; `toolkit passes` lists them."),
    ] = "fuse",
    target: args.TargetName = DEFAULT_TARGET,
    runtime: args.Runtime = None,
    opset: args.Opset = None,
    json_file: args.JsonFile = None,
) -> None:
    """Show what fused and, for the rest, the nearest rule and why it does not match.

    The passes run without verification on a copy in memory: no model is written.
    """
    report = JsonReport(json_file)
    report.side_file.require()

    from toolkit.explanation import explain_passes
    from toolkit.pass_manager.registry import parse_passes
    from toolkit.report.console import console
    from toolkit.report.explanation import print_explanation

    with redirect_stdout(sys.stderr):  # the output of a user's pass is not part of the report
        parsed = parse_passes(passes)
        limit = args.opset_limit(opset)
        loaded = read_model(model)
        require_apart(report.files, [loaded], None, None)
        found = explain_passes(loaded, parsed, rule, target, limit, runtime)
    report.write(found.to_json())
    if not report.on_stdout:
        print_explanation(console(), found)
