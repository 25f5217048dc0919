"""All that `toolkit optimize` writes: the model, and what was asked for besides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli.output_file import JsonReport, OutputFile, SideFile, joined
from toolkit.storage.atomic_write import require_writable, sidecar_of

if TYPE_CHECKING:
    from toolkit.ir.model import Model
    from toolkit.pass_manager.result import Result

_MAY_NEED_A_SIDECAR = 1 << 30
"""Bytes of weights from which on a model may come to exceed what fits into one file (2 GiB)."""


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where the model goes, with or without a data file of its own, the reports and the plan."""

    model: Path
    external_data: bool
    report: JsonReport
    plan: SideFile
    page: SideFile

    def require(self) -> None:
        """Raise unless all of it can be written, each to a file of its own."""
        models = self._models(self.external_data)
        for file in models:
            require_writable(file.path)
        self.report.require(self.model)
        taken = [*models, *self.report.files]
        for side in (self.plan, self.page):
            side.require_apart(taken)
            taken += side.files

    def files(self, loaded: Model) -> list[OutputFile]:
        """The files that may appear, for what is known of the model."""
        sidecar = self.external_data or loaded.nbytes() >= _MAY_NEED_A_SIDECAR
        return [
            *self._models(sidecar),
            *self.report.files,
            *self.plan.files,
            *self.page.files,
        ]

    def _models(self, sidecar: bool) -> list[OutputFile]:
        data = [OutputFile("the output's data file", sidecar_of(self.model))] if sidecar else []
        return [OutputFile("the output", self.model), *data]

    def write(
        self, result: Result, told: dict[str, Any], opsets: tuple[int | None, int | None]
    ) -> None:
        """Write the reports, so that they cannot fail once the model is there; then the model."""
        from toolkit.report.html import page

        with (
            self.plan.staged(lambda: joined(result.plans)),
            self.page.staged(lambda: page(told, opsets)),
            self.report.staged(told),
        ):
            result.save(self.model, self.external_data)

    def write_failure(self, told: dict[str, Any]) -> None:
        """The reports of a run that wrote no model."""
        from toolkit.report.html import page

        with self.page.staged(lambda: page(told)):
            self.report.write(told)
