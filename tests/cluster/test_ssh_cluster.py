"""`paceline cluster` and `submit --on cluster:NAME`: a laptop, and two machines that share nothing, by real ssh."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from hosts import Hosts, wait_until
from sshd import start_sshd

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PACELINE = str(Path(sys.executable).with_name("paceline"))
LAPTOP = 2
OURS = ("raylet", "gcs_server", "ray::", "paceline.launch", "paceline.ssh_cluster", "job.sh", "tensorboard.main")
TRAIN = ["paceline", "train", "--engine", "ray", "--workers", "2", "--env", "my_env.py:Mine", "--preset", "none"]
ENV = """
from gymnasium.envs.classic_control import CartPoleEnv
class Mine(CartPoleEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, 1.0 * reward, *rest
"""
GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).status)"


@dataclass
class Lab:
    hosts: Hosts
    env: dict[str, str]
    project: Path

    def paceline(self, *words: str, code: int = 0, seconds: float = 90) -> CompletedProcess[str]:
        done = self.hosts.run(LAPTOP, [PACELINE, *words], env=self.env, cwd=str(self.project), seconds=seconds)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, *words: str) -> str:
        return re.findall(r"^job +(\S+)", self.paceline("submit", "--on", "cluster:lab", *words).stdout, re.M)[0]

    def said(self, job: str) -> str:
        """What the job has written, on the head."""
        path = Path(f"{self.hosts.root(0)}{self.project.parent}/work/jobs/{job}/output.log")
        return path.read_text() if path.exists() else ""

    def look(self, page: str) -> None:
        """Opens a page of the cluster on the laptop, and closes it."""
        output = self.project.parent / page
        words = [PACELINE, "cluster", page, "lab"]
        process = self.hosts.start(LAPTOP, words, env=self.env, cwd=str(self.project), output=output)
        wait_until(lambda: "http://127.0.0.1" in output.read_text() or process.poll() is not None, page, 60)
        url = re.findall(r"http://127\.0\.0\.1:\d+/", output.read_text())
        assert url, output.read_text()
        got = self.hosts.run(LAPTOP, [sys.executable, "-c", GET, url[0]])
        assert got.stdout == "200\n" or "HTTP Error 401" in got.stderr, got.stderr  # Ray's asks for its token
        self.hosts.signal(process, signal.SIGINT)
        assert process.wait(timeout=20) == 0, output.read_text()

    def left(self) -> list[str]:
        """Of ours, on the two machines: processes and Ray's folders."""
        found = [f"{host}: {word}" for host in (0, 1) for word in OURS if self.hosts.pids(host, word)]
        return found + [f"{host}: {path}" for host in (0, 1) for path in (self.hosts.root(host) / "tmp").glob("pl-*")]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Hosts(3, shared=[tmp_path]) as hosts:
        env = start_sshd(hosts, tmp_path / "ssh", only=[0, 1]) | {"XDG_DATA_HOME": str(tmp_path / "data")}
        for name in ("project", "work", "data"):  # the machines share nothing, and know nothing of the laptop's
            (tmp_path / name).mkdir()
            for host in (0, 1):
                hosts.hide(host, tmp_path / name)
        project = tmp_path / "project"
        (project / "my_env.py").write_text(ENV)
        settings = f"workdir: {tmp_path}/work\npython: {sys.executable}\n"
        (project / "lab.yaml").write_text(f"hosts: [root@node0 cpus=1, node1 cpus=1]\n{settings}")
        yield Lab(hosts, env, project)


def test_jobs_from_a_laptop(lab: Lab) -> None:
    assert "cluster    lab, 2 hosts" in lab.paceline("cluster", "up", "lab.yaml").stdout
    first = lab.submit("--", *TRAIN, "--iterations", "30", "--name", "one")
    lab.hosts.kill(LAPTOP)  # not the terminal alone
    lab.hosts.boot(LAPTOP)
    wait_until(lambda: "Iteration 3 " in lab.said(first) or "exit code" in lab.said(first), "it trains", 60)
    status = lab.paceline("status", first).stdout
    assert "node1: ready" in status and re.search(r"progress +iteration \d+", status), status + lab.said(first)
    said = lab.paceline("logs", first, "-f").stdout
    assert "Iteration 30 " in said and said.rstrip().splitlines()[-1].startswith("paceline: exit code 0"), said
    lab.paceline("fetch", first, "here")
    summary = json.loads((lab.project / "here/one/summary.json").read_text())
    assert summary["nodes"] == 2 and summary["iterations"] == 30 and summary["return_mean"] < 600
    assert (lab.project / "here/one/checkpoints/last").is_dir()
    wait_until(lambda: lab.left() == [], "nothing is left", 10)

    # An edit at home runs everywhere.
    (lab.project / "my_env.py").write_text(ENV.replace("1.0", "1000.0"))
    second = lab.submit("--name", "edited", "--", *TRAIN, "--total-steps", "1000M", "--name", "two")
    wait_until(lambda: "Iteration 5 " in lab.said(second) or "exit code" in lab.said(second), "it trains", 60)
    lab.paceline("fetch", second, "here")
    rows = (lab.project / "here/two/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["return_mean"] > 6000
    hosts = lab.paceline("cluster", "status", "lab").stdout
    assert second in hosts and len(re.findall(r"node\d .*raylet 1.*supervisor 2", hosts)) == 2, hosts
    assert "head_job 1" in hosts, hosts
    lab.look("dashboard")
    lab.paceline("cancel", "edited")
    wait_until(lambda: "exit code" in lab.said(second), "it ends", 40)
    wait_until(lambda: lab.left() == [], "nothing is left", 10)
    states = dict(re.findall(r"^(lab-\w+) .*  (\S.*)$", lab.paceline("jobs").stdout, re.M))
    assert states[first] == "done" and states[second].startswith("cancelled"), states

    lab.look("tensorboard")
    third = lab.submit("--", "sleep", "600")
    wait_until(lambda: "2 node(s)" in lab.said(third), "it runs", 60)
    assert "nothing of paceline's runs" in lab.paceline("cluster", "down", "lab").stdout
    wait_until(lambda: lab.left() == [], "nothing is left", 10)
    assert "exit code 143" in lab.said(third)
    lab.paceline("fetch", third, "here")
    assert "exit code 143" in (lab.project / f"here/{third}/output.log").read_text()


def test_an_environment_is_built_once_and_what_is_wrong_is_said(lab: Lab, tmp_path: Path) -> None:
    lines = f"workdir: {tmp_path}/work\nextras: []\npip: [--no-deps, --no-index]\nsetup: [touch /tmp/was-set-up]\n"
    (lab.project / "built.yaml").write_text(f"hosts: [node0, node1]\n{lines}")
    done = lab.paceline("cluster", "up", "built.yaml", code=1)
    assert done.stdout.count("environment built in") == 2, done.stdout + done.stderr
    assert done.stderr.count("ray is not installed there") == 2
    digest = re.findall(r"environment (\w{12}) ", done.stdout)[0]
    work = Path(f"{lab.hosts.root(1)}{tmp_path}/work/env/{digest}")
    there = lab.hosts.run(
        1, [f"{tmp_path}/work/env/{digest}/bin/python", "-c", "import paceline; print(paceline.__file__)"]
    )
    assert work.is_dir() and str(tmp_path) in there.stdout, there.stderr
    assert (lab.hosts.root(1) / "tmp/was-set-up").exists()
    again = lab.paceline("cluster", "up", "built.yaml", code=1).stdout
    assert again.count("is there") == 2 and "being built" not in again
    (lab.project / "away").write_text("node0\nnode9\nnode2  # the laptop has no server\n")
    wrong = lab.paceline("cluster", "up", "away", code=1).stderr
    assert "node9" in wrong and "unknown name" in wrong and "node2" in wrong and "no ssh server" in wrong
    (lab.project / "lab.yaml").write_text((lab.project / "lab.yaml").read_text() + "interface: eth7\n")
    wrong = lab.paceline("cluster", "up", "lab.yaml", code=1).stderr
    assert "eth7" in wrong, wrong


def test_a_key_must_open_every_connection_itself(lab: Lab, tmp_path: Path) -> None:
    """While a connection with the right key is open, another cluster names a key that nobody knows."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "ssh/stranger")]
    subprocess.run(words, check=True, timeout=30)
    client = tmp_path / "ssh/client"  # as a user's: no key is named there
    client.write_text(re.sub(r"^ *(IdentityFile|IdentitiesOnly) .*\n", "", client.read_text(), flags=re.M))
    lines = f"hosts: [node0]\nworkdir: {tmp_path}/work\npython: {sys.executable}\n"
    for name, key in (("right", "key"), ("wrong", "stranger"), ("gone", "nothing")):
        (lab.project / f"{name}.yaml").write_text(f"{lines}key: {tmp_path}/ssh/{key}\n")
    lab.paceline("cluster", "up", "right.yaml")
    wrong = lab.paceline("cluster", "up", "wrong.yaml", code=1).stderr
    assert "Permission denied" in wrong and "your key is not accepted there" in wrong, wrong
    assert f"{tmp_path}/ssh/nothing does not exist" in lab.paceline("cluster", "up", "gone.yaml", code=2).stderr


def test_one_folder_for_all_and_a_container(tmp_path: Path) -> None:
    """The folder is the same on both machines; every command runs behind the words of a container (a namespace with a
    variable of its own)."""
    with Hosts(3, shared=[tmp_path]) as hosts:
        env = start_sshd(hosts, tmp_path / "ssh", only=[0, 1]) | {"XDG_DATA_HOME": str(tmp_path / "data")}
        project = tmp_path / "project"
        project.mkdir()
        (project / "my_env.py").write_text(f"import os\nassert os.environ['INSIDE'] == '{tmp_path}/work'\n{ENV}")
        lines = f"workdir: {tmp_path}/work\npython: {sys.executable}\nshared_filesystem: true\n"
        (project / "lab.yaml").write_text(
            f"hosts: [node0 cpus=1, node1 cpus=1]\n{lines}container: unshare --uts env INSIDE={{workdir}}\n"
        )
        lab = Lab(hosts, env, project)
        lab.paceline("cluster", "up", "lab.yaml")
        done = lab.paceline("submit", "--on", "cluster:lab", "--", *TRAIN, "--iterations", "2", "--name", "one")
        assert re.search(r"^sending .* to node0$", done.stdout, re.M), done.stdout
        job = re.findall(r"^job +(\S+)", done.stdout, re.M)[0]
        said = lab.paceline("logs", job, "-f").stdout
        assert "paceline: exit code 0" in said, said
        lab.paceline("fetch", job, "here")
        assert json.loads((project / "here/one/summary.json").read_text())["nodes"] == 2
        wait_until(lambda: lab.left() == [], "nothing is left", 10)
