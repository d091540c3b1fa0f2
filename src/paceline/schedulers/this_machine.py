"""Allocations without a scheduler: this machine, or a rehearsed cluster whose hosts are processes on this machine, each
with its own loopback address."""

from __future__ import annotations

import platform
import socket

from paceline.config import UserError
from paceline.schedulers.scheduler import Allocation, Host

MAX_REHEARSED = 64


def this_machine() -> Allocation:
    return Allocation("local", "", (Host(platform.node()),))


def rehearsal(count: int) -> Allocation:
    if not 1 <= count <= MAX_REHEARSED:
        raise UserError(f"--rehearse {count}: give a number of nodes from 1 to {MAX_REHEARSED}")
    if count > 1 and not can_bind(loopback(1)):
        raise UserError(
            f"--rehearse {count}: this system lacks the loopback address {loopback(1)}; "
            f"add one for each node, as root: ifconfig lo0 alias {loopback(1)}"
        )
    return Allocation("rehearsal", "", tuple(Host(f"rehearsal{index}") for index in range(count)))


def loopback(index: int) -> str:
    """Not 127.0.0.1, which Ray replaces by the machine's outer address."""
    return f"127.0.0.{2 + index}"


def can_bind(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def is_this_machine(name: str) -> bool:
    """Whether `[user@]name[:port]` is this machine."""
    bare = name.rpartition("@")[2].partition(":")[0]
    if bare.partition(".")[0] in ("localhost", platform.node().partition(".")[0]):
        return True
    try:
        return can_bind(socket.gethostbyname(bare))
    except OSError:
        return False
