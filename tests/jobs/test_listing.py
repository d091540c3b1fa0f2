"""Jobs that were submitted, found again; the commands answer as those of the schedulers do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import UserError
from paceline.jobs.listing import describe, refresh
from paceline.jobs.status import read_run, render
from paceline.schedulers import job_record
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.scheduler import JobStatus

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tool(home: Path, name: str, lines: str) -> None:
    path = home / "bin" / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >>{home}/called\n{lines}\n')
    path.chmod(0o755)


def made(scheduler: str = "slurm", number: str = "7", **changes: Any) -> JobRecord:
    folder = job_record.new_folder("job")
    job_record.create_folder(folder)
    common: dict[str, Any] = {"command": ("true",), "cwd": "/", "nodes": 2, "walltime": 3600, "submitted": time.time()}
    each = JobRecord(folder.name, scheduler, "job", (number,), folder=folder, **{**common, **changes})
    job_record.save(each)
    return each


def state_of(each: JobRecord) -> str:
    return describe(refresh([each])[0][1])


def test_submit_writes_a_record_and_says_what_next(home: Path, cli: Cli) -> None:
    tool(home, "sbatch", "echo 17")
    result = cli("submit", "--on", "slurm", "--nodes", "2", "--", "paceline", "train", "--env", "X", "--name", "n")
    assert result.code == 0 and "job        17 (slurm), 2 hosts" in result.out
    assert all(
        word in result.out for word in ("paceline logs 17 -f", "paceline status 17 --watch", "paceline cancel 17")
    )
    (each,) = job_record.records()
    assert each.ids == ("17",) and each.run == str(home / "runs/n") and each.command[-2:] == ("--resume", "auto")
    assert each.folder.stat().st_mode & 0o777 == 0o700 and each.folder.parent.stat().st_mode & 0o777 == 0o700
    assert os.access(each.folder / "job.sh", os.X_OK)
    assert f"sbatch --parsable {each.folder}/job.sh" in (home / "called").read_text()


def test_dry_run_writes_nothing(home: Path, cli: Cli) -> None:
    result = cli("submit", "--profile", "grid5000", "--nodes", "2", "--dry-run", "--", "true")
    assert result.code == 0 and "#OAR -l nodes=2,walltime=1:00:00\n" in result.out
    assert "#OAR -p cluster='dahu'\n" in result.out and not (home / "data").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "slurm", "--walltime", "240", "--", "x"], "--walltime 240: ambiguous"),
        (["--", "true"], "submit needs --on"),
        (["--on", "lsf", "--", "true"], "--on lsf is not known: use one of slurm, oar, pbs, cobalt"),
        (["--on", "slurm"], "submit needs a command"),
        (["--on", "slurm", "--nodes", "x", "--", "true"], "--nodes=x"),
        (["--on", "oar", "--", "true"], "cannot start oarsub"),
        (["--on", "slurm", "--seeds", "1-0", "--", "true"], "--seeds 1-0"),
        (["--on", "slurm", "--interactive", "--seeds", "1", "--", "true"], "leave out --interactive"),
    ],
)
def test_bad_input_leaves_nothing(words: list[str], message: str, home: Path, cli: Cli, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(home / "bin"))
    result = cli("submit", *words)
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1
    assert not job_record.records() and not list((home / "data").glob("paceline/jobs/*"))


def test_find() -> None:
    with pytest.raises(UserError, match="no job was submitted"):
        job_record.find(None)
    first, second = made("pbs", "7.pbs0"), made("slurm", "8")
    assert job_record.find("7") == job_record.find("7.pbs0") == job_record.find(first.key) == first
    assert job_record.find(None) == job_record.find("job") == second
    with pytest.raises(UserError, match=r"there is no job 9; the newest are 7\.pbs0, 8"):
        job_record.find("9")


def test_the_job_itself_knows_its_exit_code(home: Path) -> None:
    """Without accounting SLURM forgets a job after some minutes."""
    tool(home, "squeue", "case $* in *--me*) ;; *) echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1 ;; esac")
    tool(home, "sacct", "exit 1")
    each = made()
    assert state_of(each).startswith("unknown (the scheduler has forgotten it")
    (each.folder / "exit_code").write_text("3\n")
    assert state_of(each) == "failed, exit code 3"
    assert job_record.find("7").is_over and job_record.find("7").exit_code == 3


def test_a_scheduler_that_does_not_answer_has_killed_nothing(home: Path) -> None:
    for name in ("squeue", "sacct"):
        tool(home, name, "echo 'Unable to contact slurm controller' >&2; exit 1")
    each = made()
    assert state_of(each) == "waiting (no answer from slurm)" and not job_record.find("7").is_over


def test_accounting_knows_what_the_queue_forgot(home: Path) -> None:
    """A cancelled job is neither failed nor killed."""
    tool(home, "squeue", "case $* in *--me*) ;; *) exit 1 ;; esac")
    tool(home, "sacct", "echo '7|CANCELLED by 1000|None|s1|2026-11-15T21:08:00|job'")
    assert state_of(made()) == "cancelled"
    each = made(number="8")
    tool(home, "sacct", "exit 1")  # without accounting the job's own word counts: it was told to end
    (each.folder / "ended").touch()
    (each.folder / "exit_code").write_text("99\n")
    assert state_of(each).startswith("cancelled, exit code 99")


QSTAT = """
case "$*" in
  *-x*) echo 'qstat: PBS is not configured to maintain job history' >&2; exit 2 ;;
  *7.pbs0*) echo '{"Jobs": {"7.pbs0": {"job_state": "R"}}}'; exit 153 ;;
  *8.pbs0*) echo 'qstat: Unknown Job Id 8.pbs0' >&2; exit 153 ;;
  *) echo '{"Jobs": {"7.pbs0": {"job_state": "R"}}}' ;;
esac"""


def test_pbs_without_job_history(home: Path, cli: Cli) -> None:
    """History is off by default; -x then answers about no job, not even a running one."""
    tool(home, "qstat", QSTAT)
    running, ended, killed = made("pbs", "7.pbs0"), made("pbs", "8.pbs0"), made("pbs", "8.pbs0")
    assert state_of(running) == "running"
    (ended.folder / "exit_code").write_text("0\n")
    assert state_of(ended) == "done" and state_of(killed).startswith("unknown (the scheduler has forgotten it")
    assert [describe(status)[:7] for _, status in refresh([running, killed])] == ["running", "unknown"]


def test_pbs_with_job_history(home: Path) -> None:
    finished = '{"Jobs": {"8.pbs0": {"job_state": "F", "Exit_status": 271}}}'
    tool(home, "qstat", f"case $* in *-x*) echo '{finished}' ;; *) echo 'Job has finished' >&2; exit 35 ;; esac")
    assert state_of(made("pbs", "8.pbs0")) == "cancelled, exit code 271"


def test_over_is_over(home: Path) -> None:
    tool(home, "squeue", "echo '7|COMPLETED|None|s1|N/A|job'")
    assert state_of(made()) == "done" and state_of(job_record.find("7")) == "done"
    assert (home / "called").read_text().count("squeue") == 1


def test_a_successor_is_followed(home: Path) -> None:
    """On PBS the job writes down the id of the one it submits; OAR is asked."""
    each = made("pbs", "7.pbs0")
    (each.folder / "ids").write_text("8.pbs0\n")
    tool(home, "qstat", """echo '{"Jobs": {"8.pbs0": {"job_state": "Q"}}}'""")
    assert refresh([each])[0][0].ids == ("7.pbs0", "8.pbs0") and job_record.find("7").every_id[-1] == "8.pbs0"
    other = made("oar", "5")
    (other.folder / "exit_code").write_text("99\n")
    ended = json.dumps({"5": {"state": "Terminated", "exit_code": 99 << 8}})
    mine = json.dumps({"6": {"state": "Waiting", "resubmit_job_id": 5, "message": "R=2"}})
    tool(home, "oarstat", f"case \"$*\" in *-u*) echo '{mine}' ;; *) echo '{ended}' ;; esac")
    new, status = refresh([other])[0]
    assert new.ids == ("5", "6") and status.state == "waiting"


def test_logs(home: Path, cli: Cli) -> None:
    tool(home, "squeue", "echo '7|PENDING|Priority|||job'")
    each = made()
    waiting = cli("logs")
    assert waiting.code == 0 and "nothing yet; job 7 is waiting (Priority)" in waiting.err
    each.output.write_text("one\n")
    each.scheduler_output.write_text("slurmstepd: killed\n")
    tool(home, "squeue", "echo '7|TIMEOUT|TimeLimit|s1|N/A|job'")
    followed = cli("logs", "7", "-f")
    assert followed.out == "one\nslurmstepd: killed\n" and "job 7 is timeout (TimeLimit)" in followed.err


def test_jobs_in_a_table(home: Path, cli: Cli) -> None:
    assert cli("jobs").out.startswith("no jobs")
    tool(home, "squeue", "echo '7|RUNNING|None|s1|2026-11-15T21:08:00|job'")
    each = made()
    (each.folder / "starts").write_text("7 1794778979\n")
    head, row = cli("jobs").out.splitlines()
    assert head.split() == ["job", "on", "name", "hosts", "submitted", "starts", "state"]
    assert row.split()[:4] == ["7", "slurm", "job", "2"] and row.split()[-2:] == ["1", "running"]


def test_the_jobs_of_an_array_are_one_row(home: Path, cli: Cli) -> None:
    states = "17_0|COMPLETED|17_1|FAILED|17_2|RUNNING"
    lines = "".join(
        f"17_{n}|{state}|None|s1|2026-11-15T21:08:00|job\n" for n, state in enumerate(states.split("|")[1::2])
    )
    tool(home, "squeue", f"cat <<'END'\n{lines}END")
    records = [made(number=f"17_{n}", array="17") for n in range(3)]
    tool(home, "scancel", f"echo 99 >{records[2].folder}/exit_code")
    _, row = cli("jobs").out.splitlines()
    assert row.split()[0] == "17" and "1 done, 1 failed (17_1), 1 running" in row
    assert "job 17_1" in cli("status", "17_1").out.replace("        ", " ")
    assert cli("cancel", "17").code == 0
    assert [job_record.find(f"17_{n}").is_cancelled for n in range(3)] == [False, False, True]


def written_run(folder: Path, at: float, cpu: float) -> Path:
    run = folder / "run"
    (run / "logs").mkdir(parents=True, exist_ok=True)
    hosts = [
        {"host": f"s{i}", "address": f"10.0.0.{i}", "cores": 36, "workers": 36, "env_steps": 1000 * i}
        | {"memory_bytes": i << 30, "cpu_seconds": cpu * i}
        for i in (1, 2)
    ]
    (run / "summary.json").write_text(json.dumps({"hosts": hosts}))
    os.utime(run / "summary.json", (at, at))
    (run / "status.json").write_text(json.dumps({"state": "running", "host": "s1"}))
    row = {"iteration": 4, "env_steps": 4000, "cpu_percent": 5000.0, "memory_bytes": 3 << 30, "return_mean": 21.0}
    row |= {"workers_lost": 1, "workers_restarted": 1, "workers_healthy": 72}
    (run / "metrics.jsonl").write_text(json.dumps(row) + '\n{"iteration": 5')
    (run / "logs/events.log").write_text("2026-11-15 21:08:00 worker 3 on s2 was lost\n")
    return run


def test_status_shows_what_the_hosts_do(home: Path) -> None:
    each = made(run=str(home / "run"))
    (each.folder / "starts").write_text("7 900\n7 1000\n")
    run = written_run(home, at=1100, cpu=1000.0)
    first = read_run(run)
    text = render(each, JobStatus("running", hosts="s[1-2]"), first, now=1130.0)
    assert "running, for 0:02:10 of 1:00:00, start 2" in text and "hosts      2: s[1-2]" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip().startswith(("s1", "s2"))}
    assert rows["s1"] == ["s1", "driver,", "workers", "10.0", "36", "1.0", "GB", "36", "1,000"]
    assert rows["s2"] == ["s2", "workers", "20.0", "36", "2.0", "GB", "36", "2,000"]
    for line in (
        "50.0 of 72 cores in use, measured",
        "3.0 GB",
        "1 workers lost, 1 replaced, 72 at work",
        "return 21.0",
    ):
        assert line in text
    assert "worker 3 on s2 was lost" in text and "iteration 4, 4,000 steps" in text
    later = render(each, JobStatus("running"), read_run(written_run(home, 1110, 1300.0)), first, now=1130.0)
    assert " 30.0 " in later and " 60.0 " in later  # since the last look: 300 and 600 s in 10 s


def test_status_tells_what_was_not_measured_yet_and_which_host_is_lost(home: Path) -> None:
    run = written_run(home, at=1100, cpu=0.0)
    summary = json.loads((run / "summary.json").read_text())
    summary["workers"] = 72
    summary["hosts"][0] |= {"memory_bytes": 0, "env_steps": 0}
    summary["hosts"][1] |= {"memory_bytes": 0, "workers": 0, "cores": 0}
    (run / "summary.json").write_text(json.dumps(summary))
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    row |= {"workers_restarted": 0, "workers_healthy": 36, "env_restarts": 3}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    text = render(made(run=str(run)), JobStatus("running"), read_run(run), now=1130.0)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip().startswith(("s1", "s2"))}
    assert rows["s1"] == ["s1", "driver,", "workers", "?", "36", "?", "36", "0"]
    assert rows["s2"] == ["s2", "lost", "?", "?", "?", "0", "2,000"]
    assert "1 workers lost, 0 replaced, 36 of 72 at work" in text
    assert "3 environments failed and were started again" in text


def test_status_of_another_command(home: Path, cli: Cli) -> None:
    tool(home, "squeue", "echo '7|RUNNING|None|s[1-2]|2026-11-15T21:08:00|job'")
    each = made(command=("python", "mine.py"))
    (each.folder / "launch").mkdir()
    events = [("launcher", "formed"), ("s1", "ready"), ("s2", "ready"), ("s2", "lost")]
    lines = [json.dumps({"timestamp": time.time(), "host": h, "phase": p, "detail": "x"}) for h, p in events]
    (each.folder / "launch/timeline.jsonl").write_text("\n".join(lines) + "\n")
    (each.folder / "starts").write_text(f"7 {int(time.time())}\n")
    out = cli("status").out
    assert "s1: ready x" in out and "s2: lost x" in out and "command    python mine.py" in out and "launcher" not in out


def test_status_before_anything_is_written(home: Path) -> None:
    assert "nothing written yet" in render(made(run=str(home / "none")), JobStatus("running"), read_run(home / "none"))
