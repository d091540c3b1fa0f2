"""What runs on every host of a job, beside Ray: `python -m paceline.launch.supervisor`.

It joins the launcher, starts Ray as it is told, on the head also COMMAND, and ends all of it when told to, or when the
connection to the launcher is gone: so nothing outlives a launcher that was killed. It is two processes, each of which
ends everything when the other is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import math
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psutil

from paceline import machine
from paceline.launch import node, rendezvous
from paceline.launch.link import Link, LinkClosed, Message, connect

WATCH_SECONDS = 0.5
END_SECONDS = 5.0  # for all of Ray's processes, once they are killed
GRACE_SECONDS = 5.0  # for COMMAND, when the launcher is gone
RETRY_SECONDS = 2.0  # then a rendezvous file is read again
LOST = 3  # exit code: the launcher was never reached
DAEMONS = ("raylet", "gcs_server")
SLOW = "timed out during startup"  # what a cold file system leads to; the second time it is warm


def ray_token(key: bytes) -> str:
    """Ray sends it in clear: who reads it there learns nothing about the key of our own connections."""
    return hmac.new(key, b"ray", "sha256").hexdigest()


def facts(index: int, interface: str | None) -> Message:
    return {
        "kind": "hello",
        "index": index,
        "host": platform.node(),
        "identity": identity(),
        "cores": machine.cores(),
        "usable": usable_cores(),
        "affinity": affinity(),
        "memory": machine.memory_limit_bytes(),
        "interface": (node.interface_address(interface) or "") if interface else None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("ray", "paceline")}},
        "time": time.time(),
        "pid": os.getpid(),
    }


def identity() -> str:
    """The same for two processes on one host, whatever names it has."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        import uuid

        return f"{platform.node()} {uuid.getnode()}"


def usable_cores() -> int:
    """Whatever variables say: SLURM's are of one task, of which a job may have several on a host."""
    known = machine.core_facts()
    return min(known.affinity, known.affinity if known.quota is None else max(1, math.ceil(known.quota)))


def affinity() -> list[int]:
    get = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return sorted(get(0)) if get else list(range(os.cpu_count() or 1))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


class Supervisor:
    def __init__(self, link: Link, key: bytes, tell: Callable[[Path], None]) -> None:
        """`tell`: somebody who has to know the folder of Ray's files."""
        self._link, self._key, self._tell = link, key, tell
        self._folder: Path | None = None
        self._order: Message = {}
        self._starting: subprocess.Popen[bytes] | None = None
        self._command: subprocess.Popen[bytes] | None = None
        self._daemons: dict[int, str] = {}
        self._stop = self._was_slow = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        waker, wakened = socket.socketpair()
        wakened.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        self._selector.register(self._link.sock, selectors.EVENT_READ)
        self._selector.register(wakened, selectors.EVENT_READ)
        told = False
        try:
            for message in self._link.early:
                self._handle(message)
            while not self._stop:
                for key, _ in self._selector.select(WATCH_SECONDS):
                    if key.fileobj is wakened:
                        with contextlib.suppress(BlockingIOError):
                            self._stop |= signal.SIGTERM in wakened.recv(4096)
                    else:
                        for message in self._link.receive():
                            self._handle(message)
                self._look()
            told = True
        except LinkClosed:
            pass
        finally:
            left = self._end()
            if told:
                with contextlib.suppress(LinkClosed):
                    self._link.send(kind="stopped", left=left)
            self._link.close()
        return 0

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "node":
            self._start_node(message)
        elif kind == "command":
            self._start_command(message)
        elif kind == "signal" and self._command is not None:
            node.signal_group(self._command, message["number"])  # a shell alone would wait for its child first
        elif kind == "stop":
            self._stop = True
            if self._starting is not None and self._folder is not None:  # it took too long: why?
                self._link.send(kind="log", log=node.failure(self._folder, self._folder / "start.log"))

    def _start_node(self, order: Message) -> None:
        self._order = order
        os.environ.update(order["environment"])
        with contextlib.suppress(OSError):
            os.chdir(order["cwd"])
        if order["affinity"] and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, order["affinity"])
        if order["interface"]:
            os.environ["GLOO_SOCKET_IFNAME"] = order["interface"]
        try:
            if order["ip"] is None:
                host, _, port = order["address"].rpartition(":")
                order["ip"] = node.local_address(host, int(port))
            if order["head"] and order["port"]:
                node.check_port(order["port"])  # Ray would try for a minute, and say nothing
            self._folder = node.make_folder()
            self._tell(self._folder)
            node.write_token(self._folder, ray_token(self._key))
            environment, notices = node.node_environment(os.environ, self._folder)
            for text in notices:
                self._link.send(kind="notice", text=text)
            self._link.send(kind="starting", folder=str(self._folder), ip=order["ip"])
            with (self._folder / "start.log").open("wb") as log:
                self._starting = subprocess.Popen(
                    node.start_argv(self._folder, order),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            self._link.send(kind="failed", reason=f"{error}", log="")

    def _look(self) -> None:
        """What has ended since."""
        for pid, code in node.reap().items():
            if self._starting is not None and pid == self._starting.pid:
                self._starting.returncode = code
                self._starting = None
                self._started(code)
            elif self._command is not None and pid == self._command.pid:
                self._command.returncode = code
                self._command = None
                self._link.send(kind="ended", code=code)
            elif pid in self._daemons:
                name = self._daemons.pop(pid)
                how = f"exit code {code}" if code >= 0 else node.signal_name(-code)
                log = node.failure(self._folder, self._folder / "start.log") if self._folder else ""
                self._link.send(kind="lost", reason=f"{name} ended ({how})", log=log)

    def _started(self, code: int) -> None:
        assert self._folder is not None
        said = self._folder / "start.log"
        if code != 0:
            log = node.failure(self._folder, said)
            if SLOW in log and not self._was_slow:
                self._was_slow = True
                self._link.send(kind="notice", text="Ray was not up within the 30 s it gives itself; once more")
                node.end_all(self._folder, END_SECONDS)
                node.remove_folder(self._folder)
                self._start_node(self._order)
                return
            self._link.send(kind="failed", reason=f"`ray start` ended with {code}", log=log)
            return
        for process in node.ours(self._folder):
            with contextlib.suppress(psutil.Error):
                if process.name() in DAEMONS:
                    self._daemons[process.pid] = process.name()
        address = node.address(self._folder) if self._order["head"] else self._order["address"]
        self._link.send(kind="ready", address=address, ip=self._order["ip"], token=str(self._folder / node.TOKEN))

    def _start_command(self, message: Message) -> None:
        assert self._folder is not None
        environ = {**os.environ, **message["environment"]}
        made = node.command_environment(environ, self._folder, message["address"], message["hosts"])
        given = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() or message["remote"] else None
        try:
            self._command = subprocess.Popen(
                message["argv"],
                env=made,
                cwd=message["cwd"] if Path(message["cwd"]).is_dir() else None,
                stdin=given,
                start_new_session=True,
            )
        except OSError as error:  # as a shell has it
            code = 126 if isinstance(error, PermissionError) else 127
            self._link.send(kind="ended", code=code, reason=f"{message['argv'][0]}: {error.strerror}")

    def _end(self) -> int:
        """COMMAND may save; then everything goes."""
        if self._command is not None:
            node.signal_group(self._command, signal.SIGTERM)
            limit = time.monotonic() + GRACE_SECONDS
            while self._command.pid not in node.reap() and time.monotonic() < limit:
                time.sleep(0.02)
        left = node.end_all(self._folder, END_SECONDS)
        if self._folder is not None:
            node.remove_folder(self._folder)
        return left


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="paceline.launch.supervisor", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="which host of the job this is")
    parser.add_argument("--contact", default="0", help="where the launcher's address and key are read: a number of an "
                        "open file, or the path of a rendezvous file")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the launcher is looked for")
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # They are for COMMAND, and come by the launcher. Not SIG_IGN: that would be passed on to all we start.
        signal.signal(number, lambda number, frame: None)
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    node.raise_limits()

    def work(tell: Callable[[Path], None]) -> int:
        try:
            link, key = _join(options.contact, options.index, options.seconds)
        except LinkClosed as error:
            print(f"paceline supervisor on {platform.node()}: {error}", file=sys.stderr)
            return LOST
        return Supervisor(link, key, tell).run()

    return _guarded(work)


def _guarded(work: Callable[[Callable[[Path], None]], int]) -> int:
    """Exit code of `work`, done by a child that is told to end when we are killed. If it is killed, what it has left
    behind is ours, and ends."""
    reader, writer = os.pipe()
    guard = os.getpid()
    node.adopt_orphans()
    child = os.fork()
    if child == 0:
        os.close(reader)
        told = os.fdopen(writer, "w")
        node.adopt_orphans()
        node.end_with(guard)
        return work(lambda folder: print(folder, file=told, flush=True))
    os.close(writer)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, signal.SIGTERM))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        node.end_all(None, END_SECONDS)
        for folder in os.read(reader, 4096).decode().splitlines():
            node.remove_folder(Path(folder))
    return code if code >= 0 else 128 - code


def _join(where: str, index: int, seconds: float) -> tuple[Link, bytes]:
    if where.isdecimal():
        contact = rendezvous.read_from(int(where))
        return connect(contact, facts(index, contact.interface), seconds), contact.secret
    limit, last = time.monotonic() + seconds, f"no file {where}: is its folder on all hosts?"
    while time.monotonic() < limit:
        found = rendezvous.read(Path(where))
        if found is None:
            time.sleep(0.1)
            continue
        try:  # the file may be an old one: then nobody answers, and a new one will come
            return connect(found, facts(index, found.interface), RETRY_SECONDS), found.secret
        except LinkClosed as error:
            last = str(error)
    raise LinkClosed(f"no launcher within {seconds:g} s ({last})")


if __name__ == "__main__":
    sys.exit(main())
