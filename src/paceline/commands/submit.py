"""`paceline submit`."""

from __future__ import annotations

from typing import Annotated

from paceline.commands.flags import Argument, Flag
from paceline.commands.job_options import JobVerb


class SubmitVerb(JobVerb):
    """Submit a command to the queue of a cluster.

    Write a job script for COMMAND, submit it, and print the commands to type next. COMMAND runs once, on the first
    host, with Ray on all hosts. Options that you do not give come from the profile, then from the scheduler's defaults.
    """

    on: Annotated[str | None, Flag("SCHEDULER")] = None
    """Name of the scheduler, or cluster:NAME (default: the profile's)."""
    seeds: Annotated[str | None, Flag("A,B|A-B")] = None
    """Submit a job for each seed, as one array where the scheduler has arrays: --seed S is added to COMMAND."""
    at_once: Annotated[int | None, Flag("N", least=1)] = None
    """With --seeds: run at most N jobs of the array at a time (SLURM, PBS)."""
    yes: bool = False
    """Submit more than 100 jobs without asking."""
    interactive: bool = False
    """Open a shell on the first host instead."""
    dry_run: bool = False
    """Print the script, submit nothing."""
    command: Annotated[tuple[str, ...], Argument("-- COMMAND", rest=True)]
    """The command to run, such as `paceline train --env CartPole-v1`."""

    def run(self) -> int:
        from paceline.config import UserError
        from paceline.jobs.interactive import open_shell
        from paceline.jobs.submit import submit
        from paceline.schedulers.profile import read_profile
        from paceline.ssh_cluster.start_job import PREFIX, submit_on_cluster

        on = self.on or read_profile(self.profile).scheduler
        if on is not None and on.startswith(PREFIX):
            given = {**self.job, "seeds": self.seeds, "profile": self.profile, "interactive": self.interactive}
            given["at_once"] = self.at_once
            return submit_on_cluster(on, self.command, given, dry_run=self.dry_run)
        scheduler, profile, job = self.requested()
        if not self.interactive:
            submit(
                scheduler,
                profile,
                job,
                self.command,
                self.seeds,
                dry_run=self.dry_run,
                at_once=self.at_once,
                yes=self.yes,
            )
            return 0
        if self.seeds is not None:
            raise UserError(f"--seeds {self.seeds}: one job per seed has no single shell; leave out --interactive")
        return open_shell(scheduler, profile, job, self.command, dry_run=self.dry_run)
