"""The jobs one has submitted: a folder each, so that another terminal finds them again."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.config import UserError
from paceline.launch.scheduler import State
from paceline.launch.script import CANCELLED, EXIT_CODE, IDS, OUTPUT, SCHEDULER_OUTPUT, STARTS

_FILE = "job.json"


@dataclass(frozen=True)
class Record:
    key: str  # name of its folder
    scheduler: str
    name: str
    ids: tuple[str, ...]  # the scheduler's, the newest last: a job that is submitted again gets another
    command: tuple[str, ...]
    cwd: str
    nodes: int
    walltime: int
    submitted: float
    run: str = ""  # the run directory, where the command is one of ours
    state: State = "waiting"  # as it was last seen
    reason: str = ""
    exit_code: int | None = None
    folder: Path = field(default=Path(), compare=False)

    @property
    def every_id(self) -> tuple[str, ...]:
        """With those that the job has written down itself: of its starts, and of the one that is to continue it."""
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

    def starts(self) -> list[tuple[str, float]]:
        """Id and time of each start, as the job itself has written them."""
        made = []
        for line in _text(self.folder / STARTS).splitlines():
            words = line.split()
            if len(words) == 2 and words[1].isdecimal():
                made.append((words[0], float(words[1])))
        return made

    def written_exit_code(self) -> int | None:
        text = _text(self.folder / EXIT_CODE).strip()
        return int(text) if text.isdecimal() else None

    def mark_cancelled(self) -> None:
        """So that the job does not start itself again."""
        (self.folder / CANCELLED).touch()

    @property
    def is_cancelled(self) -> bool:
        return (self.folder / CANCELLED).exists()


def home() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute() / "paceline/jobs"


def new_folder(name: str) -> Path:
    """Where a job's files will be; it is not made yet."""
    return home() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def make(folder: Path) -> None:
    try:
        for path in (folder.parent, folder):  # what a job prints is nobody else's
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make {folder} ({error.strerror}): set XDG_DATA_HOME to a folder that the hosts see too"
        ) from None


def save(record: Record) -> None:
    tree = asdict(record)
    del tree["folder"]
    path = record.folder / _FILE
    temporary = path.with_name(f".{_FILE}.{os.getpid()}")
    temporary.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    temporary.chmod(0o600)
    temporary.replace(path)


def records() -> list[Record]:
    """All jobs, the oldest first."""
    found = [_read(path) for path in home().glob(f"*/{_FILE}")]
    return sorted((record for record in found if record is not None), key=lambda record: record.submitted)


def find(word: str | None) -> Record:
    """By id, by folder or by name, the newest of several of one name; None: the newest of all."""
    every = records()
    if not every:
        raise UserError(f"no job has been submitted from here ({home()} is empty): see paceline submit --help")
    if word is None:
        return every[-1]
    number = word.partition(".")[0]  # PBS puts the server's name behind it
    for record in reversed(every):
        if word == record.key or number in {each.partition(".")[0] for each in record.every_id}:
            return record
    for record in reversed(every):
        if word == record.name:
            return record
    last = ", ".join(record.ids[-1] for record in every[-5:])
    raise UserError(f"there is no job {word}; the last ones are {last} (paceline jobs lists them)")


def _read(path: Path) -> Record | None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree["ids"], tree["command"] = tuple(tree["ids"]), tuple(tree["command"])
        return replace(Record(**tree), folder=path.parent)
    except (OSError, ValueError, TypeError, KeyError):
        return None  # removed meanwhile, or not ours


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
