"""The launcher's end of the connections to its supervisors: who is there, what each said, and what happens next."""

from __future__ import annotations

import contextlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.link import Link, LinkClosed, LinkRefused, Message
from paceline.launch.scheduler import Host
from paceline.launch.timeline import Timeline

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
STRANGER_SECONDS = 10.0  # to prove that one knows the key
STRANGERS = 128


@dataclass
class Member:
    """One host, or under mpirun one process."""

    index: int
    host: Host
    is_here: bool
    """On the launcher's own machine."""
    process: subprocess.Popen[bytes] | None = None
    """Its supervisor, or what was started to start it."""
    link: Link | None = None
    facts: Message = field(default_factory=dict)
    state: str = "waiting"  # then here, starting, ready; or spare, failed, lost, stopped
    reason: str = ""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def is_over(self) -> bool:
        return self.state in ("failed", "lost", "stopped")


class Hub:
    def __init__(
        self,
        members: list[Member],
        key: str,
        address: str,
        timeline: Timeline,
        *,
        shared: bool,
        ranks: bool,
        open_ended: bool,
    ) -> None:
        """`shared`: several may be on one host; `ranks`: named by themselves; `open_ended`: nobody said how many."""
        self.members, self.timeline = members, timeline
        self._key, self._shared, self._ranks, self._open_ended = bytes.fromhex(key), shared, ranks, open_ended
        self._strangers: dict[Link, float] = {}
        self.signals: list[int] = []
        """That have come and nobody has taken yet."""
        self.ended: int | None = None
        """COMMAND's exit code."""
        self.is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((address, 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._waker, self._wakened = socket.socketpair()
        for end in (self._waker, self._wakened):
            end.setblocking(False)
        for sock in (self._listener, self._wakened):
            self._selector.register(sock, selectors.EVENT_READ)
        # What was ignored before we came stays so: SIGHUP under nohup, SIGINT in the background of a script.
        before = {number: signal.getsignal(number) for number in FORWARDED}
        self._handlers = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in self._handlers:
            signal.signal(number, lambda number, frame: self.signals.append(number))

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for link in [*self._strangers, *(member.link for member in self.members if member.link is not None)]:
            link.close()
        for sock in (self._listener, self._waker, self._wakened):
            sock.close()
        self._selector.close()

    def log(self, member: Member) -> Path:
        """What a host had to say."""
        return self.timeline.folder / f"{member.name.replace('/', '-')}.log"

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a reader that has gone ends no job
            print(f"paceline launch: {text}", file=sys.stderr, flush=True)

    def pump(self, seconds: float) -> None:
        """Whatever happens within that time."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._wakened:
                with contextlib.suppress(BlockingIOError):
                    self._wakened.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        for link in [link for link, since in self._strangers.items() if now - since > STRANGER_SECONDS]:
            self._forget(link)
        for member in self.members:
            if member.process is not None and member.link is None and not member.is_over:
                code = member.process.poll()
                if code is not None:
                    self.drop(member, "failed", f"its supervisor ended with {code}{self.said(member)}")

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if len(self._strangers) >= STRANGERS:
            sock.close()
            return
        try:
            link = Link(sock, self._key, "launcher")
        except LinkClosed:
            sock.close()
            return
        self._strangers[link] = time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _forget(self, link: Link) -> None:
        self._strangers.pop(link, None)
        self._selector.unregister(link.sock)
        link.close()

    def _read(self, link: Link) -> None:
        member = next((each for each in self.members if each.link is link), None)
        try:
            for message in link.receive():
                if member is None:
                    member = self._welcome(link, message)
                else:
                    self._handle(member, message)
        except LinkRefused as error:
            self.timeline.add("launcher", "refused", f"{link.peer}: {error}")
            self._forget(link)
        except LinkClosed as error:
            self._forget(link)
            if member is not None:
                member.link = None
                if not member.is_over:
                    self.drop(member, "lost", f"connection lost: {error}")

    def _welcome(self, link: Link, hello: Message) -> Member:
        index = int(hello["index"])
        if self._open_ended:  # nobody said how many there are
            while index >= len(self.members):
                self.members.append(Member(len(self.members), Host(f"rank{len(self.members)}"), False))
        member = self.members[index] if 0 <= index < len(self.members) else None
        if member is None or member.link is not None or member.is_over:
            link.send(kind="refused", reason=f"host {index} is not expected")
            raise LinkClosed(f"host {index} came twice or uninvited")
        link.send(kind="welcome")
        del self._strangers[link]
        member.link, member.facts, member.state = link, hello, "here"
        if self._ranks:
            member.host = Host(f"{hello['host']}/{index}")
        self.timeline.add(member.name, "here", f"{hello['host']}, {hello['cores']} core(s)")
        self._check(member)
        return member

    def _check(self, member: Member) -> None:
        """Whether it fits to the others."""
        facts, others = member.facts, [m for m in self.members if m is not member and m.facts]
        if facts["interface"] == "":
            return self.drop(member, "failed", "it has no such --interface")
        if facts["versions"]["ray"] == "none":
            return self.drop(member, "failed", "Ray is not installed there: pip install 'paceline[ray]'")
        for other in others:
            for name, version in facts["versions"].items():
                if other.facts["versions"][name] != version:
                    theirs = other.facts["versions"][name]
                    text = f"it has {name} {version}, {other.name} has {theirs}: all hosts need the same"
                    return self.drop(member, "failed", text)
            same = other.facts["identity"] == facts["identity"]
            if same and not self._shared:
                return self.drop(member, "failed", f"it is the same machine as {other.name}: name each once")
        return None

    def _handle(self, member: Member, message: Message) -> None:
        kind = message["kind"]
        if kind == "starting":
            self.timeline.add(member.name, "starting", f"Ray at {message['ip']}, {message['folder']}")
        elif kind == "ready":
            member.state = "ready"
            member.facts |= {name: message[name] for name in ("ip", "address", "token")}
            self.timeline.add(member.name, "ready", message["ip"])
        elif kind in ("failed", "lost", "log"):
            if message["log"]:
                with self.log(member).open("a") as file:
                    file.write(message["log"] + "\n")
            if kind == "log":
                return
            self.drop(member, kind, message["reason"] + last_line(message["log"]))
        elif kind == "notice":
            self.say(f"{member.name}: {message['text']}")
        elif kind == "ended":
            self.ended = message["code"]
            if message.get("reason"):
                self.say(message["reason"])
        elif kind == "stopped":
            if not self.is_stopping:
                self.drop(member, "lost", "its supervisor was told to stop")
            member.state = "stopped"
            self.timeline.add(member.name, "stopped", f"{message['left']} process(es) left" if message["left"] else "")

    def drop(self, member: Member, state: str, reason: str) -> None:
        was, member.state, member.reason = member.state, state, reason
        self.timeline.add(member.name, state, reason)
        if was == "ready" and not self.is_stopping:
            self.say(f"lost {member.name}: {reason}")

    def said(self, member: Member) -> str:
        try:
            return last_line(self.log(member).read_text(errors="replace"))
        except OSError:
            return ""

    def send(self, member: Member, **message: Any) -> None:
        if member.link is not None:
            with contextlib.suppress(LinkClosed):  # it is noticed when it is read
                member.link.send(**message)


def last_line(text: str) -> str:
    """In brackets, to be put behind a reason: an error that was named, else whatever came last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w*(Error|Exception)\b", line)]
    return f" ({(named or lines)[-1][:300]})" if lines else ""
