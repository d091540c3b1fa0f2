"""The runs of a scaling benchmark as jobs of a scheduler, one job per run, submitted as `paceline submit` does.

A job is found again by the run it makes. While it waits or runs it is left alone. When it has ended, the run's
directory tells the outcome, and if that says nothing, the job does.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.planned_run import PlannedRun
from paceline.bench.runner import STOPPED, Entry, failure_reason
from paceline.config import UserError
from paceline.jobs.listing import describe, refresh
from paceline.jobs.site_environment import check_environment
from paceline.jobs.submit import Submission, enqueue
from paceline.schedulers import SCHEDULERS
from paceline.schedulers import job_record as record
from paceline.schedulers.job import Job
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.profile import Profile
from paceline.schedulers.scheduler import JobStatus, Scheduler
from paceline.schedulers.script import LAUNCH, JobPaths

# What a job's script prints itself.
_SCRIPT_LINE = re.compile(r"paceline: (job .*, start \d+, on |exit code |stopped early, to be continued)")


@dataclass(frozen=True)
class Request:
    """What every job asks for, except its name and number of hosts."""

    scheduler: Scheduler
    profile: Profile
    job: Job
    words: tuple[str, ...]
    """The same as options of `paceline submit`."""

    def submit_words(self, name: str, nodes: int, train: Sequence[str]) -> list[str]:
        head = ["submit", *self.words, "--name", job_name(name), "--nodes", str(nodes)]
        return [*head, "--", "paceline", *train]


class JobQueue:
    """The jobs of these runs. The scheduler is asked once, by the constructor."""

    def __init__(self, request: Request, runs: Sequence[PlannedRun]) -> None:
        self._request = request
        names = {run.path.resolve(): run.name for run in runs}
        here = [each for each in record.records() if each.scheduler in SCHEDULERS]
        newest = {names[path]: each for each in here if (path := Path(each.run).resolve()) in names}
        self._jobs = dict(zip(newest, refresh(newest.values()), strict=True))

    def submit(self, run: PlannedRun, nodes: int) -> None:
        request = self._request
        job = request.job.model_copy(update={"name": job_name(run.name), "nodes": nodes})
        paths = JobPaths(record.new_folder(job.name), Path.cwd())
        try:
            check_environment(request.profile)
            request.scheduler.check_limits(job)
            words = ["paceline", *run.train_words]
            made = enqueue(Submission(request.scheduler, request.profile, job, paths, words))
        except UserError as error:
            raise UserError(f"{run.name}: {error}; the same command later submits what is missing") from None
        self._jobs[run.name] = made, JobStatus("waiting", "just submitted")

    def with_job(self, run: PlannedRun, entry: Entry, before: Entry | None) -> Entry:
        """The entry of a run, completed by the state of its job. `before`: its entry so far."""
        found = self._jobs.get(run.name)
        if found is None:
            return entry
        job, status = found
        if not job.is_over and not status.is_gone:
            if entry["state"] != "done":  # a finished run whose job is still being cleaned up
                state = "running" if status.state == "running" else "waiting"
                entry = {**entry, "state": state, "reason": _state_text(job, status)}
        elif before is None or before.get("job") not in job.every_id:  # a job of an earlier benchmark in this folder
            return entry
        elif entry["state"] != "done":
            # A killed job, or one told to save and stop, can be resumed. What a user cancelled stays cancelled.
            stopped = status.exit_code == STOPPED or (
                status.exit_code is None and status.state in ("timeout", "unknown")
            )
            resumes = stopped and not job.is_cancelled and entry["state"] == "interrupted"
            state = "interrupted" if resumes else "failed"
            entry = {**entry, "state": state, "reason": _end_text(job, status, entry)}
        return {**entry, "job": job.ids[-1]}

    def copy_timelines(self, runs: Sequence[PlannedRun]) -> None:
        """Copy each job's timeline beside its run, where the report looks for it."""
        for run in runs:
            if run.name not in self._jobs or not run.path.is_dir():
                continue
            source = self._jobs[run.name][0].folder / LAUNCH / "timeline.jsonl"
            target = run.out / "launch" / run.name / "timeline.jsonl"
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def job_name(run: str) -> str:
    """A name that schedulers accept: it starts with a letter."""
    name = re.sub(r"[^\w.+-]", "-", run, flags=re.ASCII)
    return name if name[:1].isalpha() else f"run-{name}"


def _state_text(job: JobRecord, status: JobStatus) -> str:
    return f"job {job.ids[-1]} {describe(status)}"


def _end_text(job: JobRecord, status: JobStatus, entry: Entry) -> str:
    """How the job ended, and the reason given by the run or by the last line it printed."""
    reason = entry["reason"] if entry["state"] == "failed" else None
    if reason is None and status.exit_code and status.exit_code != STOPPED and status.state != "cancelled":
        lines = job.output.read_text(encoding="utf-8", errors="replace").splitlines() if job.output.exists() else []
        reason = failure_reason(status.exit_code, [line for line in lines if not _SCRIPT_LINE.match(line)])
    head = _state_text(job, status)
    if reason is None or reason.startswith(head):  # from an earlier call
        return reason or head
    return f"{head}: {reason}"
