"""Submitted jobs: their states and their output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from paceline.doctor.diagnosis import table
from paceline.jobs.query import query, queue_of, states_of
from paceline.schedulers import job_record
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.killed_run import mark_ended
from paceline.schedulers.scheduler import JobStatus, State
from paceline.schedulers.script import STOPPED_EARLY
from paceline.ssh_cluster.remote_jobs import ClusterJobs, copy_job_files
from paceline.ssh_cluster.start_job import PREFIX

FOLLOW_SECONDS = 0.5
STATE_SECONDS = 5.0  # between two questions to the scheduler, which serves others too
RECENT_SECONDS = 7 * 86400.0


def refresh(records: Iterable[JobRecord]) -> list[tuple[JobRecord, JobStatus]]:
    """The records with their present states, saved. Each scheduler is asked once for all its jobs."""
    every = list(records)
    states: dict[str, dict[str, JobStatus]] = {}
    for name in {each.scheduler for each in every if not each.is_over}:
        asked = [each for each in every if each.scheduler == name and not each.is_over]
        ended = [each.every_id[-1] for each in asked if each.written_exit_code() is not None]
        states[name] = states_of(name, [each.every_id[-1] for each in asked], ended)
    refreshed = []
    for each in every:
        if each.is_over:
            refreshed.append((each, JobStatus(each.state, each.reason, each.exit_code, name=each.name)))
            continue
        ids = each.every_id
        found = states[each.scheduler].get(ids[-1])
        copy_job_files(each)
        code = each.written_exit_code()
        if code == STOPPED_EARLY and (found is None or found.state not in ("waiting", "running")):
            successor = _successor(each.scheduler, ids[-1])
            if successor is not None:
                ids, found = (*ids, successor[0]), successor[1]
        status = combined(each, found, code)
        new = replace(each, ids=ids, state=status.state, reason=status.reason, exit_code=status.exit_code)
        if new != each:
            job_record.save(new)
        if new.is_over and new.run and not new.scheduler.startswith(PREFIX):
            mark_ended(Path(new.run), f"job {new.id} ended: {describe(status)}")
        refreshed.append((new, status))
    return refreshed


def combined(record: JobRecord, status: JobStatus | None, code: int | None) -> JobStatus:
    """The scheduler's status, completed by the exit code that the job itself wrote."""
    if status is None or status.is_gone:
        if code is None:
            if record.is_cancelled:
                return JobStatus("cancelled")
            return status or JobStatus(record.state, f"no answer from {record.scheduler}", name=record.name)
        status = JobStatus("done" if code == 0 else "failed")
    if status.state in ("waiting", "running", "unknown"):
        return status
    code = status.exit_code if code is None else code
    ended: State | None = "cancelled" if record.is_cancelled else record.told_to_end
    if ended and status.state == "failed":
        status = replace(status, state=ended)
    if code == STOPPED_EARLY and status.state in ("failed", "cancelled"):
        status = replace(status, reason="stopped early; --resume continues it")
    return replace(status, exit_code=code)


def _successor(scheduler: str, job_id: str) -> tuple[str, JobStatus] | None:
    """The job that the scheduler itself submitted to continue this one."""
    queue = queue_of(scheduler)
    if isinstance(queue, ClusterJobs) or queue.restart(Path()):
        return None  # nothing restarts a job on an ssh cluster; elsewhere the job submits and records its successor
    answer = query(queue.status_argv([]))
    mine = queue.states("" if answer is None else answer.stdout)
    return next(((number, status) for number, status in mine.items() if status.replaces == job_id), None)


def describe(status: JobStatus) -> str:
    """`failed, exit code 3 (NonZeroExitCode)`."""
    code = f", exit code {status.exit_code}" if status.exit_code else ""
    return f"{status.state}{code}" + (f" ({status.reason})" if status.reason else "")


def print_jobs(*, all_jobs: bool) -> None:
    recent = time.time() - RECENT_SECONDS
    chosen = [each for each in job_record.records() if all_jobs or not each.is_over or each.submitted > recent]
    if not chosen:
        print("no jobs" if all_jobs else "no jobs in the last week (--all shows older ones)")
        return
    rows = [["job", "on", "name", "hosts", "submitted", "starts", "state"]]
    groups: dict[tuple[str, str], list[tuple[JobRecord, JobStatus]]] = {}
    for each, status in refresh(chosen):
        groups.setdefault((each.scheduler, each.array or each.key), []).append((each, status))
    for group in groups.values():
        each, status = group[0]
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.submitted))
        starts = str(sum(len(element.starts()) for element, _ in group))
        state = describe(status) if len(group) == 1 else _array_state(group)
        number, name = (each.id, each.name) if len(group) == 1 else (each.array, f"{each.name} …")
        rows.append([number, each.scheduler, name, str(each.nodes), when, starts, state])
    print(table(rows))


def _array_state(group: list[tuple[JobRecord, JobStatus]]) -> str:
    """`3 done, 2 running, 1 failed (17_4)`: the jobs of an array, with the ids of those to look at."""
    ids: dict[str, list[str]] = {}
    for each, status in group:
        ids.setdefault(status.state, []).append(each.id)
    parts = []
    for state, numbers in ids.items():
        more = f"{', '.join(numbers[:5])}{', …' * (len(numbers) > 5)}"
        parts.append(f"{len(numbers)} {state}" + ("" if state in ("waiting", "running", "done") else f" ({more})"))
    return ", ".join(parts)


def print_logs(job: str | None, *, follow: bool) -> None:
    record = job_record.find(job)
    try:
        if follow:
            _follow(record)
            return
        record, status = refresh([record])[0]
        if _copy(record.output, 0) == 0 and not record.is_over:
            print(f"paceline: nothing yet; job {record.id} is {describe(status)}", file=sys.stderr)
        _print_scheduler_output(record)
    except KeyboardInterrupt:
        return  # only the reader stops, not the job


def _follow(record: JobRecord, now: Callable[[], float] = time.monotonic) -> None:
    """Print the output until the job is over, through all of its starts."""
    position, asked, last = 0, -STATE_SECONDS, ""
    while True:
        copy_job_files(record, output_only=True)
        position += _copy(record.output, position)
        if now() - asked >= STATE_SECONDS:
            record, status = refresh([record])[0]
            asked = now()
            if status.state != last:
                print(f"paceline: job {record.id} is {describe(status)}", file=sys.stderr)
                last = status.state
            if record.is_over or status.state == "unknown":
                _copy(record.output, position)
                _print_scheduler_output(record)
                return
        time.sleep(FOLLOW_SECONDS)


def _copy(path: Path, position: int) -> int:
    """Print the file from there on; returns the number of bytes."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except OSError:
        return 0
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return len(data)


def _print_scheduler_output(record: JobRecord) -> None:
    if record.scheduler_output.exists() and record.scheduler_output.stat().st_size:
        _copy(record.scheduler_output, 0)
