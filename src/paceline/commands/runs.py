"""`paceline runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from paceline.commands.flags import Argument, Verb

DEFAULT = "runs"


class RunsVerb(Verb):
    """List runs: algorithm, environment, state, steps, return and age.

    List the runs below a folder, the most recent first. Running, finished, failed and interrupted ones are told apart.
    """

    folder: Annotated[str | None, Argument("FOLDER")] = None
    """A folder of runs, or a run (default: runs)."""
    json: bool = False
    """Print a JSON list instead of a table."""

    def run(self) -> int:
        import json

        from paceline.results.run_table import render, run_rows

        if self.folder is None and not Path(DEFAULT).exists():
            print("[]" if self.json else f"no runs yet: `paceline train` makes the first one, in the folder {DEFAULT}")
            return 0
        rows = run_rows([Path(self.folder or DEFAULT)])
        print(json.dumps(rows, indent=2) if self.json else render(rows))
        return 0
