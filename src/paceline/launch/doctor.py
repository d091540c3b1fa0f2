"""What would go wrong on one machine, and what to do about it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from paceline import machine

NEEDED = {
    "torch": "2.6",
    "numpy": "2.0",
    "gymnasium": "1.1",
    "pydantic": "2.10",
    "pyyaml": "6.0",
    "rich": "13.0",
    "tensorboard": "2.18",
    "safetensors": "0.5",
    "psutil": "6.0",
    "threadpoolctl": "3.5",
}
"""Distributions without which nothing runs, and the oldest version that will do: those of `pyproject.toml`."""

EXTRAS = {
    "ray": ("ray", "many workers, many machines"),
    "envpool": ("procgen", "Procgen games"),
    "ale-py": ("atari", "Atari games"),
    "Box2D": ("box2d", "LunarLander, BipedalWalker, CarRacing"),
    "mujoco": ("mujoco", "MuJoCo robots"),
    "imageio-ffmpeg": ("video", "evaluate --video"),
    "matplotlib": ("report", "plots and reports"),
}
"""Distribution → the pip extra that brings it, and what it is for."""

FAMILIES = {
    "classic control": "gymnasium",
    "box2d": "Box2D",
    "atari": "ale-py",
    "procgen": "envpool",
    "mujoco": "mujoco",
}
"""Kind of environments → the distribution it needs."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# The wheel of envpool links to them and doesn't carry them.
ENVPOOL_LIBRARIES = ("libGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0")
TORCH_SECONDS = 60.0
TORCH_PROGRAM = "import torch; x = torch.ones(64, 64); assert (x @ x).sum().item() == 64.0**3; print(torch.__version__)"
MB, GB = 1 << 20, 1 << 30

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str
    fix: str = ""
    """What to do about it; empty when all is well."""


def findings(out: str = "runs") -> list[Finding]:
    """Everything that was looked at, good or bad. `out` is the folder the runs would go to. Changes nothing."""
    found = [_python(), *_packages()]
    if installed_version("torch"):
        found.append(_torch())
    found += _extras()
    found += _old_gym()
    found.append(_families())
    if installed_version("psutil"):  # without it the machine can't be looked at, and that is a failure already
        facts = machine.core_facts()
        found += [
            _cores(facts),
            _memory(machine.memory_limit_bytes(), machine.cgroup_memory_bytes()),
            *_threads(facts.ours),
        ]
        found += [*_load(facts.ours, machine.load_average()), *_governor(machine.governor())]
    found += [_shared_memory(), *_limits(), _preload(), _display(), output(out)]
    return found


def _python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("fail", "python", f"{text} is too old", "use Python 3.11 or later")
    return Finding("ok", "python", f"{text}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name, least in NEEDED.items():
        version = installed_version(name)
        if version is None:
            yield Finding("fail", name, "is not installed", "pip install paceline")
        elif _numbers(version) < _numbers(least):
            yield Finding("fail", name, f"{version} is older than {least}", f"pip install --upgrade '{name}>={least}'")
        else:
            yield Finding("ok", name, version)


def _torch(seconds: float = TORCH_SECONDS) -> Finding:
    """Whether torch really works: a wheel for another processor installs well and dies at the first operation.

    In a process of its own, as it may crash or hang, and so that this one stays light.
    """
    reinstall = "reinstall it: pip install --force-reinstall torch"
    try:
        done = subprocess.run([sys.executable, "-c", TORCH_PROGRAM], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        slow = "look for a slow disk or a busy machine, then run `python -c 'import torch'` by hand"
        return Finding("fail", "torch works", f"no answer within {seconds:g} s", slow)
    if done.returncode < 0:
        return Finding("fail", "torch works", f"it was ended by {_signal_name(-done.returncode)}", reinstall)
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines() or [f"it exits with {done.returncode}"]
        return Finding("fail", "torch works", lines[-1], reinstall)
    return Finding("ok", "torch works", "it imports and multiplies")


def _extras() -> Iterator[Finding]:
    for name, (extra, purpose) in EXTRAS.items():
        version = installed_version(name)
        if version is None:
            yield Finding("ok", name, f"absent; for {purpose}: pip install {_brought_by(name, extra)}")
            continue
        lost = [library for library in ENVPOOL_LIBRARIES if not _loads(library)] if name == "envpool" else []
        if lost and sys.platform == "linux":
            text = f"{version} needs system libraries that are absent: {', '.join(lost)}"
            yield Finding("warn", name, text, machine.ENVPOOL_LIBRARIES_FIX)
        else:
            yield Finding("ok", name, f"{version} ({purpose})")


def _brought_by(name: str, extra: str) -> str:
    """What to give pip: the extra, or the distribution itself where the installed paceline has no such extra."""
    try:
        offered = metadata.metadata("paceline").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        offered = [extra]
    return f"'paceline[{extra}]'" if extra in offered else name


def _old_gym() -> Iterator[Finding]:
    version = installed_version("gym")
    if version and not installed_version("envpool"):  # envpool itself imports gym, so there it belongs
        text = f"{version} is installed: it is no longer kept up, and its environments don't work here"
        yield Finding("warn", "gym", text, "pip uninstall gym; environments come from gymnasium")


def _families() -> Finding:
    installed = [family for family, name in FAMILIES.items() if installed_version(name)]
    return Finding("ok", "environments", ", ".join(installed) or "none")


def _cores(facts: machine.CoreFacts) -> Finding:
    if facts.ours == facts.reported:
        physical = f", {facts.physical} physical" if facts.physical and facts.physical != facts.reported else ""
        return Finding("ok", "cores", f"{facts.ours}{physical}")
    reasons = [f"affinity {facts.affinity}"] if facts.affinity < facts.reported else []
    reasons += [f"cgroup quota {facts.quota:g}"] if facts.quota is not None and facts.quota < facts.reported else []
    reasons += [f"SLURM {facts.slurm}"] if facts.slurm is not None and facts.slurm < facts.reported else []
    text = f"{facts.ours} of the {facts.reported} reported are ours ({', '.join(reasons)}); {facts.ours} will be used"
    return Finding(
        "warn", "cores", text, "ask the scheduler or the container for more cores, if you meant to have more"
    )


def _memory(limit: int, cgroup: int | None) -> Finding:
    bounded = " (limited by the cgroup of this container or job)" if cgroup is not None and cgroup <= limit else ""
    text = f"{size(limit)}{bounded}"
    if limit < 2 * GB:
        return Finding("warn", "memory", f"{text} is little", "ask for at least 2 GB, or use few environments")
    return Finding("ok", "memory", text)


def _threads(ours: int) -> Iterator[Finding]:
    for name in THREAD_VARIABLES:
        value = os.environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may be a list, one per nesting level
        if value.isdecimal() and int(value) > ours:
            text = f"{value} is more than the {plural(ours, 'core')} we own: threads would wait for each other"
            yield Finding("warn", name, text, f"unset {name}")


def _load(ours: int, load: tuple[float, float, float] | None) -> Iterator[Finding]:
    if load is not None and load[0] > ours:
        text = f"{load[0]:.1f} is above our {plural(ours, 'core')}: timings will suffer"
        yield Finding("warn", "load", text, "wait for the other work to end before measuring speed")
    elif load is not None:
        yield Finding("ok", "load", f"{load[0]:.1f}")


def _governor(name: str | None) -> Iterator[Finding]:
    if name == "powersave":
        fix = "before measuring speed, as root: cpupower frequency-set -g performance"
        yield Finding("warn", "cpu governor", "powersave: the clock may stay low", fix)
    elif name is not None:
        yield Finding("ok", "cpu governor", name)


def _shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    if not path.is_dir():
        if sys.platform == "linux":
            fix = f"mount a tmpfs there: mount -t tmpfs tmpfs {path}"
            return Finding("warn", "shared memory", f"there is no {path}: environments in processes won't start", fix)
        return Finding("ok", "shared memory", "not a folder on this system")
    usage = shutil.disk_usage(path)
    text = f"{path}: {size(usage.free)} free of {size(usage.total)}"
    if usage.free < 64 * MB:
        return Finding("warn", "shared memory", text, f"empty {path}, or start the container with --shm-size=1g")
    return Finding("ok", "shared memory", text)


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    for subject, kind, least, letter in (
        ("open files", resource.RLIMIT_NOFILE, 1024, "n"),
        ("processes", resource.RLIMIT_NPROC, 512, "u"),
    ):
        soft = resource.getrlimit(kind)[0]
        if soft == resource.RLIM_INFINITY:
            yield Finding("ok", subject, "no limit")
        elif soft < least:
            fix = f"ulimit -{letter} {least * 4} (or ask the administrator)"
            yield Finding("warn", subject, f"at most {soft}, and {least} are needed with many workers", fix)
        else:
            yield Finding("ok", subject, f"at most {soft}")


def _preload() -> Finding:
    value = os.environ.get("LD_PRELOAD", "")
    if value:
        return Finding(
            "warn", "LD_PRELOAD", f"{value} is loaded into every process, workers included", "unset LD_PRELOAD"
        )
    return Finding("ok", "LD_PRELOAD", "not set")


def _display() -> Finding:
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return Finding("ok", "display", "there is one")
    driver = os.environ.get("SDL_VIDEODRIVER")
    hint = f"SDL_VIDEODRIVER={driver}" if driver else "set SDL_VIDEODRIVER=dummy if an environment asks for one"
    return Finding("ok", "display", f"none: videos are drawn off screen, --render has nowhere to show ({hint})")


def output(out: str) -> Finding:
    folder = Path(out).expanduser().absolute()
    elsewhere = "choose another folder with --out DIR"
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent  # the folder is made when the first run starts: look at where it would be made
    if not folder.is_dir():
        return Finding("fail", "output folder", f"{out}: {folder} is not a folder", elsewhere)
    try:
        # Permission bits tell little (root, read-only mounts, quotas): write something.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"paceline")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("fail", "output folder", f"{out}: can't write in {folder} ({error.strerror})", elsewhere)
    text = f"{out}: writable, {size(free)} free"
    if free < GB:
        return Finding("warn", "output folder", text, f"make room, or {elsewhere}")
    return Finding("ok", "output folder", text)


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` → (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def size(amount: int) -> str:
    return f"{amount / GB:.1f} GB" if amount >= GB else f"{amount / MB:.0f} MB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
