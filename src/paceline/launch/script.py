"""The script of a job: text that one can read, keep and submit by hand."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.command import train_words
from paceline.launch.job import Job
from paceline.launch.profile import Profile
from paceline.launch.scheduler import DEADLINE, Scheduler

SCRIPT, OUTPUT, SCHEDULER_OUTPUT, LAUNCH = "job.sh", "output.log", "scheduler.log", "launch"
STARTS, IDS, EXIT_CODE, CANCELLED = "starts", "ids", "exit_code", "cancelled"
"""Files in a job's folder: a line for each start (id, time); ids of jobs that continue it; the last exit code; there if
the user has cancelled it."""
STOPPED_EARLY = 99
_PLAIN = re.compile(r"[\w@%+=:,./-]+")


@dataclass(frozen=True)
class Place:
    """Where a job lives: the folder of its files and the one it was submitted from, both seen by its hosts."""

    folder: Path
    cwd: Path
    python: str = sys.executable


def render(scheduler: Scheduler, job: Job, profile: Profile, place: Place, command: Sequence[str]) -> str:
    # Where modules or conda are used, only a login shell knows them.
    login = " -l" if profile.modules or (profile.conda and "/" not in profile.conda) else ""
    sections = [
        [f"#!/bin/bash{login}", *scheduler.header(job, place.folder / SCHEDULER_OUTPUT)],
        _begin(scheduler, job, place),
        _site(profile, place),
        _run(scheduler, job, profile, command),
        _end(scheduler, job, place, train_words(command) is not None),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _begin(scheduler: Scheduler, job: Job, place: Place) -> list[str]:
    script = shlex.join(scheduler.submit_argv(place.folder / SCRIPT))
    number = f'"${scheduler.id_variable}"'
    return [
        f"# Made by `paceline submit`. By hand: {script}",
        f"folder={shlex.quote(str(place.folder))}",
        f'exec >>"$folder/{OUTPUT}" 2>&1 || exit 1',
        f'rm -f "$folder/{EXIT_CODE}"',
        f'echo {number} "$(date +%s)" >>"$folder/{STARTS}"',
        f'starts=$(wc -l <"$folder/{STARTS}")',
        f'echo "paceline: job ${scheduler.id_variable}, start $starts, on $(uname -n), $(date)"',
        f"{DEADLINE}=$(($(date +%s) + {job.walltime}))",
        f"export {DEADLINE}",
        f"cd {shlex.quote(str(place.cwd))} || exit 1",
    ]


def _site(profile: Profile, place: Place) -> list[str]:
    lines = [f"module {arguments}" for arguments in profile.modules]
    if profile.conda and "/" in profile.conda:
        prefix = _expanding(profile.conda)
        lines += [f"export CONDA_PREFIX={prefix}", 'export PATH="$CONDA_PREFIX/bin:$PATH"']
    elif profile.conda:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(profile.conda)}"]
    elif profile.venv:
        lines += [f"export VIRTUAL_ENV={_expanding(profile.venv)}", 'export PATH="$VIRTUAL_ENV/bin:$PATH"']
    else:
        lines.append(f'export PATH={shlex.quote(str(Path(place.python).parent))}:"$PATH"')
    if profile.unset:
        lines.append(f"unset {' '.join(profile.unset)}")
    lines += [f"export {name}={_expanding(value)}" for name, value in profile.set.items()]
    if profile.scratch:
        lines += [f"export TMPDIR={_expanding(profile.scratch)}", 'mkdir -p "$TMPDIR"']
    return [*lines, *profile.lines]


def _run(scheduler: Scheduler, job: Job, profile: Profile, command: Sequence[str]) -> list[str]:
    words = []
    if not scheduler.signals:  # so somebody else has to look at the clock
        words.append(f"timeout --foreground --preserve-status --signal=USR1 {job.walltime - job.save}")
    if profile.launcher:
        words.append(profile.launcher)
    words.append(f'python3 -m paceline launch --log "$folder/{LAUNCH}"')
    if profile.interface:
        words.append(f"--interface {shlex.quote(profile.interface)}")
    return [
        "# The shell runs a trap only when nothing is in the foreground: so the command is in the background.",
        "signals=0 ended=",
        "trap 'signals=$((signals + 1)); kill -s USR1 \"$child\"' USR1 USR2",
        "trap 'signals=$((signals + 1)) ended=1; kill -s TERM \"$child\"' TERM INT HUP",
        # What a shell of the command's is to expand, this one must not.
        *(["# shellcheck disable=SC2016"] if re.search(r"[$`]", shlex.join(command)) else []),
        f"{' '.join(words)} -- \\",
        f"  {shlex.join(command)} &",
        "child=$!",
        "while",
        "  before=$signals",
        '  wait "$child"',
        "  code=$?",
        '  [ "$before" != "$signals" ]  # a signal ended the wait, not the command',
        "do :; done",
    ]


def _end(scheduler: Scheduler, job: Job, place: Place, is_training: bool) -> list[str]:
    lines = []
    if is_training:  # told to stop before it could listen: nothing is lost
        lines.append(f'[ "$code" = {128 + signal.SIGUSR1} ] && code={STOPPED_EARLY}')
    lines += [
        'echo "paceline: exit code $code${ended:+, told to end}, $(date)"',
        f'echo "$code" >"$folder/{EXIT_CODE}"',
    ]
    if job.attempts > 1:
        again = scheduler.again(place.folder / SCRIPT)
        stopped = f'[ "$code" = {STOPPED_EARLY} ] && [ -z "$ended" ] && [ ! -e "$folder/{CANCELLED}" ]'
        lines += [f'if {stopped} && [ "$starts" -lt {job.attempts} ]; then']
        lines += ['  echo "paceline: stopped early, to be continued"', *(f"  {line}" for line in again)]
        if not again:  # the exit code alone decides
            lines += [f'elif [ "$code" = {STOPPED_EARLY} ]; then', "  code=1"]
        lines.append("fi")
    return [*lines, 'exit "$code"']


def _expanding(value: str) -> str:
    """In double quotes, where `$USER` is put in and blanks are kept; `~/` is the home folder, `\\$` a dollar sign."""
    text = re.sub(r'(["`]|\\(?!\$))', r"\\\1", re.sub(r"^~(?=/|$)", "$HOME", value))
    return text if _PLAIN.fullmatch(text) else f'"{text}"'
