"""One run that is broken in one way in one phase, and then continued as a job script does."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from paceline.run import checkpoint

HERE = Path(__file__).resolve().parent
ITERATIONS = 8
END_SECONDS = 120.0
LEFT_SECONDS = 20.0  # Ray's helpers and the guard end a moment after the command
STOP_SECONDS = 4.0

CONTINUOUS = ("sac", "td3")
SLOW = f"{HERE}/slow_envs.py"
POLICIES = {"multi_agent.policies": "{walkers: 'walker_*', drone: drone}", "env.kwargs.action": "mixed"}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "masks": (f"{SLOW}:SlowMasks", {}, ("ppo", "a2c", "a3c", "impala", "dqn")),
    "memory": (f"{SLOW}:SlowPoint", {"model.memory": "lstm"}, ("ppo", "a2c", "a3c", "impala")),
    "agents": (f"{SLOW}:SlowTeam", {}, ("ppo", "a2c", "a3c", "impala", "dqn", *CONTINUOUS)),
    "policies": (f"{SLOW}:SlowTeam", POLICIES, ("ppo", "a2c", "impala")),
}
"""Kinds of runs that differ from plain ones: environment, settings, and the algorithms that have it."""
SMALL: dict[str, dict[str, float]] = {
    "ppo": {"minibatch_size": 32},
    "dqn": {"learning_starts": 64, "replay_size": 2000},
    **{key: {"learning_starts": 64, "buffer_size": 2000, "batch_size": 32, "rounds": 2} for key in CONTINUOUS},
}
"""Settings of an algorithm for a short run."""
PROCESSES = {
    "worker": lambda title: title.startswith("ray::Worker"),
    "raylet": lambda title: "raylet/raylet" in title.split(" ")[0],
    "gcs": lambda title: "gcs_server" in title.split(" ")[0],
    "agent": lambda title: "dashboard/agent.py" in title or "DashboardAgent" in title,
}
"""Ray's processes, by their command lines."""
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static int (*real)(clockid_t, struct timespec *);
static time_t jump(void) { return access(getenv("CLOCK_JUMP"), F_OK) ? 0 : 86400; }
int clock_gettime(clockid_t id, struct timespec *now) {
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, now);
  if (id == CLOCK_REALTIME) now->tv_sec += jump();
  return code;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  int code = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
  return code;
}
time_t time(time_t *now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now) *now = precise.tv_sec;
  return precise.tv_sec;
}
"""
"""A library whose wall clock jumps a day ahead when the file CLOCK_JUMP appears."""


@dataclass(frozen=True)
class Cell:
    engine: str
    algo: str
    kind: str
    """`plain`, or one of KINDS."""
    fault: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.algo}/{self.kind}/{self.fault}/{self.phase}"


@dataclass
class Outcome:
    """What came of one fault. `problems`: everything that must not happen."""

    exit_code: int | None = None
    status: str = ""
    last_line: str = ""
    seconds: float = 0.0
    resume_code: int | None = None
    resume_level: str = ""
    lost_iterations: int = 0
    problems: list[str] = field(default_factory=list)


class BrokenRun:
    """One run in a folder of its own, which is broken and continued."""

    def __init__(self, cell: Cell, folder: Path, dice: random.Random) -> None:
        self.cell, self.folder, self.dice = cell, folder, dice
        self.run = folder / "runs/x"
        self.phases = folder / "phases"
        # Ray's folder is made in this one, so that it shows what is left.
        self.environment = os.environ | {"PACELINE_PHASES": str(self.phases), "TMPDIR": str(folder)}
        self.family: dict[int, psutil.Process] = {}
        self.outcome = Outcome()

    def words(self) -> list[str]:
        cell = self.cell
        sets: dict[str, Any] = {
            f"{cell.algo}.rollout_steps": 16,
            "checkpoint.every_iterations": 2,
            "checkpoint.every_seconds": 0,
            "eval.every_steps": 150,
            "eval.episodes": 4,
            **{f"{cell.algo}.{key}": value for key, value in SMALL.get(cell.algo, {}).items()},
        }
        if cell.kind in KINDS:
            env, own, _ = KINDS[cell.kind]
            sets |= own
            if cell.kind == "agents" and cell.algo in CONTINUOUS:
                sets["env.kwargs.action"] = "continuous"
        elif cell.algo in CONTINUOUS:
            env = f"{SLOW}:SlowPoint"
        else:
            env, sets["env.kwargs"] = "paceline/FixedCost-v0", "{cost_seconds: 0.0005, length: 50}"
        words = f"train --algo {cell.algo} --env {env} --preset none --engine {cell.engine} --name x"
        words += f" --resume auto --envs-per-worker 4 --iterations {ITERATIONS} --threads 1"
        words += " --workers 2" if cell.engine == "ray" else ""
        return [*words.split(), *(word for key, value in sets.items() for word in ("--set", f"{key}={value}"))]

    def start(self, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                [sys.executable, str(HERE / "driver.py"), *self.words()],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip

    # -- breaking it ------------------------------------------------------------------------------------------------

    def attempt(self) -> Outcome:
        with self.surroundings():
            if self.cell.fault == "disk full" and self.cell.phase == "start":
                self.fill_disk()
            began = time.monotonic()
            process = self.start("log")
            try:
                if self.wait_for_phase(process):
                    self.break_it(process)
                self.finish(process)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            self.outcome.seconds = time.monotonic() - began
            self.look_around()
            self.continue_it()
        return self.outcome

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """A small disk, or a clock that can jump, if the fault needs it."""
        if self.cell.fault == "clock jump":
            library = self.folder / "clock.so"
            command = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
            subprocess.run(command, input=CLOCK.encode(), check=True)
            self.environment |= {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(self.folder / "jumped")}
        if self.cell.fault != "disk full":
            yield
            return
        disk = self.folder / "runs"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)

    def wait_for_phase(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the run is in the phase, at a random occurrence of it; False if it ended before."""
        phase = self.cell.phase
        if phase == "start":
            self.wait_in_start(process)
        else:
            count = {"iteration": self.dice.randint(2, 6), "save": self.dice.randint(1, 3)}.get(phase, 1)
            self.until(process, lambda: self.seen(phase) >= count)
            time.sleep(self.dice.uniform(0.0, 0.2))
        self.see_family(process)
        return process.poll() is None

    def wait_in_start(self, process: subprocess.Popen[bytes]) -> None:
        kind = self.cell.fault.removeprefix("kill ")
        if kind in PROCESSES:
            self.until(process, lambda: bool(self.find(process, kind)))
        elif self.dice.random() < 0.5:  # while Python and torch are loaded
            time.sleep(self.dice.uniform(0.05, 1.5))
        else:  # while the engine is made
            self.until(process, lambda: self.seen("start") > 0)
            time.sleep(self.dice.uniform(0.0, 5.0 if self.cell.engine == "ray" else 0.3))

    def seen(self, phase: str) -> int:
        return self.phases.read_text().split().count(phase) if self.phases.exists() else 0

    def until(self, process: subprocess.Popen[bytes], true: Callable[[], bool]) -> None:
        limit = time.monotonic() + END_SECONDS
        while process.poll() is None and not true() and time.monotonic() < limit:
            time.sleep(0.01)

    def see_family(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(psutil.Error):
            driver = psutil.Process(process.pid)
            self.family |= {child.pid: child for child in [driver, *driver.children(recursive=True)]}

    def find(self, process: subprocess.Popen[bytes], kind: str) -> list[psutil.Process]:
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if PROCESSES[kind](" ".join(child.cmdline())):
                        found.append(child)
        return found

    def break_it(self, process: subprocess.Popen[bytes]) -> None:
        fault = self.cell.fault
        if fault == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        elif fault == "SIGTERM burst":
            for _ in range(3):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.005)
        elif fault in ("kill driver", "checkpoint damaged"):
            process.kill()
        elif fault == "stop and continue":
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for member in self.family.values():
                    with suppress(psutil.Error):
                        member.send_signal(number)
                time.sleep(STOP_SECONDS if number == signal.SIGSTOP else 0)
        elif fault == "clock jump":
            (self.folder / "jumped").touch()
        elif fault == "disk full":
            self.fill_disk()
        else:
            found = self.find(process, fault.removeprefix("kill "))
            if found:
                with suppress(psutil.Error):
                    self.dice.choice(found).kill()

    def fill_disk(self) -> None:
        with suppress(OSError), (self.folder / "runs/full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))

    # -- what came of it --------------------------------------------------------------------------------------------

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + END_SECONDS
        while process.poll() is None and time.monotonic() < limit:
            self.see_family(process)  # also those that started later
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.25)
        if process.poll() is None:
            self.problem(f"still running after {END_SECONDS:g} s")
        self.outcome.exit_code = process.returncode

    def look_around(self) -> None:
        """Which processes and files are left, what the status says, and how the output ends."""
        limit = time.monotonic() + LEFT_SECONDS
        while (left := self.left()) and time.monotonic() < limit:
            time.sleep(0.2)
        if left:
            self.problem(f"left behind: {', '.join(left)}")
        text = (self.folder / "log").read_text(errors="replace")
        self.outcome.last_line = ([line for line in text.splitlines() if line.strip()] or [""])[-1][:200]
        self.outcome.status = _read(self.run / "status.json").get("state", "")
        code, killed = self.outcome.exit_code, self.cell.fault in ("kill driver", "checkpoint damaged")
        if killed:
            return
        if code not in (0, 1, 2, 99, 128 + signal.SIGTERM):
            self.problem(f"exit code {code}")
        stated = {0: ("done",), 99: ("stopped",), 1: ("failed", "")}.get(code or 0, ("",))
        if self.outcome.status not in stated and self.cell.fault != "disk full":  # which cannot be written to
            self.problem(f"exit code {code} but status {self.outcome.status!r}")
        for sign in ("Traceback (most", "*** SIGABRT", "C++ stack", "Check failed", "Fatal Python error"):
            if sign in text:
                self.problem(f"prints {sign!r}")

    def left(self) -> list[str]:
        found = [f"process {pid}" for pid, process in self.family.items() if _runs(process)]
        found += [str(path) for path in self.folder.glob("pl-*")]
        return found + [str(path) for path in Path("/dev/shm").glob("paceline-*") if _made_by(path, self.family)]

    def continue_it(self) -> None:
        """Continue the run as a job script does; its counts must be those of a run that was never broken."""
        if self.cell.fault == "checkpoint damaged":
            self.damage()
        (self.folder / "runs/full").unlink(missing_ok=True)
        self.environment.pop("LD_PRELOAD", None)
        before = _rows(self.run)
        again = self.start("resumed")
        try:
            self.outcome.resume_code = again.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.problem("the resumed run hangs")
            return
        finally:
            if again.poll() is None:
                again.kill()
                again.wait()
        if self.outcome.resume_code != 0:
            lines = (self.folder / "resumed").read_text(errors="replace").split("\n")
            self.problem(f"the resumed run ends with {self.outcome.resume_code}: {' '.join(lines[-3:])[:300]}")
            return
        resumed = _read(self.run / "resume.json")
        self.outcome.resume_level = str(resumed.get("level", "new run" if not before else ""))
        rows, summary = _rows(self.run), _read(self.run / "summary.json")
        iterations, steps = [row["iteration"] for row in rows], [row["env_steps"] for row in rows]
        if iterations != list(range(1, ITERATIONS + 1)) or sorted(set(steps)) != steps:
            self.problem(f"the rows are not those of one run: iterations {iterations}, steps {steps}")
        elif (summary["iterations"], summary["env_steps"], summary["status"]) != (ITERATIONS, steps[-1], "done"):
            self.problem("the summary differs from the rows")
        elif self.is_exact() and digest(self.run) != unbroken_digest(self.cell.algo, self.cell.kind):
            self.problem("the last checkpoint differs from that of a run that was never broken")

    def is_exact(self) -> bool:
        return self.cell.engine == "local" and self.outcome.resume_level in ("exact", "new run")

    def damage(self) -> None:
        arrays = self.run / "checkpoints/last/arrays.safetensors"
        if arrays.exists():
            content = bytearray(arrays.read_bytes())
            content[self.dice.randrange(len(content))] ^= 1
            arrays.write_bytes(content)

    def problem(self, text: str) -> None:
        self.outcome.problems.append(text)


def digest(run: Path) -> str:
    """Of all arrays in the last checkpoint: weights, optimizer, normalisers, generators, environments."""
    found = hashlib.sha256()
    for name, array in sorted(checkpoint.load(checkpoint.find(run))[0].items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


@cache
def unbroken_digest(algo: str, kind: str) -> str:
    """Of the same run on the local engine, which is deterministic, without a fault."""
    with tempfile.TemporaryDirectory(prefix="cm-", dir="/tmp") as folder:
        run = BrokenRun(Cell("local", algo, kind, "none", "end"), Path(folder), random.Random(0))
        assert run.start("log").wait(END_SECONDS) == 0, (Path(folder) / "log").read_text()[-2000:]
        return digest(run.run)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _made_by(path: Path, family: dict[int, psutil.Process]) -> bool:
    return any(word.isdigit() and int(word) in family for word in path.name.split("-"))


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
