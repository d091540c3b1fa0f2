"""The verbs, on a cluster of this machine alone (`localhost`, without ssh); tests/cluster has several and real ssh."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.commands import main as cli
from paceline.ssh_cluster.cluster_state import load

Output = pytest.CaptureFixture[str]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "lab.yaml"
    path.write_text(f"hosts: [localhost]\nworkdir: {tmp_path}/work\npython: {sys.executable}\n")
    return path


def run(capsys: Output, *words: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["cluster", *words])
    said = capsys.readouterr()
    return end.value.code, said.out + said.err


@pytest.mark.needs("ps")
def test_up_status_down(lab: Path, tmp_path: Path, capsys: Output) -> None:
    code, said = run(capsys, "up", str(lab))
    assert code == 0 and "cluster    lab, 1 host: python 3." in said and f"folder     {tmp_path}/work" in said
    assert load("lab").workdir == f"{tmp_path}/work" and (tmp_path / "work").stat().st_mode & 0o077 == 0
    code, said = run(capsys, "status", "lab")
    assert code == 0 and re.search(r"^localhost +\d+\.\d+ +\d+ +\d+\.\d of \d+\.\d GB", said, re.M), said
    assert "none runs" in said
    (tmp_path / "work/env").mkdir()
    (tmp_path / "work/runs").mkdir()
    code, said = run(capsys, "down", str(lab), "--purge")
    assert code == 0 and not (tmp_path / "work/env").exists() and (tmp_path / "work/runs").exists()


@pytest.mark.needs("ps")
def test_down_ends_a_job_and_nobody_else(lab: Path, tmp_path: Path, capsys: Output) -> None:
    run(capsys, "up", str(lab))
    for name in ("lab-1", "lab-2"):
        (tmp_path / f"work/jobs/{name}").mkdir(parents=True)
        (tmp_path / f"work/jobs/{name}/job.sh").write_text("while :; do sleep 0.1; done\n")
    ours = subprocess.Popen(["sh", str(tmp_path / "work/jobs/lab-1/job.sh")], start_new_session=True)
    other = subprocess.Popen(["sleep", "60"])  # it has the number of a job that ended long ago
    try:
        (tmp_path / "work/jobs/lab-1/pid").write_text(f"{ours.pid}\n")
        (tmp_path / "work/jobs/lab-2/pid").write_text(f"{other.pid}\n")
        assert "jobs       lab-1\n" in run(capsys, "status", "lab")[1]
        reaper = threading.Thread(target=ours.wait)  # a process that ended is there until its parent has looked
        reaper.start()
        code, said = run(capsys, "down", "lab")
        assert code == 0 and other.poll() is None, said
        reaper.join(timeout=10)
        assert ours.returncode == -15
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


@pytest.mark.needs("ps")
def test_a_python_without_ray(lab: Path, tmp_path: Path, capsys: Output) -> None:
    lab.write_text(f"hosts: [localhost]\nworkdir: {tmp_path}/work\npython: {sys.base_prefix}/bin/python3\n")
    code, said = run(capsys, "up", str(lab))
    assert code == 1 and "localhost: ray is not installed there" in said
    lab.write_text(f"hosts: [localhost]\nworkdir: {tmp_path}/work\npython: /no/python\n")
    code, said = run(capsys, "up", str(lab))
    assert code == 1 and "localhost: " in said and "/no/python" in said


@pytest.mark.needs("ps")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("pip: [--no-index, --find-links=/none]\nextras: []", "depends on numpy>=2.0 The user requested"),
        ("pip: [--no-index, --no-deps]\nsetup: [sh -c 'echo was here; exit 5']", "failed: was here (full log"),
    ],
)
def test_a_build_that_fails_says_why_and_can_be_purged(
    line: str, reason: str, lab: Path, tmp_path: Path, capsys: Output
) -> None:
    lab.write_text(f"hosts: [localhost]\nworkdir: {tmp_path}/work\n{line}\n")
    code, said = run(capsys, "up", str(lab))
    last = said.splitlines()[-1]
    assert code == 1 and last.startswith("paceline: failed: localhost: building the environment failed: "), said
    assert reason in last and f":{tmp_path}/work/env/" in last
    assert list((tmp_path / "work/env").iterdir())
    for verb in ("attach", "tensorboard"):
        assert run(capsys, verb, "lab") == (2, "paceline: cluster lab is down: paceline cluster up lab\n")
    assert "cluster    lab, down" in run(capsys, "status", "lab")[1]
    code, said = run(capsys, "down", str(lab), "--purge")
    assert code == 0 and not (tmp_path / "work/env").exists(), said


@pytest.mark.needs("ps")
def test_a_cluster_that_is_up_stays_up_when_another_up_fails(lab: Path, tmp_path: Path, capsys: Output) -> None:
    assert run(capsys, "up", str(lab))[0] == 0
    before = load("lab")
    lab.write_text(f"hosts: [localhost]\nworkdir: {tmp_path}/work\npython: /no/python\n")
    assert run(capsys, "up", str(lab))[0] == 1
    assert load("lab") == before and before.is_up


def test_a_key_that_is_not_there(lab: Path, tmp_path: Path, capsys: Output) -> None:
    lab.write_text(f"hosts: [node0]\nkey: {tmp_path}/absent\n")
    code, said = run(capsys, "up", str(lab))
    assert code == 2 and f"key: {tmp_path}/absent does not exist" in said and len(said.splitlines()) == 1


@pytest.mark.needs("ps")
def test_attach_is_a_shell_in_the_environment(lab: Path, tmp_path: Path, capsys: Output) -> None:
    run(capsys, "up", str(lab))
    words = [sys.executable, "-m", "paceline", "cluster", "attach", "lab"]
    env = {"XDG_DATA_HOME": str(tmp_path / "data"), "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    given = "pwd; command -v paceline; exit 7\n"
    done = subprocess.run(words, input=given, capture_output=True, text=True, env=env, timeout=30)
    assert done.returncode == 7 and f"{tmp_path}/work\n" in done.stdout, done
    assert str(Path(sys.executable).with_name("paceline")) in done.stdout


@pytest.mark.needs("ps")
def test_no_cluster(lab: Path, capsys: Output) -> None:
    code, said = run(capsys, "status", "nothing")
    assert code == 2 and "there is no cluster nothing (none yet)" in said
    run(capsys, "up", str(lab))
    code, said = run(capsys, "dashboard", "lab")
    assert code == 2 and "no job with a dashboard runs on lab" in said
