"""`paceline cancel` asks a running job to save and end, and kills it only if it does not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.jobs import cancel as cancelling
from paceline.jobs.listing import describe, refresh
from paceline.run.directory import RunDirectory
from paceline.schedulers import job_record
from paceline.schedulers.job_record import JobRecord

Cli = Callable[..., Any]
ASK = {
    "slurm": "scancel --batch --signal=TERM 7",
    "pbs": "qdel 7",
    "oar": "oardel --signal TERM 7",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, answer in {
        "squeue": "echo '7|RUNNING|None|s1|2026-11-15T21:08:00|job'",
        "qstat": """echo '{"Jobs": {"7": {"job_state": "R", "queue": "q"}}}'""",
        "oarstat": """echo '{"7": {"state": "Running"}}'""",
        "scontrol": "echo 'KillWait                = 30 sec'",
        **dict.fromkeys(("scancel", "qsig", "qdel", "oardel"), ""),
    }.items():
        tool(tmp_path, name, answer)
    return tmp_path


def tool(home: Path, name: str, lines: str) -> None:
    path = home / "bin" / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >>{home}/called\n{lines}\n')
    path.chmod(0o755)


def called(home: Path) -> list[str]:
    """The commands that end a job."""
    lines = (home / "called").read_text().splitlines()
    return [line for line in lines if line.split()[0] in ("scancel", "qsig", "qdel", "oardel")]


def made(scheduler: str = "slurm", run: str = "") -> JobRecord:
    folder = job_record.new_folder("job")
    job_record.create_folder(folder)
    each = JobRecord(folder.name, scheduler, "job", ("7",), ("true",), "/", 1, 60, time.time(), run, folder=folder)
    job_record.save(each)
    return each


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "oar"])
def test_a_running_job_is_asked_and_saves(scheduler: str, home: Path, cli: Cli) -> None:
    each = made(scheduler)
    tool(home, ASK[scheduler].split()[0], f"echo 99 >{each.folder}/exit_code")
    result = cli("cancel", "7")
    assert result.code == 0 and "saved its run and ended" in result.out and each.is_cancelled
    assert called(home) == [ASK[scheduler]]


def test_a_job_that_does_not_end_is_killed(home: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "STOP_SECONDS", 0.2)
    tool(home, "scontrol", "echo 'KillWait                = 1 sec'")
    made()
    assert "did not end within 1.2 s" in cli("cancel", "7").out and called(home) == [ASK["slurm"], "scancel 7"]


def test_a_second_time_kills_at_once(home: Path, cli: Cli) -> None:
    made().mark_cancelled()
    assert cli("cancel", "7").code == 0 and called(home) == ["scancel 7"]


def test_a_waiting_job_is_not_asked(home: Path, cli: Cli) -> None:
    tool(home, "squeue", "echo '7|PENDING|Priority|||job'")
    made()
    assert cli("cancel", "7").code == 0 and called(home) == ["scancel 7"]


def test_a_scheduler_that_refuses_to_ask(home: Path, cli: Cli) -> None:
    tool(home, "scancel", '[ "$1" != --batch ] || { echo "not here" >&2; exit 1; }')
    made()
    assert "not here" in cli("cancel", "7").out and called(home) == [ASK["slurm"], "scancel 7"]


@pytest.mark.parametrize("in_use", [False, True])
def test_the_status_of_a_killed_run_is_corrected(in_use: bool, home: Path) -> None:
    run = RunDirectory.create(home, "r", "ppo", "X-v0", reuse=False)
    run.write_status(state="running", reason="", iteration=3)
    tool(home, "squeue", "echo '7|CANCELLED|None|s1|2026-11-15T21:08:00|job'")
    other = RunDirectory(run.path)  # another job that continues it
    if in_use:
        other.lock()
    each, status = refresh([made(run=str(run.path))])[0]
    assert each.is_over and describe(status).startswith("cancelled")
    other.unlock()
    written = json.loads(run.status_path.read_text())
    assert written["iteration"] == 3 and written["state"] == ("running" if in_use else "stopped")
    assert in_use or written["reason"] == "job 7 ended: cancelled"
