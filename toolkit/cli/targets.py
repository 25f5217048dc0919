"""`toolkit targets`: list the runtimes that a model can be written for."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from toolkit.cli.arguments import NO_VALUE


def targets(
    as_json: Annotated[
        bool, typer.Option("--json", metavar=NO_VALUE, help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """List the runtimes that --target takes, and the onnxruntime releases that --runtime takes."""
    from toolkit.report.console import console
    from toolkit.report.targets import print_targets
    from toolkit.targets import find_target, target_names
    from toolkit.targets.releases import releases, runtime_version

    found = [find_target(name) for name in target_names()]
    if as_json:
        data = {
            "targets": [target.to_json() for target in found],
            "releases": [release.to_json() for release in releases()],
            "installed": runtime_version(),
        }
        typer.echo(json.dumps(data, indent=2))
    else:
        print_targets(console(), found)
