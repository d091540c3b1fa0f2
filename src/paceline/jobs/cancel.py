"""Cancelling a job: it is asked to save and end, and killed only if it does not."""

from __future__ import annotations

import time

from paceline.config import UserError
from paceline.jobs.listing import STATE_SECONDS, describe, refresh
from paceline.jobs.query import queue_of
from paceline.jobs.scheduler_call import call
from paceline.schedulers import job_record
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import STOPPED_EARLY

STOP_SECONDS = 30.0  # beyond the kill delay: to end Ray on all hosts, and for the scheduler to notice
POLL_SECONDS = 0.5


def cancel(job: str) -> None:
    """Cancel the job, or all jobs of an array; a second time, kill them."""
    asked: dict[str, JobRecord] = {}
    seconds = 0.0
    for record, status in refresh(job_record.find_all(job)):
        if record.is_over:
            print(f"job {record.id} is over: {describe(status)}")
            continue
        is_first, queue = not record.is_cancelled, queue_of(record.scheduler)
        record.mark_cancelled()
        if is_first and status.state == "running" and isinstance(queue, Scheduler):
            seconds = seconds or queue.kill_delay(record.id) + STOP_SECONDS
            if _ask_to_end(record, queue, seconds):
                asked[record.key] = record
                continue
        _kill(record)
    for record in _wait_for_end(asked, seconds):
        print(f"job {record.id} did not end within {seconds:g} s")
        _kill(record)


def _kill(record: JobRecord) -> None:
    call(queue_of(record.scheduler).cancel_argv(record.id))
    print(f"job {record.id} is being cancelled; its output stays in {record.output}")


def _ask_to_end(record: JobRecord, queue: Scheduler, seconds: float) -> bool:
    """Whether the job could be asked to save and end."""
    argv = queue.request_end_argv(record.id)
    if not argv:
        return False
    try:
        call(argv)
    except UserError as error:
        print(f"paceline: {error}; killing it instead")
        return False
    print(
        f"job {record.id} is asked to save and end, and killed after {seconds:g} s; cancel it again to kill it at once"
    )
    return True


def _wait_for_end(asked: dict[str, JobRecord], seconds: float) -> list[JobRecord]:
    """Those of the jobs that have not ended in this time."""
    left, now = dict(asked), time.monotonic()
    limit, ask_at = now + seconds, now + STATE_SECONDS
    while left and (now := time.monotonic()) < limit:
        for record in list(left.values()):
            code = record.written_exit_code()
            if code is not None:
                how = "saved its run and ended" if code == STOPPED_EARLY else f"ended with exit code {code}"
                print(f"job {record.id} {how}; its output stays in {record.output}")
                del left[record.key]
        if now > ask_at:
            ask_at = now + STATE_SECONDS
            for seen, status in refresh(left.values()):
                if seen.is_over:
                    print(f"job {seen.id} is over: {describe(status)}")
                    del left[seen.key]
        time.sleep(POLL_SECONDS if left else 0.0)
    return list(left.values())
