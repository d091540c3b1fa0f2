"""What is asked of schedulers: whole hosts, arrays, and nothing that they can never give."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.schedulers import SCHEDULERS
from paceline.schedulers.job import Job

OUTPUT = Path("/home/carol/job/scheduler.log")
SLURM, OAR, PBS, COBALT = (SCHEDULERS[name] for name in ("slurm", "oar", "pbs", "cobalt"))
SINFO = """\
debug*|infinite|36|92160|r1
debug*|infinite|36|92160|r2
short|30:00|36|92160|r1
big|2-00:00:00|64|1031000|b1
"""


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(cores=99), "--cores 99: the hosts of partition debug have 36 at most"),
        (Job(nodes=9), "--nodes 9: partition debug has 2"),
        (Job(queue="short", walltime="2h"), "--walltime 2:00:00: partition short allows 0:30:00 at most"),
        (Job(memory="900G"), "--memory 900G: the hosts of partition debug have 92160M at most"),
        (Job(queue="big", walltime="49h"), "--walltime 49:00:00: partition big allows 48:00:00"),
        (Job(nodes=2, learner_gpus=1, learner_queue="big", learner_cores=65), "--cores 65: the hosts of partition big"),
        (Job(nodes=2, cores=36, memory="90G", walltime="500h"), ""),
        (Job(queue="big", memory="900G", walltime="48h"), ""),
        (Job(queue="short", walltime="2h", qos="long"), ""),
        (Job(queue="short,big", walltime="2h"), ""),
        (Job(queue="nowhere", cores=99), ""),
    ],
)
def test_slurm_limits(job: Job, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "sinfo", SINFO, monkeypatch)
    if not message:
        SLURM.check_limits(job)
        return
    with pytest.raises(UserError) as error:
        SLURM.check_limits(job)
    assert message in str(error.value)


def command(folder: Path, name: str, prints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, first in PATH."""
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_pbs_is_asked_for_all_cores_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk without ncpus has one core, and under cgroups no more, whatever place=excl says."""

    def node(ncpus: int, **more: object) -> dict[str, object]:
        return {"state": "free", "resources_available": {"ncpus": ncpus, "mem": "500gb", **more}}

    nodes = {"a": node(64, system="polaris"), "b": node(64, system="polaris"), "c": node(128, ngpus=4)}
    command(tmp_path, "pbsnodes", json.dumps({"nodes": nodes}), monkeypatch)
    assert "#PBS -l select=2:ncpus=64" in PBS.header(Job(nodes=2), OUTPUT)
    assert "#PBS -l place=scatter:excl" in PBS.header(Job(nodes=2), OUTPUT)
    assert "#PBS -l select=1:ncpus=128:ngpus=4" in PBS.header(Job(gpus=4), OUTPUT)
    assert "#PBS -l select=1:ncpus=64:system=polaris" in PBS.header(Job(constraint="system=polaris"), OUTPUT)
    assert "#PBS -l select=1:ncpus=8" in PBS.header(Job(cores=8), OUTPUT)
    assert "ncpus=64" in str(PBS.interactive_argv(Job()))
    PBS.check_limits(Job(nodes=3, cores=128))
    for job, message in (
        (Job(nodes=4), "--nodes 4: PBS has 3 hosts"),
        (Job(cores=129), "--cores 129: the hosts have 128"),
    ):
        with pytest.raises(UserError, match=message):
            PBS.check_limits(job)


def test_arrays() -> None:
    """One submission for many jobs, each with its own output and id."""
    job, output = Job(name="cart", cores=1), "/home/carol/jobs/cart-{index}/scheduler.log"
    slurm = SLURM.array_header(job, output, 100, 5)
    assert "#SBATCH --array=0-99%5" in slurm and "#SBATCH --output=/home/carol/jobs/cart-%a/scheduler.log" in slurm
    assert SLURM.array_ids("17;east\n", 2) == ["17_0", "17_1"] and SLURM.after_array("17", [], 20) == ["17"]
    assert not SLURM.can_be_array(Job(learner_gpus=1))
    pbs = PBS.array_header(job, output, 3, None)
    assert "#PBS -J 0-2" in pbs and "#PBS -r y" in pbs and "#PBS -r n" not in pbs
    assert "#PBS -o /home/carol/jobs/cart-^array_index^/scheduler.log" in pbs
    assert PBS.job_id("17[].pbs1\n") == "17[].pbs1" and PBS.array_ids("17[].pbs1\n", 2) == ["17[0].pbs1", "17[1].pbs1"]
    with pytest.raises(UserError, match="cannot wait for an array whose jobs continue themselves"):
        PBS.after_array("17[].pbs1", ["17[0].pbs1"], 20)
    assert PBS.after_array("17[].pbs1", ["17[0].pbs1"], 1) == ["17[].pbs1"]
    assert "#OAR --array 3" in OAR.array_header(job, output, 3, None)
    assert OAR.array_ids("OAR_JOB_ID=5\nOAR_JOB_ID=6\nOAR_ARRAY_ID=5\n", 2) == ["5", "6"]
    assert not OAR.can_be_array(Job(after=("4",))) and not COBALT.can_be_array(job)
    with pytest.raises(UserError, match="--at-once 2: not available on oar"):
        OAR.array_header(job, output, 3, 2)
    with pytest.raises(UserError, match="printed 1 job ids for 2 jobs"):
        OAR.array_ids("OAR_JOB_ID=5\n", 2)
