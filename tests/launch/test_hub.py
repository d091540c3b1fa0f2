"""What may come to a launcher from outside: strangers, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.launch.hub import Hub, Member
from paceline.launch.rendezvous import new_key
from paceline.launch.scheduler import Host
from paceline.launch.timeline import Timeline


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Hub]]:
    made: list[Hub] = []

    def start() -> Hub:
        members = [Member(0, Host("one"), True)]
        timeline = Timeline(tmp_path / "log")
        made.append(Hub(members, new_key(), "127.0.0.1", timeline, shared=False, ranks=False, open_ended=False))
        return made[-1]

    yield start
    for hub in made:
        hub.close()
        hub.timeline.close()


def test_a_stranger_that_breaks_the_connection_ends_nothing(make: Callable[[], Hub]) -> None:
    hub = make()
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        hub.pump(1.0)  # it is let in
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        time.sleep(0.05)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
    hub.pump(1.0)
    assert hub.members[0].state == "waiting" and not hub._strangers


def test_signals_are_kept_but_for_those_that_were_ignored(make: Callable[[], Hub]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        hub = make()
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGUSR1)
        assert hub.signals == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_has_gone_ends_nothing(make: Callable[[], Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", full)
    make().say("hello")
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
