from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run import provenance
from paceline.run.directory import write_json


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=30)


def test_what_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    facts = provenance.collect(["paceline", "train", "--seed", "0"])
    assert facts["argv"] == ["paceline", "train", "--seed", "0"]
    assert facts["environment"]["OMP_NUM_THREADS"] == "3" and "SLURM_JOB_ID" not in facts["environment"]
    assert facts["cores"] >= 1 and facts["memory_bytes"] > 2**26 and facts["cpu_model"]
    assert {"torch", "numpy", "gymnasium"} <= facts["packages"].keys()
    write_json(tmp_path / "provenance.json", facts)
    text = (tmp_path / "provenance.json").read_text()
    assert "very-secret" not in text and "WANDB" not in text
    assert json.loads(text) == facts


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from paceline.run import provenance; provenance.collect([]);"
        "print([m for m in ('torch', 'gymnasium', 'tensorboard', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.needs("git")
def test_git(tmp_path: Path) -> None:
    assert provenance.git(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert provenance.git(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "one")
    clean = provenance.git(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "untracked").touch()
    assert provenance.git(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert provenance.git(tmp_path) == clean | {"dirty": True}


def test_git_that_hangs_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\nexec sleep 30\n")
    fake.chmod(0o755)
    monkeypatch.setattr(provenance, "GIT_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert provenance.git(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert provenance.git(tmp_path) is None
