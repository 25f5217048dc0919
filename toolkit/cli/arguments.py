"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import UsageError
from toolkit.settings import OpsetLimit

NO_VALUE = ""
"""What stands for a flag's value in the help: typer would show `<bool>`."""

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")]
Samples = Annotated[
    list[Path] | None,
    typer.Option(
        "--sample",
        metavar="FILE.npz",
        help="Real inputs to compare with: arrays by input name. May be repeated.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the inputs that are made up.")]
CustomOps = Annotated[
    list[Path] | None,
    typer.Option(
        "--custom-ops",
        metavar="LIB",
        help="A library of custom operators for onnxruntime. May be repeated.",
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write a report as JSON; - is standard output."),
]


ExternalData = Annotated[
    bool,
    typer.Option(
        "--external-data", metavar=NO_VALUE, help="Write the weights to a file beside the model."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar=NO_VALUE, help="Print only errors.")]
Opset = Annotated[
    str | None,
    typer.Option(
        metavar="N|keep",
        help="The newest opset that passes may lift the model to; keep lifts it not at all.",
    ),
]


def opset_limit(given: str | None) -> OpsetLimit:
    """What --opset says; whether there is such an opset is for the pipeline to know."""
    if given is None or given == "keep":
        return given
    try:
        return int(given)
    except ValueError as error:
        raise UsageError(f"--opset '{given}' is not valid: a number, or keep") from error


def libraries(paths: list[Path] | None) -> tuple[str, ...]:
    """The custom-operator libraries, which must be files: the loader's own message is obscure."""
    for path in paths or ():
        if not path.is_file():
            raise UsageError(f"--custom-ops '{path}' is not a file: name a shared library")
    return tuple(str(path.resolve()) for path in paths or ())
