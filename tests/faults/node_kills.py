"""Kill hosts of runs that train on two of them, continue the runs, and write down what came of it.

    python tests/faults/node_kills.py               20 kills: any host, any algorithm, at any time
    python tests/faults/node_kills.py --kills 3

Each try makes two hosts out of namespaces, and `paceline launch` runs training with workers on both. One host loses all
its processes at once. Then the host comes back, and the same command continues the run. Tries are added to
benchmarks/results/faults/node_kills.json; those of another version of paceline are dropped. docs/generate.py makes a
table of docs/faults.md from them. It needs root, `ip` and sshd. The exit code is 1 if something happened that must not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cluster")]
from broken_run import SMALL  # noqa: E402
from crash_matrix import ALGORITHMS, PHASES, RESULTS, add  # noqa: E402
from hosts import Hosts, wait_until  # noqa: E402
from sshd import start_sshd  # noqa: E402

ITERATIONS = 8
END_SECONDS = 180.0
LEFT_SECONDS = 40.0
LEARNS_ON_ALL = ("ppo", "a2c")  # the others need a core for their learner
CONTINUOUS = ("sac", "td3")
OURS = ("raylet", "gcs_server", "ray::", "paceline", "driver.py")


@dataclass(frozen=True)
class Kill:
    algo: str
    host: str
    """`first`, where the command runs, or `second`."""
    phase: str

    @property
    def name(self) -> str:
        return f"{self.algo}/{self.host}/{self.phase}"


@dataclass
class Outcome:
    exit_code: int | None = None
    went_on: bool = False
    resume_code: int | None = None
    resume_level: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class KilledHost:
    """One run on two hosts, one of which is killed."""

    def __init__(self, kill: Kill, folder: Path, hosts: Hosts, dice: random.Random) -> None:
        self.kill, self.folder, self.hosts, self.dice = kill, folder, hosts, dice
        self.run, self.phases = folder / "runs/x", folder / "phases"
        cores = (1, 1) if kill.algo in LEARNS_ON_ALL else (2, 1)
        lines = (f"{name} cpus={count}\n" for name, count in zip(hosts.names, cores, strict=True))
        (folder / "hosts").write_text("".join(lines))
        self.env = start_sshd(hosts, folder / "ssh") | {"PACELINE_PHASES": str(self.phases), "OMP_NUM_THREADS": "1"}
        self.outcome = Outcome()

    def words(self) -> list[str]:
        algo = self.kill.algo
        sets: dict[str, Any] = {
            f"{algo}.rollout_steps": 16,
            "checkpoint.every_iterations": 2,
            "checkpoint.every_seconds": 0,
            "eval.every_steps": 150,
            "eval.episodes": 4,
            **{f"{algo}.{key}": value for key, value in SMALL.get(algo, {}).items()},
        }
        if algo in CONTINUOUS:
            env = "Pendulum-v1"
        else:
            env, sets["env.kwargs"] = "paceline/FixedCost-v0", "{cost_seconds: 0.0005, length: 50}"
        launch = f"-m paceline launch --hosts {self.folder}/hosts --log {self.folder}/launch --timeout 90 --"
        train = f"{HERE}/driver.py train --algo {algo} --env {env} --preset none --engine ray --name x --resume auto"
        train += f" --workers 2 --envs-per-worker 4 --iterations {ITERATIONS} --threads 1"
        settings = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        return [sys.executable, *launch.split(), sys.executable, *train.split(), *settings]

    def start(self, log: str) -> subprocess.Popen[str]:
        return self.hosts.start(0, self.words(), env=self.env, cwd=str(self.folder), output=self.folder / log)

    def attempt(self) -> Outcome:
        began = time.monotonic()
        process = self.start("log")
        self.wait_for_phase(process)
        host = 0 if self.kill.host == "first" else 1
        rows = len(self.rows())
        self.hosts.kill(host)
        try:
            self.outcome.exit_code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.problem(f"still running after {END_SECONDS:g} s")
        self.outcome.went_on = self.outcome.exit_code == 0 and len(self.rows()) > rows
        self.look_around()
        self.hosts.boot(host)
        start_sshd(self.hosts, self.folder / "ssh", only=[host])
        self.continue_it()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def wait_for_phase(self, process: subprocess.Popen[str]) -> None:
        phase = self.kill.phase
        if phase == "start" and self.dice.random() < 0.5:
            time.sleep(self.dice.uniform(0.5, 10.0))  # while the hosts find each other and start Ray
            return
        count = self.dice.randint(2, 6) if phase == "iteration" else 1
        limit = time.monotonic() + END_SECONDS
        while process.poll() is None and self.seen(phase) < count and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(self.dice.uniform(0.0, 5.0 if phase == "start" else 0.2))

    def seen(self, phase: str) -> int:
        return self.phases.read_text().split().count(phase) if self.phases.exists() else 0

    # -- what came of it --------------------------------------------------------------------------------------------

    def look_around(self) -> None:
        try:
            wait_until(lambda: not self.left(), "nothing is left", LEFT_SECONDS)
        except TimeoutError:
            self.problem(f"left behind: {', '.join(self.left())}")
        code, state = self.outcome.exit_code, self.read("status.json").get("state", "")
        if self.kill.host == "first":  # nobody is left to say anything
            return
        if code not in (0, 1, 99) or state not in {0: ("done",), 1: ("failed", ""), 99: ("stopped",)}[code]:
            self.problem(f"exit code {code}, status {state!r}")
        text = (self.folder / "log").read_text(errors="replace")
        for sign in ("Traceback (most", "*** SIGABRT", "C++ stack", "Check failed", "Fatal Python error"):
            if sign in text:
                self.problem(f"prints {sign!r}")
        if code == 0:
            self.check_counts()

    def left(self) -> list[str]:
        found = []
        for host in list(self.hosts._firsts):
            name, root = self.hosts.names[host], self.hosts.root(host)
            found += [f"{name}: {word}" for word in OURS if self.hosts.pids(host, word)]
            found += [f"{name}: {path.name}" for at in ("tmp", "dev/shm") for path in (root / at).glob("p[la]*-*")]
        return found

    def continue_it(self) -> None:
        before = self.rows()
        again = self.start("resumed")
        try:
            self.outcome.resume_code = again.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.problem("the resumed run hangs")
            return
        if self.outcome.resume_code != 0:
            text = (self.folder / "resumed").read_text(errors="replace")
            self.problem(f"the resumed run ends with {self.outcome.resume_code}: {' '.join(text.split())[-300:]}")
            return
        self.outcome.resume_level = str(self.read("resume.json").get("level", "" if before else "new run"))
        self.check_counts()

    def check_counts(self) -> None:
        """Every iteration once, and steps that add up: over iterations, and over hosts."""
        rows, summary = self.rows(), self.read("summary.json")
        iterations, steps = [row["iteration"] for row in rows], [row["env_steps"] for row in rows]
        if iterations != list(range(1, ITERATIONS + 1)) or sorted(set(steps)) != steps:
            self.problem(f"the rows are not those of one run: iterations {iterations}, steps {steps}")
        elif (summary["iterations"], summary["env_steps"], summary["status"]) != (ITERATIONS, steps[-1], "done"):
            self.problem("the summary differs from the rows")
        elif not summary.get("resumed") and sum(each["env_steps"] for each in summary["hosts"]) != steps[-1]:
            self.problem(f"the hosts' steps do not add up to {steps[-1]}: {summary['hosts']}")

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def read(self, name: str) -> dict[str, Any]:
        path = self.run / name
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def problem(self, text: str) -> None:
        self.outcome.problems.append(text)


def attempt(kill: Kill, seed: int) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="nk-", dir="/tmp"))
    try:
        with Hosts(2, shared=[folder]) as hosts:
            outcome = KilledHost(kill, folder, hosts, random.Random(seed)).attempt()
        if outcome.problems:
            for name in ("log", "resumed"):
                if (folder / name).exists():
                    print((folder / name).read_text(errors="replace")[-3000:], file=sys.stderr)
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn at random")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    dice, failed = random.Random(seed), 0
    for number in range(1, options.kills + 1):
        kill = Kill(dice.choice(ALGORITHMS), dice.choice(("first", "second")), dice.choice(PHASES))
        outcome = attempt(kill, seed + number)
        add(options.out / "node_kills.json", kill, seed + number, outcome)
        failed += bool(outcome.problems)
        how = "; ".join(outcome.problems) or f"{'went on' if outcome.went_on else 'ended'}, then {outcome.resume_level}"
        about = f"{number}/{options.kills} {kill.name} (seed {seed + number})"
        print(f"{about}: exit {outcome.exit_code}, {outcome.seconds:.0f} s, {how}", flush=True)
    print(f"{options.kills} kills, {failed} with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
