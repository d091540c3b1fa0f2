"""Folders of Ray: private, locked by their owner, and removed with their processes once nobody owns them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline import ray_folder

OWNER = """
import sys, time
from paceline import ray_folder
print(ray_folder.make_folder(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short TMPDIR."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def abandon(script: str = OWNER) -> Path:
    """The folder of a process that was killed."""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        ray_folder.remove_abandoned()
        assert folder.exists(), "its owner lives"
        owner.kill()
    return folder


def test_the_folder_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 60)))  # too long for sockets
    folder = ray_folder.make_folder()
    try:
        assert folder.parent.parent == Path("/tmp") and len(str(folder.parent)) <= ray_folder.MAX_FOLDER_LENGTH
        folder.chmod(0o777)  # as Ray does
        token = ray_folder.write_token(folder, "secret")
        assert folder.parent.stat().st_mode & 0o077 == 0 and token.stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError):  # one that somebody else has put there
            ray_folder.write_token(folder, "secret")
    finally:
        ray_folder.remove_folder(folder)
    assert not folder.parent.exists()


def test_a_scratch_folder_is_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's script makes it on the first host alone."""
    monkeypatch.setenv("TMPDIR", f"{place}/me")
    folder = ray_folder.make_folder()
    assert str(folder).startswith(f"{place}/me/pl-")
    ray_folder.remove_folder(folder)


def test_an_abandoned_folder_is_removed_with_its_processes(place: Path) -> None:
    folder = abandon()
    agent = place / "ray/agent.py"
    agent.parent.mkdir()
    agent.write_text("import time; time.sleep(60)")
    ray = subprocess.Popen([sys.executable, str(agent), f"--temp-dir={folder}"])
    editor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"{folder}/session/raylet.out"])
    try:
        wait_for_command(ray.pid, "agent.py")
        wait_for_command(editor.pid, "raylet.out")
        ray_folder.remove_abandoned()
        assert not psutil.pid_exists(ray.pid) and not folder.parent.exists()
        assert editor.poll() is None, "it is not Ray's"
    finally:
        for process in (ray, editor):
            process.kill()
            process.wait()


def test_the_scratch_folder_of_a_killed_worker_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a TMPDIR that is too long for Ray."""
    monkeypatch.setenv("TMPDIR", f"{place}/{'x' * 60}")
    monkeypatch.setattr(tempfile, "tempdir", None)
    Path(os.environ["TMPDIR"]).mkdir()
    folder = abandon(OWNER.replace("make_folder", "make_scratch"))
    assert folder.parent == Path(os.environ["TMPDIR"])
    ray_folder.remove_abandoned()
    assert not folder.exists()


def wait_for_command(pid: int, word: str) -> None:
    limit = time.monotonic() + 10
    while word not in " ".join(psutil.Process(pid).cmdline()) and time.monotonic() < limit:
        time.sleep(0.01)


def test_folders_that_may_be_in_use_stay(place: Path) -> None:
    own = ray_folder.make_folder()
    (unlocked := place / "pl-unlocked").mkdir()  # its owner is about to lock it
    elsewhere = abandon()
    (elsewhere.parent / ray_folder.LOCK).write_text("another-host")  # it shares this disk
    (link := place / "pl-link").symlink_to(elsewhere.parent)
    ray_folder.remove_abandoned()
    assert all(path.exists() for path in (own, unlocked, elsewhere, link))
    ray_folder.remove_folder(own)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_folders_of_another_user_stay(place: Path) -> None:
    folder = abandon()
    for path in (folder.parent, folder.parent / ray_folder.LOCK):
        os.chown(path, 65534, 65534)
    ray_folder.remove_abandoned()
    assert folder.exists()


def test_a_forked_child_does_not_keep_the_lock(place: Path) -> None:
    script = OWNER.replace(
        "time.sleep", "import os\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\ntime.sleep"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder, child = Path(owner.stdout.readline().strip()), int(owner.stdout.readline())
        try:
            owner.kill()
            owner.wait()
            assert psutil.pid_exists(child)
            ray_folder.remove_abandoned()
        finally:
            os.kill(child, signal.SIGKILL)
    assert not folder.exists()
