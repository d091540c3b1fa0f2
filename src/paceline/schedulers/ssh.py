"""Hosts that are reached by ssh, listed in a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from paceline.config import UserError
from paceline.schedulers.scheduler import Allocation, Host, with_variables

# BatchMode: nobody is there to answer questions.
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15", "-T")
LINE_FORMAT = "one host per line: [user@]name[:port] [cpus=N] [gpus=N]; # starts a comment"
_HOST = re.compile(r"(?:(?P<user>[\w.+-]+)@)?(?P<name>\w[\w.-]*)(?::(?P<port>\d+))?")


class SshHost(BaseModel):
    """A host and how ssh reaches it. Zero cpus or gpus: the host is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    target: str
    """[user@]name"""
    port: int = 0
    cpus: int = 0
    gpus: int = 0

    @property
    def name(self) -> str:
        return self.target.rpartition("@")[2]

    @property
    def label(self) -> str:
        """As the user wrote it; unique in its file."""
        return f"{self.target}:{self.port}" if self.port else self.target


def parse_host(line: str) -> SshHost:
    words = line.split()
    match = _HOST.fullmatch(words[0]) if words else None
    if match is None:
        raise ValueError(f"{line!r} is not a host ({LINE_FORMAT})")
    values: dict[str, int] = {}
    for setting in words[1:]:
        key, _, value = setting.partition("=")
        if key not in ("cpus", "gpus") or not value.isdecimal():
            raise ValueError(f"{setting!r} is not a setting of a host ({LINE_FORMAT})")
        values[key] = int(value)
    user = f"{match['user']}@" if match["user"] else ""
    return SshHost(target=f"{user}{match['name']}", port=int(match["port"] or 0), **values)


def distinct_hosts(entries: Iterable[str | Mapping[str, object]]) -> tuple[SshHost, ...]:
    """The hosts of these lines or mappings; ValueError for none, or for one that is listed twice."""
    found: dict[str, SshHost] = {}
    for entry in entries:
        host = parse_host(entry) if isinstance(entry, str) else SshHost.model_validate(entry)
        address = host.label.rpartition("@")[2]
        if address in found:
            raise ValueError(f"{address} is listed twice; list each host once")
        found[address] = host
    if not found:
        raise ValueError(f"no hosts ({LINE_FORMAT})")
    return tuple(found.values())


def read_text(path: Path, where: str, advice: str) -> str:
    """The text of a hosts file; UserError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null character
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{where}: {reason}; {advice}") from None


def lines_of(text: str) -> list[str]:
    """The lines of a hosts file without comments and empty lines."""
    return [line for each in text.splitlines() if (line := each.partition("#")[0].strip())]


def allocation(path: Path) -> Allocation:
    text = read_text(path, f"--hosts {path}", f"give a file with {LINE_FORMAT}")
    try:
        hosts = distinct_hosts(lines_of(text))
    except ValueError as error:
        raise UserError(f"--hosts {path}: {error}") from None
    return Allocation("ssh", "", tuple(Host(host.label, host.cpus, host.gpus) for host in hosts))


def remote_argv(host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """ssh passes its words to the user's shell there, so they are quoted."""
    target, _, port = host.partition(":")
    return ["ssh", *OPTIONS, *(["-p", port] if port else []), target, shlex.join(with_variables(argv, environ))]
