"""Network addresses of this host."""

from __future__ import annotations

import socket

import psutil


def interface_addresses(interface: str | None = None) -> dict[str, str]:
    """IPv4 address → network interface: of this interface, or of all that are up, loopback last."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {
        str(each.address): name
        for name, several in psutil.net_if_addrs().items()
        for each in several
        if each.family == socket.AF_INET and (name == interface if interface else name in up)
    }
    return dict(sorted(found.items(), key=lambda item: item[0].startswith("127.")))


def address_towards(host: str, port: int) -> str:
    """This host's address on the route to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])
