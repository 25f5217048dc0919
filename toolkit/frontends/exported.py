"""Exported: proven graphs and their companion files, ready to save or to optimize."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import SaveError, UsageError
from toolkit.frontends.protocol import Case, Failure
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.scratch import Scratch
from toolkit.ir.model import Model
from toolkit.ir.signature import describe_value
from toolkit.storage import serialize
from toolkit.storage.atomic_write import require_writable, same_file, write_files
from toolkit.targets import DEFAULT_TARGET
from toolkit.verification.framework import Proof

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Pass, Progress
    from toolkit.pass_manager.result import Result

_SAMPLES = 4
"""The number of test inputs of the export proof on which later passes are verified too."""


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """One graph, proven against its framework.

    `failures` are the earlier attempts; `optimized` is the result of running passes, proven against
    the graph as exported.
    """

    name: str
    model: Model
    proof: Proof
    exporter: str
    dynamic: Axes
    cases: tuple[Case, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    optimized: Result | None = None

    @property
    def result(self) -> Model:
        """The graph to deploy: the optimized one if passes ran."""
        return self.model if self.optimized is None else self.optimized.model

    def to_json(self) -> dict[str, Any]:
        graph = self.result.graph
        return {
            "name": self.name,
            "exporter": self.exporter,
            "tried": [{"exporter": f.exporter, "reason": f.reason} for f in self.failures],
            "opset": self.result.opsets.get("", 0),
            "nodes": self.result.node_count(),
            "inputs": [describe_value(self.result, name) for name in graph.feeds],
            "outputs": [describe_value(self.result, name) for name in graph.outputs],
            "dynamic": {
                n: {str(a): d for a, d in axes.items()} for n, axes in self.dynamic.items()
            },
            "proof": self.proof.to_json(),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "optimized": None if self.optimized is None else self.optimized.to_json(),
        }


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SaveError(f"cannot create the folder '{folder}': {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of `export`.

    Weights and companions are in a scratch folder, deleted with the last reference to this object
    and its models.
    """

    graphs: Mapping[str, ExportedGraph]
    framework: str
    request: Request
    companions: Mapping[str, Path] = field(default_factory=dict[str, Path])
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    scratch: Scratch | None = field(default=None, repr=False)

    @property
    def only(self) -> ExportedGraph:
        """The single graph; raises UsageError if there are several."""
        if len(self.graphs) != 1:
            raise UsageError(
                f"there are {len(self.graphs)} graphs ({', '.join(self.graphs)}): name one of them"
            )
        return next(iter(self.graphs.values()))

    @property
    def model(self) -> Model:
        """The model of the single graph."""
        return self.only.result

    def to_bytes(self, name: str | None = None) -> bytes:
        """Serialize a graph, with all weights, as one ModelProto."""
        graph = self.only if name is None else self.graphs[name]
        chunks = serialize.inflate(graph.result.to_proto(), graph.result.weights)
        if serialize.size_of(chunks) >= serialize.PROTOBUF_LIMIT:
            raise UsageError("the model exceeds protobuf's limit of 2 GiB: save it to a file")
        return b"".join(chunks)

    def files(self, path: str | os.PathLike[str]) -> dict[str, Path]:
        """Return the path at which `save` writes each graph.

        A single graph is written to `path`, or as `model.onnx` if `path` is a folder; several
        graphs are written into the folder `path`.
        """
        folder = os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir()
        path = Path(path)
        if len(self.graphs) == 1 and not folder:
            return dict.fromkeys(self.graphs, path)
        if path.suffix == ".onnx" and not folder:
            raise SaveError(
                f"'{path}' is one file, but there are {len(self.graphs)} graphs "
                f"({', '.join(self.graphs)}): name a folder"
            )
        return {name: path / f"{name}.onnx" for name in self.graphs}

    def save(self, path: str | os.PathLike[str], external_data: bool = False) -> list[Path]:
        """Write the graphs and their companion files; return the paths.

        A companion replaces a different file only if an earlier export wrote to the same place.
        """
        places = self.files(path)
        folder = next(iter(places.values())).parent
        if folder != Path(path).parent:  # a folder for the graphs, perhaps a new one
            _make_folder(folder)
        companions = {
            folder / name: source
            for name, source in self.companions.items()
            if not same_file(folder / name, source)
        }
        again = all(place.exists() for place in places.values())
        for inner in {target.parent for target in companions} - {folder}:  # such as 1_Pooling/
            _make_folder(inner)
        for place in (*places.values(), *companions):
            require_writable(place)
        for target, source in companions.items():
            if target.exists() and not again and target.read_bytes() != source.read_bytes():
                raise SaveError(
                    f"'{target}' already exists and differs: export to a folder of its own, as in "
                    "-o exported/"
                )
        if companions:
            write_files({target: [source.read_bytes()] for target, source in companions.items()})
        for name, place in places.items():
            self.graphs[name].result.save(place, external_data)
        return [*places.values(), *companions]

    def optimize(
        self,
        passes: str | Sequence[Pass | str],
        target: str = DEFAULT_TARGET,
        progress: Callable[[Progress], None] | None = None,
        runtime: str | None = None,
    ) -> Exported:
        """Run passes on every graph, verified against the graph as exported.

        Test inputs of the export proof serve as samples. A requested opset is kept. `runtime` is
        the oldest onnxruntime that must load and run the result.
        """
        from toolkit.api import optimize

        done: dict[str, ExportedGraph] = {}
        for name, graph in self.graphs.items():
            result = optimize(
                graph.result,
                passes,
                target,
                runtime=runtime,
                opset=self.request.opset,
                samples=[
                    {n: v for n, v in case.feed.items() if n in graph.result.graph.inputs}
                    for case in graph.cases[:_SAMPLES]
                ],
                seed=self.request.seed,
                custom_ops=self.request.custom_ops,
                progress=progress,
            )
            done[name] = replace(graph, optimized=result)
        return replace(self, graphs=done)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for `json.dump`."""
        return {
            "framework": self.framework,
            "graphs": [graph.to_json() for graph in self.graphs.values()],
            "companions": sorted(self.companions),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }
