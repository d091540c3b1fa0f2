"""`paceline jobs`, `logs`, `cancel`: the jobs one has submitted, from any terminal."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.launch.record import Record
    from paceline.launch.scheduler import JobStatus

ASK_SECONDS = 60.0
FOLLOW_SECONDS = 0.5
STATE_SECONDS = 5.0
"""Between two questions to the scheduler: it serves others too."""
STOPPED_EARLY = 99


def add_jobs(verbs: Any) -> None:
    jobs = verbs.add_parser("jobs", help="the jobs submitted, with their states")
    jobs.add_argument("--all", action="store_true", help="also those that ended more than a week ago")
    jobs.set_defaults(run=_jobs)
    logs = verbs.add_parser("logs", help="what a job has printed")
    logs.add_argument("job", nargs="?", metavar="JOB", help="id or name (default: the newest)")
    logs.add_argument("-f", "--follow", action="store_true", help="and what it prints, until it ends")
    logs.set_defaults(run=_logs)
    cancel = verbs.add_parser("cancel", help="take a job out of the queue, or end it")
    cancel.add_argument("job", metavar="JOB", help="id or name")
    cancel.set_defaults(run=_cancel)


def refresh(records: Iterable[Record]) -> list[tuple[Record, JobStatus]]:
    """The records with the scheduler's word on them, asked once for all jobs of a scheduler, and saved."""
    from paceline.launch import record
    from paceline.launch.cluster_jobs import bring, queue_of
    from paceline.launch.scheduler import JobStatus

    every = list(records)
    told: dict[str, dict[str, JobStatus]] = {}
    for name in {each.scheduler for each in every if not each.is_over}:
        newest = [each.every_id[-1] for each in every if each.scheduler == name and not each.is_over]
        queue = queue_of(name)
        told[name] = queue.states(_said(queue.status_argv(newest)))
    made = []
    for each in every:
        if each.is_over:
            made.append((each, JobStatus(each.state, each.reason, each.exit_code, name=each.name)))
            continue
        ids = each.every_id
        status = told[each.scheduler].get(ids[-1])
        bring(each)
        code = each.written_exit_code()
        if code == STOPPED_EARLY and (status is None or status.state not in ("waiting", "running")):
            successor = _successor(each.scheduler, ids)
            if successor is not None:
                ids, status = (*ids, successor[0]), successor[1]
        status = settle(each, status, code)
        new = replace(each, ids=ids, state=status.state, reason=status.reason, exit_code=status.exit_code)
        if new != each:
            record.save(new)
        made.append((new, status))
    return made


class Listing:
    """Tells jobs that a scheduler knows no more from those it only gave no answer about."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, JobStatus] | None] = {}

    def is_gone(self, each: Record, status: JobStatus) -> bool:
        """Unknown for good: asked for all jobs, the scheduler answers, and this one is not among them."""
        from paceline.launch.cluster_jobs import queue_of

        if status.state != "unknown":
            return False
        if each.scheduler not in self._asked:
            queue = queue_of(each.scheduler)
            self._asked[each.scheduler] = (
                None if (text := _answer(queue.status_argv([]))) is None else queue.states(text)
            )
        listed = self._asked[each.scheduler]
        return listed is not None and each.every_id[-1] not in listed


def settle(record: Record, status: JobStatus | None, code: int | None) -> JobStatus:
    """The scheduler's word, and where it has none, or no exit code, what the job itself wrote down."""
    from paceline.launch.scheduler import JobStatus

    if status is None:
        if code is None:
            reason = "the scheduler does not know it any more, and it left no exit code: it was killed"
            return JobStatus("cancelled" if record.is_cancelled else "unknown", "" if record.is_cancelled else reason)
        status = JobStatus("done" if code == 0 else "failed")
    if status.state in ("waiting", "running", "unknown"):
        return status
    code = status.exit_code if code is None else code
    if record.is_cancelled and status.state == "failed":
        status = replace(status, state="cancelled")
    if code == STOPPED_EARLY and status.state == "failed":
        status = replace(status, reason="stopped early; --resume continues it")
    return replace(status, exit_code=code)


def _successor(scheduler: str, ids: Sequence[str]) -> tuple[str, JobStatus] | None:
    """The job that the scheduler itself has made to continue this one."""
    from paceline.launch.cluster_jobs import queue_of

    queue = queue_of(scheduler)
    if queue.again(Path()):
        return None  # the job itself does it, and says so
    mine = queue.states(_said(queue.status_argv([])))
    return next(((number, status) for number, status in mine.items() if status.replaces == ids[-1]), None)


def _said(argv: Sequence[str]) -> str:
    """What is printed counts, not the exit code: a job that is no longer known makes these commands fail."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=ASK_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"paceline: {argv[0]} gave no answer ({error}); states may be old", file=sys.stderr)
        return ""
    return done.stdout.decode(errors="replace")


def _answer(argv: Sequence[str]) -> str | None:
    """None where the command failed."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=ASK_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def describe(status: JobStatus) -> str:
    """`failed, exit code 3 (NonZeroExitCode)`."""
    code = f", exit code {status.exit_code}" if status.exit_code else ""
    return f"{status.state}{code}" + (f" ({status.reason})" if status.reason else "")


def _jobs(options: argparse.Namespace) -> int:
    from paceline.launch import record

    recent = time.time() - 7 * 86400
    chosen = [each for each in record.records() if options.all or not each.is_over or each.submitted > recent]
    if not chosen:
        print("no jobs" if options.all else "no jobs of the last week (--all shows older ones)")
        return 0
    rows = [["job", "on", "name", "hosts", "submitted", "starts", "state"]]
    for each, status in refresh(chosen):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.submitted))
        row = [each.ids[-1], each.scheduler, each.name, str(each.nodes), when, str(len(each.starts()))]
        rows.append([*row, describe(status)])
    print(table(rows))
    return 0


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cancel(options: argparse.Namespace) -> int:
    from paceline.launch import record
    from paceline.launch.cluster_jobs import queue_of
    from paceline.launch.submit import call

    each, status = refresh([record.find(options.job)])[0]
    if each.is_over:
        print(f"job {each.ids[-1]} is over: {describe(status)}")
        return 0
    each.mark_cancelled()
    call(queue_of(each.scheduler).cancel_argv(each.ids[-1]))
    print(f"job {each.ids[-1]} is being cancelled; its output stays in {each.output}")
    return 0


def _logs(options: argparse.Namespace) -> int:
    from paceline.launch import record

    each = record.find(options.job)
    try:
        if options.follow:
            _follow(each)
        else:
            each, status = refresh([each])[0]
            if _copy(each.output, 0) == 0 and not each.is_over:
                print(f"paceline: nothing yet; job {each.ids[-1]} is {describe(status)}", file=sys.stderr)
            _last_words(each)
    except KeyboardInterrupt:
        return 0  # the job goes on
    return 0


def _follow(each: Record, now: Callable[[], float] = time.monotonic) -> None:
    """Until the job is over, through all of its starts; the user may leave at any time."""
    from paceline.launch.cluster_jobs import bring

    position, asked, last = 0, -STATE_SECONDS, ""
    while True:
        bring(each, output_only=True)
        position += _copy(each.output, position)
        if now() - asked >= STATE_SECONDS:
            each, status = refresh([each])[0]
            asked = now()
            if status.state != last:
                print(f"paceline: job {each.ids[-1]} is {describe(status)}", file=sys.stderr)
                last = status.state
            if each.is_over or status.state == "unknown":
                _copy(each.output, position)
                _last_words(each)
                return
        time.sleep(FOLLOW_SECONDS)


def _copy(path: Path, position: int) -> int:
    """What stands in the file from there on, to our output; how much it was."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except OSError:
        return 0
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return len(data)


def _last_words(each: Record) -> None:
    """What the scheduler itself has printed."""
    if each.scheduler_output.exists() and each.scheduler_output.stat().st_size:
        _copy(each.scheduler_output, 0)
