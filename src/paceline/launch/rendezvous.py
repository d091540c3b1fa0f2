"""How a supervisor learns where the launcher is, and the key of the job.

Where the launcher starts it, through its standard input. Where somebody else does (mpirun, srun), or where standard
input gets lost on the way (pbs_tmrsh): from a file that only the user can read, in a folder that all hosts share.
Neither ever stands on a command line, where everybody could read it.
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

FOLDER = "PACELINE_RENDEZVOUS"


@dataclass(frozen=True)
class Contact:
    addresses: list[str]
    port: int
    key: str
    interface: str | None = None
    """The network interface that every host is to use."""

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def new_key() -> str:
    return secrets.token_hex(32)


def read_from(number: int) -> Contact:
    """From an open file; standard input stays open, so that its number is not given to something else."""
    if number == 0:
        return Contact(**json.loads(sys.stdin.readline() or "{}"))
    with os.fdopen(number) as file:
        return Contact(**json.loads(file.readline() or "{}"))


def folder(environ: Mapping[str, str]) -> Path:
    """Shared between the hosts: home folders mostly are."""
    return Path(environ.get(FOLDER) or "~/.paceline/rendezvous").expanduser()


def write(path: Path, contact: Contact) -> None:
    """At once whole; in place of one that an earlier job left."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(contact.line())
    new.replace(path)


def read(path: Path) -> Contact | None:
    """None: not there yet, or not ours; whoever could write it could make us start anything."""
    with contextlib.suppress(OSError, ValueError, TypeError), path.open() as file:
        stat = os.fstat(file.fileno())
        if stat.st_uid == os.getuid() and not stat.st_mode & 0o077:
            return Contact(**json.loads(file.read()))
    return None
