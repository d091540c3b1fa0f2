"""Facts about this machine: the cores and the memory that are really ours, and what we have used of them.

A container or a batch job sees every core of its host but may use only a few: `os.cpu_count()` is never the answer.
Functions that read files below `/proc` and `/sys` take `root`, the folder that stands for `/`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
ENVPOOL_LIBRARIES_FIX = (
    "apt-get install libgl1 libglib2.0-0, or without root: conda install -c conda-forge libgl libglib"
)
"""What the wheel of envpool links to and does not bring."""


@dataclass(frozen=True)
class CoreFacts:
    reported: int
    """What `os.cpu_count()` says: the logical cores of the whole machine."""
    physical: int | None
    """Cores without hyper-threads, where the system tells."""
    affinity: int
    """Cores this process may be scheduled on."""
    quota: float | None
    """CPU time per second granted by the cgroups, or None without a limit."""
    slurm: int | None
    """Cores given by SLURM to this task or node, or None outside of it."""
    ours: int
    """The least of these, at least 1."""


def cores(root: Path = ROOT) -> int:
    """How many cores are ours to keep busy."""
    return core_facts(root).ours


def core_facts(root: Path = ROOT) -> CoreFacts:
    reported = os.cpu_count() or 1
    get_affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    affinity = len(get_affinity(0)) if get_affinity else reported
    quota = cpu_quota(root)
    slurm = _slurm_cores()
    limits = [affinity, *([math.ceil(quota)] if quota is not None else []), *([slurm] if slurm is not None else [])]
    return CoreFacts(reported, _physical_cores(), affinity, quota, slurm, max(1, min(limits)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """The tightest CPU quota over our cgroup and its parents, in cores."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        limit, _, period = _read(folder / "cpu.max").partition(" ")  # version 2: "200000 100000" or "max 100000"
        if not limit:
            limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")  # version 1
        if _is_positive(limit) and _is_positive(period):
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = ROOT) -> int:
    """What we may use in all: the tightest cgroup limit, or the memory of the machine if that is less."""
    limit, physical = cgroup_memory_bytes(root), physical_memory_bytes()
    return physical if limit is None else min(limit, physical)


def cgroup_memory_bytes(root: Path = ROOT) -> int | None:
    """The tightest memory limit over our cgroup and its parents."""
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

    It is the proportional set size, which counts a page shared by N processes once and not N times; where the kernel
    doesn't tell it, the resident set size. Processes that have gone count nothing.
    """
    if pids is None:
        import psutil

        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return sum(_process_bytes(pid, root) for pid in pids)


def cpu_seconds() -> float:
    """User and system time so far of this process and its descendants, living or reaped."""
    import psutil

    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.Error:
            continue  # gone since it was listed
        total += used.user + used.system + used.children_user + used.children_system
    return total


def governor(root: Path = ROOT) -> str | None:
    """The frequency governor of the first core (`performance`, `powersave`, …), where the system has one."""
    return _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None


def load_average() -> tuple[float, float, float] | None:
    """Runnable processes over the last 1, 5 and 15 minutes."""
    try:
        return os.getloadavg()
    except (OSError, AttributeError):
        return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders that can limit us, from our own cgroup up to where its hierarchy is mounted.

    Inside a container the path may be the host's, which isn't there; the mount itself is then our cgroup. So every
    parent is tried, and the reader skips what doesn't exist.
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


def _slurm_cores() -> int | None:
    values = [os.environ.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")]
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
