from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.launch import link as link_module
from paceline.launch.link import GREETING, Link, LinkClosed, LinkRefused, connect
from paceline.launch.rendezvous import Contact, new_key

KEY = bytes(range(32))


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ours, theirs = _tcp_pair()
    launcher, supervisor = Link(ours, KEY, "launcher"), Link(theirs, KEY, "supervisor")
    for side in (launcher, supervisor):
        side.greet(2)
    yield launcher, supervisor
    for side in (launcher, supervisor):
        side.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return server.accept()[0], theirs


def test_both_sides_hear_each_other_in_order(pair: tuple[Link, Link]) -> None:
    launcher, supervisor = pair
    for number in range(3):
        supervisor.send(kind="hello", number=number)
    assert [launcher.wait(2)["number"] for _ in range(3)] == [0, 1, 2]
    launcher.send(kind="welcome")
    assert supervisor.wait(2) == {"kind": "welcome"}


def test_who_does_not_know_the_key_is_refused() -> None:
    ours, theirs = _tcp_pair()
    launcher, stranger = Link(ours, KEY, "launcher"), Link(theirs, bytes(32), "supervisor")
    launcher.greet(2)
    stranger.greet(2)
    stranger.send(kind="hello")
    with pytest.raises(LinkRefused, match="key"):
        launcher.wait(2)
    for side in (launcher, stranger):
        side.close()


def test_a_line_is_good_once_and_at_its_place(pair: tuple[Link, Link]) -> None:
    launcher, supervisor = pair
    supervisor.send(kind="one")
    line = launcher.sock.recv(1 << 16)
    launcher._buffer = b""
    supervisor._write(line + line)  # played again by somebody who listened
    with pytest.raises(LinkRefused):
        launcher.wait(2)


def test_a_changed_line_is_refused(pair: tuple[Link, Link]) -> None:
    launcher, supervisor = pair
    launcher.send(kind="command", argv=["true"])
    line = supervisor.sock.recv(1 << 16)
    launcher._write(line.replace(b"true", b"evil"))
    with pytest.raises(LinkRefused):
        supervisor.wait(2)


def test_what_speaks_another_language_is_refused() -> None:
    ours, theirs = _tcp_pair()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    launcher = Link(ours, KEY, "launcher")
    with pytest.raises(LinkRefused):
        launcher.greet(2)
    launcher.close()
    theirs.close()


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_LINE_BYTES", 1000)
    ours, theirs = _tcp_pair()
    theirs.sendall(b"x" * 2000)
    launcher = Link(ours, KEY, "launcher")
    with pytest.raises(LinkRefused):
        launcher.greet(2)
    launcher.close()
    theirs.close()


def test_the_end_of_the_other_side_is_noticed(pair: tuple[Link, Link]) -> None:
    launcher, supervisor = pair
    supervisor.close()
    with pytest.raises(LinkClosed):
        launcher.wait(2)


def test_connect_goes_past_addresses_where_nobody_or_somebody_else_answers() -> None:
    """A stranger's server at the same port of another address of ours; then the launcher."""
    key = new_key()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)) as other:
            heard: list[object] = []
            refused: list[bool] = []

            def strange() -> None:
                link = Link(other.accept()[0], bytes(32), "launcher")
                with pytest.raises(LinkRefused):
                    link.wait(5)
                refused.append(True)
                link.close()

            def serve() -> None:
                link = Link(server.accept()[0], bytes.fromhex(key), "launcher")
                heard.append(link.wait(5))
                link.send(kind="welcome")
                link.send(kind="node")  # at once: it must not get lost

            threads = [threading.Thread(target=each, daemon=True) for each in (strange, serve)]
            for thread in threads:
                thread.start()
            contact = Contact(["127.0.0.3", "127.0.0.2", "127.0.0.1"], port, key)
            link = connect(contact, {"kind": "hello", "index": 0}, 5)
            assert link.wait(2) == {"kind": "node"} and heard == [{"kind": "hello", "index": 0}]
            for thread in threads:
                thread.join(5)
            assert refused


def test_connect_gives_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkClosed, match=f"127.0.0.1:{port}"):
        connect(Contact(["127.0.0.1"], port, new_key()), {"kind": "hello"}, 0.5)


def test_the_key_is_never_sent(pair: tuple[Link, Link]) -> None:
    launcher, supervisor = pair
    supervisor.send(kind="hello")
    seen = launcher.sock.recv(1 << 16).decode()
    assert KEY.hex() not in seen and json.loads(seen.split(" ", 1)[1]) == {"kind": "hello"} and GREETING not in seen
