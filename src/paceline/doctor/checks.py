"""Checks of one machine: what would go wrong, and what to do about it. They change nothing."""

from __future__ import annotations

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
from paceline.schedulers import mpi

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
"""Required distributions and their minimum versions, as in `pyproject.toml`."""

EXTRAS = {
    "ray": ("ray", "many workers, many machines"),
    "dm-tree": ("rllib", "--engine rllib"),  # of what ray[rllib] adds, what nothing else here needs
    "tensorboardX": ("tune", "paceline tune"),  # the same for ray[tune]
    "envpool": ("procgen", "Procgen games"),
    "ale-py": ("atari", "Atari games"),
    "Box2D": ("box2d", "LunarLander, BipedalWalker, CarRacing"),
    "mujoco": ("mujoco", "MuJoCo robots"),
    "imageio-ffmpeg": ("video", "evaluate --video"),
    "matplotlib": ("report", "plots and reports"),
    "onnx": ("export", "paceline export"),
    "pettingzoo": ("multi-agent", "environments of several agents"),
}
"""Distribution that only one pip extra installs → that extra, and its purpose."""

MORE_OF_EXTRAS = {
    "plotly": ("report", "charts of reports and of the dashboard"),
    "jinja2": ("report", "reports"),
    "aiohttp": ("report", "paceline dashboard"),
    "pygame": ("video", "windows and pictures of classic control, Box2D and PettingZoo"),
    "imageio": ("video", "videos, pictures of MuJoCo"),
    "onnxruntime": ("export", "runs an exported policy to compare it"),
    "mobile-env": ("multi-agent", "an example environment"),
}
"""The rest of what the extras install, in the same form."""

FAMILIES = {
    "classic control": "gymnasium",
    "box2d": "Box2D",
    "atari": "ale-py",
    "procgen": "envpool",
    "mujoco": "mujoco",
}
"""Family of environments → the distribution it needs."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
TORCH_SECONDS = 60.0
TORCH_PROGRAM = "import torch; x = torch.ones(64, 64); assert (x @ x).sum().item() == 64.0**3; print(torch.__version__)"
MB, GB = 1 << 20, 1 << 30

Level = Literal["ok", "absent", "warn", "fail"]
"""`absent`: something optional is not there."""


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str
    fix: str = ""
    """What to do about it, for the levels warn and fail."""


def findings(out: str = "runs") -> list[Finding]:
    """All findings, good and bad. `out`: the folder for runs."""
    found = [check_python(), *check_packages()]
    found += [check_torch()] if installed_version("torch") else []
    found += [*check_extras(), *check_old_gym(), check_families()]
    if installed_version("psutil"):  # without psutil, which is a failure above, the machine cannot be examined
        cores = machine.core_counts()
        found += [check_cores(cores), check_memory(machine.memory_limit_bytes(), machine.cgroup_memory_bytes())]
        found += [*check_threads(cores.usable), *check_load(cores.usable, machine.load_average())]
        found += check_governor(machine.governor())
    return [*found, check_shared_memory(), *check_limits(), check_preload(), check_display(), check_output(out)]


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("fail", "python", f"{text} is too old", "use Python 3.11 or later")
    return Finding("ok", "python", f"{text}, {sys.executable}")


def check_packages() -> Iterator[Finding]:
    for name, least in NEEDED.items():
        version = installed_version(name)
        if version is None:
            yield Finding("fail", name, "is not installed", "pip install paceline")
        elif version_numbers(version) < version_numbers(least):
            yield Finding("fail", name, f"{version} is older than {least}", f"pip install --upgrade '{name}>={least}'")
        else:
            yield Finding("ok", name, version)


def check_torch(seconds: float = TORCH_SECONDS) -> Finding:
    """Whether torch works: a wheel for another processor installs well and crashes at the first operation.

    It runs in a separate process, which may crash or hang.
    """
    reinstall = "reinstall it: pip install --force-reinstall torch"
    try:
        done = subprocess.run([sys.executable, "-c", TORCH_PROGRAM], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        slow = "look for a slow disk or a busy machine, then run `python -c 'import torch'` by hand"
        return Finding("fail", "torch works", f"no answer within {seconds:g} s", slow)
    if done.returncode < 0:
        return Finding("fail", "torch works", f"it was killed by {_signal_name(-done.returncode)}", reinstall)
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines() or [f"it exits with {done.returncode}"]
        return Finding("fail", "torch works", lines[-1], reinstall)
    return Finding("ok", "torch works", "it imports and multiplies")


def check_extras() -> Iterator[Finding]:
    for name, (extra, purpose) in (EXTRAS | MORE_OF_EXTRAS).items():
        version = installed_version(name)
        if version is None:
            yield Finding("absent", name, f"not installed; for {purpose}: pip install {pip_argument(name, extra)}")
            continue
        missing = machine.missing_libraries(machine.ENVPOOL_LIBRARIES) if name == "envpool" else []
        if missing and sys.platform == "linux":
            text = f"{version} needs system libraries that are missing: {', '.join(missing)}"
            yield Finding("warn", name, text, machine.ENVPOOL_LIBRARIES_FIX)
        else:
            yield Finding("ok", name, f"{version} ({purpose})")


def pip_argument(name: str, extra: str) -> str:
    """The extra, or the distribution itself where the installed paceline has no such extra."""
    try:
        offered = metadata.metadata("paceline").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        offered = [extra]
    return f"'paceline[{extra}]'" if extra in offered else name


def check_old_gym() -> Iterator[Finding]:
    version = installed_version("gym")
    if version and not installed_version("envpool"):  # envpool needs gym
        text = f"{version} is installed: it is no longer maintained, and its environments do not work here"
        yield Finding("warn", "gym", text, "pip uninstall gym; environments come from gymnasium")


def check_families() -> Finding:
    installed = [family for family, name in FAMILIES.items() if installed_version(name)]
    return Finding("ok", "environments", ", ".join(installed) or "none")


def check_cores(cores: machine.CoreCounts) -> Finding:
    if cores.usable == cores.reported:
        physical = f", {cores.physical} physical" if cores.physical and cores.physical != cores.reported else ""
        return Finding("ok", "cores", f"{cores.usable}{physical}")
    limits = {"affinity": cores.affinity, "cgroup quota": cores.quota, "scheduler": cores.scheduler}
    reasons = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None and limit < cores.reported]
    text = f"{cores.usable} of {cores.reported} are usable ({', '.join(reasons)})"
    fix = "if you expected more, ask the scheduler or the container for more cores"
    if mpi.OPEN_MPI_RANK in os.environ and cores.affinity < cores.reported:
        fix = "mpirun binds processes to cores; mpirun --bind-to none allows all (`paceline launch` undoes it itself)"
    return Finding("warn", "cores", text, fix)


def check_memory(limit: int, cgroup: int | None) -> Finding:
    bounded = " (limited by the cgroup of this container or job)" if cgroup is not None and cgroup <= limit else ""
    text = f"{size(limit)}{bounded}"
    if limit < 2 * GB:
        return Finding("warn", "memory", f"{text} is little", "ask for at least 2 GB, or use few environments")
    return Finding("ok", "memory", text)


def check_threads(cores: int) -> Iterator[Finding]:
    for name in THREAD_VARIABLES:
        value = os.environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may be a list, one per nesting level
        if value.isdecimal() and int(value) > cores:
            text = f"{value} is more than the {plural(cores, 'usable core')}: threads would wait for each other"
            yield Finding("warn", name, text, f"unset {name}")


def check_load(cores: int, load: tuple[float, float, float] | None) -> Iterator[Finding]:
    if load is not None and load[0] > cores:
        text = f"{load[0]:.1f} is above the {plural(cores, 'usable core')}: timings will suffer"
        yield Finding("warn", "load", text, "wait for the other work to end before measuring speed")
    elif load is not None:
        yield Finding("ok", "load", f"{load[0]:.1f}")


def check_governor(name: str | None) -> Iterator[Finding]:
    if name == "powersave":
        fix = "before measuring speed, as root: cpupower frequency-set -g performance"
        yield Finding("warn", "cpu governor", "powersave: the clock may stay low", fix)
    elif name is not None:
        yield Finding("ok", "cpu governor", name)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    if not path.is_dir():
        if sys.platform == "linux":
            fix = f"mount a tmpfs there: mount -t tmpfs tmpfs {path}"
            return Finding("warn", "shared memory", f"{path} is missing: environments in processes cannot start", fix)
        return Finding("ok", "shared memory", "not a folder on this system")
    usage = shutil.disk_usage(path)
    text = f"{path}: {size(usage.free)} free of {size(usage.total)}"
    if usage.free < 64 * MB:
        return Finding("warn", "shared memory", text, f"empty {path}, or start the container with --shm-size=1g")
    return Finding("ok", "shared memory", text)


def check_limits() -> Iterator[Finding]:
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
            yield Finding("warn", subject, f"at most {soft}; many workers need {least}", fix)
        else:
            yield Finding("ok", subject, f"at most {soft}")


def check_preload() -> Finding:
    value = os.environ.get("LD_PRELOAD", "")
    if not value:
        return Finding("ok", "LD_PRELOAD", "not set")
    return Finding("warn", "LD_PRELOAD", f"{value} is loaded into every process, workers included", "unset LD_PRELOAD")


def check_display() -> Finding:
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return Finding("ok", "display", "available")
    driver = os.environ.get("SDL_VIDEODRIVER")
    hint = f"SDL_VIDEODRIVER={driver}" if driver else "set SDL_VIDEODRIVER=dummy if an environment needs one"
    return Finding("absent", "display", f"none: videos are rendered off screen, --render cannot show a window ({hint})")


def check_output(out: str) -> Finding:
    folder = Path(out).expanduser().absolute()
    elsewhere = "choose another folder with --out DIR"
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent  # the first run creates the folder: check the one it is created in
    if not folder.is_dir():
        return Finding("fail", "output folder", f"{out}: {folder} is not a folder", elsewhere)
    try:
        # Permission bits tell little (root, read-only mounts, quotas), so write something.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"paceline")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("fail", "output folder", f"{out}: cannot write in {folder} ({error.strerror})", elsewhere)
    text = f"{out}: writable, {size(free)} free"
    if free < GB:
        return Finding("warn", "output folder", text, f"free some space, or {elsewhere}")
    return Finding("ok", "output folder", text)


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` → (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def size(amount: int) -> str:
    return f"{amount / GB:.1f} GB" if amount >= GB else f"{amount / MB:.0f} MB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
