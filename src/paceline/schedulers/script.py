"""The script of a job, which a user can read, keep and submit by hand."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.schedulers.job import Job
from paceline.schedulers.profile import Profile
from paceline.schedulers.scheduler import DEADLINE, INDEX, KILL_DELAY, PASS_ON, Scheduler
from paceline.schedulers.train_command import train_words

SCRIPT, OUTPUT, SCHEDULER_OUTPUT, LAUNCH = "job.sh", "output.log", "scheduler.log", "launch"
RECORD = "job.json"
BY_WARNING = 128 + signal.SIGUSR1
"""Exit code of a command that the signal before the end of the walltime ended: it had no handler."""
STARTS, IDS, EXIT_CODE, ENDED, CANCELLED = "starts", "ids", "exit_code", "ended", "cancelled"
"""Files in a job's folder: a line for each start (id, time); ids of the jobs that continue it; the last exit code; a
marker that the last start was told to end; a marker that the user has cancelled it."""
STOPPED_EARLY = 99
WAIT = """\
while
  before=$signals
  wait "$child"
  code=$?
  [ "$before" != "$signals" ]  # a signal ended the wait, not the command
do :; done"""
"""Waits for `$child` although signals interrupt `wait`; traps must increment `$signals`."""
# `export -p` prints a line for each variable: `declare -x NAME="value"`.
_CHANGED = (
    'comm -13 <(sort <<<"$before") <(export -p | sort) | '
    r"sed -n 's/^declare -x \([A-Za-z_][A-Za-z_0-9]*\)=.*/\1/p'"
)
_PLAIN = re.compile(r"[\w@%+=:,./-]+")


@dataclass(frozen=True)
class JobPaths:
    """A job's own folder and the folder it was submitted from, both visible to its hosts, and its interpreter."""

    folder: Path
    cwd: Path
    python: str = sys.executable
    messages: Path | None = None
    """File for the scheduler's own messages; by default in the folder, which must exist then."""
    record: str = ""
    """JSON: the job's record, for a script that is submitted by hand."""


def render(scheduler: Scheduler, job: Job, profile: Profile, paths: JobPaths, command: Sequence[str]) -> str:
    # Only a login shell knows `module` and `conda`.
    login = " -l" if needs_login_shell(profile) else ""
    sections = [
        [f"#!/bin/bash{login}", *scheduler.header(job, paths.messages or paths.folder / SCHEDULER_OUTPUT)],
        _begin(scheduler, job, paths),
        site_lines(profile, paths.python),
        _run(scheduler, job, profile, command),
        _end(scheduler, job, paths, train_words(command) is not None),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def render_array(scheduler: Scheduler, job: Job, folders: Path, count: int, at_once: int | None) -> str:
    """The script of an array, whose elements run the scripts in FOLDERS-0, FOLDERS-1, …"""
    output = f"{folders}-{INDEX}/{SCHEDULER_OUTPUT}"
    lines = [
        "#!/bin/bash",
        *scheduler.array_header(job, output, count, at_once),
        "",
        "# Written by `paceline submit --seeds`. Each element of the array runs the script of its seed.",
        f'exec {shlex.quote(str(folders))}-"${scheduler.array_variable}"/{SCRIPT}',
    ]
    return "\n".join(lines) + "\n"


def needs_login_shell(profile: Profile) -> bool:
    return bool(profile.modules or (profile.conda and "/" not in profile.conda))


def _begin(scheduler: Scheduler, job: Job, paths: JobPaths) -> list[str]:
    script = Path(SCRIPT) if paths.messages else paths.folder / SCRIPT
    lines = [
        f"# Written by `paceline submit`. To submit it by hand: {shlex.join(scheduler.submit_argv(script, job.after))}",
        f"folder={shlex.quote(str(paths.folder))}",
        '(umask 077 && mkdir -p "$folder") || exit 1',
        f'exec >>"$folder/{OUTPUT}" 2>&1 || exit 1',
    ]
    if paths.record:  # so that `paceline jobs` knows a script that was submitted by hand, and the job can continue
        lines += [
            f"""[ -e "$folder/{RECORD}" ] || cat >"$folder/{RECORD}" <<'END'""",
            paths.record,
            "END",
            f'[ -e "$folder/{SCRIPT}" ] || {{ cp "$0" "$folder/{SCRIPT}" && chmod 700 "$folder/{SCRIPT}"; }}',
        ]
    return [
        *lines,
        f'rm -f "$folder/{EXIT_CODE}" "$folder/{ENDED}"',
        f'echo "{scheduler.id_text}" "$(date +%s)" >>"$folder/{STARTS}"',
        f'starts=$(wc -l <"$folder/{STARTS}")',
        f'echo "paceline: job {scheduler.id_text}, start $starts, on $(uname -n), $(date)"',
        f"{DEADLINE}=$(($(date +%s) + {job.walltime}))",
        f"export {DEADLINE}",
        f"cd {shlex.quote(str(paths.cwd))} || exit 1",
    ]


def site_lines(profile: Profile, python: str) -> list[str]:
    """Shell lines that set up the environment of a site."""
    lines = ["before=$(export -p)", *(f"module {arguments}" for arguments in profile.modules)]
    if profile.conda and "/" in profile.conda:
        lines += [
            f"export CONDA_PREFIX={_expanding(profile.conda)}",
            'export PATH="$CONDA_PREFIX/bin:$PATH"',
            # As `conda activate` does, which may not be installed here.
            'for hook in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do',
            "  # shellcheck disable=SC1090",
            '  if [ -r "$hook" ]; then . "$hook"; fi',
            "done",
        ]
    elif profile.conda:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(profile.conda)}"]
    elif profile.venv:
        lines += [f"export VIRTUAL_ENV={_expanding(profile.venv)}", 'export PATH="$VIRTUAL_ENV/bin:$PATH"']
    else:
        lines.append(f'export PATH={shlex.quote(str(Path(python).parent))}:"$PATH"')
    lines += [f"unset {' '.join(profile.unset)}"] if profile.unset else []
    lines += [f"export {name}={_expanding(value)}" for name, value in profile.set.items()]
    if profile.scratch:
        lines += [f"export TMPDIR={_expanding(profile.scratch)}", 'mkdir -p "$TMPDIR"']
    lines += [f"export {KILL_DELAY}={profile.kill_delay}"] if profile.kill_delay else []
    return [*lines, *profile.lines, f"{PASS_ON}=$({_CHANGED})", f"export {PASS_ON}  # to all hosts of the job"]


def launch_options(profile: Profile) -> list[str]:
    """Shell words: the options of `paceline launch` that the profile sets."""
    options = [f"--interface {shlex.quote(profile.interface)}"] if profile.interface else []
    options += [f"--ports {profile.ports}"] if profile.ports else []
    if profile.container and not profile.launcher:  # a launcher starts the container itself, on every host
        options.append(f"--container {_expanding(profile.container)}")
    return options


def _run(scheduler: Scheduler, job: Job, profile: Profile, command: Sequence[str]) -> list[str]:
    words = []
    if not scheduler.signals:
        words.append(f"timeout --foreground --preserve-status --signal=USR1 {job.walltime - job.save}")
    if profile.launcher:
        words += [profile.launcher, *([profile.container] if profile.container else [])]
    words.append(f'python3 -m paceline launch --log "$folder/{LAUNCH}"')
    words += launch_options(profile)
    return [
        "# A shell runs a trap only when no command is in the foreground, so the command runs in the background.",
        # One request to end may come as several signals: from the scheduler, again from the scheduler, from `timeout`.
        "signals=0 ended='' child=''",
        "trap 'signals=$((signals + 1)); kill -s USR1 \"$child\"' USR1 USR2",
        'trap \'signals=$((signals + 1)); [ -n "$ended" ] || kill -s TERM "$child"; ended=1\' TERM INT HUP',
        # Single quotes keep this shell from expanding what the command's own shell expands.
        *(["# shellcheck disable=SC2016"] if re.search(r"[$`]", shlex.join(command)) else []),
        f"{' '.join(words)} -- \\",
        f"  {shlex.join(command)} &",
        "child=$!",
        '[ -z "$ended" ] || kill -s TERM "$child"',
        WAIT,
    ]


def _end(scheduler: Scheduler, job: Job, paths: JobPaths, is_training: bool) -> list[str]:
    lines = []
    if is_training:  # the signal came before it had a handler, so nothing is lost
        lines.append(f'[ "$code" = {BY_WARNING} ] && code={STOPPED_EARLY}')
    lines += [
        'echo "paceline: exit code $code${ended:+, told to end}, $(date)"',
        f'if [ -n "$ended" ] && [ "$(date +%s)" -ge "${{{DEADLINE}:-9999999999}}" ]; then',
        f'  echo timeout >"$folder/{ENDED}"',
        'elif [ -n "$ended" ]; then',
        f'  echo cancelled >"$folder/{ENDED}"',
        f'elif [ "$code" = {BY_WARNING} ]; then',
        f'  echo timeout >"$folder/{ENDED}"',
        "fi",
        f'echo "$code" >"$folder/{EXIT_CODE}"',
    ]
    if job.attempts > 1:
        restart, submit = scheduler.restart(paths.folder / SCRIPT), scheduler.submit_argv(paths.folder / SCRIPT)
        by_hand = f"to continue it, run on a login node: {shlex.join(submit)}"
        stopped = f'[ "$code" = {STOPPED_EARLY} ] && [ -z "$ended" ] && [ ! -e "$folder/{CANCELLED}" ]'
        lines += [
            f'if {stopped} && [ "$starts" -lt {job.attempts} ]; then',
            f'  echo "paceline: stopped early, to be continued (start $starts of {job.attempts} at most)"',
        ]
        if restart:
            lines += ["  {", *(f"    {line}" for line in restart)]
            lines.append(
                f"  }} || echo {shlex.quote(f'paceline: the scheduler does not let a job continue; {by_hand}')}"
            )
        last = f"paceline: stopped early at its last start (--attempts {job.attempts}); {by_hand}"
        lines.append(f'elif [ "$code" = {STOPPED_EARLY} ]; then')
        lines.append(f'  [ "$starts" -lt {job.attempts} ] || echo {shlex.quote(last)}')
        if not restart:  # the scheduler restarts a job that exits with 99
            lines.append("  code=1")
        lines.append("fi")
    return [*lines, 'exit "$code"']


def _expanding(value: str) -> str:
    """Double-quoted: `$USER` expands, blanks stay; `~/` is the home folder, `\\$` a dollar sign."""
    text = re.sub(r'(["`]|\\(?!\$))', r"\\\1", re.sub(r"^~(?=/|$)", "$HOME", value))
    return text if _PLAIN.fullmatch(text) else f'"{text}"'
