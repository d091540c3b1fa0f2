"""Jobs on a real SLURM: two hosts that work, one where one logs in."""

from __future__ import annotations

import json
import re
import shlex
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
    assert first.returncode == 0 and len(set(numbers)) == 4, first.stdout + first.stderr
    slurm.said("paceline", "cancel", numbers[3])
    again = slurm.run(words)
    assert "submitted" not in again.stdout, again.stdout
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


def is_saved(run: Path) -> bool:
    """Whether it stopped when it was told to, and its last checkpoint is of its last iteration."""
    status = json.loads((run / "status.json").read_text())
    last = (run / "checkpoints/last").readlink().name
    return status["state"] == "stopped" and "SIGTERM" in status["reason"] and last == f"step-{status['env_steps']}"


def left(slurm: SlurmBed) -> list[str]:
    """Processes and folders of ours, on any host that lives."""
    found = []
    for host in [host for host in slurm.hosts._firsts if host > 0]:
        name = slurm.hosts.names[host]
        found += [f"{name}: {word}" for word in ("raylet", "paceline") if slurm.hosts.pids(host, word)]
        found += [f"{name}: {path}" for path in (slurm.hosts.root(host) / "tmp").glob("pl-*")]
    return found


def train(slurm: SlurmBed, name: str, nodes: int, *words: str) -> tuple[str, Path]:
    """A job without an end that trains already; its id and its run."""
    command = ["paceline", "train", "--env", "CartPole-v1", *SMALL, "--total-steps", "1000M", "--name", name]
    number = submit(slurm, "--name", name, "--nodes", str(nodes), *words, "--", *command)
    run = slurm.home / "runs" / name
    wait_until(lambda: len(rows(run)) > 3, "it trains", 90)
    return number, run


@pytest.mark.parametrize(("how", "nodes"), [("scancel", 1), ("scancel", 2), ("paceline cancel", 2)])
def test_cancelled_jobs_are_saved(how: str, nodes: int, slurm: SlurmBed) -> None:
    name = f"{how.split()[0]}{nodes}"
    number, run = train(slurm, name, nodes)
    shown = slurm.said("paceline", "status", number)
    assert "running, for 0:" in shown and slurm.names[0].rstrip("12") in shown
    slurm.said(*how.split(), number)
    wait_until(lambda: "cancelled" in slurm.said("paceline", "status", number), "it is cancelled", 40)
    assert is_saved(run), (folder_of(slurm, name) / "output.log").read_text()
    assert (folder_of(slurm, name) / "exit_code").read_text() == "99\n"
    wait_until(lambda: left(slurm) == [], "nothing is left", 20)
    time.sleep(2)
    assert slurm.said("squeue", "--noheader") == ""  # nor is it queued again
    assert "is over" in slurm.said("paceline", "cancel", number)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_preempted_job_is_saved_and_goes_on(nodes: int, slurm: SlurmBed) -> None:
    """With a grace time SLURM tells the steps of a job, not its script."""
    number, run = train(slurm, f"preempted{nodes}", nodes)
    script = slurm.home / "urgent.sh"
    script.write_text("#!/bin/sh\nsleep 5\n")
    slurm.said("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "urgent.sh")
    output = folder_of(slurm, f"preempted{nodes}") / "output.log"
    wait_until(lambda: "to be continued" in output.read_text(), "it is stopped", 30)
    before = json.loads((run / "status.json").read_text())
    assert is_saved(run), output.read_text()
    if nodes == 1:
        wait_until(lambda: rows(run)[-1]["env_steps"] > before["env_steps"], "it goes on", 90)
    slurm.said("paceline", "cancel", number)
    iterations = [row["iteration"] for row in rows(run)]
    assert is_saved(run) and iterations == list(range(1, len(iterations) + 1))


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


def test_seeds_are_an_array(slurm: SlurmBed) -> None:
    """One of them continues itself; a job comes after all."""
    continues = "[ {seed} = 4 ] && [ ! -e again ] && touch again && exit 99; echo seed {seed}; touch seed-{seed}"
    words = ["--cores", "1", "--name", "many", "--seeds", "3,4,8", "--at-once", "2"]
    said = slurm.said("paceline", "submit", "--on", "slurm", *words, "--", "sh", "-c", continues)
    array = said.split()[1]
    assert f"array      {array} (slurm), 3 jobs of 1 host" in said and said.count("job        ") == 1
    after = submit(slurm, "--cores", "1", "--after", array, "--", "sh", "-c", "ls seed-3 seed-4 seed-8")
    for at, seed in enumerate((3, 4, 8)):
        followed = slurm.run(["paceline", "logs", f"{array}_{at}", "-f"], seconds=90)
        assert f"seed {seed}\n" in followed.stdout and f"job {array}_{at} is done" in followed.stderr, followed.stdout
    assert re.search(rf"^{array} +slurm +many-3 … +1 .* 4 +3 done$", slurm.said("paceline", "jobs"), re.M)
    assert "is done" in slurm.run(["paceline", "logs", after, "-f"], seconds=60).stderr
    said = slurm.said("paceline", "submit", "--on", "slurm", "--seeds", "0-2", "--name", "gone2", "--", "sleep", "100")
    slurm.said("paceline", "cancel", said.split()[1])
    wait_until(lambda: slurm.said("squeue", "--noheader") == "", "all jobs have ended", 40)
    assert "3 cancelled" in slurm.said("paceline", "jobs")


def test_interactive(slurm: SlurmBed) -> None:
    argv = slurm.said("paceline", "submit", "--on", "slurm", "--nodes", "2", "--interactive", "--dry-run").split()
    assert argv[0] == "salloc" and argv[-2:] == ["--pty", "bash"]
    shell = [*argv[:-2], "bash", "-c", "hostname; echo $SLURM_JOB_NODELIST"]  # without a terminal
    assert slurm.said(*shell).split() == [slurm.names[0], "node[1-2]"]


def test_an_interactive_shell_has_what_the_profile_sets(slurm: SlurmBed) -> None:
    (slurm.home / "site.yaml").write_text("scheduler: slurm\nset: {LICENSE: 1@host}\nlines: [ulimit -c 0]\n")
    submit = "paceline submit --profile ./site.yaml --interactive"
    typed = "echo 'echo got $LICENSE on $(hostname), $(ulimit -c); exit'; sleep 8"
    said = slurm.said("sh", "-c", f"({typed}) | script -qec {shlex.quote(submit)} /dev/null")
    assert f"got 1@host on {slurm.names[0]}, 0" in said, said


def test_a_script_of_a_dry_run_submitted_by_hand(slurm: SlurmBed) -> None:
    script = slurm.said(
        "paceline", "submit", "--on", "slurm", "--name", "hand", "--dry-run", "--", "sh", "-c", "exit 3"
    )
    (slurm.home / "mine.sh").write_text(script)
    number = slurm.said("sbatch", "--parsable", "mine.sh").strip()
    wait_until(lambda: " hand " in slurm.said("paceline", "jobs"), "paceline knows it", 30)
    followed = slurm.run(["paceline", "logs", number, "-f"], seconds=60)
    assert "failed, exit code 3" in followed.stderr, followed.stdout + followed.stderr


@pytest.mark.parametrize(
    "words",
    [["--cores", "99"], ["--nodes", "9"], ["--queue", "short", "--walltime", "2h"], ["--memory", "900G"]],
)
def test_what_can_never_run_is_refused(words: list[str], slurm: SlurmBed) -> None:
    done = slurm.run(["paceline", "submit", "--on", "slurm", "--name", "never", *words, "--", "true"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    assert "never" not in slurm.said("squeue", "--noheader", "--format=%j")
    assert not list((slurm.home / "data/paceline/jobs").glob("never-*"))


def test_after_a_job_that_never_was(slurm: SlurmBed) -> None:
    done = slurm.run(["paceline", "submit", "--on", "slurm", "--after", "99999", "--", "true"])
    assert done.returncode == 2 and "--after 99999: slurm knows no such job" in done.stderr


def test_what_sbatch_refuses_is_shown(slurm: SlurmBed) -> None:
    done = slurm.run(["paceline", "submit", "--on", "slurm", "--queue", "nowhere", "--name", "refused", "--", "true"])
    assert done.returncode == 2 and "invalid partition" in done.stderr and done.stderr.count("\n") == 1
    assert not list((slurm.home / "data/paceline/jobs").glob("refused-*"))


def test_a_host_that_crashes(slurm: SlurmBed) -> None:
    """The job goes on without it, past the time after which SLURM takes a host for dead."""
    number, run = train(slurm, "crash", 2)
    slurm.hosts.kill(2)
    wait_until(lambda: "down" in slurm.said("sinfo", "--noheader", "--format=%T"), "SLURM knows", 90)
    at = rows(run)[-1]["iteration"]
    wait_until(lambda: rows(run)[-1]["iteration"] > at + 3, "it goes on", 60)
    assert f"lost {slurm.names[1]}" in (folder_of(slurm, "crash") / "output.log").read_text()
    slurm.said("paceline", "cancel", number)
    assert is_saved(run)
    wait_until(lambda: left(slurm) == [], "nothing is left", 20)
    slurm.reboot(2)
    wait_until(slurm._is_idle, "the host is back", 60)


def test_the_first_host_crashes(slurm: SlurmBed) -> None:
    """SLURM keeps the job without its script; the other host has it started again. Last: the host stays away."""
    number, _ = train(slurm, "head", 2)
    slurm.hosts.kill(1)
    wait_until(lambda: "PENDING" in slurm.said("squeue", "--noheader", "--format=%T"), "it is queued again", 200)
    slurm.said("paceline", "cancel", number)
    wait_until(lambda: left(slurm) == [], "nothing is left", 20)
