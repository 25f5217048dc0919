"""Exported: proven graphs with the files that belong beside them, ready to save or to optimize."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import SaveError, UsageError
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import Case, Failure
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.scratch import Scratch
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import dtype_name
from toolkit.storage import serialize
from toolkit.storage.atomic_write import require_writable, same_file, write_files
from toolkit.targets import DEFAULT_TARGET
from toolkit.verification.framework import Proof

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Pass, Progress
    from toolkit.pass_manager.result import Result

_SAMPLES = 4
"""Of the inputs that the export was proven with, so many also judge the passes after it."""


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """One graph, as it was proven against its framework.

    `failures` are the ways that were tried before and why they were given up; `optimized` is what
    passes made of it, with a proof of its own against the graph as exported.
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
        """The graph to deploy: optimized where passes ran."""
        return self.model if self.optimized is None else self.optimized.model

    def to_json(self) -> dict[str, Any]:
        graph = self.result.graph
        return {
            "name": self.name,
            "exporter": self.exporter,
            "tried": [{"exporter": f.exporter, "reason": f.reason} for f in self.failures],
            "opset": self.result.opsets.get("", 0),
            "nodes": self.result.node_count(),
            "inputs": [_value(self.result, name) for name in graph.feeds],
            "outputs": [_value(self.result, name) for name in graph.outputs],
            "dynamic": {
                n: {str(a): d for a, d in axes.items()} for n, axes in self.dynamic.items()
            },
            "proof": self.proof.to_json(),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "optimized": None if self.optimized is None else self.optimized.to_json(),
        }


def _taken(feed: Feed, model: Model) -> Feed:
    """The feed without inputs that the graph does not have."""
    return {name: value for name, value in feed.items() if name in model.graph.inputs}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SaveError(f"cannot make the folder '{folder}': {error.strerror}") from error


def _value(model: Model, name: str) -> dict[str, Any]:
    declared = model.graph.type(name)
    if declared is None:
        return {"name": name, "type": None, "shape": None}
    shape = None
    if declared.shape is not None:
        shape = [size if isinstance(size, int) else str(size) for size in declared.shape]
    return {"name": name, "type": dtype_name(declared.dtype), "shape": shape}


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` hands back.

    Weights and companions lie in a scratch folder, which goes with the last of this and its models.
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
        """The graph, where there is one; UsageError where there are several."""
        if len(self.graphs) != 1:
            raise UsageError(
                f"there are {len(self.graphs)} graphs ({', '.join(self.graphs)}): name one of them"
            )
        return next(iter(self.graphs.values()))

    @property
    def model(self) -> Model:
        """The one graph's model, to go on with."""
        return self.only.result

    def to_bytes(self, name: str | None = None) -> bytes:
        """The model as one serialized ModelProto, with all weights inside."""
        graph = self.only if name is None else self.graphs[name]
        chunks = serialize.inflate(graph.result.to_proto(), graph.result.weights)
        if serialize.size_of(chunks) >= serialize.PROTOBUF_LIMIT:
            raise UsageError("the model is over 2 GiB, which no protobuf holds: save it to a file")
        return b"".join(chunks)

    def files(self, path: str | os.PathLike[str]) -> dict[str, Path]:
        """Where `save` puts each graph: one graph at `path`, several in the folder `path`.

        One graph in a folder is called `model.onnx`.
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
        """Write the graphs, and beside them the files that belong to them; returns all of them.

        A companion never replaces a file that is not of an earlier export to the same place.
        """
        places = self.files(path)
        folder = next(iter(places.values())).parent
        if folder != Path(path).parent:  # a folder of the model's own, which may be new
            _make_folder(folder)
        companions = {
            folder / name: source
            for name, source in self.companions.items()
            if not same_file(folder / name, source)
        }
        again = all(place.exists() for place in places.values())
        for inner in {target.parent for target in companions} - {folder}:  # as of 1_Pooling/
            _make_folder(inner)
        for place in (*places.values(), *companions):
            require_writable(place)
        for target, source in companions.items():
            if target.exists() and not again and target.read_bytes() != source.read_bytes():
                raise SaveError(
                    f"'{target}' is there and differs from the model's own: name a folder for "
                    "the model alone, as in -o exported/"
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
    ) -> Exported:
        """The same with passes run over every graph, proven against the graph as exported.

        The inputs that the export was proven with judge them too. An opset that was asked for is
        kept.
        """
        from toolkit.api import optimize

        done: dict[str, ExportedGraph] = {}
        for name, graph in self.graphs.items():
            result = optimize(
                graph.result,
                passes,
                target,
                opset=self.request.opset,
                samples=[_taken(case.feed, graph.result) for case in graph.cases[:_SAMPLES]],
                seed=self.request.seed,
                custom_ops=self.request.custom_ops,
                progress=progress,
            )
            done[name] = replace(graph, optimized=result)
        return replace(self, graphs=done)

    def to_json(self) -> dict[str, Any]:
        """The report, as plain data for `json.dump`."""
        return {
            "framework": self.framework,
            "graphs": [graph.to_json() for graph in self.graphs.values()],
            "companions": sorted(self.companions),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }
