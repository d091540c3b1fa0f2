"""`paceline status`."""

from __future__ import annotations

from typing import Annotated

from paceline.commands.flags import Argument, Flag, Verb


class StatusVerb(Verb):
    """Show the hosts, CPU use, memory, failures and progress of a job."""

    job: Annotated[str | None, Argument("JOB")] = None
    """Id or name (default: the newest)."""
    watch: bool = False
    """Repeat until the job ends."""
    every: Annotated[float, Flag("S")] = 2
    """Seconds between updates."""

    def run(self) -> int:
        from paceline.jobs.status import show_status

        show_status(self.job, watch=self.watch, every=self.every)
        return 0
