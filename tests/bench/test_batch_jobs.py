"""A scaling benchmark as jobs. `sbatch` and `squeue` answer as SLURM's do; tests/cluster has a real one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.batch_jobs import JobQueue, Request, job_name
from paceline.bench.scaling import Matrix, plan_scaling
from paceline.schedulers import SCHEDULERS
from paceline.schedulers import job_record as record
from paceline.schedulers.job import Job
from paceline.schedulers.profile import Profile
from paceline.schedulers.script import CANCELLED, EXIT_CODE, OUTPUT

Cli = Callable[..., Any]
REQUEST = Request(SCHEDULERS["slurm"], Profile(), Job(), ("--on", "slurm"))
SMALL = ["--iterations", "2", "--seeds", "1", "--preset", "none", "--set", "ppo.rollout_steps=16", "--out", "st"]
STUDY = ["bench", "scaling", "--on", "slurm", *SMALL]


@pytest.fixture(autouse=True)
def home(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty queue that takes everything."""
    monkeypatch.setenv("XDG_DATA_HOME", str(here / "data"))
    (here / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")
    tool(here, "sbatch", "wc -l <called")
    tool(here, "squeue", "")
    return here


def tool(home: Path, name: str, lines: str) -> None:
    path = home / "bin" / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >>{home}/called\n{lines}\n')
    path.chmod(0o755)


def submitted(home: Path) -> int:
    path = home / "called"
    return path.read_text().count("sbatch ") if path.exists() else 0


def states() -> list[str]:
    return [run["state"] for run in json.loads(Path("st/scaling.json").read_text())["runs"]]


def test_submitted_once_then_read(home: Path, cli: Cli) -> None:
    words = [*STUDY, "--workers", "1,2", "--nodes", "1,2", "--cores", "4", "--extra", "--comment=a b"]
    shown = cli(*words, "--dry-run")
    assert shown.code == 0 and submitted(home) == 0 and not Path("st").exists()
    assert (
        "paceline submit --on slurm --cores 4 --extra '--comment=a b' --name CartPole-v1-ppo-auto-n2-w2-s0" in shown.out
    )
    tool(home, "sbatch", 'for each; do :; done; grep -q nodes=2 "$each" && { echo too many jobs >&2; exit 1; }; echo 7')
    result = cli(*words)
    assert result.code == 2 and "n2-w2-s0: `sbatch" in result.err and "too many jobs; the same command" in result.err
    assert states() == ["waiting", "waiting", "missing"] and len(record.records()) == 2
    tool(home, "sbatch", "echo 9")
    tool(home, "squeue", "echo '7|RUNNING|None|n1|N/A|x'; echo '9|PENDING|Priority||N/A|x'")
    result = cli(*words)
    assert result.code == 0 and len(record.records()) == 3, result.out
    assert "job 9 waiting (just submitted)" in result.out and result.out.count("job 7 running") == 2
    before = submitted(home)
    result = cli(*words)
    assert result.code == 0 and "job 9 waiting (Priority)" in result.out and submitted(home) == before
    nodes = [(each.folder / "job.sh").read_text().count("#SBATCH --nodes=2\n") for each in record.records()]
    assert nodes == [0, 0, 1]
    result = cli("bench", "scaling", *SMALL, "--workers", "1", "--nodes", "1")  # would be made twice
    assert result.code == 2 and "is in a queue (job 7 running)" in result.err
    text = Path("st/scaling.md").read_text()
    assert "- `CartPole-v1-ppo-auto-n2-w2-s0`: job 9 waiting (Priority)" in text and "0 of 1 (1 queued)" in text


def test_what_a_job_came_to(home: Path, cli: Cli) -> None:
    """A run for real, one that never began, and one more with --retry."""
    words = [*STUDY, "--workers", "1", "--engines", "auto,local"]
    assert cli(*words).code == 0
    first, second = record.records()
    assert first.run == str(home / "st/CartPole-v1-ppo-auto-w1-s0")
    assert cli(*first.command[1:]).code == 0  # as its job would
    (first.folder / EXIT_CODE).write_text("0\n")
    (second.folder / EXIT_CODE).write_text("2\n")
    (second.folder / OUTPUT).write_text(
        "paceline: job 7, start 1, on n1, now\npaceline: no room\npaceline: exit code 2\n"
    )
    result = cli(*words)
    assert result.code == 1 and "speed-up" in result.out and "already done: " in result.out, result.out
    assert states() == ["done", "failed"] and f"job {second.id} failed, exit code 2: no room" in result.out
    assert "skipped without --retry" in cli(*words).out and len(record.records()) == 2
    result = cli(*words, "--retry")
    assert result.code == 0 and len(record.records()) == 3 and states() == ["done", "waiting"]
    assert f"missing: job {record.records()[-1].ids[0]} waiting (just submitted)" in cli("compare", "st").out
    # It dies without a word, in a queue that does not answer, and then does.
    tool(home, "squeue", "exit 1")
    assert cli(*words).code == 0 and states() == ["done", "waiting"]
    tool(home, "squeue", "")
    result = cli(*words)
    assert result.code == 1 and "it was killed" in result.out and len(record.records()) == 3
    shutil.rmtree("st")  # and from the beginning: those jobs are of another time
    assert cli(*words).code == 0 and len(record.records()) == 5


@pytest.mark.parametrize(
    ("code", "cancelled", "directory", "state"),
    [
        ("99", False, "interrupted", "interrupted"),  # saved and stopped: goes on
        ("99", True, "interrupted", "failed"),  # because the user said so
        (None, False, "interrupted", "interrupted"),  # killed, its host gone perhaps
        (None, False, "missing", "failed"),  # before it began: more of that helps nobody
        ("1", False, "interrupted", "failed"),
        ("0", False, "done", "done"),
        ("0", False, "missing", "failed"),
    ],
)
def test_what_is_resumed(code: str | None, cancelled: bool, directory: str, state: str) -> None:
    (run,) = plan_scaling(Matrix(workers=[1], seeds=1, iterations=2), out=Path("st"), request=REQUEST)
    JobQueue(REQUEST, [run]).submit(run, 1)
    (each,) = record.records()
    if code is not None:
        (each.folder / EXIT_CODE).write_text(f"{code}\n")
    if cancelled:
        (each.folder / CANCELLED).touch()
    entry = {"name": run.name, "state": directory, "reason": None}
    found = JobQueue(REQUEST, [run]).with_job(run, entry, {"state": "waiting", "job": each.ids[0]})
    assert found["state"] == state and found["job"] == each.ids[0], found
    assert state != "failed" or f"job {each.ids[0]} " in found["reason"]


def test_pbs_without_job_history(home: Path, cli: Cli) -> None:
    """A running job is no failed one, and --retry does not submit it twice."""
    tool(home, "qsub", "echo 7.pbs0")
    tool(home, "pbsnodes", "exit 1")
    running = '{"Jobs": {"7.pbs0": {"job_state": "R"}}}'
    tool(home, "qstat", f"case $* in *-x*) echo 'no history' >&2; exit 2 ;; *) echo '{running}' ;; esac")
    words = ["bench", "scaling", "--on", "pbs", *SMALL, "--workers", "1"]
    assert cli(*words).code == 0 and states() == ["waiting"]
    result = cli(*words, "--retry")
    assert result.code == 0 and states() == ["running"] and len(record.records()) == 1, result.out


def test_names_that_schedulers_take() -> None:
    names = [job_name(name) for name in ("CartPole-v1-w1", "2048@x=1-w1")]
    assert names == ["CartPole-v1-w1", "run-2048-x-1-w1"] and all(Job(name=name) for name in names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "scaling", *SMALL, "--walltime", "1h"], "--walltime 1h is an option for jobs: also give --on"),
        ([*STUDY, "--walltime", "90"], "minutes in SLURM"),
        ([*STUDY, "--nodes", "1", "--rehearse"], "--rehearse: the jobs of --on"),
        (["bench", "scaling", "--on", "cluster:lab", *SMALL], "--on cluster:lab is not known: use one of slurm"),
    ],
)
def test_what_is_refused(words: list[str], said: str, cli: Cli) -> None:
    result = cli(*words)
    assert result.code == 2 and said in result.err and not Path("st").exists()
