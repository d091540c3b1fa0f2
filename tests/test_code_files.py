from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.code_files import project_files


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


@pytest.mark.needs("git")
def test_git_decides_which_files_belong_to_a_project(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "new.py", "data/big.bin", "runs/x/config.yaml", "runs/x/metrics.jsonl", "b/c.txt")
    (tmp_path / ".gitignore").write_text("data\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "a.py", ".gitignore"], check=True)
    (tmp_path / "gone.py").write_text("")
    subprocess.run(["git", "-C", str(tmp_path), "add", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert project_files(tmp_path, []) == [".gitignore", "a.py", "b/c.txt", "new.py"]
    assert project_files(tmp_path, ["b/", "*.gitignore"]) == ["a.py", "new.py"]


def test_without_git_hidden_files_caches_and_environments_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, "a.py", ".secret", "x/b.py", "x/__pycache__/b.pyc", "env/pyvenv.cfg", "env/lib.py", "x/y/c.txt")
    assert project_files(tmp_path, []) == ["a.py", "x/b.py", "x/y/c.txt"]
    assert project_files(tmp_path, ["x/y"]) == ["a.py", "x/b.py"] and project_files(tmp_path, ["**/c.*"]) == [
        "a.py",
        "x/b.py",
    ]
