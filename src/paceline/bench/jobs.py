"""The runs of a study as jobs of a scheduler, one each, by `paceline submit`'s own means.

A job is found again by the run it makes. While it waits or runs it is left alone; when it has ended, the run's
directory says what came of it, and where that says nothing, the job does.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.cell import PlannedRun
from paceline.bench.make import STOPPED, Entry, reason
from paceline.config import UserError
from paceline.launch import SCHEDULERS, record
from paceline.launch.job import Job
from paceline.launch.jobs import Listing, describe, refresh
from paceline.launch.profile import Profile
from paceline.launch.record import Record
from paceline.launch.scheduler import JobStatus, Scheduler
from paceline.launch.script import LAUNCH, Place
from paceline.launch.submit import enqueue

# What the script of a job prints itself.
_OURS = re.compile(r"paceline: (job .*, start \d+, on |exit code |stopped early, to be continued)")


@dataclass(frozen=True)
class Request:
    """What every job of a study asks for, but its name and number of hosts."""

    scheduler: Scheduler
    profile: Profile
    job: Job
    words: tuple[str, ...]
    """The same as options of `paceline submit`."""

    def submit_words(self, name: str, nodes: int, train: Sequence[str]) -> list[str]:
        head = ["submit", *self.words, "--name", job_name(name), "--nodes", str(nodes)]
        return [*head, "--", "paceline", *train]


class Queue:
    """The jobs of these runs; the scheduler is asked once, when this is made."""

    def __init__(self, request: Request, cells: Sequence[PlannedRun]) -> None:
        self._request = request
        names = {cell.path.resolve(): cell.name for cell in cells}
        here = [each for each in record.records() if each.scheduler in SCHEDULERS]
        newest = {names[run]: each for each in here if (run := Path(each.run).resolve()) in names}
        self._jobs = dict(zip(newest, refresh(newest.values()), strict=True))
        self._listing = Listing()

    def submit(self, cell: PlannedRun, nodes: int) -> None:
        request = self._request
        job = request.job.model_copy(update={"name": job_name(cell.name), "nodes": nodes})
        place = Place(record.new_folder(job.name), Path.cwd())
        try:
            made = enqueue(request.scheduler, request.profile, job, place, ["paceline", *cell.train_words])
        except UserError as error:
            raise UserError(f"{cell.name}: {error}; the same command later submits what is missing") from None
        self._jobs[cell.name] = made, JobStatus("waiting", "just submitted")

    def judge(self, cell: PlannedRun, entry: Entry, before: Entry | None) -> Entry:
        """The entry of a run as its directory has it, with what its job says."""
        found = self._jobs.get(cell.name)
        if found is None:
            return entry
        each, status = found
        known = before is not None and before.get("job") in each.every_id
        if not each.is_over and not self._listing.is_gone(each, status):
            if entry["state"] != "done":  # else it is only being cleared away
                state = "running" if status.state == "running" else "waiting"
                entry = {**entry, "state": state, "reason": _shown(each, status)}
        elif not known:  # of an earlier study in this place: what the directory says is all
            return entry
        elif entry["state"] != "done":
            # Killed without a word of its own, or told to save and stop: it can go on. What a user cancels stays so.
            stopped = status.exit_code == STOPPED or (
                status.exit_code is None and status.state in ("timeout", "unknown")
            )
            resumes = stopped and not each.is_cancelled and entry["state"] == "interrupted"
            state = "interrupted" if resumes else "failed"
            entry = {**entry, "state": state, "reason": _why(each, status, entry)}
        return {**entry, "job": each.ids[-1]}

    def keep_timelines(self, cells: Sequence[PlannedRun]) -> None:
        """What the hosts of each job did, beside the runs, where the report looks."""
        for cell in cells:
            if cell.name not in self._jobs or not cell.path.is_dir():
                continue
            source = self._jobs[cell.name][0].folder / LAUNCH / "timeline.jsonl"
            target = cell.out / "launch" / cell.name / "timeline.jsonl"
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def job_name(run: str) -> str:
    """As schedulers take it: it begins with a letter."""
    name = re.sub(r"[^\w.+-]", "-", run, flags=re.ASCII)
    return name if name[:1].isalpha() else f"run-{name}"


def _shown(each: Record, status: JobStatus) -> str:
    return f"job {each.ids[-1]} {describe(status)}"


def _why(each: Record, status: JobStatus, entry: dict[str, Any]) -> str:
    """The job's end, and the reason that the run itself, or the last line it printed, gives."""
    said = entry["reason"] if entry["state"] == "failed" else None
    if said is None and status.exit_code and status.exit_code != STOPPED and status.state != "cancelled":
        lines = each.output.read_text(encoding="utf-8", errors="replace").splitlines() if each.output.exists() else []
        said = reason(status.exit_code, [line for line in lines if not _OURS.match(line)])
    head = _shown(each, status)
    if said is None or said.startswith(head):  # it was read before
        return said or head
    return f"{head}: {said}"
