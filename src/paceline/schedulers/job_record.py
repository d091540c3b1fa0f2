"""Records of submitted jobs, a folder each, so that `paceline jobs` works in any terminal."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.config import UserError
from paceline.schedulers.job import Job
from paceline.schedulers.scheduler import State, clock
from paceline.schedulers.script import (
    CANCELLED,
    ENDED,
    EXIT_CODE,
    IDS,
    OUTPUT,
    RECORD,
    SCHEDULER_OUTPUT,
    STARTS,
)


@dataclass(frozen=True)
class JobRecord:
    key: str  # name of its folder
    scheduler: str
    name: str
    ids: tuple[str, ...]  # job ids, newest last: a resubmitted job gets a new one
    command: tuple[str, ...]
    cwd: str
    nodes: int
    walltime: int
    submitted: float
    run: str = ""  # run directory, where the command is `paceline train` or `tune`
    state: State = "waiting"  # as last seen
    reason: str = ""
    exit_code: int | None = None
    attempts: int = 1  # how often it starts at most
    array: str = ""  # id of the array it is an element of
    folder: Path = field(default=Path(), compare=False)

    @property
    def id(self) -> str:
        """The id it was last seen under."""
        return self.ids[-1]

    @property
    def every_id(self) -> tuple[str, ...]:
        """The known ids and those that the job itself wrote down: of its starts, and of the job that continues it."""
        written = [*_text(self.folder / IDS).split(), *(number for number, _ in self.starts())]
        return tuple(dict.fromkeys([*self.ids, *written]))

    @property
    def output(self) -> Path:
        return self.folder / OUTPUT

    @property
    def scheduler_output(self) -> Path:
        return self.folder / SCHEDULER_OUTPUT

    @property
    def is_over(self) -> bool:
        return self.state not in ("waiting", "running", "unknown")

    @property
    def is_cancelled(self) -> bool:
        return (self.folder / CANCELLED).exists()

    @property
    def told_to_end(self) -> State | None:
        """`cancelled` if its last start ended because of SIGTERM, as after `scancel` or `qdel`; `timeout` if that came
        with the end of the walltime."""
        if not (self.folder / ENDED).exists():
            return None
        return "timeout" if _text(self.folder / ENDED).strip() == "timeout" else "cancelled"

    def mark_cancelled(self) -> None:
        """Keep the job from starting itself again."""
        (self.folder / CANCELLED).touch()

    def starts(self) -> list[tuple[str, float]]:
        """Id and time of each start, as the job wrote them."""
        lines = [line.split() for line in _text(self.folder / STARTS).splitlines()]
        return [(words[0], float(words[1])) for words in lines if len(words) == 2 and words[1].isdecimal()]

    def written_exit_code(self) -> int | None:
        text = _text(self.folder / EXIT_CODE).strip()
        return int(text) if text.isdecimal() else None


def data_folder(name: str) -> Path:
    """Folder for this user's records of jobs and clusters."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute() / "paceline" / name


def home() -> Path:
    return data_folder("jobs")


def new_folder(name: str) -> Path:
    """Path of a new job's folder, which is not created yet."""
    return home() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def create_folder(folder: Path) -> None:
    try:
        for path in (folder.parent, folder):  # private: it holds the job's output
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create {folder} ({error.strerror}): set XDG_DATA_HOME to a folder that the hosts share"
        ) from None


def planned(folder: Path, scheduler: str, job: Job, words: Sequence[str], run: str) -> JobRecord:
    """The record of a job that the working directory is about to submit."""
    return JobRecord(
        key=folder.name,
        scheduler=scheduler,
        name=job.name,
        ids=(),
        command=tuple(words),
        cwd=str(Path.cwd()),
        nodes=job.hosts,
        walltime=job.walltime,
        submitted=0.0,
        run=run,
        attempts=job.attempts,
        folder=folder,
    )


def submitted(record: JobRecord, job_id: str, array: str = "") -> JobRecord:
    """Record that the job was just submitted, under this id."""
    record = replace(record, ids=(job_id,), submitted=time.time(), array=array)
    save(record)
    return record


def create(folder: Path, scheduler: str, job: Job, job_id: str, words: Sequence[str], run: str) -> JobRecord:
    """Record a job that was just submitted from the working directory."""
    return submitted(planned(folder, scheduler, job, words, run), job_id)


def print_next_steps(record: JobRecord, run: str, count: int = 1) -> None:
    """`count`: number of jobs in the array of which this is the first."""
    hosts = f"{record.nodes} {'host' if record.nodes == 1 else 'hosts'}"
    if count > 1:
        print(f"array      {record.array} ({record.scheduler}), {count} jobs of {hosts}; the first:")
    print(f"job        {record.id} ({record.scheduler}), {hosts}")
    if run:
        print(f"run        {run}")
    if record.attempts > 1 and record.walltime:
        limit = clock(record.walltime)
        print(f"starts     {record.attempts} at most, of {limit} each: stopped early, it continues (--attempts)")
    print(f"follow     paceline logs {record.id} -f")
    print(f"watch      paceline status {record.id} --watch")
    print(f"cancel     paceline cancel {record.array if count > 1 else record.id}")


def save(record: JobRecord) -> None:
    path = record.folder / RECORD
    temporary = path.with_name(f".{RECORD}.{os.getpid()}")
    temporary.write_text(as_json(record, indent=2) + "\n", encoding="utf-8")
    temporary.chmod(0o600)
    temporary.replace(path)


def as_json(record: JobRecord, indent: int | None = None) -> str:
    tree = asdict(record)
    del tree["folder"]
    return json.dumps(tree, indent=indent)


def records() -> list[JobRecord]:
    """All jobs, oldest first."""
    found = [_read(path) for path in home().glob(f"*/{RECORD}")]
    return sorted((record for record in found if record is not None), key=lambda record: record.submitted)


def find(word: str | None) -> JobRecord:
    """The job with this id, folder or name, the newest of several; None: the newest job."""
    every = records()
    if not every:
        raise UserError(f"no job was submitted yet ({home()} is empty): see paceline submit --help")
    if word is None:
        return every[-1]
    number = word.partition(".")[0]  # PBS appends the server's name
    for record in reversed(every):
        if word == record.key or number in {each.partition(".")[0] for each in record.every_id}:
            return record
    for record in reversed(every):
        if word == record.name:
            return record
    last = ", ".join(record.id for record in every[-5:])
    raise UserError(f"there is no job {word}; the newest are {last} (paceline jobs lists all)")


def find_all(word: str) -> list[JobRecord]:
    """The jobs of the array with this id; otherwise the job that `find` finds."""
    number = word.partition(".")[0]
    elements = [each for each in records() if each.array and number == each.array.partition(".")[0]]
    newest = elements[-1].array if elements else ""  # ids can be repeated, by another scheduler for instance
    last = [each for each in elements if (each.array, each.scheduler) == (newest, elements[-1].scheduler)]
    return last or [find(word)]


def _read(path: Path) -> JobRecord | None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree["ids"], tree["command"] = tuple(tree["ids"]), tuple(tree["command"])
        record = replace(JobRecord(**tree), folder=path.parent)
        if not record.ids and (starts := record.starts()):  # submitted by hand: only the job itself knows its id
            record = replace(record, ids=(starts[0][0],), submitted=starts[0][1])
        return record if record.ids else None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # removed meanwhile, or another program's file


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
