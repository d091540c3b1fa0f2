"""This machine: alone, or as a rehearsal of a cluster: several 'hosts' that are processes here, each with a loopback
address of its own."""

from __future__ import annotations

import platform
import socket

from paceline.config import UserError
from paceline.launch.scheduler import Allocation, Host

MOST = 64


def alone() -> Allocation:
    return Allocation("local", "", (Host(platform.node()),))


def rehearsal(count: int) -> Allocation:
    if not 1 <= count <= MOST:
        raise UserError(f"--rehearse {count}: 1 to {MOST} nodes on this machine")
    if count > 1 and not can_bind(loopback(1)):
        raise UserError(
            f"--rehearse {count}: this system has no loopback address {loopback(1)}; "
            f"as root: ifconfig lo0 alias {loopback(1)}, and so on for each node"
        )
    return Allocation("rehearsal", "", tuple(Host(f"rehearsal{index}") for index in range(count)))


def loopback(index: int) -> str:
    """Not 127.0.0.1: Ray puts the machine's outer address in its place."""
    return f"127.0.0.{2 + index}"


def can_bind(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def is_here(name: str) -> bool:
    """Whether a host of that name is this machine."""
    bare = name.rpartition("@")[2].partition(":")[0]
    if bare.partition(".")[0] in ("localhost", platform.node().partition(".")[0]):
        return True
    try:
        found = socket.gethostbyname(bare)
    except OSError:
        return False
    return can_bind(found)
