"""Several hosts on this machine, as root: a bridge, and for each host network, host-name, mount, process and IPC
namespaces of its own. A host has its own address and name, process table, /tmp and /dev/shm; it reaches the other hosts
and nothing else. Everything else on the disk is the machine's own.

The namespaces have no names: they go with the host's first process, and that one goes with the process that made it,
however it ends. Only network devices can outlive a killed test run; the next one removes them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SECONDS = 30.0
REPOSITORY = Path(__file__).parents[2]
PREFIX = "pcl"
_DEVICE = re.compile(rf"^{PREFIX}(\d+)[bgv]\d+(\.\d+)?$")
_ENTER = ("--mount", "--uts", "--ipc", "--net", "--pid")
_numbers = itertools.count()

# `mount /tmp` anew, then show in it again what was named; the name service needs no answer from a network.
_BOOT = """
set -e
hostname {name}
mount -t tmpfs -o size={shm} tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
mkdir /mnt/old
mount --rbind /tmp /mnt/old
mount -t tmpfs -o mode=1777 tmpfs /tmp
for path in {shown}; do mkdir -p "/tmp/$path"; mount --rbind "/mnt/old/$path" "/tmp/$path"; done
umount -l /mnt
printf '%s' {table} > /tmp/.hosts
mount --bind /tmp/.hosts /etc/hosts
ip link set lo up
echo ready
exec env --ignore-signal=CHLD sleep infinity  # so the kernel buries orphans by itself
"""


def wait_until(true: Callable[[], bool], what: str, seconds: float = SECONDS) -> float:
    """Waits for it, and gives the seconds it took."""
    start = time.monotonic()
    while not true():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - start


def missing() -> str:
    """What this machine lacks for hosts, in one line; empty when nothing."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces: that needs root"
    tools = [tool for tool in ("ip", "nsenter", "unshare", "setpriv") if shutil.which(tool) is None]
    return f"not found: {', '.join(tools)} (Debian: apt-get install iproute2 util-linux)" if tools else ""


class Hosts:
    """`count` hosts named `names`, with the addresses `ips`; `shared` folders under /tmp stay visible to all."""

    def __init__(self, count: int = 2, *, shared: Sequence[Path] = (), shm: str = "160m") -> None:
        if lacking := missing():
            raise RuntimeError(lacking)
        pid, number = os.getpid(), next(_numbers)
        self.bridge = f"{PREFIX}{pid}b{number}"
        self.names = [f"node{i}" for i in range(count)]
        self.ips = [f"10.{64 + pid % 128}.{number % 256}.{11 + i}" for i in range(count)]
        self._links = [f"{PREFIX}{pid}v{number}.{i}" for i in range(count)]
        self._shm = shm
        visible = (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *shared)
        self._shown = sorted({str(path.resolve().relative_to("/tmp")) for path in visible if _in_tmp(path)})
        self._gates = [f"{PREFIX}{pid}g{number}.{i}" for i in range(count)]
        self._inits: dict[int, subprocess.Popen[str]] = {}
        self._firsts: dict[int, int] = {}
        self._relays: dict[int, subprocess.Popen[str]] = {}
        self._commands: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        _remove_leftovers()
        try:
            _sh("ip", "link", "add", self.bridge, "type", "bridge")
            _sh("ip", "link", "set", self.bridge, "up")
            for host in range(len(self.names)):
                self.boot(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for host in list(self._firsts):
            self._end_processes(host)
        for host in range(len(self.names)):
            self._remove_devices(host)
        for process in self._commands:
            process.wait(timeout=SECONDS)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._commands.clear()
        _remove(self.bridge)

    def boot(self, host: int) -> None:
        """Starts a host; also one that was killed."""
        table = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(self.ips, self.names, strict=True))
        script = _BOOT.format(
            name=self.names[host], shm=self._shm, shown=shlex.join(self._shown), table=shlex.quote(table)
        )
        unshare = ["unshare", *_ENTER, "--mount-proc", "--kill-child", "--", "sh", "-c", script]
        init = self._inits[host] = _start_until_ready(unshare)
        first = self._firsts[host] = _children(init.pid)[0]
        link = self._links[host]
        _sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(first))
        _sh("ip", "link", "set", link, "master", self.bridge, "up")
        # Its hardware address stays the same when it is booted again, so that the others reach it at once.
        hardware = f"link set eth0 address 02:00:00:00:00:{11 + host:02x}"
        for words in (hardware, f"addr add {self.ips[host]}/24 dev eth0", "link set eth0 up"):
            _sh("nsenter", f"--net=/proc/{first}/ns/net", "ip", *words.split())

    def kill(self, host: int) -> None:
        """Every process of the host ends at once. Its kernel still closes the connections, as after a crash of the
        processes; when the power fails nobody does: then take the link down first."""
        self._end_processes(host)
        with contextlib.suppress(TimeoutError):  # the others hear of it; the link goes with the last connection
            wait_until(lambda: not _exists(self._links[host]), "every connection is closed", seconds=0.5)
        self._remove_devices(host)

    def _end_processes(self, host: int) -> None:
        os.kill(self._firsts.pop(host), signal.SIGKILL)
        self._inits.pop(host).communicate(timeout=SECONDS)  # the first process is only gone when all others are

    def _remove_devices(self, host: int) -> None:
        self._end_relay(host)
        # A connection that nobody answers any more keeps its namespace for minutes, but not the link.
        _remove(self._links[host])

    def link(self, host: int, up: bool) -> None:
        """Plugs the host's cable in or out."""
        _sh("ip", "link", "set", self._links[host], "up" if up else "down")

    def delay(self, host: int, ms: float) -> None:
        """Packets reach the host `ms` later; 0 takes that back. A round trip between two hosts pays for both."""
        link, gate = self._links[host], self._gates[host]
        self._end_relay(host)
        if ms <= 0:
            _sh("ip", "link", "set", link, "master", self.bridge)
            return
        # The host's link leaves the bridge; in its place a pair of devices, and between the two the relay.
        _sh("ip", "link", "set", link, "nomaster")
        _sh("ip", "link", "add", gate, "type", "veth", "peer", "name", f"{gate}b")
        _sh("ip", "link", "set", f"{gate}b", "master", self.bridge, "up")
        _sh("ip", "link", "set", gate, "up")
        relay = [sys.executable, str(Path(__file__).with_name("relay.py")), link, gate, str(ms)]
        self._relays[host] = _start_until_ready(relay)

    def _end_relay(self, host: int) -> None:
        if relay := self._relays.pop(host, None):
            relay.kill()
            relay.communicate(timeout=SECONDS)
        _remove(self._gates[host])

    def hide(self, host: int, folder: Path) -> None:
        """The host sees an empty folder there from now on."""
        self.run(host, ["mount", "-t", "tmpfs", "tmpfs", str(folder)]).check_returncode()

    def root(self, host: int) -> Path:
        """The host's file system seen from here: `root(1) / "tmp"` is its /tmp."""
        return Path(f"/proc/{self._firsts[host]}/root")

    def pids(self, host: int, word: str = "") -> list[int]:
        """The host's processes by the numbers they have outside, first the first; those with `word` in the command."""
        space = _process_space(self._firsts[host])
        return [pid for pid in _all_pids() if _process_space(pid) == space and word in _command(pid)]

    def start(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        output: Path | None = None,
    ) -> subprocess.Popen[str]:
        """A command on the host, to be waited for; its output goes to pipes, or both streams to a file.

        Signals are for `signal`: the process here only waits for the one on the host, and passes on how it ended."""
        enter = ["nsenter", "--target", str(self._firsts[host]), *_ENTER, "env", f"--chdir={cwd}", *argv]
        environment = {**os.environ, **(env or {})}
        if output is None:
            out: int = subprocess.PIPE
            err: int = subprocess.PIPE
        else:
            out, err = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), subprocess.STDOUT
        try:
            process = subprocess.Popen(
                enter,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        finally:
            if output is not None:
                os.close(out)
        self._commands.append(process)
        return process

    def run(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        seconds: float = SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """A command on the host, waited for; past the limit it is killed and `subprocess.TimeoutExpired` raised."""
        process = self.start(host, argv, env=env, cwd=cwd)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate(timeout=SECONDS)
            late.stdout, late.stderr = out.encode(), err.encode()
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Sends a signal to a command of `start`."""
        for pid in _children(process.pid):
            os.kill(pid, number)


def _in_tmp(path: Path) -> bool:
    return path.resolve().is_relative_to("/tmp")


def _sh(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _start_until_ready(argv: Sequence[str]) -> subprocess.Popen[str]:
    """Something that runs until it is killed, at the latest when we end; it has printed `ready`."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline() if select.select([process.stdout], [], [], SECONDS)[0] else "no answer\n"
    if said != "ready\n":
        process.kill()
        raise RuntimeError(f"{shlex.join(argv)}: {said}{process.communicate(timeout=SECONDS)[0]}")
    return process


def _exists(link: str) -> bool:
    return Path("/sys/class/net", link).exists()


def _remove(link: str) -> None:
    try:
        if _exists(link):
            _sh("ip", "link", "del", link)
    except RuntimeError:
        if _exists(link):  # else it went by itself meanwhile
            raise


def _remove_leftovers() -> None:
    for link in os.listdir("/sys/class/net"):  # noqa: PTH208 (names are all we want)
        made_by = _DEVICE.match(link)
        if made_by and not Path("/proc", made_by[1]).exists():
            _remove(link)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _all_pids() -> list[int]:
    return sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _process_space(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:  # it ended meanwhile
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
