"""`toolkit passes`: list the catalogue, or show one pass in detail."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from toolkit.cli.arguments import NO_VALUE


def passes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this pass or group in detail.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=NO_VALUE, help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """List the passes and groups that --passes takes, with their options."""
    from toolkit.pass_manager.registry import catalogue, find
    from toolkit.report.catalogue import print_catalogue, print_pass
    from toolkit.report.console import console

    chosen = catalogue() if name is None else [find(name)]
    if as_json:
        data = [dataclasses.asdict(row) for row in chosen]
        typer.echo(json.dumps(data if name is None else data[0], indent=2))
    elif name is None:
        print_catalogue(console(), chosen)
    else:
        print_pass(console(), chosen[0])
