"""Text in, text out. SQUEUE and OARSTAT are what SLURM 22.05 and OAR 2.5.9 printed. The rest of the answers is written
by hand: for PBS after notes on a real OpenPBS 23.06, for Cobalt from general knowledge, checked against no machine.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.config import UserError
from paceline.schedulers import SCHEDULERS
from paceline.schedulers.job import Job
from paceline.schedulers.scheduler import Host, grace_seconds
from paceline.schedulers.slurm import expand

OUTPUT = Path("/home/carol/job/scheduler.log")
SQUEUE = """\
7|CANCELLED|Priority||2026-11-15T22:19:40|gone
1|COMPLETED|None|node[1-2]|2026-11-15T22:19:27|hostname
2|COMPLETED|None|node1|2026-11-15T22:19:29|ok
3|FAILED|NonZeroExitCode|node1|2026-11-15T22:19:29|a|b
4+0|PENDING|None||N/A|het
4+1|PENDING|None||N/A|het
6|PENDING|Priority||N/A|waits
"""
OARSTAT = """{"1": {"project": "default", "array_index": 1, "submissionTime": 1794780131, "resubmit_job_id": 0,
"queue": "default", "job_user": "alice", "name": "t1", "jobType": "PASSIVE", "scheduledStart": null,
"stopTime": 1794780143, "exit_code": 768, "types": ["idempotent"], "owner": "alice", "startTime": 1794780133,
"message": "R=4,W=0:5:0,J=B,N=t1,T=idempotent (Karma=0.000,quota_ok)", "assigned_network_address": ["o1", "o2"],
"Job_Id": 1, "state": "Terminated", "cpuset_name": "alice_1", "dependencies": [], "walltime": 300,
"events": [{"to_check": "NO", "event_id": 1, "job_id": 1, "description": "[bipbip 1] Ask to change the job state",
"date": 1794780144, "type": "SWITCH_INTO_TERMINATE_STATE"}]}}"""
SLURM, OAR, PBS, COBALT = (SCHEDULERS[name] for name in ("slurm", "oar", "pbs", "cobalt"))


def command(folder: Path, name: str, prints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, first in PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_schedulers_are_light_and_complete() -> None:
    """Every process of a job imports them to count its cores."""
    program = (
        "import sys; from paceline.schedulers import SCHEDULERS; print('pydantic' in sys.modules, len(SCHEDULERS))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", str(len(SCHEDULERS))]
    for name, scheduler in SCHEDULERS.items():
        assert scheduler.name == name and scheduler.id_variables and scheduler.hosts_variable
        assert scheduler.allocation({}) is None and scheduler.states("") == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("s1", "s1"),
        ("s1,s2", "s1 s2"),
        ("r7i7n[09-11]", "r7i7n09 r7i7n10 r7i7n11"),
        ("n[1-2,5],x[3]-ib,login", "n1 n2 n5 x3-ib login"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("", ""),
    ],
)
def test_slurm_hostlist(text: str, names: str) -> None:
    assert expand(text) == names.split()


def test_slurm_header() -> None:
    job = Job(name="cart", nodes=3, cores=36, memory="90G", walltime="20m", account="p", qos="high", queue="debug")
    lines = SLURM.header(job, OUTPUT)
    assert all(line.startswith("#SBATCH --") for line in lines)
    words = [line.removeprefix("#SBATCH ") for line in lines]
    for word in ("--job-name=cart", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=36", "--mem=90G"):
        assert word in words
    for word in (
        "--time=0:20:00",
        "--account=p",
        "--qos=high",
        "--partition=debug",
        "--signal=B:USR1@120",
        "--requeue",
        "--no-kill",
    ):
        assert word in words
    whole = SLURM.header(Job(), OUTPUT)
    assert "#SBATCH --exclusive" in whole and "#SBATCH --mem=0" in whole  # else DefMemPerCPU times its cores
    assert "#SBATCH --mem=0" not in SLURM.header(Job(memory="5G"), OUTPUT)
    assert "#SBATCH --no-requeue" in SLURM.header(Job(attempts=1), OUTPUT)


def test_slurm_learner_with_a_gpu_comes_first() -> None:
    job = Job(nodes=3, cores=4, queue="cpu", learner_gpus=2, learner_queue="gpu", learner_cores=8)
    lines = SLURM.header(job, OUTPUT)
    at = lines.index("#SBATCH hetjob")
    first, second = lines[:at], lines[at:]
    assert {"#SBATCH --nodes=1", "#SBATCH --gres=gpu:2", "#SBATCH --partition=gpu", "#SBATCH --cpus-per-task=8"} <= {
        *first
    }
    assert {"#SBATCH --nodes=3", "#SBATCH --partition=cpu", "#SBATCH --cpus-per-task=4"} <= {*second}
    assert not any("gres" in line for line in second)
    assert ":" in SLURM.interactive_argv(job) and job.hosts == 4


def test_slurm_allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "s[1-3]",
        "SLURM_JOB_CPUS_PER_NODE": "36(x2),4",
        "SLURM_MEM_PER_NODE": "1000",
        "SLURM_PROCID": "0",  # the batch script has it too
        "SLURM_JOB_END_TIME": "1700000000",
    }
    found = SLURM.allocation(environ)
    assert found is not None and found.rank is None and found.deadline == 1.7e9
    assert found.hosts == tuple(Host(f"s{i}", n, 0, 1000 << 20) for i, n in ((1, 36), (2, 36), (3, 4)))
    step = SLURM.allocation({**environ, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"})
    assert step is not None and (step.rank, step.size) == (2, 3)
    del environ["SLURM_JOB_END_TIME"]
    command(tmp_path, "squeue", "2026-11-15T21:08:00", monkeypatch)
    asked = SLURM.allocation(environ)
    assert asked is not None and asked.deadline == time.mktime((2026, 11, 15, 21, 8, 0, 0, 0, -1))
    assert SLURM.allocation({}) is None


def test_kill_delays_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """30 s where nothing answers, PBS 10 s; a quarter of it, at most 5 s, is for ending everything else."""
    for name in ("scontrol", "qstat"):
        command(tmp_path, name, "no answer", monkeypatch)
    assert [SCHEDULERS[name].kill_delay("7") for name in ("slurm", "oar", "pbs", "cobalt")] == [30, 30, 10, 30]
    command(tmp_path, "scontrol", "KillOnBadExit           = 0\nKillWait                = 90 sec", monkeypatch)
    found = SLURM.allocation({"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "s1", "SLURM_JOB_END_TIME": "1"})
    assert found is not None and found.kill_delay == 90 and SLURM.kill_delay("12") == 90
    assert found.sentinel[0] == "srun" and found.sentinel[-2:] == ("sleep", "infinity")
    answers = """[ "$1" = -Q ] && echo '    kill_delay = 45' || echo '{"Jobs": {"7": {"queue": "q"}}}'"""
    (tmp_path / "qstat").write_text(f"#!/bin/sh\n{answers}\n")
    assert PBS.kill_delay("7") == 45
    assert [grace_seconds({}, delay) for delay in (30, 10, 90)] == [25, 7.5, 85]
    assert grace_seconds({"PACELINE_KILL_DELAY": "20"}, 30) == 15


def test_slurm_heterogeneous_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "g1",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "g1",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "8",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "s[1-2]",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "36(x2)",
        "SLURM_JOB_END_TIME": "1",
    }
    found = SLURM.allocation(environ)
    assert found is not None and [(host.name, host.cpus) for host in found.hosts] == [("g1", 8), ("s1", 36), ("s2", 36)]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    argv = SLURM.remote_argv("s2", ["python", "x y"], {"A": "b c"})
    assert argv[0] == "srun" and {"--overlap", "--nodelist=s2", "--het-group=1", "--cpus-per-task=36"} <= {*argv}
    assert argv[-4:] == ["env", "A=b c", "python", "x y"]
    assert "--het-group=0" in SLURM.remote_argv("g1", ["x"], {})


def test_what_the_schedulers_printed() -> None:
    states = SLURM.states(SQUEUE)
    assert {n: s.state for n, s in states.items()} == {
        **{"7": "cancelled", "1": "done", "2": "done", "3": "failed", "4": "waiting", "6": "waiting"}
    }
    assert states["3"].name == "a|b" and states["3"].reason == "NonZeroExitCode" and states["1"].hosts == "node[1-2]"
    job = OAR.states(OARSTAT)["1"]
    assert (job.state, job.exit_code, job.hosts, job.reason) == ("failed", 3, "o1,o2", "")
    assert job.started == 1794780133 and job.name == "t1" and job.replaces == ""


def test_slurm_states() -> None:
    text = (
        "41|PENDING|Resources||N/A|waits\n42|RUNNING|None|s[1-2]|2026-11-15T21:08:00|a|b\n43|TIMEOUT|TimeLimit|s1|N/A|t\n"
        "44+0|RUNNING|None|g1|2026-11-15T21:08:00|het\n44+1|RUNNING|None|s1|2026-11-15T21:08:00|het\n"
        "45|CANCELLED|None||N/A|c\n46|COMPLETED|None|s1|2026-11-15T21:08:00|d\n47|MARTIAN|None||N/A|x\n"
    )
    states = SLURM.states(text)
    assert {number: status.state for number, status in states.items()} == {
        "41": "waiting",
        "42": "running",
        "43": "timeout",
        "44": "running",
        "45": "cancelled",
        "46": "done",
        "47": "unknown",
    }
    assert states["41"].reason == "Resources" and states["41"].started is None
    assert states["42"].name == "a|b" and states["42"].hosts == "s[1-2]" and states["44"].hosts == "g1,s1"
    assert SLURM.job_id("17\n") == "17" and SLURM.job_id("18;east\n") == "18"
    assert SLURM.states("slurm_load_jobs error: Invalid job id specified") == {}


def test_slurm_asks_its_accounting_about_old_jobs() -> None:
    """The lines of jobs 2 to 6 are those of a real accounting: a job that lost a host has a line for each of its sizes.
    The others are written after sacct's manual."""
    text = (
        "2|CANCELLED by 0|None|node[1-2]|2026-11-16T22:08:37|scancel-2-0\n"
        "4|FAILED|None|node[1-2]|2026-11-16T22:10:45|paceline-cancel-2-0\n"
        "6|RESIZING|None|node[1-2]|2026-11-16T22:13:14|link-cut-2-0\n"
        "6|FAILED|None|node1|2026-11-16T22:14:00|link-cut-2-0\n"
        "7|CANCELLED by 1000|None|node1|2026-11-15T22:19:40|gone\n8|OUT_OF_MEMORY|None|node1|2026-11-15T22:19:27|big\n"
        "9_3|COMPLETED|None|node2|2026-11-15T22:19:27|element\n10|CANCELLED by 0|None|None assigned|None|never began\n"
    )
    states = SLURM.states(text)
    assert {n: s.state for n, s in states.items()} == {
        "2": "cancelled",
        "4": "failed",
        "6": "failed",
        "7": "cancelled",
        "8": "failed",
        "9_3": "done",
        "10": "cancelled",
    }
    assert states["10"].hosts == "" and states["10"].started is None and states["7"].name == "gone"
    argv = SLURM.history_argv(["7", "9_3"])
    assert argv[0] == "sacct" and "--jobs=7,9_3" in argv and "--parsable2" in argv


def test_no_job_id_shows_what_was_said() -> None:
    with pytest.raises(UserError, match="sbatch printed no job id; its output: the queue is closed"):
        SLURM.job_id("the queue\nis closed")


def test_oar_header_is_not_quoted() -> None:
    job = Job(name="g5k", nodes=2, walltime="1h", constraint="cluster='dahu'", account="p", mail="a@b.c", after=("7",))
    lines = [line.removeprefix("#OAR ") for line in OAR.header(job, OUTPUT)]
    assert lines[:2] == ["-l nodes=2,walltime=1:00:00", "-n g5k"]
    for line in ("-p cluster='dahu'", "--project p", "-a 7", "--checkpoint 120", "--signal 12", "-t idempotent"):
        assert line in lines
    assert OAR.interactive_argv(job)[:4] == ["oarsub", "-I", "-l", "nodes=2,walltime=1:00:00"]
    assert "-t idempotent" not in str(OAR.header(Job(attempts=1), OUTPUT))


def test_oar_allocation_keeps_the_order(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("o2\no2\no1\no1\no1\n")
    os.utime(nodes, (1e9, 1e9))
    found = OAR.allocation({"OAR_JOB_ID": "5", "OAR_NODEFILE": str(nodes), "OAR_JOB_WALLTIME_SECONDS": "300"})
    assert found is not None and found.hosts == (Host("o2", 2), Host("o1", 3))
    assert found.deadline == 1e9 + 300 and found.rank is None
    assert OAR.allocation({}) is None
    with pytest.raises(UserError, match="first host"):
        OAR.allocation({"OAR_JOB_ID": "5", "OAR_NODEFILE": str(tmp_path / "none")})


def test_a_node_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_bytes(b"n\xe4chster\n")
    for name, given in (("oar", {"OAR_JOB_ID": "7"}), ("pbs", {"PBS_JOBID": "7"}), ("cobalt", {"COBALT_JOBID": "7"})):
        scheduler = SCHEDULERS[name]
        with pytest.raises(UserError, match="not UTF-8 text"):
            scheduler.allocation({**given, scheduler.hosts_variable: str(tmp_path / "nodes")})


def test_oarsh_gets_one_word_that_a_shell_takes_apart() -> None:
    argv = OAR.remote_argv("o2", ["python", "-c", "print('x')"], {"A": "b c"})
    assert argv[:2] == ["oarsh", "o2"] and len(argv) == 3
    assert shlex.split(argv[2]) == ["env", "A=b c", "python", "-c", "print('x')"]


def oar_job(**changes: Any) -> dict[str, Any]:
    return {**json.loads(OARSTAT)["1"], "exit_code": 0, "events": [], **changes}


@pytest.mark.parametrize(
    ("changes", "state", "code"),
    [
        ({}, "done", 0),
        ({"exit_code": 768}, "failed", 3),
        ({"exit_code": 99 << 8}, "failed", 99),
        ({"state": "Error", "exit_code": None, "events": [{"type": "FRAG_JOB_REQUEST"}]}, "cancelled", None),
        ({"state": "Error", "exit_code": None, "events": [{"type": "WALLTIME"}]}, "timeout", None),
        ({"state": "Error", "exit_code": None}, "failed", None),
        ({"state": "Waiting", "exit_code": None, "message": "R=2,W=1:0:0"}, "waiting", None),
        ({"state": "Running", "exit_code": None}, "running", None),
        ({"state": "Sleeping", "exit_code": None}, "unknown", None),
    ],
)
def test_oar_states(changes: dict[str, Any], state: str, code: int | None) -> None:
    status = OAR.states(json.dumps({"12": oar_job(**changes)}))["12"]
    assert (status.state, status.exit_code, status.hosts) == (state, code, "o1,o2")


def test_oar_says_which_job_it_started_again() -> None:
    assert OAR.states(json.dumps({"13": oar_job(resubmit_job_id=12)}))["13"].replaces == "12"
    assert OAR.job_id("[ADMISSION RULE] Modify resource description\nOAR_JOB_ID=12\n") == "12"
    assert OAR.states("no such job") == {}


def test_pbs_header() -> None:
    job = Job(
        name="x", nodes=2, cores=4, gpus=1, memory="16G", walltime="90m", constraint="system=polaris", after=("1",)
    )
    lines = [line.removeprefix("#PBS ") for line in PBS.header(job, OUTPUT)]
    assert "-l select=2:ncpus=4:ngpus=1:mem=16gb:system=polaris" in lines and "-l place=scatter" in lines
    assert "-l walltime=1:30:00" in lines and "-S /bin/bash" in lines
    # Not in the script, which the job submits again when the jobs before it are forgotten.
    assert not any("depend" in line for line in lines)
    assert PBS.submit_argv(Path("job.sh"), ["1", "2"]) == ["qsub", "-W", "depend=afterok:1:2", "job.sh"]
    assert PBS.interactive_argv(job)[-2:] == ["-W", "depend=afterok:1"]
    assert "#PBS -l place=scatter:excl" in PBS.header(Job(), OUTPUT)
    het = PBS.header(Job(nodes=3, cores=4, learner_gpus=1), OUTPUT)
    assert "#PBS -l select=1:ncpus=4:ngpus=1+3:ncpus=4" in het


def test_pbs_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("pbs1.site\npbs2.site\npbs2.site\n")
    os.utime(nodes, (1e9, 1e9))
    environ = {"PBS_JOBID": "7.pbs1", "PBS_NODEFILE": str(nodes)}
    job = {"exec_host": "pbs1/0*4+pbs2/0*2+pbs2/1", "Resource_List": {"walltime": "00:10:00", "place": "scatter"}}
    command(tmp_path, "qstat", json.dumps({"Jobs": {"7.pbs1": job}}), monkeypatch)
    found = PBS.allocation(environ)
    assert found is not None and found.hosts == (Host("pbs1.site", 4), Host("pbs2.site", 3))
    assert found.deadline == 1e9 + 600
    job["Resource_List"] = {"place": "scatter:excl"}  # one CPU was asked for, the whole host given
    command(tmp_path, "qstat", json.dumps({"Jobs": {"7.pbs1": job}}), monkeypatch)
    whole = PBS.allocation({**environ, "PACELINE_DEADLINE": "77"})
    assert whole is not None and whole.hosts[0].cpus == 0 and whole.deadline == 77
    job["Resource_List"] = {"place": "scatter"}
    job["exec_vnode"] = (
        "(pbs1:ncpus=4:mem=8388608kb:ngpus=1)+(pbs2[0]:ncpus=1:mem=1gb+pbs2[1]:ncpus=1:mem=1gb)+(pbs2:ncpus=1)"
    )
    command(tmp_path, "qstat", json.dumps({"Jobs": {"7.pbs1": job}}), monkeypatch)
    shared = PBS.allocation(environ)
    assert shared is not None and shared.hosts == (Host("pbs1.site", 4, 1, 8 << 30), Host("pbs2.site", 3, 0, 2 << 30))


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"job_state": "Q", "comment": "Can Never Run: Insufficient amount of resource: ncpus"}, "waiting"),
        ({"job_state": "R"}, "running"),
        ({"job_state": "F", "Exit_status": 0}, "done"),
        ({"job_state": "F", "Exit_status": 3}, "failed"),
        ({"job_state": "F", "Exit_status": 271}, "cancelled"),
        ({"job_state": "F", "Exit_status": 143}, "cancelled"),
        ({"job_state": "F", "Exit_status": -29}, "timeout"),
        ({"job_state": "Z"}, "unknown"),
    ],
)
def test_pbs_states(changes: dict[str, Any], state: str) -> None:
    job = {"Job_Name": "x", "exec_host": "pbs1/0*4+pbs2/0*4", "stime": "Sun Nov 15 21:08:00 2026", **changes}
    status = PBS.states(json.dumps({"Jobs": {"7.pbs1": job}}))["7.pbs1"]
    assert status.state == state and status.hosts == "pbs1,pbs2" and status.started is not None
    assert status.reason == changes.get("comment", "")


def test_pbs_odd_answers() -> None:
    assert PBS.states('{"timestamp": 1, "pbs_server": "pbs1"}') == {} and PBS.states("qstat: Unknown Job Id 9") == {}
    raw = '{"Jobs": {"7.pbs1": {"job_state": "R", "Variable_List": {"A": "a\tb", "B": true, "C": 7}}}}'
    assert PBS.states(raw)["7.pbs1"].state == "running"
    assert PBS.job_id("7.pbs1\n") == "7.pbs1"
    argv = PBS.remote_argv("pbs2", ["/venv/bin/python", "a b"], {"A": "c"})
    assert argv[:4] == ["pbs_tmrsh", "pbs2", "/bin/sh", "-c"] and argv[4] == "exec env A=c /venv/bin/python 'a b'"


def test_cobalt(tmp_path: Path) -> None:
    job = Job(nodes=2, walltime="61s", save=1, queue="debug", account="datascience", constraint="enable_ssh=1")
    lines = [line.removeprefix("#COBALT ") for line in COBALT.header(job, OUTPUT)]
    assert {"-n 2", "-t 2", "-q debug", "-A datascience", "--attrs enable_ssh=1"} <= {*lines}
    assert COBALT.job_id("Submitting to the debug queue\n266379\n") == "266379"
    text = (
        "JobID: 266379\n    JobName           : x\n    State             : running\n    Location          : 3840-3841\n"
        "JobID: 266380\n    JobName           : y\n    State             : dep_hold\n    Location          : None\n"
    )
    states = COBALT.states(text)
    assert {n: (s.state, s.hosts) for n, s in states.items()} == {
        "266379": ("running", "3840-3841"),
        "266380": ("waiting", ""),
    }
    nodes = tmp_path / "nodes"
    nodes.write_text("nid03840\nnid03841\n")
    found = COBALT.allocation({"COBALT_JOBID": "1", "COBALT_NODEFILE": str(nodes), "COBALT_ENDTIME": "1700000000.5"})
    assert (
        found is not None
        and [h.name for h in found.hosts] == ["nid03840", "nid03841"]
        and found.deadline == 1.7e9 + 0.5
    )
    with pytest.raises(UserError, match="aprun"):
        COBALT.allocation({"COBALT_JOBID": "1"})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("oar", "qos", "high"),
        ("oar", "memory", "1G"),
        ("oar", "learner_gpus", 1),
        ("pbs", "qos", "x"),
        ("cobalt", "cores", 4),
    ],
)
def test_what_a_scheduler_cannot_do_is_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')} {value}"):
        SCHEDULERS[name].header(Job.model_validate({field: value}), OUTPUT)


def test_extra_directives_are_verbatim() -> None:
    for scheduler in SCHEDULERS.values():
        assert scheduler.header(Job(extra=("-x 'a b'",)), OUTPUT)[-1] == f"{scheduler.prefix} -x 'a b'"


def test_slurm_quotes_in_a_script_and_not_on_a_command_line() -> None:
    job = Job(constraint="a|b&c", account="p1", extra=("-w n[1-2] --hint=nomultithread",))
    lines = SLURM.header(job, Path("/home/a b/out"))
    assert '#SBATCH --constraint="a|b&c"' in lines and '#SBATCH --output="/home/a b/out"' in lines
    assert "#SBATCH --account=p1" in lines and "#SBATCH -w n[1-2] --hint=nomultithread" in lines
    words = SLURM.interactive_argv(job)
    assert "--constraint=a|b&c" in words and {"-w", "n[1-2]", "--hint=nomultithread"} <= {*words}
