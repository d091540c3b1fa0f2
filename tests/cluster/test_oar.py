"""Jobs on a real OAR: two hosts that work, one where one logs in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from hosts import wait_until
from oarbed import OarBed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
TRAIN = "paceline train --env CartPole-v1 --preset none --envs-per-worker 2 --workers 2 --set ppo.rollout_steps=16"
TRAIN += " --set ppo.minibatch_size=32 --set ppo.epochs=1"


@pytest.fixture(scope="module")
def oar() -> Iterator[OarBed]:
    with OarBed() as bed:
        yield bed


def submit(oar: OarBed, line: str) -> str:
    match = re.search(r"^job        (\d+) \(oar\)", oar.said(f"paceline submit --on oar {line}"), re.M)
    assert match is not None
    return match[1]


def output(oar: OarBed, name: str) -> str:
    path = next((oar.home / ".local/share/paceline/jobs").glob(f"{name}-*/output.log"), None)
    return path.read_text() if path else ""


def test_train_on_two_hosts(oar: OarBed) -> None:
    number = submit(oar, f"--nodes 2 --walltime 5m --name pair -- {TRAIN} --iterations 30 --name pair")
    followed = oar.run(f"paceline logs {number} -f", seconds=120)
    assert "paceline: exit code 0" in followed.stdout and "is done" in followed.stderr, followed.stdout
    summary = json.loads((oar.home / "runs/pair/summary.json").read_text())
    assert {host["host"] for host in summary["hosts"]} == set(oar.names)
    assert all(name in oar.said(f"paceline status {number}") for name in oar.names)


def test_exit_code(oar: OarBed) -> None:
    three = submit(oar, "--walltime 5m --name three -- sh -c 'exit 3'")
    assert "failed, exit code 3\n" in oar.run(f"paceline logs {three} -f", seconds=60).stderr


@pytest.mark.parametrize("how", ["paceline cancel", "oardel"])
def test_cancel(how: str, oar: OarBed) -> None:
    """oardel kills at once: the run is resumable from its last checkpoint, and whoever asks gets a true status."""
    name = how.split()[0]
    words = f"--total-steps 1000M --set checkpoint.every_seconds=1 --name {name}"
    number = submit(oar, f"--nodes 2 --walltime 5m --name {name} -- {TRAIN} {words}")
    run = oar.home / "runs" / name
    wait_until(lambda: (run / "checkpoints/last").exists() and (run / "metrics.jsonl").exists(), "it trains", 90)
    oar.said(f"{how} {number}")
    wait_until(lambda: "cancelled" in oar.said(f"paceline status {number}"), "it is cancelled", 40)
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped", status
    if name == "paceline":
        assert (run / "checkpoints/last").readlink().name == f"step-{status['env_steps']}", output(oar, name)
    for host in (1, 2):
        wait_until(lambda host=host: not oar.hosts.pids(host, "raylet"), "nothing of Ray is left", 20)  # type: ignore[misc]
        assert not list((oar.hosts.root(host) / "tmp").glob("pl-*"))


def test_seeds_are_an_array(oar: OarBed) -> None:
    said = oar.said("paceline submit --on oar --walltime 5m --name many --seeds 3-5 -- echo seed {seed}")
    array = said.split()[1]
    assert f"array      {array} (oar), 3 jobs of 1 host" in said
    for at, seed in enumerate((3, 4, 5)):
        followed = oar.run(f"paceline logs {int(array) + at} -f", seconds=60)
        assert f"seed {seed}\n" in followed.stdout and "is done" in followed.stderr, followed.stdout
    assert re.search(rf"^{array} +oar +many-3 … .* 3 done$", oar.said("paceline jobs"), re.M)
    said = oar.said("paceline submit --on oar --walltime 5m --name gone --seeds 0-1 -- sleep 100")
    oar.said(f"paceline cancel {said.split()[1]}")
    wait_until(lambda: "2 cancelled" in oar.said("paceline jobs"), "both are cancelled", 40)


def test_a_script_of_a_dry_run_submitted_by_hand(oar: OarBed) -> None:
    oar.said(
        "paceline submit --on oar --walltime 5m --name hand --dry-run -- sh -c 'exit 3' >mine.sh; chmod +x mine.sh"
    )
    match = re.search(r"^OAR_JOB_ID=(\d+)$", oar.said("oarsub -S ./mine.sh"), re.M)
    assert match is not None
    wait_until(lambda: " hand " in oar.said("paceline jobs"), "paceline knows it", 40)
    assert "failed, exit code 3" in oar.run(f"paceline logs {match[1]} -f", seconds=60).stderr


def test_what_can_never_run_is_refused(oar: OarBed) -> None:
    for words in ("--cores 99", "--nodes 9", "--after 99999"):
        done = oar.run(f"paceline submit --on oar --walltime 5m {words} -- true")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr


def test_checkpoint_resubmission_resume_one_curve(oar: OarBed) -> None:
    """OAR submits a job again only when it has run for more than a minute."""
    words = "--nodes 2 --walltime 3m --save 105s --name again"
    number = submit(oar, f"{words} -- {TRAIN} --total-steps 1000M --name again")
    run = oar.home / "runs/again"
    wait_until(lambda: "to be continued" in output(oar, "again"), "it is stopped early", 120)
    wait_until(lambda: ", start 2, on" in output(oar, "again"), "it starts again", 60)
    wait_until((run / "resume.json").exists, "it resumes", 60)
    shown = oar.said(f"paceline status {number}")
    assert "start 2" in shown and f"job        {number} " not in shown, shown  # it has another id
    oar.said(f"paceline cancel {number}")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    iterations = [json.loads(line)["iteration"] for line in lines if line.endswith("\n")]
    assert iterations == list(range(1, len(iterations) + 1))
