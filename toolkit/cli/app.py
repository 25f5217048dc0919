"""The application: its subcommands and global options.

Command modules import onnx, onnxruntime and the like inside their functions, so that
`toolkit --help` stays instant.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from toolkit import __version__
from toolkit.cli.arguments import NO_VALUE
from toolkit.cli.demo import demo
from toolkit.cli.explain import explain
from toolkit.cli.export import export
from toolkit.cli.inspect import inspect
from toolkit.cli.optimize import optimize
from toolkit.cli.passes import passes
from toolkit.cli.sensitivity import sensitivity
from toolkit.cli.targets import targets
from toolkit.cli.tune import tune
from toolkit.cli.verify import verify


class _Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> TyperOption | None:
        return _without_value(super().get_help_option(ctx))


class _CommandGroup(TyperGroup):
    def get_help_option(self, ctx: Any) -> TyperOption | None:
        return _without_value(super().get_help_option(ctx))


def _without_value(option: TyperOption | None) -> TyperOption | None:
    """Show the option --help without a value."""
    if option is not None:
        option.metavar = NO_VALUE
    return option


app = typer.Typer(
    name="toolkit",
    cls=_CommandGroup,
    help="Make ONNX models smaller and faster; every pass is verified against the original.",
    epilog="To start: toolkit optimize model.onnx --passes fuse --time",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

# In the order of the help.
for _command in (
    *(optimize, export, explain, inspect, verify),
    *(sensitivity, passes, targets, tune, demo),
):
    app.command(cls=_Command)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"toolkit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar=NO_VALUE,
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Accept the global options; --version is handled by its callback."""
