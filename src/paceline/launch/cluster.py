"""An allocation → Ray: a supervisor on every host, a Ray node each, COMMAND once on the head, and the end of it all."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.launch import local, rendezvous
from paceline.launch.hub import Hub, Member
from paceline.launch.node import interface_address
from paceline.launch.scheduler import DEADLINE, Allocation, Host, deadline_of
from paceline.launch.start import meeting_point, start_supervisor, supervisor_argv
from paceline.launch.timeline import Timeline

Remote = Callable[[str, Sequence[str], Mapping[str, str]], list[str]]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_SECONDS = 0.5
COMMAND_SECONDS = 25.0  # to end after a signal that asks for it: schedulers kill after 30
STOP_SECONDS = 12.0
PROCESS_SECONDS = 1.0
EVERYWHERE_HERE = ("local", "rehearsal")
NO_INPUT = ("pbs_tmrsh", "pbsdsh")  # what they start has no standard input
TO_BEGIN = ("PYTHONPATH", "LD_LIBRARY_PATH")  # without these Python may not even begin there
PASSED_ON = (*TO_BEGIN, "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_ALL", "TMPDIR")
PASSED_PREFIXES = ("PACELINE_", "RAY_", "OMP_", "MKL_", "OPENBLAS_", "GLOO_", "KMP_")
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


class LaunchError(Exception):
    """There is no cluster, and why."""


@dataclass(frozen=True)
class Options:
    folder: Path
    """Of the timeline, and of what the hosts said."""
    interface: str | None = None
    min_nodes: int | None = None
    timeout: float = 120.0
    keep: bool = False
    cpus: int | None = None
    port: int = 0
    dashboard: bool = False


class Cluster:
    def __init__(self, allocation: Allocation, remote: Remote, options: Options) -> None:
        self._allocation, self._remote, self._options = allocation, remote, options
        self._is_mpi, self._is_rehearsal = allocation.rank is not None, allocation.scheduler == "rehearsal"
        try:
            self.timeline = Timeline(options.folder)
        except OSError as error:
            raise LaunchError(f"{options.folder}: {error.strerror}; give a folder that can be written: --log") from None
        self.members = self._make_members()
        self._head = next((member for member in self.members if member.is_here), self.members[0])
        self._file: Path | None = None
        is_alone = all(member.is_here for member in self.members) and not (self._is_mpi and allocation.size != 1)
        addresses = ["127.0.0.1"] if is_alone else own_addresses(options.interface)
        key = rendezvous.new_key()
        self.hub = Hub(
            self.members,
            key,
            "127.0.0.1" if is_alone else "",
            self.timeline,
            shared=self._is_mpi or self._is_rehearsal,
            ranks=self._is_mpi,
            open_ended=self._is_mpi and allocation.size == 0,
        )
        self._contact = rendezvous.Contact(addresses, self.hub.port, key, options.interface)
        self.timeline.add("launcher", "listening", f"port {self.hub.port}, {len(self.members)} expected")

    def _make_members(self) -> list[Member]:
        allocation = self._allocation
        if allocation.rank is not None:
            return [Member(i, Host(f"rank{i}"), i == allocation.rank) for i in range(max(1, allocation.size))]
        here = allocation.scheduler in EVERYWHERE_HERE
        return [Member(i, host, here or local.is_here(host.name)) for i, host in enumerate(allocation.hosts)]

    def run(self, command: Sequence[str]) -> int:
        """COMMAND's exit code. Whatever happens, all that was started has ended then."""
        try:
            self._start_supervisors()
            self._form()
            if self.hub.signals:
                return 128 + self.hub.signals[0]
            code = self._run_command(command) if command else 0
            if self._options.keep:
                self._keep()
            return code
        finally:
            self._stop()
            self.hub.close()
            self.timeline.close()

    # -- supervisors ------------------------------------------------------------------------------------------------

    def _start_supervisors(self) -> None:
        if self._allocation.rank is not None:
            self._publish(meeting_point(self._allocation))
            self._start_here(self.members[self._allocation.rank])
            return
        for member in self.members:
            if member.is_here:
                self._start_here(member)
            else:
                self._start_there(member)

    def _start_here(self, member: Member) -> None:
        argv = supervisor_argv(member.index, self._options.timeout)
        if member is self._head:  # its output is COMMAND's: it goes where ours does
            member.process = start_supervisor(argv, self._contact)
        else:
            with self.hub.log(member).open("ab") as log:
                member.process = start_supervisor(argv, self._contact, log.fileno())
        self.timeline.add(member.name, "supervisor", f"process {member.process.pid}")

    def _start_there(self, member: Member) -> None:
        variables = {name: os.environ[name] for name in TO_BEGIN if os.environ.get(name)}
        argv = supervisor_argv(member.index, self._options.timeout)
        words = self._remote(member.name, argv, variables)
        blind = Path(words[0]).name in NO_INPUT
        if blind:
            path = self._publish(self._options.folder.absolute() / "contact")
            words = self._remote(member.name, [*argv, "--contact", str(path)], variables)
        with self.hub.log(member).open("ab") as log:
            try:
                member.process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL if blind else subprocess.PIPE,
                    stdout=None if member is self._head else log,
                    stderr=None if member is self._head else log,
                    start_new_session=True,
                )
            except OSError as error:
                self.hub.drop(member, "failed", f"{words[0]}: {error.strerror}")
                return
        if member.process.stdin is not None:
            with contextlib.suppress(OSError), member.process.stdin as given:
                given.write(self._contact.line().encode())
        self.timeline.add(member.name, "supervisor", f"by {words[0]}")

    def _publish(self, path: Path) -> Path:
        if self._file is None:
            rendezvous.write(path, self._contact)
            self._file = path
        return self._file

    # -- forming ----------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        options, hub, limit = self._options, self.hub, time.monotonic() + self._options.timeout
        while not hub.signals:
            is_late = time.monotonic() > limit
            self._advance(is_late)
            unsure = [m for m in self.members if m.state in ("waiting", "here", "starting")]
            ready = [m for m in self.members if m.state == "ready"]
            over = [m for m in self.members if m.is_over]
            needed = options.min_nodes or len(ready) + len(unsure) + len(over)
            if self._head.is_over or len(ready) + len(unsure) < needed:
                raise LaunchError(self._why(len(ready), needed))
            if self._head.state == "ready" and len(ready) >= needed and (not unsure or is_late):
                break
            if is_late:
                for member in unsure:
                    what = "no sign of it" if member.state == "waiting" else f"{member.state}, but not ready"
                    hub.drop(member, "failed", f"{what} within {options.timeout:g} s{hub.said(member)}")
            else:
                hub.pump(min(TICK_SECONDS, max(0.0, limit - time.monotonic())))
        if hub.signals:
            return
        for member in self.members:
            if member.state not in ("ready", "spare"):
                hub.say(f"going on without {member.name}: {member.reason or 'no sign of it'}")
        cpus = sum(member.facts["given"] for member in ready)
        formed = f"{len(ready)} node(s), {cpus} CPU(s) at {self.address}"
        self.timeline.add("launcher", "formed", formed)
        hub.say(f"{formed} after {self.timeline.seconds:.1f} s")

    def _why(self, ready: int, needed: int) -> str:
        reasons = [f"{m.name}: {m.reason}" for m in self.members if m.is_over]
        more = [f"and {len(reasons) - 5} more"] if len(reasons) > 5 else []
        what = f"{ready} of {needed} nodes are ready" if not self._head.is_over else "the head did not start"
        return f"no cluster, {what}: " + "; ".join([*reasons[:5], *more])

    def _advance(self, is_late: bool) -> None:
        """Starts each node as soon as it can be."""
        if self._is_mpi:
            if not is_late and any(member.state == "waiting" for member in self.members):
                return  # which of them share a host is known when all are there
            self._pair_up()
        here = [member for member in self.members if member.state == "here"]
        if self._head in here:
            address = self._head_address(is_late)
            if address is not None:
                self._order(self._head, address)
        elif self._head.state == "ready":
            if self._is_rehearsal:  # they share the cores: all at once, each would wait for all others
                busy = sum(member.state == "starting" for member in self.members)
                here = here[: max(0, max(2, int(self._head.facts["cores"])) - busy)]
            for member in here:
                self._order(member, self._member_address(member))

    def _pair_up(self) -> None:
        """One Ray node a host, with the cores of all its processes; the other processes wait for the end."""
        first = {m.facts["identity"]: m for m in self.members if m.state in ("starting", "ready")}
        here = [member for member in self.members if member.state == "here"]
        for member in sorted(here, key=lambda each: (each is not self._head, each.index)):
            other = first.setdefault(member.facts["identity"], member)
            if other is not member:
                member.state = "spare"
                other.facts["affinity"] = sorted({*other.facts["affinity"], *member.facts["affinity"]})
                other.facts["cores"] = max(other.facts["cores"], len(other.facts["affinity"]))
                self.timeline.add(member.name, "spare", f"on the host of {other.name}")

    def _head_address(self, is_late: bool) -> str | None:
        """As the others see it: that by which they came. None: not known yet."""
        head, others = self._head, [m for m in self.members if m is not self._head and m.state != "spare"]
        if self._is_rehearsal:
            return local.loopback(head.index)
        if self._options.interface:
            return str(head.facts["interface"])
        if not head.is_here:
            return head.link.peer if head.link is not None else None
        for member in others:
            if member.link is not None:
                return member.link.own
        if is_late or all(member.is_over for member in others):
            return local.loopback(0) if local.can_bind(local.loopback(0)) else "127.0.0.1"
        return None

    def _member_address(self, member: Member) -> str | None:
        if self._is_rehearsal:
            return local.loopback(member.index)
        return member.facts["interface"] if self._options.interface else None

    def _order(self, member: Member, address: str | None) -> None:
        options, cores = self._options, int(member.facts["cores"])
        neighbours = len(self.members) if self._is_rehearsal else 1
        cpus = options.cpus or (max(1, cores // neighbours) if self._is_rehearsal else member.host.cpus or cores)
        ours = min(member.host.cpus, int(member.facts["usable"])) if member.host.cpus else cores
        if cpus > ours and not self._is_rehearsal:
            if options.cpus:
                return self.hub.drop(member, "failed", f"--cpus {cpus}: {ours} core(s) are ours there")
            self.hub.say(f"{member.name}: of {cpus} CPUs in the allocation {ours} can be used (affinity, cgroup)")
            cpus = ours
        member.facts["given"], member.state = cpus, "starting"
        self.hub.send(
            member,
            kind="node",
            head=member is self._head,
            ip=address,
            address=self._head.facts.get("address"),
            port=options.port,
            cpus=cpus,
            gpus=(None if member is self._head else 0) if self._is_rehearsal else member.host.gpus or None,
            memory=member.host.memory_bytes,
            neighbours=neighbours,
            dashboard=options.dashboard,
            cwd=str(Path.cwd()),
            affinity=member.facts["affinity"] if self._is_mpi else None,
            interface=options.interface,
            environment={} if member.is_here else passed_on(os.environ),
        )
        return None

    # -- COMMAND ----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return str(self._head.facts.get("address"))

    def _run_command(self, command: Sequence[str]) -> int:
        hub, head, limit = self.hub, self._head, float("inf")
        hub.send(
            head,
            kind="command",
            argv=[word.replace("{address}", self.address) for word in command],
            environment={**passed_on(os.environ), **self._deadline()},
            address=self.address,
            hosts=[name for m in self.members if m.facts for name in (m.facts["host"], m.facts.get("ip")) if name],
            remote=not head.is_here,
            cwd=str(Path.cwd()),
        )
        self.timeline.add(head.name, "command", command[0])
        while hub.ended is None:
            while hub.signals:
                number = hub.signals.pop(0)
                self.timeline.add("launcher", "signal", signal.Signals(number).name)
                hub.send(head, kind="signal", number=number)
                if number in ENDING:
                    limit = min(limit, time.monotonic() + COMMAND_SECONDS)
            if head.is_over:
                hub.say(f"the head {head.name} is gone: {head.reason}")
                return 1
            if time.monotonic() > limit:
                hub.say(f"the command did not end within {COMMAND_SECONDS:g} s of the signal, and is ended")
                return 128 + signal.SIGKILL
            hub.pump(TICK_SECONDS)
            self._advance(is_late=True)  # a host that comes late is welcome
        code = hub.ended if hub.ended >= 0 else 128 - hub.ended
        self.timeline.add(head.name, "ended", f"exit code {code}")
        return code

    def _deadline(self) -> dict[str, str]:
        """That of the allocation, unless a nearer one was given."""
        known = [seconds for seconds in (deadline_of(os.environ), self._allocation.deadline) if seconds]
        return {DEADLINE: f"{min(known):.0f}"} if known else {}

    def _keep(self) -> None:
        token = self._head.facts["token"]
        self.hub.say(
            f"the cluster is kept until Ctrl-C; on {self._head.facts['host']}: "
            f"export RAY_ADDRESS={self.address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}"
        )
        while not any(number in ENDING for number in self.hub.signals) and not self._head.is_over:
            self.hub.pump(TICK_SECONDS)
            self._advance(is_late=True)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        hub, limit = self.hub, time.monotonic() + STOP_SECONDS
        hub.is_stopping = True
        self.timeline.add("launcher", "stopping")
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        for member in self.members:
            hub.send(member, kind="stop")
        while any(member.link is not None for member in self.members) and time.monotonic() < limit:
            hub.pump(0.1)
        for member in self.members:
            if member.link is not None:
                hub.drop(member, "lost", f"it did not stop within {STOP_SECONDS:g} s")
        # A supervisor that never came, or the ssh to it; one that was reached ends by itself when we are gone.
        processes = [member.process for member in self.members if member.process is not None]
        for number in (0, signal.SIGTERM, signal.SIGKILL):  # first they may end by themselves
            processes = [process for process in processes if process.poll() is None]
            for process in processes if number else ():
                with contextlib.suppress(PermissionError):  # oarsh is another user's; it ends with what it started
                    process.send_signal(number)
            patience = time.monotonic() + PROCESS_SECONDS  # of all together
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, patience - time.monotonic()))
        self.timeline.add("launcher", "stopped")


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What another host is told of our variables: nothing secret, as the connection can be listened to."""
    return {
        name: value
        for name, value in environ.items()
        if (name in PASSED_ON or name.startswith(PASSED_PREFIXES))
        and not any(word in name.upper() for word in SECRET_WORDS)
    }


def own_addresses(interface: str | None) -> list[str]:
    """Of this machine, those first that lead out of it."""
    if interface:
        found = interface_address(interface)
        if found is None:
            known = ", ".join(sorted(psutil.net_if_addrs()))
            raise LaunchError(f"--interface {interface}: this machine has {known}")
        return [found, "127.0.0.1"]
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    every = [
        str(address.address)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return sorted(every, key=lambda address: address.startswith("127."))
