"""From a job and its command to an entry in the scheduler's queue."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import UserError
from paceline.jobs.dependencies import resolved, tell_predecessors
from paceline.jobs.query import query
from paceline.jobs.scheduler_call import call
from paceline.jobs.site_environment import check_environment
from paceline.schedulers import SCHEDULERS, job_record
from paceline.schedulers.job import Job
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.profile import Profile
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import SCRIPT, JobPaths, render, render_array
from paceline.schedulers.train_command import parse_seeds, resumable, run_directory, with_seed

ARRAY_SCRIPT = "array.sh"
MANY_JOBS = 100
WHY_SECONDS = (0.0, 0.5, 1.0, 2.0)  # pauses before a new job is asked why it waits: schedulers take a moment to know


def scheduler_named(name: str | None) -> Scheduler:
    known = ", ".join(SCHEDULERS)
    if name is None:
        raise UserError(f"submit needs --on SCHEDULER ({known}), or a --profile that names one")
    if name not in SCHEDULERS:
        raise UserError(f"--on {name} is not known: use one of {known}")
    return SCHEDULERS[name]


@dataclass(frozen=True)
class Submission:
    """One job that is about to be submitted."""

    scheduler: Scheduler
    profile: Profile
    job: Job
    paths: JobPaths
    words: Sequence[str]

    @property
    def record(self) -> JobRecord:
        run = run_directory(self.words, self.paths.cwd)
        return job_record.planned(self.paths.folder, self.scheduler.name, self.job, self.words, run)

    def text(self) -> str:
        paths = replace(self.paths, record=job_record.as_json(self.record))
        return render(self.scheduler, self.job, self.profile, paths, self.words)

    def text_by_hand(self) -> str:
        """The script for a user who submits it: the job's folder does not exist before the job starts."""
        messages = self.paths.cwd / f"{self.paths.folder.name}.log"
        return replace(self, paths=replace(self.paths, messages=messages)).text()

    def write(self) -> Path:
        text, script = self.text(), self.paths.folder / SCRIPT
        job_record.create_folder(self.paths.folder)
        _write_script(script, text)
        return script


def submit(
    scheduler: Scheduler,
    profile: Profile,
    job: Job,
    command: Sequence[str],
    seeds: str | None,
    *,
    dry_run: bool,
    at_once: int | None = None,
    yes: bool = False,
) -> None:
    """Submit the command, once for each seed; a dry run prints the scripts."""
    if not command:
        raise UserError("submit needs a command: paceline submit … -- paceline train --env CartPole-v1")
    chosen = [None] if seeds is None else parse_seeds(seeds)
    job = resolved(scheduler, job)
    is_array = len(chosen) > 1 and scheduler.can_be_array(job)
    if at_once is not None and not is_array:
        raise UserError(f"--at-once {at_once}: needs --seeds with several seeds, and a scheduler with arrays")
    check_environment(profile, only_warn=dry_run)
    if not dry_run:
        scheduler.check_limits(job)
    folders = job_record.new_folder(job.name)
    submissions = []
    for index, seed in enumerate(chosen, start=scheduler.array_first):
        named = job if seed is None else job.model_copy(update={"name": f"{job.name}-{seed}"})
        own = job_record.new_folder(named.name)
        paths = JobPaths(folders.with_name(f"{folders.name}-{index}") if is_array else own, Path.cwd())
        words = resumable(with_seed(command, seed), own.name, seed)
        submissions.append(Submission(scheduler, profile, named, paths, words))
    array = render_array(scheduler, job, folders, len(chosen), at_once) if is_array else ""
    if dry_run:
        for text in [*([array] if array else []), *(each.text_by_hand() for each in submissions)]:
            sys.stdout.write(text)
        return
    if len(chosen) > MANY_JOBS and not yes and not _is_confirmed(len(chosen)):
        raise UserError(f"--seeds {seeds}: {len(chosen)} jobs are many; give --yes to submit them")
    if is_array:
        records = enqueue_array(submissions, array)
        job_record.print_next_steps(records[0], records[0].run, len(records))
        return
    for each in submissions:
        record = enqueue(each)
        job_record.print_next_steps(record, record.run)


def enqueue(submission: Submission) -> JobRecord:
    """Write the script, submit it and record the job; where that fails, nothing is left behind."""
    scheduler, after = submission.scheduler, submission.job.after
    with _removed_on_failure([submission]):
        script = submission.write()
        number = scheduler.job_id(call(scheduler.submit_argv(script, after)))
        record = job_record.submitted(submission.record, number)
        check_can_start(scheduler, number, number)
    tell_predecessors(record, after)
    return record


def enqueue_array(submissions: Sequence[Submission], text: str) -> list[JobRecord]:
    """The same for many jobs as one array, whose script is `text`."""
    scheduler, after = submissions[0].scheduler, submissions[0].job.after
    script = submissions[0].paths.folder / ARRAY_SCRIPT
    with _removed_on_failure(submissions):
        for each in submissions:
            each.write()
        _write_script(script, text)
        answer = call(scheduler.submit_argv(script, after))
        array, numbers = scheduler.job_id(answer), scheduler.array_ids(answer, len(submissions))
        pairs = zip(submissions, numbers, strict=True)
        records = [job_record.submitted(each.record, number, array) for each, number in pairs]
        check_can_start(scheduler, numbers[0], array)
    tell_predecessors(replace(records[0], ids=(array,)), after)
    return records


@contextlib.contextmanager
def _removed_on_failure(submissions: Sequence[Submission]) -> Iterator[None]:
    """Remove the folders of the jobs, and the folders above them that did not exist, if the jobs are not submitted."""
    home = job_record.home()
    missing = [folder for folder in (home, *home.parents) if not folder.exists()]
    try:
        yield
    except UserError:
        for each in submissions:
            shutil.rmtree(each.paths.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another command may use them by now
            for folder in missing:
                folder.rmdir()
        raise


def check_can_start(scheduler: Scheduler, number: str, whole: str) -> None:
    """UserError where the scheduler has accepted a job that it can never start; the job is cancelled then. `whole`: the
    id to cancel, of an array for instance."""
    for seconds in WHY_SECONDS if scheduler.never else ():
        time.sleep(seconds)
        answer = query(scheduler.status_argv([number]), quiet=True)
        status = scheduler.states(answer.stdout).get(number) if answer else None
        if status is None or status.state != "waiting":
            return
        if re.search(scheduler.never, status.reason):
            call(scheduler.cancel_argv(whole))
            raise UserError(
                f"{scheduler.name} accepted job {whole}, but can never start it ({status.reason}); it was cancelled: "
                "ask for hosts, cores, memory and a walltime that the queue has"
            )
        if status.reason:
            return


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o700)  # OAR starts it as a program


def _is_confirmed(count: int) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(f"submit {count} jobs? [y/N] ").strip().lower() in ("y", "yes")
