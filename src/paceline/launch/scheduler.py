"""What every scheduler knows how to do: text in, text out, so that it is tested with and without a cluster.

A new scheduler is a class with these members and its line in `launch/__init__.py`, an example in `sites/`, a page in
the documentation.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from paceline.config import UserError
from paceline.launch.job import Job

State = Literal["waiting", "running", "done", "failed", "cancelled", "timeout", "unknown"]
DEADLINE = "PACELINE_DEADLINE"
"""The variable with the end of the walltime, in seconds since the epoch; a job script of ours sets it."""
_ASK_SECONDS = 10.0


@dataclass(frozen=True)
class Host:
    """One machine of an allocation. 0: not said; the host itself is asked then."""

    name: str
    cpus: int = 0
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Allocation:
    """The machines that are ours now.

    `rank` is None where this process is the only one of the job and reaches the other hosts itself (`remote_argv`), and
    a number where somebody (mpirun, srun, aprun) has started one process on each host already. `size`: how many.
    """

    scheduler: str
    job_id: str
    hosts: tuple[Host, ...]  # in the scheduler's order, each once; empty where only the processes know (mpirun)
    deadline: float | None = None  # seconds since the epoch
    rank: int | None = None
    size: int = 0


@dataclass(frozen=True)
class JobStatus:
    state: State
    reason: str = ""  # why it waits, or ended: in the scheduler's words
    exit_code: int | None = None
    hosts: str = ""
    started: float | None = None
    name: str = ""
    replaces: str = ""  # id of the job that the scheduler started again under this id


class Scheduler(Protocol):
    name: str
    prefix: str
    """Of a line of directives, as `#SBATCH`."""
    id_variable: str
    """The variable that holds the job's id, in the job."""
    signals: bool
    """Whether it tells the job when its walltime is about to end."""

    def header(self, job: Job, output: Path) -> list[str]:
        """The directives at the top of a script; what the scheduler itself prints goes to `output`."""

    def again(self, script: Path) -> list[str]:
        """Shell lines, run in the job, that have it start anew; none where exit code 99 does that. A new id goes to the
        file `ids` in `$folder`."""

    def submit_argv(self, script: Path) -> list[str]: ...

    def interactive_argv(self, job: Job) -> list[str]:
        """A shell on the first host of an allocation."""

    def job_id(self, text: str) -> str:
        """The job's id in what the submit command printed; UserError with that text where there is none."""

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        """Asks for these jobs; without ids for all that are mine, waiting or running."""

    def states(self, text: str) -> dict[str, JobStatus]:
        """By id. A job that the answer does not mention is absent."""

    def cancel_argv(self, job_id: str) -> list[str]: ...

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """The allocation this process is in, None outside one."""

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The command that runs argv on a host of the allocation, with those variables set."""


def found(pattern: str, text: str, command: str) -> str:
    """The first group of the pattern, line by line; what the command printed instead is the user's to read."""
    match = re.search(pattern, text, re.M)
    if match is None:
        raise UserError(f"{command} gave no job id; it said: {' '.join(text.split()) or 'nothing'}")
    return match[1]


def refuse(job: Job, scheduler: str, **advice: str) -> None:
    """Nothing that was asked for is left out silently: an error for each of these fields that is set."""
    for name, instead in advice.items():
        value = getattr(job, name)
        if value != Job.model_fields[name].default:
            raise UserError(f"--{name.replace('_', '-')} {value}: {scheduler} has no such thing; {instead}")


def clock(seconds: int) -> str:
    """`5400` → `1:30:00`."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def counted(names: Iterable[str]) -> dict[str, int]:
    """Each name once, in order, with how often it came."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def node_file(path: str) -> tuple[dict[str, int], float]:
    """The hosts of a scheduler's node file with their lines, and when it was written: when the job began."""
    file = Path(path)
    try:
        return counted(file.read_text().split()), file.stat().st_mtime
    except OSError as error:
        raise UserError(
            f"{path}, the list of this job's hosts, cannot be read ({error.strerror}); start on the job's first host"
        ) from None


def deadline_of(environ: Mapping[str, str]) -> float | None:
    """What a job script of ours says of the end of the walltime."""
    text = environ.get(DEADLINE, "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def with_variables(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in environ.items()), *argv] if environ else list(argv)


def ask(argv: Sequence[str], seconds: float = _ASK_SECONDS) -> str:
    """What a command prints; nothing where it fails, is absent or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
