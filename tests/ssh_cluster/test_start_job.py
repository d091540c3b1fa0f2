from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.commands import main as cli
from paceline.schedulers.job import Job
from paceline.ssh_cluster.cluster_state import ClusterState, save
from paceline.ssh_cluster.hosts_file import ClusterConfig
from paceline.ssh_cluster.start_job import make_plan, project_of

TRAIN = ["paceline", "train", "--env", "my_env:Maze", "--name", "x"]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterState:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    hosts = ClusterConfig(name="lab", hosts=("ann@a cpus=8", "b:2222", "c"), python="/opt/python", interface="ib0")  # type: ignore[arg-type]
    made = ClusterState(config=hosts, workdir="/w", python="/opt/python")
    save(made)
    return made


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["submit", "--on", "cluster:lab", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_plan(up: ClusterState) -> None:
    plan = make_plan(up, Job(nodes=2, cores=4), TRAIN, Path.cwd())
    assert [(each.name, each.cpus) for each in plan.hosts] == [("a", 4), ("b", 4)]
    assert plan.run == f"/w/runs/{project_of(Path.cwd())}/x" and plan.words[-2:] == ["--resume", "auto"]
    elsewhere = make_plan(up, Job(), [*TRAIN, "--out", "results/ppo"], Path.cwd())
    assert elsewhere.out == "results/ppo" and elsewhere.run == f"/w/runs/{project_of(Path.cwd())}/results/ppo/x"
    assert make_plan(up, Job(), [*TRAIN, "--out", "/scratch"], Path.cwd()).run == "/scratch/x"
    own = make_plan(up, Job(), ["python", "train.py"], Path.cwd())
    assert own.run == "" and own.out == "runs" and own.words == ["python", "train.py"]


def test_the_script_is_one(up: ClusterState, tmp_path: Path, shellcheck: Callable[[str], None]) -> None:
    plan = make_plan(up, Job(nodes=3), [*TRAIN, "--set", "env.kwargs={a: 'b c'}"], Path.cwd())
    path = tmp_path / "job.sh"
    path.write_text(plan.script())
    subprocess.run(["sh", "-n", str(path)], check=True)
    shellcheck(plan.script())
    assert "--interface ib0" in plan.script() and "--dashboard" in plan.script()


def test_dry_run(up: ClusterState, capsys: pytest.CaptureFixture[str]) -> None:
    Path("code.py").write_text("x")
    with pytest.raises(SystemExit) as end:
        cli.main(["submit", "--on", "cluster:lab", "--dry-run", "--", *TRAIN])
    out = capsys.readouterr().out
    assert end.value.code == 0 and out.startswith("#!/bin/sh") and "# 1 files, 0.0 MB to 3 hosts" in out


def test_nothing_is_ignored(up: ClusterState, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-time" in refused(capsys, "--walltime", "1h", "--", "true")
    assert "no queue" in refused(capsys, "--seeds", "0-3", "--", "true")
    assert "--queue x: not available on an ssh cluster" in refused(capsys, "--queue", "x", "--", "true")
    assert "--nodes 4: cluster lab has 3" in refused(capsys, "--nodes", "4", "--", "true")
    assert "needs a command" in refused(capsys)
    save(up.model_copy(update={"config": up.config.model_copy(update={"python": None})}))
    assert "cluster lab is down" in refused(capsys, "--", "true")
    with pytest.raises(SystemExit):
        cli.main(["submit", "--on", "cluster:lib", "--", "true"])
    assert re.search(r"no cluster lib \(lab\)", capsys.readouterr().err)
