"""`paceline submit`: from the command line and a site's profile to a job in the queue."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.launch.job import Job
    from paceline.launch.profile import Profile
    from paceline.launch.record import Record
    from paceline.launch.scheduler import Scheduler
    from paceline.launch.script import Place

SECONDS = 120.0
"""The longest that a command of a scheduler may take."""
_LISTS = ("after", "extra")
_ALSO = {"queue": ["--partition"], "constraint": ["--property"]}


def add_submit(verbs: Any) -> None:
    submit = verbs.add_parser(
        "submit",
        help="put a command into the queue of a cluster",
        description="Write a job script for COMMAND, submit it and say what to type next. COMMAND runs once, on the "
        "first host, with Ray on all of them. What is not given comes from the profile, or is the scheduler's default.",
    )
    add_job_options(submit, also=" or cluster:NAME")
    submit.add_argument("--seeds", metavar="A,B|A-B", help="a job for each seed: --seed S is added to COMMAND")
    submit.add_argument("--interactive", action="store_true", help="open a shell on the first host instead")
    submit.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    submit.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    submit.set_defaults(run=_run)


def add_job_options(parser: Any, leave_out: Sequence[str] = (), also: str = "") -> None:
    """Where to submit, and what to ask for."""
    parser.add_argument("--on", metavar="SCHEDULER", help=f"slurm, oar, pbs, cobalt{also}; default: the profile's")
    parser.add_argument("--profile", metavar="SITE", help="a YAML file, or the name of one in ~/.config/paceline/sites")
    for name, text in JOB_OPTIONS.items():
        names = [f"--{name.replace('_', '-')}", *_ALSO.get(name, [])]
        if name in leave_out:
            continue
        if name in _LISTS:
            parser.add_argument(*names, dest=f"job:{name}", action="append", metavar="X", help=f"{text}; repeatable")
        else:
            parser.add_argument(*names, dest=f"job:{name}", default=None, metavar="X", help=text)


# Written down here, so that --help needs no pydantic; a test compares them with the fields of Job.
JOB_OPTIONS = {
    "name": "of the job, in the queue (default: paceline)",
    "nodes": "hosts (default: 1)",
    "cores": "of each host (default: all)",
    "gpus": "of each host",
    "memory": "of each host: 16G, 500M",
    "walltime": "30m, 1h30m, 01:30:00 (default: 1h)",
    "account": "who pays: account or project",
    "queue": "queue or partition",
    "qos": "quality of service (SLURM)",
    "constraint": "what the hosts must be, in the scheduler's words",
    "mail": "address to be told when it begins and ends",
    "after": "id of a job that has to end before",
    "extra": "a further directive, verbatim",
    "attempts": "how often it may start in all, resuming (default: 20)",
    "save": "so long before the walltime it saves and stops (default: 2m)",
    "learner_gpus": "one more host, first of all, with so many GPUs (SLURM, PBS)",
    "learner_cores": "of that host",
    "learner_memory": "of that host",
    "learner_queue": "of that host (SLURM)",
    "learner_constraint": "of that host",
}


def _run(options: argparse.Namespace) -> int:
    from paceline.config import UserError
    from paceline.launch import record
    from paceline.launch.command import parse_seeds, resumable, with_seed
    from paceline.launch.profile import read_profile
    from paceline.launch.script import Place, render

    on = options.on or read_profile(options.profile).scheduler
    if on is not None and on.startswith("cluster:"):
        from paceline.launch.cluster_submit import submit_on_cluster

        return submit_on_cluster(on, options)
    scheduler, profile, job = asked(options)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.interactive:
        return _interactive(scheduler, job, profile, options, command)
    if not command:
        raise UserError("submit needs a command: paceline submit … -- paceline train --env CartPole-v1")
    seeds = [None] if options.seeds is None else parse_seeds(options.seeds)
    places = []
    for seed in seeds:
        name = job.name if seed is None else f"{job.name}-{seed}"
        place = Place(record.new_folder(name), Path.cwd())
        words = resumable(with_seed(command, seed), place.folder.name, seed)
        places.append((place, job.model_copy(update={"name": name}), words))
    for place, each, words in places:
        if options.dry_run:
            sys.stdout.write(render(scheduler, each, profile, place, words))
        else:
            _say(enqueue(scheduler, profile, each, place, words))
    return 0


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those of a job that were given, by name."""
    given = {name.removeprefix("job:"): value for name, value in vars(options).items() if name.startswith("job:")}
    return {name: value for name, value in given.items() if value is not None}


def asked(options: argparse.Namespace) -> tuple[Scheduler, Profile, Job]:
    """What the options of `add_job_options` ask for."""
    from paceline.config import UserError
    from paceline.launch.job import Job
    from paceline.launch.profile import checked, read_profile

    profile = read_profile(options.profile)
    scheduler, given = _scheduler(options.on or profile.scheduler), given_options(options)
    if (wall := given.get("walltime", "")).isdecimal():
        raise UserError(f"--walltime {wall}: minutes to SLURM, seconds to PBS; say {wall}m or {wall}s")
    return scheduler, profile, checked(Job, {**profile.defaults, **given}, "--")


def enqueue(scheduler: Scheduler, profile: Profile, job: Job, place: Place, words: Sequence[str]) -> Record:
    """A job in the queue, and the record of it."""
    from paceline.launch import record
    from paceline.launch.command import run_directory
    from paceline.launch.script import SCRIPT, render

    text = render(scheduler, job, profile, place, words)
    record.make(place.folder)
    script = place.folder / SCRIPT
    script.write_text(text, encoding="utf-8")
    script.chmod(0o700)  # OAR starts it as a program
    try:
        number = scheduler.job_id(call(scheduler.submit_argv(script)))
    except BaseException:
        script.unlink(missing_ok=True)  # nothing is in the queue: leave nothing behind
        place.folder.rmdir()
        raise
    made = record.Record(
        key=place.folder.name,
        scheduler=scheduler.name,
        name=job.name,
        ids=(number,),
        command=tuple(words),
        cwd=str(place.cwd),
        nodes=job.hosts,
        walltime=job.walltime,
        submitted=time.time(),
        run=run_directory(words, place.cwd),
        folder=place.folder,
    )
    record.save(made)
    return made


def _say(made: Record) -> None:
    number = made.ids[-1]
    print(f"job        {number} ({made.scheduler}), {made.nodes} {'host' if made.nodes == 1 else 'hosts'}")
    if made.run:
        print(f"run        {made.run}")
    print(f"follow     paceline logs {number} -f")
    print(f"watch      paceline status {number} --watch")
    print(f"cancel     paceline cancel {number}")


def _interactive(
    scheduler: Scheduler, job: Job, profile: Profile, options: argparse.Namespace, command: Sequence[str]
) -> int:
    from paceline.config import UserError

    if options.seeds is not None:
        raise UserError(f"--seeds {options.seeds}: a job for each seed has no one shell; leave out --interactive")
    argv = scheduler.interactive_argv(job)
    if options.dry_run:
        print(shlex.join(argv))
        return 0
    interface = f"--interface {profile.interface} " if profile.interface else ""
    print(f"on the host: paceline launch {interface}-- {shlex.join(command) or 'COMMAND'}", file=sys.stderr)
    try:
        return subprocess.run(argv).returncode  # as long as the user stays
    except OSError as error:
        raise UserError(_absent(argv, error)) from None


def _scheduler(name: str | None) -> Scheduler:
    from paceline.config import UserError
    from paceline.launch import SCHEDULERS

    known = ", ".join(SCHEDULERS)
    if name is None:
        raise UserError(f"submit needs --on SCHEDULER ({known}), or a --profile that says so")
    if name not in SCHEDULERS:
        raise UserError(f"--on {name}: there are {known}")
    return SCHEDULERS[name]


def call(argv: Sequence[str], seconds: float = SECONDS) -> str:
    """What a command of the scheduler prints; where it fails, an error with all of that."""
    from paceline.config import UserError

    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise UserError(_absent(argv, error)) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{shlex.join(argv)}` gave no answer within {seconds:g} s: try again later") from None
    if done.returncode != 0:
        said = " ".join(f"{done.stderr}\n{done.stdout}".split())
        raise UserError(f"`{shlex.join(argv)}` failed with {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def _absent(argv: Sequence[str], error: OSError) -> str:
    return (
        f"{argv[0]} cannot be started ({error.strerror}): run this where the scheduler's commands are, the login node"
    )
