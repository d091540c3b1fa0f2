"""`paceline jobs`, `logs`, `cancel` and `fetch`: submitted jobs, from any terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from paceline.commands.flags import Argument, Flag, Verb


class JobsVerb(Verb):
    """List the submitted jobs with their states."""

    all: bool = False
    """Also list jobs that ended more than a week ago."""

    def run(self) -> int:
        from paceline.jobs.listing import print_jobs

        print_jobs(all_jobs=self.all)
        return 0


class LogsVerb(Verb):
    """Print the output of a job."""

    job: Annotated[str | None, Argument("JOB")] = None
    """Id or name (default: the newest)."""
    follow: Annotated[bool, Flag(also=("-f",))] = False
    """Keep printing until the job ends."""

    def run(self) -> int:
        from paceline.jobs.listing import print_logs

        print_logs(self.job, follow=self.follow)
        return 0


class CancelVerb(Verb):
    """Cancel a waiting or running job.

    A running job is asked to save and end, and killed if it does not. Cancel it again to kill it at once.
    """

    job: Annotated[str, Argument("JOB")]
    """Id or name."""

    def run(self) -> int:
        from paceline.jobs.cancel import cancel

        cancel(self.job)
        return 0


class FetchVerb(Verb):
    """Copy the results of a job to this machine."""

    what: Annotated[str, Argument("JOB|RUN")]
    """Id or name of a job, CLUSTER:RUN, or a run directory."""
    to: Annotated[str, Argument("DEST")]
    """Folder to copy into."""

    def run(self) -> int:
        from paceline.ssh_cluster.fetch import fetch

        print(fetch(self.what, Path(self.to)))
        return 0
