"""`paceline report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from paceline.commands.flags import Argument, Flag, Verb


class ReportVerb(Verb):
    """Write a self-contained report about any number of runs.

    Write one self-contained page about runs: results, speed and what limits it, missing runs, machines and commands.
    """

    paths: Annotated[tuple[str, ...], Argument("DIR|RUN")]
    """Runs, or folders of runs."""
    out: Annotated[str | None, Flag("FILE", also=("-o",))] = None
    """Default: report.html, or report.md; - prints Markdown."""
    format: Literal["html", "md"] | None = None
    """Default: by the ending of --out, else html."""
    title: Annotated[str | None, Flag("TEXT")] = None
    """Default: the name of the folder."""
    timeline: Annotated[tuple[str, ...], Flag("DIR")] = ()
    """Folder of `launch --log`, to draw its timeline."""

    def run(self) -> int:
        from paceline.report.page import write_report

        paths, timelines = [Path(path) for path in self.paths], [Path(path) for path in self.timeline]
        written = write_report(paths, self.out, form=self.format, title=self.title, timelines=timelines)
        if written is not None:
            print(written)
        return 0
