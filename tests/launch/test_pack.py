from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.launch.pack import env_packages, listed, pack


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def test_git_decides(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "new.py", "data/big.bin", "runs/x/config.yaml", "runs/x/metrics.jsonl", "b/c.txt")
    (tmp_path / ".gitignore").write_text("data\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "a.py", ".gitignore"], check=True)
    (tmp_path / "gone.py").write_text("")
    subprocess.run(["git", "-C", str(tmp_path), "add", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert listed(tmp_path, []) == [".gitignore", "a.py", "b/c.txt", "new.py"]
    assert listed(tmp_path, ["b/", "*.gitignore"]) == ["a.py", "new.py"]


def test_without_git(tmp_path: Path) -> None:
    make(tmp_path, "a.py", ".secret", "x/b.py", "x/__pycache__/b.pyc", "env/pyvenv.cfg", "env/lib.py", "x/y/c.txt")
    assert listed(tmp_path, []) == ["a.py", "x/b.py", "x/y/c.txt"]
    assert listed(tmp_path, ["x/y"]) == ["a.py", "x/b.py"] and listed(tmp_path, ["**/c.*"]) == ["a.py", "x/b.py"]


def test_a_parcel_is_known_by_its_content(tmp_path: Path) -> None:
    make(tmp_path / "work", "a.py")
    first = pack(tmp_path / "work", [], [], [], 1).digest
    assert pack(tmp_path / "work", [], [], [], 1).digest == first
    (tmp_path / "work/a.py").write_text("edited")
    second = pack(tmp_path / "work", [], [], [], 1)
    assert second.digest != first
    second.archive(tmp_path / "x.tar.gz")
    with tarfile.open(tmp_path / "x.tar.gz") as tar:
        assert tar.getnames() == ["a.py"]


def test_packages_from_elsewhere(tmp_path: Path) -> None:
    make(tmp_path, "work/a.py", "mine/__init__.py", "mine/env.py", "other/src/thing/__init__.py")
    made = pack(tmp_path / "work", [], [str(tmp_path / "mine"), str(tmp_path / "other")], [], 1)
    assert sorted(made.files) == [
        ".packages/mine/__init__.py",
        ".packages/mine/env.py",
        ".packages/other/src/thing/__init__.py",
        "a.py",
    ]
    assert made.packages == (".packages", ".packages/other/src")
    with pytest.raises(UserError, match=r"nothing: no such folder"):
        pack(tmp_path / "work", [], [str(tmp_path / "nothing")], [], 1)


def test_the_package_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed from a folder of the user's is found; one of site-packages is expected there."""
    make(tmp_path, "work/local.py", "lib/farenv/__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    train = [sys.executable, "-m", "paceline", "train", "--env"]
    found = list(env_packages([*train, "farenv.maze:Maze-v0"], tmp_path / "work"))
    assert found == [tmp_path / "lib/farenv"]
    for env in ("gymnasium.envs:X", "CartPole-v1", "local:X", "./local.py:X", "not_there:X", "json:X"):
        assert list(env_packages([*train, env], tmp_path / "work")) == []


def test_too_much(tmp_path: Path) -> None:
    (tmp_path / "huge.bin").write_bytes(b"x" * 1_500_000)
    with pytest.raises(UserError, match=r"2 MB would be sent .* 1 MB are allowed.*huge.bin"):
        pack(tmp_path, [], [], [], 1)
