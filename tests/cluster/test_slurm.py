"""Jobs on a real SLURM: two hosts that work, one where one logs in."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import wait_until
from slurmbed import SlurmBed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmBed]:
    folder = tmp_path_factory.mktemp("slurm")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    with SlurmBed(folder) as bed:
        yield bed


def submit(slurm: SlurmBed, *words: str) -> str:
    match = re.match(r"job        (\d+) \(slurm\)", slurm.said("paceline", "submit", "--on", "slurm", *words))
    assert match is not None
    return match[1]


def rows(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def folder_of(slurm: SlurmBed, name: str) -> Path:
    return next((slurm.home / "data/paceline/jobs").glob(f"{name}-*"))


def test_train_on_two_hosts(slurm: SlurmBed) -> None:
    words = ["--name", "pair", "--nodes", "2", "--walltime", "10m"]
    train = ["paceline", "train", "--env", "CartPole-v1", *SMALL, "--iterations", "30", "--name", "pair"]
    number = submit(slurm, *words, "--", *train)
    followed = slurm.run(["paceline", "logs", number, "-f"], seconds=120)
    assert followed.returncode == 0 and "paceline: exit code 0" in followed.stdout, followed.stdout
    assert f"job {number} is done" in followed.stderr
    summary = json.loads((slurm.home / "runs/pair/summary.json").read_text())
    assert summary["status"] == "done" and {host["host"] for host in summary["hosts"]} == set(slurm.names)
    shown = slurm.said("paceline", "status", number)
    for word in (*slurm.names, "cores in use", "0 workers lost", "30", "driver"):
        assert word in shown, shown
    assert re.search(rf"^{number} +slurm +pair +2 .* 1 +done$", slurm.said("paceline", "jobs"), re.M)


def test_exit_code_is_known_without_accounting(slurm: SlurmBed) -> None:
    number = submit(slurm, "--name", "three", "--cores", "1", "--", "sh", "-c", "echo said; exit 3")
    followed = slurm.run(["paceline", "logs", number, "-f"], seconds=60)
    assert "said\n" in followed.stdout and "exit code 3" in followed.stderr


def test_a_scaling_study_as_jobs(slurm: SlurmBed) -> None:
    """A job for each run, of as many hosts as it takes; one fails, one is cancelled before it begins."""
    words = ["paceline", "bench", "scaling", "--on", "slurm", "--cores", "2", "--walltime", "10m", "--out", "study"]
    words += ["--envs", "CartPole-v1,NoSuchEnv-v0", "--nodes", "1,2", "--workers", "2", "--seeds", "1"]
    words += ["--iterations", "5", "--preset", "none", "--set", "ppo.rollout_steps=16", "--set", "ppo.epochs=1"]
    first = slurm.run(words)
    numbers = re.findall(r"job (\d+) waiting", first.stdout)
    assert first.returncode == 99 and len(set(numbers)) == 4, first.stdout + first.stderr
    slurm.said("paceline", "cancel", numbers[3])
    again = slurm.run(words)
    assert again.returncode == 99 and "submitted" not in again.stdout, again.stdout
    wait_until(lambda: slurm.said("squeue", "--noheader") == "", "all jobs have ended", 100)
    last = slurm.run(words)
    assert last.returncode == 1, last.stdout + last.stderr
    assert slurm.said("squeue", "--noheader", "--states=all", "--format=%i").split().count(numbers[3]) == 1
    one, two, unknown, gone = json.loads((slurm.home / "study/scaling.json").read_text())["runs"]
    assert [each["state"] for each in (one, two, unknown, gone)] == ["done", "done", "failed", "failed"]
    assert [each["job"] for each in (one, two, unknown, gone)] == numbers
    assert [each["ran_on"]["nodes"] for each in (one, two)] == [1, 2]
    assert "exit code 2" in unknown["reason"] and "NoSuchEnv" in unknown["reason"], unknown["reason"]
    assert f"job {numbers[3]} cancelled" in gone["reason"]
    text = (slurm.home / "study/scaling.md").read_text()
    assert "0 of 1 (1 failed)" in text and gone["reason"] in text and "paceline submit --on slurm" in text
    assert (slurm.home / "study/launch" / two["name"] / "timeline.jsonl").stat().st_size


def test_cancel(slurm: SlurmBed) -> None:
    train = ["paceline", "train", "--env", "CartPole-v1", *SMALL, "--total-steps", "1000M", "--name", "gone"]
    number = submit(slurm, "--name", "gone", "--nodes", "2", "--", *train)
    wait_until(lambda: len(rows(slurm.home / "runs/gone")) > 3, "it trains", 60)
    shown = slurm.said("paceline", "status", number)
    assert "running, for 0:" in shown and "node[1-2]" in shown
    slurm.said("paceline", "cancel", number)
    wait_until(lambda: "cancelled" in slurm.said("paceline", "status", number), "it is cancelled", 40)
    time.sleep(3)
    assert slurm.said("squeue", "--noheader") == ""  # nor is it queued again
    for host in (1, 2):
        wait_until(lambda host=host: not slurm.hosts.pids(host, "raylet"), "nothing of Ray is left", 20)  # type: ignore[misc]
    assert "is over" in slurm.said("paceline", "cancel", number)


def test_walltime_requeue_resume_one_curve(slurm: SlurmBed) -> None:
    """SLURM counts walltimes in minutes, and gives the signal half a minute early."""
    train = ["paceline", "train", "--env", "CartPole-v1", *SMALL, "--total-steps", "1000M", "--name", "long"]
    number = submit(slurm, "--name", "long", "--nodes", "2", "--walltime", "2m", "--save", "60s", "--", *train)
    run = slurm.home / "runs/long"
    output = folder_of(slurm, "long") / "output.log"
    wait_until(output.exists, "it starts", 30)
    wait_until(lambda: "to be continued" in output.read_text(), "it is stopped early", 100)
    before = rows(run)[-1]["iteration"]
    wait_until(lambda: "waiting" in slurm.said("paceline", "status", number), "it is queued again", 20)
    wait_until(lambda: ", start 2, on" in output.read_text(), "it starts again", 150)
    wait_until(lambda: rows(run)[-1]["iteration"] > before + 3, "it goes on", 60)
    shown = slurm.said("paceline", "status", number)
    slurm.said("paceline", "cancel", number)
    assert "start 2" in shown, shown
    iterations = [row["iteration"] for row in rows(run)]
    assert iterations == sorted(set(iterations)) == list(range(1, len(iterations) + 1))
    assert json.loads((run / "status.json").read_text())["resumes"] == 1


def test_learner_on_a_host_with_a_gpu(slurm: SlurmBed) -> None:
    """A heterogeneous job: the host with the GPU comes first, and both are in one cluster."""
    program = "import os, ray; ray.init(); print('hosts', len(ray.nodes()), 'on', os.uname().nodename)"
    words = ["--name", "het", "--nodes", "1", "--cores", "1", "--learner-gpus", "1", "--walltime", "5m"]
    number = submit(slurm, *words, "--", "python", "-c", program)
    followed = slurm.run(["paceline", "logs", number, "-f"], seconds=90)
    assert f"hosts 2 on {slurm.names[-1]}" in followed.stdout, followed.stdout + followed.stderr


OWN = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --mem-per-cpu=100
#SBATCH --output=own.out
paceline launch --log own -- sh -c 'echo {address} until $PACELINE_DEADLINE; exit 6'
echo "exit code $?"
"""


def test_launch_in_a_script_of_ones_own(slurm: SlurmBed) -> None:
    """Several tasks a host and memory by the core, as at many sites: the whole allocation is taken all the same."""
    (slurm.home / "own.sh").write_text(OWN)
    began = time.time()
    slurm.said("sbatch", "--wait-all-nodes=1", "--time=5", "own.sh")
    output = slurm.home / "own.out"
    wait_until(lambda: output.exists() and "exit code" in output.read_text(), "the job has ended", 60)
    text = output.read_text()
    assert "2 node(s), 4 CPU(s)" in text and text.endswith("exit code 6\n"), text
    assert abs(int(text.split("until ")[1].split()[0]) - began - 300) < 60


def test_seeds_are_jobs_of_their_own(slurm: SlurmBed) -> None:
    said = slurm.said("paceline", "submit", "--on", "slurm", "--cores", "1", "--seeds", "3,4", "--", "echo", "it is")
    numbers = re.findall(r"^job        (\d+)", said, re.M)
    assert len(numbers) == 2
    for number, seed in zip(numbers, (3, 4), strict=True):
        assert f"it is --seed {seed}\n" in slurm.run(["paceline", "logs", number, "-f"], seconds=90).stdout


def test_interactive(slurm: SlurmBed) -> None:
    argv = slurm.said("paceline", "submit", "--on", "slurm", "--nodes", "2", "--interactive", "--dry-run").split()
    assert argv[0] == "salloc" and argv[-2:] == ["--pty", "bash"]
    shell = [*argv[:-2], "bash", "-c", "hostname; echo $SLURM_JOB_NODELIST"]  # without a terminal
    assert slurm.said(*shell).split() == [slurm.names[0], "node[1-2]"]


def test_what_sbatch_refuses_is_shown(slurm: SlurmBed) -> None:
    done = slurm.run(["paceline", "submit", "--on", "slurm", "--queue", "nowhere", "--name", "refused", "--", "true"])
    assert done.returncode == 2 and "invalid partition" in done.stderr and done.stderr.count("\n") == 1
    assert not list((slurm.home / "data/paceline/jobs").glob("refused-*"))
