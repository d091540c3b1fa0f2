"""The connection between the launcher and a supervisor: JSON lines over TCP, each with an authentication code.

Both sides begin with a random number. The connection's key is derived from the job's key and both numbers, so a line is
valid only on its own connection and at its own position: a stranger can neither join, nor insert a line, nor replay
one. The lines are not encrypted and contain no secrets.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import time
from typing import Any, Literal

from paceline.launch.rendezvous import Contact

Side = Literal["launcher", "supervisor"]
Message = dict[str, Any]

GREETING = "paceline-1"
MAX_LINE_BYTES = 1 << 20
SEND_SECONDS = 10.0
CONNECT_SECONDS = 2.0
ALIVE_SECONDS = 5.0  # how often a supervisor says that it is there
SILENCE_SECONDS = 60  # until a host without power counts as lost; shorter network failures do no harm


class LinkClosed(Exception):
    """The other side closed the connection or was never reached."""


class LinkRefused(LinkClosed):
    """The other side does not know the job's key, or is not paceline."""


class Link:
    def __init__(self, sock: socket.socket, key: bytes, side: Side) -> None:
        self.sock, self._key, self._side = sock, key, side
        self._nonce = secrets.token_hex(16)
        self._session: bytes | None = None
        self._sent = self._received = 0
        self._buffer = b""
        self.pending: list[Message] = []
        """Messages that arrived together with the one that `wait` returned."""
        sock.settimeout(SEND_SECONDS)
        _keep_alive(sock)
        self._write(f"{GREETING} {self._nonce}\n".encode())

    @property
    def local_address(self) -> str:
        """This side's address, as the other side sees it."""
        return str(self.sock.getsockname()[0]).removeprefix("::ffff:")

    @property
    def peer_address(self) -> str:
        try:
            return str(self.sock.getpeername()[0]).removeprefix("::ffff:")
        except OSError:  # the peer has reset the connection
            return "unknown"

    def send(self, **message: Any) -> None:
        if self._session is None:
            raise LinkClosed("the other side has not sent its greeting yet")
        text = json.dumps(message)
        self._write(f"{self._code(self._side, self._sent, text)} {text}\n".encode())
        self._sent += 1

    def receive(self) -> list[Message]:
        """The messages that have arrived, perhaps none. Call it when the socket is readable."""
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError as error:
            raise LinkClosed(str(error)) from None
        if not data:
            raise LinkClosed("the other side closed the connection")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            raise LinkRefused("it sent a line without an end")
        return [message for line in lines if (message := self._read(line.decode(errors="replace"))) is not None]

    def wait(self, seconds: float) -> Message:
        """The next message."""
        limit = time.monotonic() + seconds
        while not self.pending:
            if time.monotonic() > limit:
                raise LinkClosed(f"no answer within {seconds:g} s")
            self.sock.settimeout(max(0.01, limit - time.monotonic()))
            try:
                self.pending += self.receive()
            finally:
                self.sock.settimeout(SEND_SECONDS)
        return self.pending.pop(0)

    def greet(self, seconds: float) -> None:
        """Wait for the other side's number, without which nothing can be sent."""
        limit = time.monotonic() + seconds
        while self._session is None:
            if time.monotonic() > limit:
                raise LinkClosed(f"no greeting within {seconds:g} s")
            self.receive()

    def close(self) -> None:
        self.sock.close()

    def _read(self, line: str) -> Message | None:
        first, _, rest = line.partition(" ")
        if self._session is None:
            if first != GREETING or len(rest) != len(self._nonce):
                raise LinkRefused("it does not speak paceline's protocol")
            nonces = (self._nonce, rest) if self._side == "launcher" else (rest, self._nonce)
            self._session = hmac.digest(self._key, " ".join(nonces).encode(), "sha256")
            return None
        other: Side = "supervisor" if self._side == "launcher" else "launcher"
        if not hmac.compare_digest(first.encode(), self._code(other, self._received, rest).encode()):
            raise LinkRefused("it does not know the key of this job")
        self._received += 1
        message: Message = json.loads(rest)
        return message

    def _code(self, side: Side, number: int, text: str) -> str:
        assert self._session is not None
        return hmac.new(self._session, f"{side} {number} {text}".encode(), "sha256").hexdigest()

    def _write(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise LinkClosed(str(error)) from None


def connect(contact: Contact, hello: Message, seconds: float) -> Link:
    """A link to the launcher, at the first of its addresses where a process that knows the key answers.

    Some of a machine's addresses may be unreachable from here, or belong to another machine: all are tried in turn.
    """
    limit, last, port = time.monotonic() + seconds, "no address", contact.port
    while time.monotonic() < limit:
        for address in contact.addresses:
            try:
                sock = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            except OSError as error:
                last = f"{address}:{port}: {error}"
                continue
            try:
                link = Link(sock, contact.secret, "supervisor")
                link.greet(SEND_SECONDS)
                link.send(**hello)
                answer = link.wait(SEND_SECONDS)
                if answer["kind"] == "welcome":
                    return link
                last = f"{address}:{port}: {answer['reason']}"
            except LinkClosed as error:
                last = f"{address}:{port}: {error}"
            sock.close()
        time.sleep(0.2)
    raise LinkClosed(f"the launcher was not reached within {seconds:g} s ({last})")


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice a host that lost its power and closes no connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        every = SILENCE_SECONDS // 6
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)
