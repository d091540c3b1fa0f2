"""The contract of a batch scheduler: a table of words, and functions from text to text.

A scheduler runs nothing itself but `ask`, so it can be tested without a cluster. Every process reads these modules to
count the cores it was given. So they import nothing heavy: `Job` only as a type, `UserError` when it is raised.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from paceline.schedulers.job import Job

State = Literal["waiting", "running", "done", "failed", "cancelled", "timeout", "unknown"]
DEADLINE = "PACELINE_DEADLINE"
"""Variable with the end of the walltime, in seconds since the epoch; job scripts set it."""
GRACE = "PACELINE_GRACE_SECONDS"
"""Variable that `paceline launch` sets for COMMAND: its time to save and end after SIGTERM."""
KILL_DELAY = "PACELINE_KILL_DELAY"
"""Variable with the seconds between SIGTERM and SIGKILL at this site; job scripts set it where the profile says."""
PASS_ON = "PACELINE_PASS_ON"
"""Variable with the names of variables, separated by blanks, that `paceline launch` passes on to every host."""
KILL_DELAY_SECONDS = 30.0
STOP_SHARE, STOP_SECONDS = 0.25, 5.0  # of the kill delay, at most: to end everything else once COMMAND has ended
ASK_SECONDS = 10.0
INDEX = "{index}"
"""Stands for the number of an array's element in the path of its output."""


@dataclass(frozen=True)
class Host:
    """One machine of an allocation. 0 means that the scheduler does not say; the host is asked then."""

    name: str
    cpus: int = 0
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Allocation:
    """The machines a job may use.

    `rank` is None where this process is the only one and starts the others with `remote_argv`. It is a number where
    mpirun, srun or aprun have already started `size` processes.
    """

    scheduler: str
    job_id: str
    hosts: tuple[Host, ...]  # each once, in the scheduler's order; empty where only the processes know them (mpirun)
    deadline: float | None = None  # seconds since the epoch
    rank: int | None = None
    size: int = 0
    kill_delay: float = KILL_DELAY_SECONDS  # seconds between the scheduler's SIGTERM and SIGKILL
    sentinel: tuple[
        str, ...
    ] = ()  # a command that SIGTERM ends when the job is preempted, where no other process is told


@dataclass(frozen=True)
class JobStatus:
    state: State
    reason: str = ""  # why the job waits or ended, in the scheduler's words
    exit_code: int | None = None
    hosts: str = ""
    started: float | None = None
    name: str = ""
    replaces: str = ""  # id of the job that the scheduler resubmitted under this id
    is_gone: bool = False  # the scheduler knows no such job any more, and nothing says how it ended


class Scheduler(ABC):
    name: str
    """As in `--on NAME`."""
    prefix: str
    """Start of a directive line, such as `#SBATCH`."""
    id_variables: tuple[str, ...]
    """Environment variables that identify a job, and a step of it; the first one holds the job id."""
    hosts_variable: str
    """Environment variable that holds the job's hosts, or the path of the file that lists them."""
    core_variables: tuple[str, ...] = ()
    """Environment variables that hold the cores of this task or host, for sites without cgroups."""
    submit: tuple[str, ...]
    """Command that submits a script, whose path is appended."""
    id_pattern: str
    """Regular expression for a line that `submit` prints; its first group is the job id."""
    interactive: tuple[str, ...] = ()
    """Command that opens a shell on the first host of an allocation; options are appended."""
    reads_setup: bool = False
    """Whether `interactive_argv` has the shell read a file first."""
    cancel: str
    """Command that cancels a job, whose id is appended."""
    request_end: tuple[str, ...] = ()
    """Command that sends SIGTERM to a running job's script and leaves it time, so that COMMAND can save; the id is
    appended. Empty where there is none."""
    signals: bool = False
    """Whether the scheduler signals the job shortly before its walltime ends."""
    unsupported: dict[str, str] = {}
    """Fields of `Job` that this scheduler cannot honour → advice for the user."""
    never: str = ""
    """Regular expression for the reason of a waiting job that can never start."""
    after_failure: bool = False
    """Whether a job with `after` also starts when one of those jobs has failed."""
    array_variable: str = ""
    """Environment variable with the number of an array's element; empty without arrays."""
    array_first: int = 0
    """Number of the first element."""

    @abstractmethod
    def options(self, job: Job) -> list[str]:
        """Options that ask for the job's resources, in a script or on a command line."""

    def batch_options(self, job: Job, output: Path) -> list[str]:
        """Further options of a script; the scheduler's own messages go to `output`."""
        return []

    def header(self, job: Job, output: Path) -> list[str]:
        """The directives at the top of a script."""
        self.check(job)
        options = [*self.options(job), *self.batch_options(job, output), *job.extra]
        return [f"{self.prefix} {option}" for option in options]

    def interactive_argv(self, job: Job, setup: Path | None = None) -> list[str]:
        """Command that opens the shell. `setup`: a file for it to read first; where the scheduler starts the shell
        itself, the user is told to read it."""
        self.check(job)
        words = [word for option in [*self.options(job), *job.extra] for word in shlex.split(option)]
        return [*self.interactive, *words]

    @property
    def id_text(self) -> str:
        """Shell text: the id of the job that a script runs in, as `states` has it."""
        return f"${self.id_variables[0]}"

    def restart(self, script: Path) -> list[str]:
        """Shell lines that a stopped job runs to start again; none where exit code 99 suffices. A new job id is
        appended to the file `ids` in `$folder`. The last line fails where the scheduler refuses."""
        return []

    def submit_argv(self, script: Path, after: Sequence[str] = ()) -> list[str]:
        """Command that submits a script. `after`: the job's dependencies, where they are no part of the script."""
        return [*self.submit, str(script)]

    def can_be_array(self, job: Job) -> bool:
        """Whether many of these jobs can be submitted as one array."""
        return bool(self.array_variable)

    def array_header(self, job: Job, output: str, count: int, at_once: int | None) -> list[str]:
        """The directives of an array of `count` jobs, of which at most `at_once` run at a time. `output` contains
        INDEX."""
        bad_input(f"paceline submits no arrays to {self.name}")

    def array_ids(self, text: str, count: int) -> list[str]:
        """The ids of an array's elements, from the output of `submit`. `job_id` has the id of the whole array."""
        bad_input(f"paceline submits no arrays to {self.name}")

    def after_array(self, array: str, elements: Sequence[str], attempts: int) -> list[str]:
        """The ids to wait for where a job comes after an array."""
        return list(elements)

    def job_id(self, text: str) -> str:
        """The job id in the output of `submit`; UserError with that output where there is none."""
        match = re.search(self.id_pattern, text, re.M)
        if match is None:
            bad_input(f"{self.submit[0]} printed no job id; its output: {' '.join(text.split()) or 'nothing'}")
        return match[1]

    @abstractmethod
    def status_argv(self, ids: Sequence[str]) -> list[str]:
        """Command that lists these jobs; without ids, all waiting and running jobs of this user."""

    def history_argv(self, ids: Sequence[str]) -> list[str]:
        """Command that lists jobs which `status_argv` no longer does; empty where there is none."""
        return []

    @abstractmethod
    def states(self, text: str) -> dict[str, JobStatus]:
        """The output of `status_argv` or `history_argv`, by job id. Jobs it does not mention are absent."""

    def cancel_argv(self, job_id: str) -> list[str]:
        return [self.cancel, job_id]

    def request_end_argv(self, job_id: str) -> list[str]:
        return [*self.request_end, job_id] if self.request_end else []

    def kill_delay(self, job_id: str) -> float:
        """Seconds between SIGTERM and SIGKILL when the scheduler ends this job."""
        return KILL_DELAY_SECONDS

    def revive_argv(self, job_id: str, first_host: str) -> list[str]:
        """Command for another host of a job whose first host, and so its script, is gone: it waits until the scheduler
        gives up that host and starts the job again. Empty where the scheduler does so itself."""
        return []

    def attach_argv(self, pid: int, job_id: str) -> list[str]:
        """Command that has the session of a process accounted for as the job's; empty where that is not needed."""
        return []

    @abstractmethod
    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        """The allocation this process is in, or None outside of one."""

    @abstractmethod
    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Command that runs argv on another host of the allocation, with these variables set."""

    def check_limits(self, job: Job) -> None:
        """UserError for a request that no host or queue of the site can ever fulfil, as far as the scheduler says."""
        return

    def check(self, job: Job) -> None:
        """UserError for a field that is set and cannot be honoured: nothing is ignored silently."""
        for field, advice in self.unsupported.items():
            value = getattr(job, field)
            if value != type(job).model_fields[field].default:
                bad_input(f"--{field.replace('_', '-')} {value}: not available on {self.name}; {advice}")


def bad_input(text: str) -> NoReturn:
    from paceline.config import UserError

    raise UserError(text)


def set_options(job: Job, **templates: str) -> list[str]:
    """The templates, filled in, of those fields of the job that are set."""
    return [template.format(value) for field, template in templates.items() if (value := getattr(job, field))]


def clock(seconds: int) -> str:
    """`5400` → `1:30:00`."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def read_node_file(path: str) -> tuple[dict[str, int], float]:
    """Host → number of lines in a scheduler's node file, and when it was written, which is when the job began."""
    file = Path(path)
    try:
        names, began = file.read_text(encoding="utf-8").split(), file.stat().st_mtime
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        bad_input(f"{path}: cannot read the list of this job's hosts ({reason}); run on the job's first host")
    return Counter(names), began


def deadline_of(environ: Mapping[str, str]) -> float | None:
    text = environ.get(DEADLINE, "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def grace_seconds(environ: Mapping[str, str], known: float) -> float:
    """COMMAND's time to save and end: the kill delay of the environment, else the known one, less the time to stop
    everything else."""
    text = environ.get(KILL_DELAY, "")
    delay = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else known
    return delay - min(STOP_SECONDS, STOP_SHARE * delay)


def with_variables(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in environ.items()), *argv] if environ else list(argv)


def ask(argv: Sequence[str], seconds: float = ASK_SECONDS) -> str:
    """The output of a command; empty where it fails, is not installed or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
