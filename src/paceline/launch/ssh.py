"""Hosts that are reached by ssh, named in a file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.launch.scheduler import Allocation, Host

# No questions, as nobody could answer them; a host that is away is given up soon.
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15", "-T")
FORM = "one host a line: [user@]name [cpus=N] [gpus=N]; # begins a comment"


def allocation(path: Path) -> Allocation:
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"--hosts {path}: {error.strerror or error}") from None
    hosts = hosts_of(text, path)
    return Allocation("ssh", "", hosts)


def hosts_of(text: str, path: Path) -> tuple[Host, ...]:
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *settings = words
        values: dict[str, int] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in ("cpus", "gpus") or not value.isdecimal():
                raise UserError(f"--hosts {path}, line {number}: {setting!r} is not understood ({FORM})")
            values[key] = int(value)
        if name.startswith("-"):
            raise UserError(f"--hosts {path}, line {number}: {name!r} is no host ({FORM})")
        if name in found:
            raise UserError(f"--hosts {path}, line {number}: {name} stands there twice; each host once")
        found[name] = Host(name, **values)
    if not found:
        raise UserError(f"--hosts {path}: no host in it ({FORM})")
    return tuple(found.values())


def remote_argv(host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """ssh hands its words to the user's shell there, so they are quoted."""
    variables = [f"{name}={value}" for name, value in environ.items()]
    return ["ssh", *OPTIONS, host, shlex.join(["env", *variables, *argv] if variables else argv)]
