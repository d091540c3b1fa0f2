"""A cluster of this machine alone, without ssh: what runs on a head is run here."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.schedulers import job_record
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.scheduler import JobStatus
from paceline.ssh_cluster.cluster_state import ClusterState, save
from paceline.ssh_cluster.fetch import fetch
from paceline.ssh_cluster.hosts_file import ClusterConfig
from paceline.ssh_cluster.remote import RemoteError, RemoteHost
from paceline.ssh_cluster.remote_jobs import ClusterJobs, copy_job_files, run_folder


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    """A job of a cluster `lab`, whose head is this machine."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    hosts = ClusterConfig(name="lab", hosts=("localhost",))  # type: ignore[arg-type]
    save(ClusterState(config=hosts, workdir=str(tmp_path / "w"), python="python"))
    job, run = tmp_path / "w/jobs/lab-1", tmp_path / "w/runs/p/x"
    (job / "work").mkdir(parents=True)
    (run / "logs").mkdir(parents=True)
    (job / "job.sh").write_text("sleep 30\n")
    (job / "output.log").write_text("one\n")
    (run / "status.json").write_text("{}")
    (run / "metrics.jsonl").write_text("row\n" * 30_000)
    folder = job_record.new_folder("paceline")
    job_record.create_folder(folder)
    made = JobRecord(
        key=folder.name, scheduler="cluster:lab", name="paceline", ids=("lab-1",), command=("true",), cwd="/", nodes=1,
        walltime=0, submitted=time.time(), run=str(run), folder=folder,
    )  # fmt: skip
    job_record.save(made)
    return made


def state(cluster: ClusterJobs) -> JobStatus | None:
    said = subprocess.run(cluster.status_argv(["lab-1"]), capture_output=True, text=True, timeout=20).stdout
    return cluster.states(said).get("lab-1")


@pytest.mark.needs("ps")
def test_the_states_of_a_job(made: JobRecord, tmp_path: Path) -> None:
    cluster, job = ClusterJobs("cluster:lab"), tmp_path / "w/jobs/lab-1"
    gone = state(cluster)
    assert gone is not None and gone.state == "failed" and "no exit code" in gone.reason
    with subprocess.Popen(["sh", str(job / "job.sh")], start_new_session=True) as process:
        (job / "pid").write_text(f"{process.pid}\n")
        running = state(cluster)
        assert running is not None and running.state == "running"
        subprocess.run(cluster.cancel_argv("lab-1"), check=True, timeout=20)
        assert process.wait(timeout=10) == -15
    with subprocess.Popen(["sleep", "30"]) as process:  # another process that was given the number
        (job / "pid").write_text(f"{process.pid}\n")
        subprocess.run(cluster.cancel_argv("lab-1"), check=True, timeout=20)
        assert state(cluster) == gone and process.poll() is None
        process.kill()
    (job / "exit_code").write_text("3\n")
    ended = state(cluster)
    assert ended is not None and (ended.state, ended.exit_code) == ("failed", 3)
    assert ClusterJobs("cluster:lab").states("") == {}
    unknown = ClusterJobs("cluster:other")
    assert state(unknown) == JobStatus("unknown", "no answer from cluster:other")


def test_its_files_are_brought(made: JobRecord, tmp_path: Path) -> None:
    copy_job_files(made)
    assert made.output.read_text() == "one\n" and (run_folder(made) / "status.json").exists()
    assert 0 < (run_folder(made) / "metrics.jsonl").stat().st_size <= 1 << 16
    with (tmp_path / "w/jobs/lab-1/output.log").open("a") as file:
        file.write("two\n")
    (tmp_path / "w/jobs/lab-1/exit_code").write_text("0\n")
    copy_job_files(made, output_only=True)
    assert made.output.read_text() == "one\ntwo\n" and made.written_exit_code() is None
    copy_job_files(made)
    assert made.output.read_text() == "one\ntwo\n" and made.written_exit_code() == 0


def test_fetch(made: JobRecord, tmp_path: Path) -> None:
    assert fetch("lab-1", tmp_path / "here") == tmp_path / "here/x"
    run = tmp_path / "w/runs/p/x"
    (run / "late.txt").write_text("late")
    (run / "last").symlink_to("late.txt")
    (tmp_path / "here/x/mine.txt").write_text("mine")
    assert fetch(f"lab:{run}", tmp_path / "here") == tmp_path / "here/x"
    assert (tmp_path / "here/x/last").read_text() == "late" and (tmp_path / "here/x/mine.txt").exists()
    (tmp_path / "there/x").mkdir(parents=True)
    with pytest.raises(UserError, match=r"there/x exists"):
        fetch("lab-1", tmp_path / "there")
    with pytest.raises(RemoteError, match=r"nothing does not exist"):
        fetch("lab:nothing", tmp_path / "here")
    assert not (tmp_path / "here/nothing").exists()


def test_fetch_what_a_command_made(made: JobRecord, tmp_path: Path) -> None:
    job_record.save(replace(made, run=""))
    work = tmp_path / "w/jobs/lab-1/work"
    (work / "results.csv").write_text("1")
    os.utime(tmp_path / "w/jobs/lab-1/job.sh", (1e9, 1e9))
    (work / "shipped.py").write_text("code")
    os.utime(work / "shipped.py", (9e8, 9e8))
    place = fetch("lab-1", tmp_path / "here")
    assert sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()) == [
        ".fetched",
        "output.log",
        "work/results.csv",
    ]


def test_a_folder_of_this_machine_is_copied(tmp_path: Path) -> None:
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/a").write_text("1")
    (tmp_path / "runs/x/last").symlink_to("a")
    assert fetch(str(tmp_path / "runs/x"), tmp_path / "to") == tmp_path / "to/x"
    (tmp_path / "runs/x/a").write_text("2")
    fetch(str(tmp_path / "runs/x"), tmp_path / "to")
    assert (tmp_path / "to/x/last").read_text() == "2"


def test_how_a_host_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    hosts = ClusterConfig(name="lab", hosts=("ann@a:2222",), key="/k")  # type: ignore[arg-type]
    argv = RemoteHost(hosts.head, hosts.key).argv("echo 'a b'")
    assert argv[:5] == ["ssh", "-p", "2222", "-i", "/k"] and "BatchMode=yes" in argv and argv[-2] == "ann@a"
    assert subprocess.run(argv[-1], shell=True, capture_output=True, text=True).stdout == "a b\n"
    (tmp_path / f"paceline-ssh-{os.getuid()}").chmod(0o755)
    with pytest.raises(UserError, match=r"is not private to you"):
        RemoteHost(hosts.head).argv("true")


def test_sending_leaves_no_half(tmp_path: Path) -> None:
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    here = RemoteHost(ClusterConfig(name="l", hosts=("localhost",)).head)  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match=r"localhost"):
        here.send(tmp_path / "broken.tar.gz", str(tmp_path / "into"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.tar.gz"]
