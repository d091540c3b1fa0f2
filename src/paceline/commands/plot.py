"""`paceline plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from paceline.commands.flags import Argument, Flag, Verb


class PlotVerb(Verb):
    """Draw the return, losses, entropy and throughput of runs."""

    runs: Annotated[tuple[str, ...], Argument("RUN|DIR")]
    """Runs, or folders of runs."""
    smooth: Annotated[int, Flag("K", least=1)] = 1
    """Moving average over K rows."""
    output: Annotated[str, Flag("FILE", also=("-o",))]
    """A .png, .svg or .pdf file."""

    def run(self) -> int:
        from paceline.report.plots import plot_runs

        print(plot_runs([Path(run) for run in self.runs], Path(self.output), smooth=self.smooth))
        return 0
