"""The process that runs Ray on one host of a job: `python -m paceline.launch.supervisor`.

It connects to the launcher, starts Ray on request and, on the head, COMMAND. It ends both when told to or when the
connection is lost, so that nothing outlives a killed launcher. It consists of two processes, each of which ends
everything when the other is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import math
import os
import platform
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psutil

from paceline import machine, ray_folder, ray_node
from paceline.launch import processes, rendezvous
from paceline.launch.addresses import address_towards, interface_addresses
from paceline.launch.link import ALIVE_SECONDS, CONNECT_SECONDS, Link, LinkClosed, Message, connect
from paceline.schedulers import SCHEDULERS
from paceline.schedulers.scheduler import KILL_DELAY_SECONDS, ask, grace_seconds

WATCH_SECONDS = 0.5
KILL_SECONDS = 5.0  # for Ray's processes to disappear once killed
RETRY_SECONDS = 2.0  # after which a rendezvous file is read again
NO_LAUNCHER = 3  # exit code
DAEMONS = ("raylet", "gcs_server")
SLOW = "timed out during startup"  # a cold file system; the second attempt finds it warm
START_LOG = "start.log"

TellFolder = Callable[[Path], None]
"""Tells the guarding process which folder to remove."""


def ray_token(key: bytes) -> str:
    """Ray sends its token in clear, so it is derived from the job's key and does not reveal it."""
    return hmac.new(key, b"ray", "sha256").hexdigest()


def hello(index: int, interface: str | None) -> Message:
    """The first message: what this host is."""
    limits = machine.core_counts()
    get_affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return {
        "kind": "hello",
        "index": index,
        "host": platform.node(),
        "identity": machine_identity(),
        "cores": limits.usable,
        # Without the scheduler's variables: SLURM's are those of one task, and a host may have several.
        "usable": min(limits.affinity, limits.affinity if limits.quota is None else max(1, math.ceil(limits.quota))),
        "affinity": sorted(get_affinity(0)) if get_affinity else list(range(os.cpu_count() or 1)),
        "memory": machine.memory_limit_bytes(),
        "interface": next(iter(interface_addresses(interface)), "") if interface else None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("ray", "paceline")}},
        "time": time.time(),
        "pid": os.getpid(),
    }


def machine_identity() -> str:
    """Equal for two processes on one host, under whatever names the host is known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        import uuid

        return f"{platform.node()} {uuid.getnode()}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


class Supervisor:
    def __init__(self, link: Link, key: bytes, tell_folder: TellFolder) -> None:
        self._link, self._key, self._tell_folder = link, key, tell_folder
        self._guard = os.getppid()
        self._grace = grace_seconds(os.environ, KILL_DELAY_SECONDS)
        self._asked_at: float | None = None  # when COMMAND was asked to end
        self._told_at: float | None = None  # when this host was
        self._alive_at = time.monotonic()
        self._folder: Path | None = None
        self._request: Message = {}
        self._starting: subprocess.Popen[bytes] | None = None
        self._command: subprocess.Popen[bytes] | None = None
        self._daemons: dict[int, str] = {}
        self._stop = self._was_slow = False

    def run(self) -> int:
        wakeup_writer, wakeup = socket.socketpair()
        for end in (wakeup_writer, wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        selector = selectors.DefaultSelector()
        for sock in (self._link.sock, wakeup):
            selector.register(sock, selectors.EVENT_READ)
        is_connected, is_head_gone = True, False
        try:
            for message in self._link.pending:
                self._handle(message)
            while not self._stop:
                for key, _ in selector.select(WATCH_SECONDS):
                    if key.fileobj is wakeup:
                        with contextlib.suppress(BlockingIOError):
                            if signal.SIGTERM in wakeup.recv(4096):
                                self._told_to_end()
                    else:
                        for message in self._link.receive():
                            self._handle(message)
                self._check_children()
                self._watch_clock()
        except LinkClosed:
            is_connected = False
            is_head_gone = self._outlast_command()
        finally:
            left = self._end()
            if is_connected:
                with contextlib.suppress(LinkClosed):
                    self._link.send(kind="stopped", left=left)
            self._link.close()
        if is_head_gone:
            name, *job = self._request["job"]
            argv = SCHEDULERS[name].revive_argv(*job) if name in SCHEDULERS else []
            if argv:
                subprocess.run(argv, stdin=subprocess.DEVNULL)
        return 0

    def _told_to_end(self) -> None:
        """SIGTERM. A scheduler that ends a job sends it to every process, and gives them time: COMMAND may need this
        host to save. So the launcher, which asks COMMAND to end, says when to stop."""
        if os.getppid() != self._guard:
            self._stop = True
        elif self._told_at is None:
            self._told_at = time.monotonic()
            self._link.send(kind="told")

    def _watch_clock(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_SECONDS:
            self._alive_at = now
            self._link.send(kind="alive")
        if self._told_at is not None and now > self._told_at + self._grace + KILL_SECONDS:
            self._stop = True

    def _outlast_command(self) -> bool:
        """The launcher is gone. COMMAND, on another host, has its time to save, and its Ray needs this host. Returns
        whether that host is gone, too."""
        limit = time.monotonic() + self._grace
        while self._daemons and not self._request["head"] and time.monotonic() < limit:
            host, _, port = self._request["address"].rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            except OSError as error:
                return not isinstance(error, ConnectionRefusedError)
            time.sleep(WATCH_SECONDS)
            for pid in processes.reap():
                self._daemons.pop(pid, None)
        return False

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "node":
            self._start_node(message)
        elif kind == "command":
            self._start_command(message)
        elif kind == "signal" and self._command is not None:
            self._signal_command(message["number"])
        elif kind == "stop":
            self._stop = True
            if self._starting is not None:  # it took too long; the log says why
                self._link.send(kind="log", log=self._start_logs())

    def _signal_command(self, number: int) -> None:
        assert self._command is not None
        if number in processes.ENDING and self._asked_at is None:
            self._asked_at = time.monotonic()
        # To the whole group: a shell would handle the signal only after its child has ended.
        processes.signal_group(self._command, number)

    def _start_node(self, request: Message) -> None:
        self._request, self._grace = request, request["grace"]
        os.environ.update(request["environment"])
        with contextlib.suppress(OSError):
            os.chdir(request["cwd"])
        if request["affinity"] and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, request["affinity"])
        if request["interface"]:
            os.environ["GLOO_SOCKET_IFNAME"] = request["interface"]
        try:
            if request["ip"] is None:
                host, _, port = request["address"].rpartition(":")
                request["ip"] = address_towards(host, int(port))
            if request["head"] and request["port"]:
                ray_node.check_port(request["port"])  # Ray would retry for a minute without a message
            ray_folder.remove_abandoned()
            self._folder = ray_folder.make_folder()
            self._tell_folder(self._folder)
            ray_folder.write_token(self._folder, ray_token(self._key))
            environment, notices = ray_node.node_environment(os.environ, self._folder)
            for text in notices:
                self._link.send(kind="notice", text=text)
            self._link.send(kind="starting", folder=str(self._folder), ip=request["ip"])
            # Ray's processes have nothing to save, and COMMAND needs them as long as it saves.
            with (self._folder / START_LOG).open("wb") as log, processes.blocked(signal.SIGTERM):
                self._starting = subprocess.Popen(
                    ray_node.start_argv(self._folder, request),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            self._link.send(kind="failed", reason=f"{error}", log="")

    def _start_logs(self) -> str:
        return "" if self._folder is None else ray_node.start_logs(self._folder, self._folder / START_LOG)

    def _check_children(self) -> None:
        for pid, code in processes.reap().items():
            if self._starting is not None and pid == self._starting.pid:
                self._starting.returncode = code
                self._starting = None
                self._ray_started(code)
            elif self._command is not None and pid == self._command.pid:
                self._command.returncode = code
                self._command = None
                self._link.send(kind="ended", code=code)
            elif pid in self._daemons:
                how = f"exit code {code}" if code >= 0 else processes.signal_name(-code)
                self._link.send(kind="lost", reason=f"{self._daemons.pop(pid)} ended ({how})", log=self._start_logs())

    def _ray_started(self, code: int) -> None:
        """`ray start` has ended."""
        assert self._folder is not None
        if code != 0:
            log = self._start_logs()
            if SLOW in log and not self._was_slow:
                self._was_slow = True
                self._link.send(kind="notice", text="Ray did not start within its own limit of 30 s; trying once more")
                processes.kill_all(self._folder, KILL_SECONDS)
                ray_folder.remove_folder(self._folder)
                self._start_node(self._request)
                return
            self._link.send(kind="failed", reason=f"`ray start` exited with {code}", log=log)
            return
        for process in processes.descendants(self._folder):
            with contextlib.suppress(psutil.Error):
                if process.name() in DAEMONS:
                    self._daemons[process.pid] = process.name()
        address = ray_node.head_address(self._folder) if self._request["head"] else self._request["address"]
        token = str(self._folder / ray_folder.TOKEN)
        self._link.send(kind="ready", address=address, ip=self._request["ip"], token=token)

    def _start_command(self, message: Message) -> None:
        assert self._folder is not None
        environ = {**os.environ, **message["environment"]}
        no_input = sys.stdin is None or sys.stdin.isatty() or message["remote"]
        try:
            self._command = subprocess.Popen(
                message["argv"],
                env=ray_node.command_environment(environ, self._folder, message["address"], message["hosts"]),
                cwd=message["cwd"] if Path(message["cwd"]).is_dir() else None,
                stdin=subprocess.DEVNULL if no_input else None,
                start_new_session=True,
            )
        except OSError as error:
            code = 126 if isinstance(error, PermissionError) else 127  # as a shell does
            self._link.send(kind="ended", code=code, reason=f"{message['argv'][0]}: {error.strerror}")
            return
        attach(self._command.pid)

    def _end(self) -> int:
        """Give COMMAND time to save, then kill everything; returns how many processes are left."""
        if self._command is not None:
            if self._asked_at is None:
                self._signal_command(signal.SIGTERM)
            limit = (self._asked_at or time.monotonic()) + self._grace
            while self._command.pid not in processes.reap() and time.monotonic() < limit:
                time.sleep(0.02)
        left = processes.kill_all(self._folder, KILL_SECONDS)
        if self._folder is not None:
            ray_folder.remove_folder(self._folder)
            ray_folder.remove_abandoned()  # scratch folders of the workers
        return left


def attach(pid: int) -> None:
    """Have the scheduler account for the process, which leads a session of its own, where it does not by itself."""
    for scheduler in SCHEDULERS.values():
        job_id = os.environ.get(scheduler.id_variables[0])
        argv = scheduler.attach_argv(pid, job_id) if job_id else []
        if argv and shutil.which(argv[0]):
            ask(argv)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="paceline.launch.supervisor", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="number of this host in the job")
    parser.add_argument(
        "--contact", default="0", help="source of the launcher's address and key: a file descriptor or a path"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="time to find the launcher")
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # COMMAND gets them from the launcher. Not SIG_IGN: all processes started here would inherit that.
        signal.signal(number, lambda number, frame: None)
    with contextlib.suppress(PermissionError):  # it already leads a session
        os.setsid()
    attach(os.getpid())
    processes.raise_limits()

    def work(tell_folder: TellFolder) -> int:
        try:
            link, key = _find_launcher(options.contact, options.index, options.seconds)
        except LinkClosed as error:
            print(f"paceline supervisor on {platform.node()}: {error}", file=sys.stderr)
            return NO_LAUNCHER
        return Supervisor(link, key, tell_folder).run()

    return _run_guarded(work)


def _run_guarded(work: Callable[[TellFolder], int]) -> int:
    """Exit code of `work`, which runs in a child. The child ends when this process is killed; if the child is killed,
    this process ends what it left behind."""
    reader, writer = os.pipe()
    guard = os.getpid()
    processes.adopt_orphans()
    child = os.fork()
    if child == 0:
        os.close(reader)
        folders = os.fdopen(writer, "w")
        processes.adopt_orphans()
        processes.end_with(guard)
        return work(lambda folder: print(folder, file=folders, flush=True))
    os.close(writer)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, signal.SIGTERM))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        processes.kill_all(None, KILL_SECONDS)
        for folder in os.read(reader, 4096).decode().splitlines():
            ray_folder.remove_folder(Path(folder))
    return code if code >= 0 else 128 - code


def _find_launcher(source: str, index: int, seconds: float) -> tuple[Link, bytes]:
    if source.isdecimal():
        contact = rendezvous.read_from(int(source))
        return connect(contact, hello(index, contact.interface), seconds), contact.secret
    limit, last = time.monotonic() + seconds, f"no file {source}: is its folder shared by all hosts?"
    while time.monotonic() < limit:
        found = rendezvous.read(Path(source))
        if found is None:
            time.sleep(0.1)
            continue
        try:  # an earlier job's file leads nowhere and will be replaced
            return connect(found, hello(index, found.interface), RETRY_SECONDS), found.secret
        except LinkClosed as error:
            last = str(error)
    raise LinkClosed(f"no launcher within {seconds:g} s ({last})")


if __name__ == "__main__":
    sys.exit(main())
