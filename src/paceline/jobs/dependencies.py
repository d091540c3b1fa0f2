"""Jobs that come after others (`--after`)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import UserError
from paceline.jobs.listing import describe, refresh
from paceline.jobs.query import query
from paceline.schedulers import job_record
from paceline.schedulers.job import Job
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.scheduler import JobStatus, Scheduler

AFTER, DEPENDENTS = "after", "dependents"
"""Files in a job's folder: the ids it waits for; id and folder of each job that waits for it. A job that continues
under a new id (PBS) changes both."""


def resolved(scheduler: Scheduler, job: Job) -> Job:
    """The job with the present ids of those it comes after, without those that have succeeded. UserError for one that
    is unknown or has failed: the job would never start."""
    ids: list[str] = []
    for word in job.after:
        ids += _waiting_for(scheduler, word)
    return job.model_copy(update={"after": tuple(dict.fromkeys(ids))})


def tell_predecessors(record: JobRecord, after: Sequence[str]) -> None:
    """Write down that this job waits for those ids."""
    if not after:
        return
    (record.folder / AFTER).write_text("".join(f"{each}\n" for each in after))
    for each in job_record.records():
        if each.scheduler == record.scheduler and each.every_id[-1] in after:
            with (each.folder / DEPENDENTS).open("a") as file:
                file.write(f"{record.id} {record.folder}\n")


def _waiting_for(scheduler: Scheduler, word: str) -> list[str]:
    records = _records(scheduler, word)
    if not records:
        status = _ask(scheduler, word)
        return [word] if status is None or _must_wait(scheduler, word, status) else []
    waiting = [each for each, status in refresh(records) if _must_wait(scheduler, each.id, status)]
    if waiting and waiting[0].array and len(records) > 1:
        elements = [each.every_id[-1] for each in waiting]
        return scheduler.after_array(waiting[0].array, elements, waiting[0].attempts)
    return [each.every_id[-1] for each in waiting]


def _records(scheduler: Scheduler, word: str) -> list[JobRecord]:
    try:
        return [each for each in job_record.find_all(word) if each.scheduler == scheduler.name]
    except UserError:
        return []  # of another program


def _must_wait(scheduler: Scheduler, word: str, status: JobStatus) -> bool:
    if status.is_gone or status.state in ("failed", "cancelled", "timeout"):
        if not scheduler.after_failure:
            raise UserError(f"--after {word}: that job is {describe(status)}, so this one would never start")
        return False
    return status.state != "done"


def _ask(scheduler: Scheduler, word: str) -> JobStatus | None:
    """The status of a job that paceline did not submit; None without an answer. UserError if there is no such job."""
    for argv in (scheduler.status_argv([word]), scheduler.history_argv([word])):
        answer = query(argv, quiet=True) if argv else None
        for number, status in (scheduler.states(answer.stdout) if answer else {}).items():
            if number.partition(".")[0] == word.partition(".")[0]:
                return status
    listed = query(scheduler.status_argv([]), quiet=True)
    if listed is None or listed.returncode != 0:
        return None
    raise UserError(f"--after {word}: {scheduler.name} knows no such job; `paceline jobs` lists yours")
