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


def test_exit_code_and_cancel(oar: OarBed) -> None:
    three = submit(oar, "--walltime 5m --name three -- sh -c 'exit 3'")
    assert "failed, exit code 3\n" in oar.run(f"paceline logs {three} -f", seconds=60).stderr
    long = submit(oar, "--nodes 2 --walltime 5m --name long -- sleep 200")
    wait_until(lambda: "launch: 2 node(s)" in output(oar, "long"), "it runs", 60)
    oar.said(f"paceline cancel {long}")
    wait_until(lambda: "cancelled" in oar.said(f"paceline status {long}"), "it is cancelled", 40)
    for host in (1, 2):
        wait_until(lambda host=host: not oar.hosts.pids(host, "raylet"), "nothing of Ray is left", 20)  # type: ignore[misc]


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
