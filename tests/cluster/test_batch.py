"""Jobs on stand-ins for OpenPBS and Cobalt, which run them for real on two hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Hosts, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SMALL = [
    "--preset",
    "none",
    "--envs-per-worker",
    "2",
    "--set",
    "ppo.rollout_steps=16",
    "--set",
    "ppo.minibatch_size=32",
]
SMALL += ["--set", "ppo.epochs=1", "--workers", "2"]


class Batch:
    def __init__(self, kind: str, folder: Path, hosts: Hosts) -> None:
        self.kind, self.hosts, self.home = kind, hosts, folder / "home"
        self.state = folder / "batch"
        self.bin = self.state / "bin"
        for path in (self.home, self.state / "jobs", self.bin):
            path.mkdir(parents=True)
        names = hosts.names[1:]
        (self.state / "hosts").write_text("\n".join(names))
        (self.state / "cpus").write_text("2")
        if kind == "cobalt":
            (self.state / "cobalt").touch()
        program = Path(__file__).with_name("fakebatch.py")
        for name in ("qsub", "qstat", "qdel", "ssh" if kind == "cobalt" else "pbs_tmrsh"):
            tool = self.bin / name
            call = f'exec {sys.executable} {program} {name} "$@"'
            tool.write_text(f"#!/bin/bash\nexport FAKEBATCH={self.state}\n{call}\n")
            tool.chmod(0o755)
        self.env = {
            "FAKEBATCH": str(self.state),
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "PATH": f"{self.bin}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        }
        for number, name in enumerate(names, start=1):
            argv = [sys.executable, str(program), "mom", name]
            hosts.start(number, argv, env=self.env, output=self.state / f"{name}.log")
            wait_until((self.state / f"{name}.sock").exists, "its mom answers", 20)

    def run(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self.hosts.run(0, words, env=self.env, cwd=str(self.home), seconds=seconds)

    def said(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *words: str) -> str:
        match = re.match(r"job        (\S+) ", self.said("paceline", "submit", "--on", self.kind, *words))
        assert match is not None
        return match[1]

    def followed(self, number: str, seconds: float = 120.0) -> str:
        done = self.run("paceline", "logs", number, "-f", seconds=seconds)
        assert done.returncode == 0
        return done.stdout + done.stderr


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Callable[[str], Batch]]:
    with Hosts(3, shared=[tmp_path]) as hosts:
        yield lambda kind: Batch(kind, tmp_path, hosts)


@pytest.mark.parametrize("kind", ["pbs", "cobalt"])
def test_train_on_two_hosts(kind: str, batch: Callable[[str], Batch]) -> None:
    queue = batch(kind)
    train = ["paceline", "train", "--env", "CartPole-v1", *SMALL, "--iterations", "30", "--name", "pair"]
    number = queue.submit("--nodes", "2", "--walltime", "10m", "--", *train)
    said = queue.followed(number)
    assert "paceline: exit code 0" in said and "is done" in said, said
    summary = json.loads((queue.home / "runs/pair/summary.json").read_text())
    assert {host["host"] for host in summary["hosts"]} == set(queue.hosts.names[1:])
    assert "done" in queue.said("paceline", "jobs")


@pytest.mark.parametrize("kind", ["pbs", "cobalt"])
def test_the_job_submits_its_successor(kind: str, batch: Callable[[str], Batch]) -> None:
    queue = batch(kind)
    train = ["paceline", "train", "--env", "CartPole-v1", *SMALL, "--total-steps", "1000M", "--name", "long"]
    number = queue.submit("--nodes", "1", "--walltime", "1m", "--save", "40s", "--", *train)
    output = next((queue.home / "data/paceline/jobs").iterdir()) / "output.log"
    wait_until(lambda: output.exists() and ", start 2, on" in output.read_text(), "it starts again", 90)
    shown = queue.said("paceline", "status", number)
    assert "start 2" in shown and "running" in shown, shown
    resumed = queue.home / "runs/long/resume.json"
    wait_until(resumed.exists, "it resumes", 40)
    queue.said("paceline", "cancel", number)  # of the first: the one that goes on is meant
    said = queue.followed(number, 60)
    assert "cancelled" in said, said
    lines = (queue.home / "runs/long/metrics.jsonl").read_text().splitlines()
    iterations = [json.loads(line)["iteration"] for line in lines]
    assert iterations == list(range(1, len(iterations) + 1))
    assert len(list((queue.state / "jobs").glob("*.json"))) == 2  # and no third


def test_pbs_tells_why_it_waits_and_how_it_ended(batch: Callable[[str], Batch]) -> None:
    queue = batch("pbs")
    never = queue.submit("--nodes", "7", "--cores", "1", "--", "true")
    assert "waiting (Can Never Run: Insufficient" in queue.said("paceline", "status", never)
    queue.said("paceline", "cancel", never)
    assert "cancelled" in queue.said("paceline", "status", never)
    failed = queue.submit("--name", "three", "--", "sh", "-c", "exit 3")
    assert "failed, exit code 3" in queue.followed(failed, 60)
    deaf = "trap '' USR1 TERM; sleep 60"
    late = queue.submit("--walltime", "9s", "--save", "1s", "--attempts", "1", "--", "sh", "-c", deaf)
    assert "timeout" in queue.followed(late, 90)


@pytest.mark.parametrize("kind", ["pbs", "cobalt"])
def test_unknown_directives_are_refused(kind: str, batch: Callable[[str], Batch]) -> None:
    queue = batch(kind)
    done = queue.run("paceline", "submit", "--on", kind, "--extra", "--nonsense 1", "--", "true")
    assert done.returncode == 2 and "illegal option --nonsense" in done.stderr
    assert not list((queue.home / "data/paceline/jobs").iterdir())
