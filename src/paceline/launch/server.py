"""The launcher's server: it accepts the supervisors' connections, checks their hosts and records what they report."""

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

from paceline.launch.link import ALIVE_SECONDS, SILENCE_SECONDS, Link, LinkClosed, LinkRefused, Message
from paceline.launch.timeline import Timeline
from paceline.ray_node import free_ports
from paceline.schedulers.scheduler import Host

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
AUTHENTICATION_SECONDS = 10.0
SILENT_SECONDS = 3 * ALIVE_SECONDS
MAX_UNAUTHENTICATED = 128


@dataclass
class LaunchNode:
    """One host of the launch; under mpirun, one rank."""

    index: int
    host: Host
    is_local: bool
    """On the launcher's own machine."""
    process: subprocess.Popen[bytes] | None = None
    """Its supervisor, or the command that starts it there."""
    link: Link | None = None
    info: Message = field(default_factory=dict)
    """What its supervisor said about the host, and later about its Ray node."""
    heard_at: float = 0.0
    is_silent: bool = False
    state: str = "waiting"  # then here, starting, ready; or spare, failed, lost, stopped
    reason: str = ""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def is_over(self) -> bool:
        return self.state in ("failed", "lost", "stopped")


class Server:
    def __init__(
        self,
        nodes: list[LaunchNode],
        key: str,
        address: str,
        timeline: Timeline,
        *,
        shared_hosts: bool,
        is_mpi: bool,
        open_ended: bool,
        independent_hosts: bool = False,
        ports: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> None:
        """`shared_hosts`: several nodes may be on one host; `open_ended`: the number of nodes is unknown;
        `independent_hosts`: a host that is told to end leaves the others alone; `version`: of paceline, which the hosts
        must have."""
        self.nodes, self.timeline = nodes, timeline
        self._key, self._shared_hosts, self._is_mpi = bytes.fromhex(key), shared_hosts, is_mpi
        self._open_ended, self._independent_hosts, self._version = open_ended, independent_hosts, version
        self._unauthenticated: dict[Link, float] = {}
        self.signals: list[int] = []
        """Signals that have arrived and are not handled yet."""
        self.exit_code: int | None = None
        """COMMAND's, once it has ended."""
        self.is_stopping = False
        self._selector = selectors.DefaultSelector()
        port = 0 if ports is None else free_ports(ports, 1)[0]
        self._listener = socket.create_server((address, port), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._wakeup_writer, self._wakeup = socket.socketpair()
        for end in (self._wakeup_writer, self._wakeup):
            end.setblocking(False)
        for sock in (self._listener, self._wakeup):
            self._selector.register(sock, selectors.EVENT_READ)
        # Signals that were ignored stay ignored: SIGHUP under nohup, SIGINT in the background of a script.
        before = {number: signal.getsignal(number) for number in FORWARDED}
        self._handlers = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in self._handlers:
            signal.signal(number, lambda number, frame: self.signals.append(number))

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for link in [*self._unauthenticated, *(node.link for node in self.nodes if node.link is not None)]:
            link.close()
        for sock in (self._listener, self._wakeup_writer, self._wakeup):
            sock.close()
        self._selector.close()

    def log_path(self, node: LaunchNode) -> Path:
        return self.timeline.folder / f"{node.name.replace('/', '-')}.log"

    def notify(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed standard error ends no job
            print(f"paceline launch: {text}", file=sys.stderr, flush=True)

    def handle_events(self, seconds: float) -> None:
        """Wait this long for messages, connections and signals, and handle them."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.data)
        limit = time.monotonic() - AUTHENTICATION_SECONDS
        for link in [link for link, since in self._unauthenticated.items() if since < limit]:
            self._disconnect(link)
        self._report_silence()
        for node in self.nodes:
            if node.process is not None and node.link is None and not node.is_over:
                code = node.process.poll()
                if code is not None:
                    self.end(node, "failed", f"its supervisor exited with {code}{self.last_log_line(node)}")

    def _report_silence(self) -> None:
        """Training stalls while a host cannot be reached: say why, long before the host counts as lost."""
        now = time.monotonic()
        for node in self.nodes:
            if node.link is None or node.is_silent or self.is_stopping or now - node.heard_at < SILENT_SECONDS:
                continue
            node.is_silent = True
            text = f"no answer for {now - node.heard_at:.0f} s"
            self.timeline.add(node.name, "silent", text)
            self.notify(f"{node.name}: {text}; is its network cut? It counts as lost after {SILENCE_SECONDS} s")

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            sock.close()
            return
        try:
            link = Link(sock, self._key, "launcher")
        except LinkClosed:
            sock.close()
            return
        self._unauthenticated[link] = time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _disconnect(self, link: Link) -> None:
        self._unauthenticated.pop(link, None)
        self._selector.unregister(link.sock)
        link.close()

    def _read(self, link: Link) -> None:
        node = next((each for each in self.nodes if each.link is link), None)
        try:
            for message in link.receive():
                if node is None:
                    node = self._admit(link, message)
                else:
                    self._handle(node, message)
        except LinkRefused as error:
            self.timeline.add("launcher", "refused", f"{link.peer_address}: {error}")
            self._disconnect(link)
        except LinkClosed as error:
            self._disconnect(link)
            if node is not None:
                node.link = None
                if not node.is_over:
                    self.end(node, "lost", f"connection lost: {error}")

    def _admit(self, link: Link, hello: Message) -> LaunchNode:
        index = int(hello["index"])
        if self._open_ended:
            while index >= len(self.nodes):
                self.nodes.append(LaunchNode(len(self.nodes), Host(f"rank{len(self.nodes)}"), False))
        node = self.nodes[index] if 0 <= index < len(self.nodes) else None
        if node is None or node.link is not None or node.is_over:
            link.send(kind="refused", reason=f"host {index} is not expected")
            raise LinkClosed(f"host {index} is unknown or already connected")
        link.send(kind="welcome")
        del self._unauthenticated[link]
        node.link, node.info, node.state, node.heard_at = link, hello, "here", time.monotonic()
        if self._is_mpi:
            node.host = Host(f"{hello['host']}/{index}")
        self.timeline.add(node.name, "here", f"{hello['host']}, {hello['cores']} core(s)")
        if reason := self._incompatible(node):
            self.end(node, "failed", reason)
        return node

    def _incompatible(self, node: LaunchNode) -> str:
        """Why this host cannot join the others; empty if it can."""
        info = node.info
        if info["interface"] == "":
            return "it has no such --interface"
        if self._version and info["versions"]["paceline"] != self._version:
            theirs = info["versions"]["paceline"]
            return f"its container has paceline {theirs}, the launcher {self._version}: install the same version"
        if info["versions"]["ray"] == "none":
            return "Ray is not installed there: pip install 'paceline[ray]'"
        for other in [each for each in self.nodes if each is not node and each.info]:
            for name, version in info["versions"].items():
                theirs = other.info["versions"][name]
                if theirs != version:
                    return f"it has {name} {version}, {other.name} has {theirs}: all hosts need the same version"
            if other.info["identity"] == info["identity"] and not self._shared_hosts:
                return f"it is the same machine as {other.name}: list each machine once"
        return ""

    def _handle(self, node: LaunchNode, message: Message) -> None:
        kind, now = message["kind"], time.monotonic()
        if node.is_silent:
            node.is_silent = False
            self.timeline.add(node.name, node.state, "it answers again")
            self.notify(f"{node.name} answers again after {now - node.heard_at:.0f} s")
        node.heard_at = now
        if kind == "starting":
            self.timeline.add(node.name, "starting", f"Ray at {message['ip']}, {message['folder']}")
        elif kind == "ready":
            node.state = "ready"
            node.info |= {name: message[name] for name in ("ip", "address", "token")}
            self.timeline.add(node.name, "ready", message["ip"])
        elif kind in ("failed", "lost", "log"):
            if message["log"]:
                with self.log_path(node).open("a") as file:
                    file.write(message["log"] + "\n")
            if kind != "log":
                self.end(node, kind, message["reason"] + last_line(message["log"]))
        elif kind == "notice":
            self.notify(f"{node.name}: {message['text']}")
        elif kind == "ended":
            self.exit_code = message["code"]
            if message.get("reason"):
                self.notify(message["reason"])
        elif kind == "told":
            self.timeline.add(node.name, "told", "SIGTERM: its part of the job is being ended")
            if self._independent_hosts and not node.is_local:
                self.send(node, kind="stop")
            else:
                self.signals.append(signal.SIGTERM)
        elif kind == "stopped":
            if not self.is_stopping:
                self.end(node, "lost", "its supervisor was told to stop")
            node.state = "stopped"
            self.timeline.add(node.name, "stopped", f"{message['left']} process(es) left" if message["left"] else "")

    def end(self, node: LaunchNode, state: str, reason: str) -> None:
        """The node has failed or is lost."""
        was, node.state, node.reason = node.state, state, reason
        self.timeline.add(node.name, state, reason)
        if was == "ready" and not self.is_stopping:
            self.notify(f"lost {node.name}: {reason}")

    def last_log_line(self, node: LaunchNode) -> str:
        try:
            return last_line(self.log_path(node).read_text(errors="replace"))
        except OSError:
            return ""

    def send(self, node: LaunchNode, **message: Any) -> None:
        if node.link is not None:
            with contextlib.suppress(LinkClosed):  # noticed when it is read
                node.link.send(**message)


def last_line(text: str) -> str:
    """The last line that names an exception, else the last line, in brackets to append to a reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\w*(Error|Exception)\b", line)]
    return f" ({(errors or lines)[-1][:300]})" if lines else ""
