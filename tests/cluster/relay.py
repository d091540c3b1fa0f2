"""`relay.py HOST BRIDGE MS`: carries frames between two network devices; those for the host leave MS milliseconds late.

The kernel has a queue for this, netem, but not every kernel has it built in, and this one file runs anywhere.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET = 263
# Each frame comes with 10 bytes on what the kernel left to the card, checksums and segmentation, and goes with them
# again: otherwise a frame on a virtual link has no valid checksum and may be larger than any link takes.
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
EVERY_PROTOCOL = 3
LARGEST = 10 + 14 + 65536
BUFFER = 32 << 20


def open_device(name: str) -> socket.socket:
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        device.setsockopt(SOL_PACKET, option, 1)
    device.setsockopt(socket.SOL_SOCKET, 33, BUFFER)  # SO_RCVBUFFORCE: past the user's limit
    device.setblocking(False)
    device.bind((name, EVERY_PROTOCOL))
    return device


def relay(host: socket.socket, bridge: socket.socket, delay: float) -> None:
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([host, bridge], [], [], pause)[0]
        # A link that is down, or full, loses the frame, as a cable does.
        with contextlib.suppress(OSError):
            if host in ready:
                bridge.send(host.recv(LARGEST))
        with contextlib.suppress(OSError):
            if bridge in ready:
                waiting.append((time.monotonic() + delay, bridge.recv(LARGEST)))
        while waiting and waiting[0][0] <= time.monotonic():
            frame = waiting.popleft()[1]
            with contextlib.suppress(OSError):
                host.send(frame)


if __name__ == "__main__":
    devices = [open_device(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    relay(devices[0], devices[1], float(sys.argv[3]) / 1000)
