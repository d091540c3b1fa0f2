"""How a supervisor learns the launcher's address and the key of the job.

The launcher writes both to the standard input of the supervisors it starts. Where mpirun or srun start them, or where
standard input is lost (pbs_tmrsh), they are in a file that only the user can read, in a folder that all hosts share.
They are never on a command line, which every user of the host can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.schedulers import mpi
from paceline.schedulers.scheduler import Allocation

FOLDER = "PACELINE_RENDEZVOUS"


@dataclass(frozen=True)
class Contact:
    addresses: list[str]
    port: int
    key: str
    interface: str | None = None
    """Network interface that every host is to use."""

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def new_key() -> str:
    return secrets.token_hex(32)


def read_from(descriptor: int) -> Contact:
    """From an open file. Standard input stays open, so that its number is not reused."""
    if descriptor == 0:
        return Contact(**json.loads(sys.stdin.readline() or "{}"))
    with os.fdopen(descriptor) as file:
        return Contact(**json.loads(file.readline() or "{}"))


def folder(environ: Mapping[str, str]) -> Path:
    """A folder that the hosts share, as they usually do the home folder."""
    return Path(environ.get(FOLDER) or "~/.paceline/rendezvous").expanduser()


def file_for(allocation: Allocation) -> Path:
    """The rendezvous file of this allocation's launch."""
    return folder(os.environ) / f"{allocation.job_id or 'job'}-{mpi.launch_id(os.environ)}"


def write(path: Path, contact: Contact) -> None:
    """Atomically replaces a file that an earlier job may have left."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(contact.line())
    new.replace(path)


def read(path: Path) -> Contact | None:
    """None where the file is missing, or writable by others, who could then make this process start anything."""
    with contextlib.suppress(OSError, ValueError, TypeError), path.open() as file:
        stat = os.fstat(file.fileno())
        if stat.st_uid == os.getuid() and not stat.st_mode & 0o077:
            return Contact(**json.loads(file.read()))
    return None
