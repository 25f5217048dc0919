"""`toolkit export`: export a framework's model to ONNX, and prove the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from toolkit.cli import arguments as args
from toolkit.cli.interrupts import Interrupted
from toolkit.cli.outputs import JsonReport, model_files
from toolkit.errors import NotProven, UsageError
from toolkit.storage.atomic_write import require_writable, same_file
from toolkit.targets.releases import find_release

if TYPE_CHECKING:
    from toolkit.frontends.exported import Exported
    from toolkit.frontends.operator_map import OperatorMap
    from toolkit.frontends.request import Request

_QUANTIZE = "quantize"


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="module:factory or ./file.py:factory (returns a model, or a model and its "
            "example); a checkpoint folder or .gguf; a .pt2 or TorchScript file; a .keras, .h5 or "
            ".tflite file; a SavedModel folder.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where to write; a folder if there are several."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help="The task of a checkpoint, as in pooling.")
    ] = None,
    example: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.npz|SPEC",
            help="Example inputs: arrays, or types as in x=float32[1,10]. Repeatable.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weights to load: safetensors or a state_dict."),
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXES",
            help="Dynamic axes, as in input:0=batch,1=sequence, or none. Repeatable.",
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option(metavar="N", help="The opset of the exported model.")
    ] = None,
    runtime: args.Runtime = None,
    exporter: Annotated[
        str,
        typer.Option(
            metavar="auto|dynamo|torchscript",
            help="PyTorch's exporter; auto: dynamo, then TorchScript if that fails.",
        ),
    ] = "auto",
    input_names: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names for the inputs, in order.")
    ] = None,
    output_names: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names for the outputs, in order.")
    ] = None,
    translate: Annotated[
        str | None,
        typer.Option(
            metavar="module:table",
            help="Translations of operators: a dict of operator to function or CustomOp.",
        ),
    ] = None,
    custom_ops: args.CustomOps = None,
    passes: Annotated[
        str | None,
        typer.Option(metavar="PASSES", help="Passes to run on the result, as in fuse,quantize."),
    ] = None,
    quantize: Annotated[
        bool,
        typer.Option("--quantize", metavar=args.NO_VALUE, help=f"Append {_QUANTIZE} to --passes."),
    ] = False,
    show_map: Annotated[
        bool,
        typer.Option(
            "--map",
            metavar=args.NO_VALUE,
            help="Show which ONNX nodes each module and operator became.",
        ),
    ] = False,
    framework: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The front end, if several fit the source."),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            metavar=args.NO_VALUE,
            help="Run the Python code that comes with a checkpoint.",
        ),
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(metavar="X", help="Largest error allowed, relative to an output's scale."),
    ] = 1e-4,
    seed: args.Seed = 0,
    external_data: args.ExternalData = False,
    json_file: args.JsonFile = None,
    quiet: args.Quiet = False,
) -> None:
    """Export a model to ONNX and prove the graph against the framework at several sizes."""
    _require_output(output, source, show_map)
    report = JsonReport(json_file)
    report.side_file.require(model_files(Path(output), sidecar=True) if output else ())
    shown = not quiet and not report.on_stdout
    listed = ",".join(filter(None, [passes, _QUANTIZE if quantize else None]))
    if runtime is not None:
        find_release(runtime)  # reports an unknown version before the export starts
        listed = listed or "legalize"

    with _progress(shown) as progress, redirect_stdout(sys.stderr):
        from toolkit.frontends.examples import read_examples
        from toolkit.frontends.request import Request, parse_dynamic

        if listed:
            from toolkit.pass_manager.registry import parse_passes

            parse_passes(listed)  # reports a misspelled pass before the export starts
        request = Request(
            task=task,
            framework=framework,
            exporter=cast("Any", exporter),
            opset=opset,
            input_names=_names(input_names),
            output_names=_names(output_names),
            dynamic=parse_dynamic(dynamic or ()),
            example=read_examples(example or (), seed),
            weights=weights,
            translations=_table(translate),
            custom_ops=args.libraries(custom_ops),
            trust_remote_code=trust_remote_code,
            seed=seed,
            tolerance=tolerance,
            progress=progress,
        )
        try:
            exported = _exported(source, request, listed, runtime)
        except NotProven as error:
            report.write({"output": None, "error": str(error)})
            raise
        maps = _maps(exported, request) if show_map else {}
    _finish(exported, maps, output, external_data, report, shown)


def _exported(source: str, request: Request, passes: str, runtime: str | None) -> Exported:
    from toolkit.frontends.export import export_request

    exported = export_request(source, request)
    if not passes:
        return exported
    request.progress("optimizing")
    return exported.optimize(
        passes,
        progress=lambda where: request.progress(f"{where.name}: {where.stage}".strip(": ")),
        runtime=runtime,
    )


def _maps(exported: Exported, request: Request) -> dict[str, OperatorMap]:
    from toolkit.frontends.operator_map import map_operators

    request.progress("mapping nodes to modules")
    return {
        name: map_operators(graph.model, request.custom_ops)
        for name, graph in exported.graphs.items()
    }


def _finish(
    exported: Exported,
    maps: Mapping[str, OperatorMap],
    output: str | None,
    external_data: bool,
    report: JsonReport,
    shown: bool,
) -> None:
    """Write the model and the report, then print the report."""
    from toolkit.report.console import console, line
    from toolkit.report.exported import print_exported, print_map

    files = [] if output is None else [str(path) for path in exported.files(output).values()]
    data = {**exported.to_json(), "output": files or None}
    if maps:
        data["map"] = {name: found.to_json() for name, found in maps.items()}
    written: list[Path] = []
    try:
        with report.staged(data):
            if output is not None:
                written = exported.save(output, external_data)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(f"'{output}' is complete or as it was before") from interrupt
    if shown:
        out = console()
        for name, found in maps.items():
            if len(maps) > 1:
                out.rule(name, align="left", characters="-")
            print_map(out, found)
        print_exported(out, exported)
        if written:
            line(out, "written", ", ".join(str(p) for p in written[: len(exported.graphs)]))


def _require_output(output: str | None, source: str, show_map: bool) -> None:
    """Raise, before the work starts, unless the output can be written."""
    if source.endswith(".onnx"):
        raise UsageError(f"'{source}' is an ONNX model already: use toolkit optimize")
    if output is None:
        if not show_map:
            raise UsageError("-o FILE is missing: say where to write the model")
        return
    if output == "-":
        raise UsageError("-o - is not possible: a model is written to a file")
    path = Path(output)
    if Path(source).is_file() and same_file(path, Path(source)):
        raise UsageError(f"the output '{output}' is the source: name another file to write")
    if not output.endswith("/") and not path.is_dir():
        require_writable(path)


def _names(given: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",")) if given else ()


def _table(address: str | None) -> dict[Any, Any]:
    """Load the user's table of translations, or call the function that returns it."""
    if address is None:
        return {}
    from toolkit.frontends.select import build
    from toolkit.user_code import object_at

    found = object_at(address)
    table = cast("Any", found) if isinstance(found, Mapping) else build(found, address)
    if not isinstance(table, Mapping):
        raise UsageError(f"--translate {address} is a {type(table).__name__}, not a dict")
    return dict(cast("Mapping[Any, Any]", table))


@contextmanager
def _progress(wanted: bool) -> Generator[Callable[[str], None]]:
    """Show the current step on standard error, on a terminal only."""
    from toolkit.report.console import console

    out = console(stderr=True)
    if not wanted or not out.is_terminal:
        yield lambda _: None
        return
    with out.status("loading") as status:
        yield status.update
