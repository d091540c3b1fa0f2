"""What a scheduler says about jobs: those in its queue, then those in its history."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from paceline.config import UserError
from paceline.jobs.scheduler_call import run_command
from paceline.schedulers import SCHEDULERS
from paceline.schedulers.scheduler import JobStatus, Scheduler
from paceline.ssh_cluster.remote_jobs import ClusterJobs
from paceline.ssh_cluster.start_job import PREFIX

QUERY_SECONDS = 60.0
GONE = JobStatus("unknown", "the scheduler has forgotten it, and it left no exit code: it was killed", is_gone=True)


def queue_of(name: str) -> Scheduler | ClusterJobs:
    """Who knows the jobs that were submitted with `--on NAME`."""
    return ClusterJobs(name) if name.startswith(PREFIX) else SCHEDULERS[name]


def states_of(name: str, ids: Sequence[str], with_exit_code: Sequence[str] = ()) -> dict[str, JobStatus]:
    """The jobs that the scheduler of this name knows, and `GONE` for those it has forgotten. A job is absent where the
    scheduler gives no answer, or where it has forgotten one of `with_exit_code`, which need no further question.

    A running job must never be taken for a dead one, so exit codes do not count: these commands fail for unknown jobs
    as they do without a server. Only a list of all jobs, which the job is not in, says that it is gone.
    """
    queue = queue_of(name)
    found = _ask(queue, queue.status_argv(ids))
    if isinstance(queue, ClusterJobs):
        return found
    missing = [each for each in ids if each not in found]
    if missing and (argv := queue.history_argv(missing)):
        found = {**_ask(queue, argv, quiet=True), **found}
    missing = [each for each in missing if each not in found and each not in with_exit_code]
    listed = query(queue.status_argv([])) if missing else None
    if listed is not None and listed.returncode == 0:
        known = queue.states(listed.stdout)
        found |= {each: known.get(each, GONE) for each in missing}
    return found


def query(argv: Sequence[str], *, quiet: bool = False) -> subprocess.CompletedProcess[str] | None:
    try:
        return run_command(argv, QUERY_SECONDS)
    except UserError as error:
        if not quiet:
            print(f"paceline: {error}; states may be old", file=sys.stderr)
        return None


def _ask(queue: Scheduler | ClusterJobs, argv: Sequence[str], *, quiet: bool = False) -> dict[str, JobStatus]:
    answer = query(argv, quiet=quiet)
    return queue.states("" if answer is None else answer.stdout)
