from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.ssh_cluster.pack import named_packages, pack_job


def test_the_package_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in a folder of the user is packed; one in site-packages is expected on the hosts."""
    for name in ("work/local.py", "lib/farenv/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    train = [sys.executable, "-m", "paceline", "train", "--env"]
    found = list(named_packages([*train, "farenv.maze:Maze-v0"], tmp_path / "work"))
    assert found == [tmp_path / "lib/farenv"]
    algo = [*train, "CartPole-v1", "--algo=farenv.own:Own"]
    bundle = pack_job(tmp_path / "work", algo, [], [], 1)
    assert sorted(bundle.files) == [".packages/farenv/__init__.py", "local.py"] and bundle.packages == (".packages",)
    for env in ("gymnasium.envs:X", "CartPole-v1", "local:X", "./local.py:X", "not_there:X", "json:X"):
        assert list(named_packages([*train, env], tmp_path / "work")) == []
