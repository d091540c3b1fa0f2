"""This machine: the cores and the memory this process may use, and how much it has used.

A container or a batch job sees every core of its host but may use only some of them, so `os.cpu_count()` is not enough.
Functions that read files below `/proc` and `/sys` take `root`, a folder to use instead of `/`.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from paceline.schedulers import SCHEDULERS

ROOT = Path("/")
ENVPOOL_LIBRARIES = ("libGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0")
"""System libraries that envpool links to but does not include."""
ENVPOOL_LIBRARIES_FIX = (
    "apt-get install libgl1 libglib2.0-0, or without root: conda install -c conda-forge libgl libglib"
)


@dataclass(frozen=True)
class CoreCounts:
    reported: int
    """`os.cpu_count()`: the logical cores of the whole machine."""
    physical: int | None
    """Cores without hyper-threads, if known."""
    affinity: int
    """Cores this process may be scheduled on."""
    quota: float | None
    """CPU time per second granted by the cgroups, or None without a limit."""
    scheduler: int | None
    """Cores that a batch scheduler gave to this task or host, or None outside of a job."""
    usable: int
    """The least of these, at least 1."""


def missing_libraries(names: Iterable[str]) -> list[str]:
    """The shared libraries among `names` that the dynamic loader does not find."""
    missing = []
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    return missing


def cores(root: Path = ROOT) -> int:
    """How many cores this process may use."""
    return core_counts(root).usable


def core_counts(root: Path = ROOT) -> CoreCounts:
    reported = os.cpu_count() or 1
    get_affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    affinity = len(get_affinity(0)) if get_affinity else reported
    quota = cpu_quota(root)
    given = _scheduler_cores()
    limits = [affinity, *([math.ceil(quota)] if quota is not None else []), *([given] if given is not None else [])]
    return CoreCounts(reported, _physical_cores(), affinity, quota, given, max(1, min(limits)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """The lowest CPU quota of our cgroup and its parents, in cores."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        limit, _, period = _read(folder / "cpu.max").partition(" ")  # version 2: "200000 100000" or "max 100000"
        if not limit:
            limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")  # version 1
        if _is_positive(limit) and _is_positive(period):
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = ROOT) -> int:
    """The memory that may be used: the lowest cgroup limit, or the memory of the machine if that is less."""
    limit, physical = cgroup_memory_bytes(root), physical_memory_bytes()
    return physical if limit is None else min(limit, physical)


def cgroup_memory_bytes(root: Path = ROOT) -> int | None:
    """The lowest memory limit of our cgroup and its parents."""
    limits = []
    for folder in _cgroup_folders(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if _is_positive(limit) and int(limit) < 1 << 60:  # version 1 writes "no limit" as 2**63 less a page
            limits.append(int(limit))
    return min(limits, default=None)


def physical_memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def memory_bytes(pids: list[int] | None = None, root: Path = ROOT) -> int:
    """Memory of these processes, or of this one and all its descendants.

    It is the proportional set size, which counts a page shared by N processes once instead of N times, or the resident
    set size where the kernel does not report it. Processes that have ended count 0.
    """
    if pids is None:
        import psutil

        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return sum(_process_bytes(pid, root) for pid in pids)


class Usage(NamedTuple):
    """What processes have used so far."""

    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    """User and system time, including that of descendants that have ended."""
    waited_seconds: float = 0.0
    """In which threads could have run but had no core, in sum; 0 where the kernel does not tell."""

    def plus(self, other: Usage) -> Usage:
        memory, cpu, waited = (one + more for one, more in zip(self, other, strict=True))
        return Usage(int(memory), cpu, waited)

    def since(self, start: Usage) -> Usage:
        """The seconds since `start`, with the memory of now."""
        waited = max(0.0, self.waited_seconds - start.waited_seconds)  # threads that ended are no longer counted
        return Usage(self.memory_bytes, self.cpu_seconds - start.cpu_seconds, waited)


def usage() -> Usage:
    """Of this process and its descendants."""
    import psutil

    own, children = os.times(), psutil.Process().children(recursive=True)
    seconds = own.user + own.system + own.children_user + own.children_system
    for child in children:
        try:
            used = child.cpu_times()
        except psutil.Error:
            continue  # it has ended meanwhile
        seconds += used.user + used.system + used.children_user + used.children_system
    pids = [os.getpid(), *(child.pid for child in children)]
    return Usage(memory_bytes(pids), seconds, sum(waited_seconds(pid) for pid in pids))


def waited_seconds(pid: int, root: Path = ROOT) -> float:
    """In which the threads of a process could have run but had no core, in sum, as far as the kernel tells."""
    threads = (_read(path).split() for path in (root / "proc" / str(pid) / "task").glob("*/schedstat"))
    return sum(int(words[1]) / 1e9 for words in threads if len(words) == 3)


def busy_seconds() -> float:
    """CPU seconds of all processes of this machine since it started."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def governor(root: Path = ROOT) -> str | None:
    """The frequency governor of the first core (`performance`, `powersave`, …), if there is one."""
    return _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None


def load_average() -> tuple[float, float, float] | None:
    """Runnable processes over the last 1, 5 and 15 minutes."""
    try:
        return os.getloadavg()
    except (OSError, AttributeError):
        return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders whose limits apply, from our own cgroup up to the mount of its hierarchy.

    Inside a container the path may be the host's, which does not exist there; the mount itself is then our cgroup. So
    every parent is tried, and the reader skips missing ones.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            bases = [mounts / controllers, mounts / controller]  # "cpu,cpuacct", and often a link "cpu" to it
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth])


def _scheduler_cores() -> int | None:
    names = [name for scheduler in SCHEDULERS.values() for name in scheduler.core_variables]
    values = [os.environ.get(name, "") for name in names]
    return min((int(value) for value in values if _is_positive(value)), default=None)


def _physical_cores() -> int | None:
    import psutil

    return psutil.cpu_count(logical=False)


def _process_bytes(pid: int, root: Path) -> int:
    for line in _read(root / "proc" / str(pid) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _is_positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
