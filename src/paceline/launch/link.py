"""The talk between the launcher and the supervisors: JSON lines over TCP, each with a code that only the job can make.

Both sides begin with a random number. The key of the connection is made from the job's key and both numbers, so a line
is good on its own connection and at its own place in it only: a stranger can neither join, nor put in a line, nor play
an old one again. The lines are not encrypted: nothing secret is said in them.
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
LONGEST_LINE = 1 << 20
SEND_SECONDS = 10.0
KNOCK_SECONDS = 2.0
SILENCE_SECONDS = 60  # of a host without power: a cut that is mended before harms nothing


class LinkClosed(Exception):
    """The other side is gone."""


class LinkRefused(LinkClosed):
    """The other side does not know the job's key, or is no part of this program."""


class Link:
    def __init__(self, sock: socket.socket, key: bytes, side: Side) -> None:
        self.sock, self._key, self._side = sock, key, side
        self._mine = secrets.token_hex(16)
        self._session: bytes | None = None
        self._sent = self._received = 0
        self._buffer = b""
        self.early: list[Message] = []
        """What came together with that which `wait` returned."""
        sock.settimeout(SEND_SECONDS)
        _keep_alive(sock)
        self._write(f"{GREETING} {self._mine}\n".encode())

    @property
    def own(self) -> str:
        """The address of this side, as the other sees it."""
        return str(self.sock.getsockname()[0]).removeprefix("::ffff:")

    @property
    def peer(self) -> str:
        try:
            return str(self.sock.getpeername()[0]).removeprefix("::ffff:")
        except OSError:  # it broke the connection
            return "unknown"

    def send(self, **message: Any) -> None:
        if self._session is None:
            raise LinkClosed("nothing was heard from the other side yet")
        text = json.dumps(message)
        self._write(f"{self._code(self._side, self._sent, text)} {text}\n".encode())
        self._sent += 1

    def receive(self) -> list[Message]:
        """What has come, perhaps nothing yet; to be called when there is something to read."""
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError as error:
            raise LinkClosed(str(error)) from None
        if not data:
            raise LinkClosed("the other side is gone")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LONGEST_LINE:
            raise LinkRefused("a line without an end")
        return [message for line in lines if (message := self._read(line.decode(errors="replace"))) is not None]

    def wait(self, seconds: float) -> Message:
        """The next message, within so many seconds."""
        limit = time.monotonic() + seconds
        while not self.early:
            if time.monotonic() > limit:
                raise LinkClosed(f"no answer within {seconds:g} s")
            self.sock.settimeout(max(0.01, limit - time.monotonic()))
            try:
                self.early += self.receive()
            finally:
                self.sock.settimeout(SEND_SECONDS)
        return self.early.pop(0)

    def greet(self, seconds: float) -> None:
        """Waits for the other side's number: from then on we can send."""
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
            if first != GREETING or len(rest) != len(self._mine):
                raise LinkRefused("it does not speak our language")
            numbers = (self._mine, rest) if self._side == "launcher" else (rest, self._mine)
            self._session = hmac.digest(self._key, " ".join(numbers).encode(), "sha256")
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
    """The launcher, at the first of its addresses where it answers as one that knows the key.

    A machine may have addresses that lead nowhere from here, or to somebody else: each is tried, and then again.
    """
    limit, last, port = time.monotonic() + seconds, "no address", contact.port
    while time.monotonic() < limit:
        for address in contact.addresses:
            try:
                sock = socket.create_connection((address, port), timeout=KNOCK_SECONDS)
            except OSError as error:
                last = f"{address}:{port}: {error}"
                continue
            try:
                link = Link(sock, contact.secret, "supervisor")
                link.greet(SEND_SECONDS)
                link.send(**hello)
                welcome = link.wait(SEND_SECONDS)
                if welcome["kind"] == "welcome":
                    return link
                last = f"{address}:{port}: {welcome['reason']}"
            except LinkClosed as error:
                last = f"{address}:{port}: {error}"
            sock.close()
        time.sleep(0.2)
    raise LinkClosed(f"the launcher was not reached within {seconds:g} s ({last})")


def _keep_alive(sock: socket.socket) -> None:
    """A host that lost its power says no goodbye: the kernel finds out."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        every = SILENCE_SECONDS // 6
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)
