"""Hosts that are reached by ssh, named in a file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.launch.hosts_file import FORM, parse_line
from paceline.launch.scheduler import Allocation, Host, with_variables

# No questions, as nobody could answer them; a host that is away is given up soon.
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15", "-T")


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
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            machine = parse_line(words)
        except ValueError as error:
            raise UserError(f"--hosts {path}, line {number}: {error}") from None
        if machine.label in found:
            raise UserError(f"--hosts {path}, line {number}: {machine.label} stands there twice; each host once")
        found[machine.label] = Host(machine.label, machine.cpus, machine.gpus)
    if not found:
        raise UserError(f"--hosts {path}: no host in it ({FORM})")
    return tuple(found.values())


def remote_argv(host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """ssh hands its words to the user's shell there, so they are quoted."""
    target, _, port = host.partition(":")
    way = ["-p", port] if port else []
    return ["ssh", *OPTIONS, *way, target, shlex.join(with_variables(argv, environ))]
