"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import UsageError
from toolkit.settings import OpsetLimit
from toolkit.targets import target_names

NO_VALUE = ""
"""The metavar of a flag: nothing, where typer would show `<bool>`."""

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")]
Samples = Annotated[
    list[Path] | None,
    typer.Option(
        "--sample",
        metavar="FILE.npz",
        help="Real inputs to compare on: arrays by input name. Repeatable.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the synthetic inputs.")]
CustomOps = Annotated[
    list[Path] | None,
    typer.Option(
        "--custom-ops",
        metavar="LIB",
        help="A library of custom operators for onnxruntime. Repeatable.",
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Write the report as JSON; - is standard output."
    ),
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
        help="The newest opset that the result may need; keep: leave the opset as it is.",
    ),
]

TargetName = Annotated[
    str,
    typer.Option(
        metavar="|".join(target_names()),
        help="The runtime to optimize for; onnx: use standard operators only.",
    ),
]

Runtime = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION",
        help="The oldest onnxruntime that must load and run the result, as in 1.18.",
    ),
]


def opset_limit(given: str | None) -> OpsetLimit:
    """Parse --opset; the pipeline checks that the opset exists."""
    if given is None or given == "keep":
        return given
    try:
        return int(given)
    except ValueError as error:
        raise UsageError(f"--opset '{given}' is not valid: write a number, or keep") from error


def libraries(paths: list[Path] | None) -> tuple[str, ...]:
    """Return the absolute paths of custom-operator libraries.

    Raise UsageError for one that is not a file: the loader's own message is obscure.
    """
    for path in paths or ():
        if not path.is_file():
            raise UsageError(f"--custom-ops '{path}' is not a file: name a shared library")
    return tuple(str(path.resolve()) for path in paths or ())
