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
        own = ("ssh",) if kind == "cobalt" else ("pbs_tmrsh", "pbsnodes")
        for name in ("qsub", "qstat", "qdel", "qsig", "qalter", *own):
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
        match = re.search(r"^job        (\S+) ", self.said("paceline", "submit", "--on", self.kind, *words), re.M)
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
    number = queue.submit("--nodes", "1", "--walltime", "1m", "--save", "30s", "--", *train)
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


@pytest.mark.parametrize("history", [False, True])
def test_pbs_tells_how_a_job_ended(history: bool, batch: Callable[[str], Batch]) -> None:
    """Without history, its default, only the job itself knows."""
    queue = batch("pbs")
    if history:
        (queue.state / "history").touch()
    never = queue.run("paceline", "submit", "--on", "pbs", "--nodes", "7", "--cores", "1", "--", "true")
    assert never.returncode == 2 and "--nodes 7: PBS has 2 hosts" in never.stderr, never.stderr
    assert not list(queue.home.glob("data/paceline/jobs/*"))
    failed = queue.submit("--name", "three", "--", "sh", "-c", "exit 3")
    assert "failed, exit code 3" in queue.followed(failed, 60)
    deaf = "trap '' USR1 TERM; sleep 60"
    late = queue.submit("--walltime", "9s", "--save", "1s", "--attempts", "1", "--", "sh", "-c", deaf)
    assert "timeout" in queue.followed(late, 90)


def test_a_running_job_is_running_without_history(batch: Callable[[str], Batch]) -> None:
    """`qstat -x` answers nothing then: the job was called killed, and `logs -f` stopped."""
    queue = batch("pbs")
    number = queue.submit("--", "sh", "-c", "until [ -e go ]; do sleep 0.2; done; echo it went")
    output = next((queue.home / "data/paceline/jobs").iterdir()) / "output.log"
    wait_until(lambda: output.exists() and "launch: 1 node(s), 2 CPU(s)" in output.read_text(), "it runs", 60)
    assert " running" in queue.said("paceline", "jobs") and "running, for" in queue.said("paceline", "status", number)
    queue.run("sh", "-c", "(sleep 6; touch go) >/dev/null 2>&1 &")  # logs asks every 5 s
    said = queue.followed(number, 60)
    assert "it went\n" in said and "is done" in said, said


def test_a_script_of_a_dry_run_submitted_by_hand(batch: Callable[[str], Batch]) -> None:
    queue = batch("pbs")
    script = queue.said("paceline", "submit", "--on", "pbs", "--name", "hand", "--dry-run", "--", "sh", "-c", "exit 3")
    (queue.home / "mine.sh").write_text(script)
    number = queue.said("qsub", "mine.sh").strip()
    wait_until(lambda: "hand" in queue.said("paceline", "jobs"), "paceline knows it", 30)
    assert "failed, exit code 3" in queue.followed(number, 60)


def test_an_array_of_seeds(batch: Callable[[str], Batch]) -> None:
    """Elements continue themselves one by one; a job can come after all of them only if they do not."""
    queue = batch("pbs")
    continues = "[ {seed} = 4 ] && [ ! -e again ] && touch again && exit 99; echo seed {seed}"
    number = queue.submit("--cores", "1", "--name", "many", "--seeds", "3-5", "--", "sh", "-c", continues)
    assert number == "1[0].pbs0"
    for at, seed in enumerate((3, 4, 5)):
        assert f"seed {seed}\n" in queue.followed(f"1[{at}]", 90)
    _, row = queue.said("paceline", "jobs").splitlines()
    assert row.split()[0] == "1[].pbs0" and row.split()[-3:] == ["4", "3", "done"], row
    done = queue.run("paceline", "submit", "--on", "pbs", "--after", "1[].pbs0", "--", "true")
    assert done.returncode == 0, done.stderr  # all of them are done


def test_a_job_after_one_that_continues_itself(batch: Callable[[str], Batch]) -> None:
    """PBS would delete it when the first start ends with 99."""
    queue = batch("pbs")
    continues = "[ -e again ] || { touch again; sleep 3; exit 99; }; sleep 1; touch first-is-done"
    first = queue.submit("--name", "first", "--", "sh", "-c", continues)
    second = queue.submit("--name", "second", "--after", first, "--", "sh", "-c", "[ -e first-is-done ]")
    assert "is done" in queue.followed(second, 90)
    assert "2 " in queue.said("paceline", "jobs").splitlines()[1]


SHOW = """
import os, socket, time
import ray
ray.init(log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=1)
def where():
    time.sleep(0.5)
    return socket.gethostname(), os.environ.get("LICENSE"), os.environ.get("FROM_A_LINE")

print("seen", sorted(set(ray.get([where.remote() for _ in range(8)]))), flush=True)
"""


def test_a_profile_reaches_every_host(batch: Callable[[str], Batch]) -> None:
    queue = batch("pbs")
    (queue.home / "show.py").write_text(SHOW)
    (queue.home / "site.yaml").write_text("set: {LICENSE: 27@server}\nlines: [export FROM_A_LINE=yes]\n")
    number = queue.submit("--profile", "site.yaml", "--nodes", "2", "--", "python3", "show.py")
    said = queue.followed(number)
    assert str([(name, "27@server", "yes") for name in sorted(queue.hosts.names[1:])]) in said, said


@pytest.mark.parametrize("how", ["qdel", "paceline cancel"])
def test_a_cancelled_job_is_saved(how: str, batch: Callable[[str], Batch]) -> None:
    """qdel signals the session of the script, `timeout` included: one request is several SIGTERMs."""
    queue = batch("pbs")
    train = ["paceline", "train", "--env", "CartPole-v1", *SMALL, "--total-steps", "1000M", "--name", "gone"]
    number = queue.submit("--nodes", "1", "--", *train)
    run = queue.home / "runs/gone"
    wait_until(lambda: (run / "metrics.jsonl").exists(), "it trains", 60)
    queue.said(*how.split(), number)
    assert "cancelled" in queue.followed(number, 60)
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and "SIGTERM" in status["reason"], status
    assert (run / "checkpoints/last").readlink().name == f"step-{status['env_steps']}"


@pytest.mark.parametrize("kind", ["pbs", "cobalt"])
def test_unknown_directives_are_refused(kind: str, batch: Callable[[str], Batch]) -> None:
    queue = batch(kind)
    done = queue.run("paceline", "submit", "--on", kind, "--extra", "--nonsense 1", "--", "true")
    assert done.returncode == 2 and "illegal option --nonsense" in done.stderr
    assert not (queue.home / "data").exists()
