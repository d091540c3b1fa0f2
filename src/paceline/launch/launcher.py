"""From an allocation to Ray: a supervisor and a Ray node on every host, COMMAND once on the head, then a clean end."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from paceline.launch import rendezvous
from paceline.launch.addresses import interface_addresses
from paceline.launch.environment import TO_START_PYTHON, looks_secret, passed_on
from paceline.launch.options import LaunchOptions
from paceline.launch.processes import ENDING
from paceline.launch.server import LaunchNode, Server
from paceline.launch.start_supervisor import start_supervisor, supervisor_argv
from paceline.launch.timeline import Timeline
from paceline.schedulers.scheduler import DEADLINE, GRACE, PASS_ON, Allocation, Host, deadline_of, grace_seconds
from paceline.schedulers.this_machine import can_bind, is_this_machine, loopback

RemoteArgv = Callable[[str, Sequence[str], Mapping[str, str]], list[str]]
"""Host, command and variables → the command here that runs it there."""

TICK_SECONDS = 0.5
BURST_SECONDS = 3.0  # a scheduler, its script and the hosts pass on one request to end: this long it is the same one
STOP_SECONDS = 12.0
PROCESS_SECONDS = 1.0
LOCAL = ("local", "rehearsal")  # allocations whose hosts are all this machine
INDEPENDENT = ("ssh", "cluster")  # allocations whose hosts do not end together
TERMINATED = 128 + signal.SIGTERM
WITHOUT_INPUT = ("pbs_tmrsh", "pbsdsh")  # programs they start have no standard input


class LaunchError(Exception):
    """The cluster could not be started."""


class Launcher:
    def __init__(self, allocation: Allocation, remote_argv: RemoteArgv, options: LaunchOptions) -> None:
        self._allocation, self._remote_argv, self._options = allocation, remote_argv, options
        self._is_mpi, self._is_rehearsal = allocation.rank is not None, allocation.scheduler == "rehearsal"
        try:
            self.timeline = Timeline(options.folder)
        except OSError as error:
            raise LaunchError(f"{options.folder}: {error.strerror}; give a writable folder with --log") from None
        self.nodes = self._make_nodes()
        self._head = next((node for node in self.nodes if node.is_local), self.nodes[0])
        self._rendezvous_file: Path | None = None
        self._grace = grace_seconds(os.environ, allocation.kill_delay)
        self._names = os.environ.get(PASS_ON, "")
        self._variables = passed_on(os.environ, self._names, into_container=bool(options.container))
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._is_running = False
        is_alone = all(node.is_local for node in self.nodes) and not (self._is_mpi and allocation.size != 1)
        addresses = ["127.0.0.1"] if is_alone else own_addresses(options.interface)
        key = rendezvous.new_key()
        self.server = Server(
            self.nodes,
            key,
            "127.0.0.1" if is_alone else "",
            self.timeline,
            shared_hosts=self._is_mpi or self._is_rehearsal,
            is_mpi=self._is_mpi,
            open_ended=self._is_mpi and allocation.size == 0,
            ports=options.ports,
            version=metadata.version("paceline") if options.container else None,
            independent_hosts=allocation.scheduler in INDEPENDENT,
        )
        self._contact = rendezvous.Contact(addresses, self.server.port, key, options.interface)
        self.timeline.add("launcher", "listening", f"port {self.server.port}, {len(self.nodes)} expected")

    def _make_nodes(self) -> list[LaunchNode]:
        allocation = self._allocation
        if allocation.rank is not None:
            return [LaunchNode(i, Host(f"rank{i}"), i == allocation.rank) for i in range(max(1, allocation.size))]
        local = allocation.scheduler in LOCAL
        return [LaunchNode(i, host, local or is_this_machine(host.name)) for i, host in enumerate(allocation.hosts)]

    def run(self, command: Sequence[str]) -> int:
        """COMMAND's exit code. Everything that was started has ended when this returns or raises."""
        try:
            self._start_supervisors()
            self._form()
            if self.server.signals:
                return 128 + self.server.signals[0]
            code = self._run_command(command) if command else 0
            if self._options.keep:
                self._keep()
            return code
        finally:
            self._stop()
            self.server.close()
            self.timeline.close()

    # -- supervisors ------------------------------------------------------------------------------------------------

    def _start_supervisors(self) -> None:
        if self._allocation.sentinel:
            with contextlib.suppress(OSError), Path(os.devnull).open("r+b") as null:
                argv = self._allocation.sentinel
                self._sentinel = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)
        if self._allocation.rank is not None:
            self._publish(rendezvous.file_for(self._allocation))
            self._start_here(self.nodes[self._allocation.rank])
            return
        kept = [name for name in self._names.split() if looks_secret(name) and name in os.environ]
        if kept and not all(node.is_local for node in self.nodes):
            self.server.notify(
                f"{', '.join(kept)} stays on this host: it looks secret, and the connection is not encrypted"
            )
        for node in self.nodes:
            if node.is_local:
                self._start_here(node)
            else:
                self._start_there(node)

    def _start_here(self, node: LaunchNode) -> None:
        argv = self._supervisor_argv(node)
        by_input = bool(self._options.container)
        if node is self._head:  # COMMAND runs below it and prints where the launcher does
            node.process = start_supervisor(argv, self._contact, by_input=by_input)
        else:
            with self.server.log_path(node).open("ab") as log:
                node.process = start_supervisor(argv, self._contact, log.fileno(), by_input=by_input)
        self.timeline.add(node.name, "supervisor", f"process {node.process.pid}")

    def _supervisor_argv(self, node: LaunchNode) -> list[str]:
        if not self._options.container:
            return supervisor_argv(node.index, self._options.timeout)
        program, *words = (word.replace("{workdir}", str(Path.cwd())) for word in self._options.container)
        inside = supervisor_argv(node.index, self._options.timeout, "python3")
        return [shutil.which(program) or program, *words, *inside]  # PATH may be another one on other hosts

    def _start_there(self, node: LaunchNode) -> None:
        names = () if self._options.container else TO_START_PYTHON
        variables = {name: os.environ[name] for name in names if os.environ.get(name)}
        argv = self._supervisor_argv(node)
        words = self._remote_argv(node.name, argv, variables)
        has_input = Path(words[0]).name not in WITHOUT_INPUT
        if not has_input:
            path = self._publish(self._options.folder.absolute() / "contact")
            words = self._remote_argv(node.name, [*argv, "--contact", str(path)], variables)
        with self.server.log_path(node).open("ab") as log:
            output = None if node is self._head else log
            try:
                node.process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                self.server.end(node, "failed", f"{words[0]}: {error.strerror}")
                return
        if node.process.stdin is not None:
            with contextlib.suppress(OSError), node.process.stdin as stdin:
                stdin.write(self._contact.line().encode())
        self.timeline.add(node.name, "supervisor", f"by {words[0]}")

    def _publish(self, path: Path) -> Path:
        if self._rendezvous_file is None:
            rendezvous.write(path, self._contact)
            self._rendezvous_file = path
        return self._rendezvous_file

    # -- forming the cluster ----------------------------------------------------------------------------------------

    def _form(self) -> None:
        options, server, limit = self._options, self.server, time.monotonic() + self._options.timeout
        while not server.signals:
            is_late = time.monotonic() > limit
            self._start_nodes(is_late)
            pending = [node for node in self.nodes if node.state in ("waiting", "here", "starting")]
            ready = [node for node in self.nodes if node.state == "ready"]
            over = [node for node in self.nodes if node.is_over]
            needed = options.min_nodes or len(ready) + len(pending) + len(over)
            if self._head.is_over or len(ready) + len(pending) < needed:
                raise LaunchError(self._why(len(ready), needed))
            if self._head.state == "ready" and len(ready) >= needed and (not pending or is_late):
                break
            if is_late:
                for node in pending:
                    what = "no answer" if node.state == "waiting" else f"{node.state}, but not ready"
                    server.end(node, "failed", f"{what} within {options.timeout:g} s{server.last_log_line(node)}")
            else:
                server.handle_events(min(TICK_SECONDS, max(0.0, limit - time.monotonic())))
        if server.signals:
            return
        for node in self.nodes:
            if node.state not in ("ready", "spare"):
                server.notify(f"going on without {node.name}: {node.reason or 'no answer'}")
        cpus = sum(node.info["given"] for node in ready)
        formed = f"{len(ready)} node(s), {cpus} CPU(s) at {self.address}"
        self.timeline.add("launcher", "formed", formed)
        server.notify(f"{formed} after {self.timeline.seconds:.1f} s")

    def _why(self, ready: int, needed: int) -> str:
        reasons = [f"{node.name}: {node.reason}" for node in self.nodes if node.is_over]
        more = [f"and {len(reasons) - 5} more"] if len(reasons) > 5 else []
        what = f"{ready} of {needed} nodes are ready" if not self._head.is_over else "the head did not start"
        return f"no cluster, {what}: " + "; ".join([*reasons[:5], *more])

    def _start_nodes(self, is_late: bool) -> None:
        """Start Ray on each host that is there: on the head first, then on the others."""
        if self._is_mpi:
            if not is_late and any(node.state == "waiting" for node in self.nodes):
                return  # which ranks share a host is known only when all have connected
            self._merge_ranks()
        here = [node for node in self.nodes if node.state == "here"]
        if self._head in here:
            address = self._head_address(is_late)
            if address is not None:
                self._start_node(self._head, address)
        elif self._head.state == "ready":
            if self._is_rehearsal:  # they share the cores, and all at once would time out
                busy = sum(node.state == "starting" for node in self.nodes)
                here = here[: max(0, max(2, int(self._head.info["cores"])) - busy)]
            for node in here:
                address = node.info["interface"] if self._options.interface else None
                self._start_node(node, loopback(node.index) if self._is_rehearsal else address)

    def _merge_ranks(self) -> None:
        """One Ray node per host, with the cores of all its ranks; the other ranks wait for the end."""
        first = {node.info["identity"]: node for node in self.nodes if node.state in ("starting", "ready")}
        here = [node for node in self.nodes if node.state == "here"]
        for node in sorted(here, key=lambda each: (each is not self._head, each.index)):
            other = first.setdefault(node.info["identity"], node)
            if other is not node:
                node.state = "spare"
                other.info["affinity"] = sorted({*other.info["affinity"], *node.info["affinity"]})
                other.info["cores"] = max(other.info["cores"], len(other.info["affinity"]))
                self.timeline.add(node.name, "spare", f"on the host of {other.name}")

    def _head_address(self, is_late: bool) -> str | None:
        """The head's address that other hosts have already reached; None if not known yet."""
        head, others = self._head, [node for node in self.nodes if node is not self._head and node.state != "spare"]
        if self._is_rehearsal:
            return loopback(head.index)
        if self._options.interface:
            return str(head.info["interface"])
        if not head.is_local:
            return head.link.peer_address if head.link is not None else None
        for node in others:
            if node.link is not None:
                return node.link.local_address
        if is_late or all(node.is_over for node in others):
            return loopback(0) if can_bind(loopback(0)) else "127.0.0.1"
        return None

    def _start_node(self, node: LaunchNode, address: str | None) -> None:
        options, cores, info = self._options, int(node.info["cores"]), node.info
        neighbours = len(self.nodes) if self._is_rehearsal else 1
        cpus = options.cpus or (max(1, cores // neighbours) if self._is_rehearsal else node.host.cpus or cores)
        usable = min(node.host.cpus, int(info["usable"])) if node.host.cpus else cores
        if cpus > usable and not self._is_rehearsal:
            if options.cpus:
                self.server.end(node, "failed", f"--cpus {cpus}: only {usable} core(s) are usable there")
                return
            self.server.notify(f"{node.name}: {usable} of its {cpus} allocated CPUs are usable (affinity, cgroup)")
            cpus = usable
        info["given"], node.state = cpus, "starting"
        self.server.send(
            node,
            kind="node",
            head=node is self._head,
            ip=address,
            address=self._head.info.get("address"),
            port=options.port,
            ports=options.ports,
            cpus=cpus,
            gpus=(None if node is self._head else 0) if self._is_rehearsal else node.host.gpus or None,
            memory=node.host.memory_bytes,
            granted_cores=node.host.cpus,
            neighbours=neighbours,
            dashboard=options.dashboard,
            cwd=str(Path.cwd()),
            affinity=info["affinity"] if self._is_mpi else None,
            interface=options.interface,
            environment={} if node.is_local and not options.container else self._variables,
            grace=self._grace,
            job=[self._allocation.scheduler, self._allocation.job_id, self._head.name],
        )

    # -- COMMAND ----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return str(self._head.info.get("address"))

    def _run_command(self, command: Sequence[str]) -> int:
        server, head, limit, asked = self.server, self._head, math.inf, dict[int, float]()
        self._is_running = True
        server.send(
            head,
            kind="command",
            argv=[word.replace("{address}", self.address) for word in command],
            environment={**self._variables, **self._deadline(), GRACE: f"{self._grace:g}"},
            address=self.address,
            hosts=[
                name for node in self.nodes if node.info for name in (node.info["host"], node.info.get("ip")) if name
            ],
            remote=not head.is_local,
            cwd=str(Path.cwd()),
        )
        self.timeline.add(head.name, "command", command[0])
        while server.exit_code is None:
            while server.signals:
                number, now = server.signals.pop(0), time.monotonic()
                if number != signal.SIGINT and now - asked.get(number, -math.inf) < BURST_SECONDS:
                    continue
                asked[number] = now
                self.timeline.add("launcher", "signal", signal.Signals(number).name)
                server.send(head, kind="signal", number=number)
                if number in ENDING:
                    limit = min(limit, now + self._grace)
            if head.is_over:
                server.notify(f"the head {head.name} is lost: {head.reason}")
                return 1
            if time.monotonic() > limit:
                server.notify(f"the command did not end within {self._grace:g} s of the signal and is killed")
                return 128 + signal.SIGKILL
            server.handle_events(TICK_SECONDS)
            self._start_nodes(is_late=True)  # hosts that come late join too
            if self._sentinel is not None and self._sentinel.poll() is not None:
                if self._sentinel.returncode == TERMINATED:
                    server.notify("the scheduler ends the job's steps: it is being preempted or cancelled")
                    server.signals.append(signal.SIGTERM)
                self._sentinel = None
        self._is_running = False
        code = server.exit_code if server.exit_code >= 0 else 128 - server.exit_code
        self.timeline.add(head.name, "ended", f"exit code {code}")
        return code

    def _deadline(self) -> dict[str, str]:
        """The earlier of the allocation's deadline and the one in the environment."""
        known = [seconds for seconds in (deadline_of(os.environ), self._allocation.deadline) if seconds]
        return {DEADLINE: f"{min(known):.0f}"} if known else {}

    def _keep(self) -> None:
        token = self._head.info["token"]
        self.server.notify(
            f"the cluster runs until Ctrl-C; on {self._head.info['host']}: "
            f"export RAY_ADDRESS={self.address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}"
        )
        while not any(number in ENDING for number in self.server.signals) and not self._head.is_over:
            self.server.handle_events(TICK_SECONDS)
            self._start_nodes(is_late=True)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        server, limit = self.server, time.monotonic() + STOP_SECONDS + (self._grace if self._is_running else 0.0)
        server.is_stopping = True
        self.timeline.add("launcher", "stopping")
        if self._rendezvous_file is not None:
            self._rendezvous_file.unlink(missing_ok=True)
        if self._sentinel is not None:
            self._sentinel.terminate()
        for node in self.nodes:
            server.send(node, kind="stop")
        while any(node.link is not None for node in self.nodes) and time.monotonic() < limit:
            server.handle_events(0.1)
        for node in self.nodes:
            if node.link is not None:
                server.end(node, "lost", f"it did not stop within {STOP_SECONDS:g} s")
        # What is left never connected; a supervisor that did ends by itself when the launcher is gone.
        processes = [node.process for node in self.nodes if node.process is not None]
        processes += [self._sentinel] if self._sentinel is not None else []
        for number in (0, signal.SIGTERM, signal.SIGKILL):  # first wait for them to end by themselves
            processes = [process for process in processes if process.poll() is None]
            for process in processes if number else ():
                with contextlib.suppress(PermissionError):  # oarsh runs as another user and ends with its command
                    process.send_signal(number)
            limit = time.monotonic() + PROCESS_SECONDS
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, limit - time.monotonic()))
        self.timeline.add("launcher", "stopped")


def own_addresses(interface: str | None) -> list[str]:
    """This machine's addresses, loopback last."""
    found = list(interface_addresses(interface))
    if interface and not found:
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise LaunchError(f"--interface {interface}: this machine has no such interface; it has {known}")
    return [found[0], "127.0.0.1"] if interface else found
