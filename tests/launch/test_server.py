"""What may come to a launcher from outside: strangers, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import server as server_module
from paceline.launch.link import Link, connect
from paceline.launch.rendezvous import Contact, new_key
from paceline.launch.server import LaunchNode, Server
from paceline.launch.timeline import Timeline
from paceline.schedulers.scheduler import Host


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    made: list[Server] = []

    def start() -> Server:
        nodes = [LaunchNode(0, Host("one"), True)]
        timeline = Timeline(tmp_path / "log")
        made.append(Server(nodes, new_key(), "127.0.0.1", timeline, shared_hosts=False, is_mpi=False, open_ended=False))
        return made[-1]

    yield start
    for server in made:
        server.close()
        server.timeline.close()


def test_a_stranger_that_breaks_the_connection_ends_nothing(make: Callable[[], Server]) -> None:
    server = make()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        server.handle_events(1.0)  # it is let in
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        time.sleep(0.05)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
    server.handle_events(1.0)
    assert server.nodes[0].state == "waiting" and not server._unauthenticated


def test_signals_are_kept_but_for_those_that_were_ignored(make: Callable[[], Server]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        server = make()
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGUSR1)
        assert server.signals == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_silent_host_is_reported(
    make: Callable[[], Server], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_module, "SILENT_SECONDS", 0.2)
    server, links = make(), list[Link]()
    versions = {"ray": "1", "python": "1", "paceline": "1"}
    hello = {"kind": "hello", "index": 0, "host": "one", "cores": 1, "interface": None, "identity": "x"}
    contact = Contact(["127.0.0.1"], server.port, server._key.hex())
    thread = threading.Thread(target=lambda: links.append(connect(contact, {**hello, "versions": versions}, 10)))
    thread.start()
    while server.nodes[0].state == "waiting":
        server.handle_events(0.1)
    thread.join(10)
    limit = time.monotonic() + 10
    while not server.nodes[0].is_silent and time.monotonic() < limit:
        server.handle_events(0.05)
    links[0].send(kind="alive")
    while server.nodes[0].is_silent and time.monotonic() < limit:
        server.handle_events(0.05)
    said = capfd.readouterr().err
    assert "one: no answer for 0 s; is its network cut?" in said and "one answers again" in said
    links[0].close()


@pytest.mark.parametrize("independent", [False, True])
def test_a_host_that_is_told_to_end(independent: bool, tmp_path: Path) -> None:
    """A scheduler ends all hosts of a job together; a machine of one's own leaves the others alone."""
    node, timeline, sent = LaunchNode(0, Host("two"), False), Timeline(tmp_path / "log"), list[dict[str, Any]]()
    options: dict[str, bool] = {"shared_hosts": False, "is_mpi": False, "open_ended": False}
    server = Server([node], new_key(), "127.0.0.1", timeline, **options, independent_hosts=independent)
    server.send = lambda node, **message: sent.append(message)  # type: ignore[method-assign]
    server._handle(node, {"kind": "told"})
    server.close()
    timeline.close()
    assert (server.signals, sent) == (([], [{"kind": "stop"}]) if independent else ([signal.SIGTERM], []))


def test_a_reader_that_has_gone_ends_nothing(make: Callable[[], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", full)
    make().notify("hello")
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
