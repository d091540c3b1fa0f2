"""What a host says of itself; processes and folders that earlier jobs left are real ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from paceline.doctor import host_agent
from paceline.ray_folder import MAX_FOLDER_LENGTH


def test_proxies_are_named_and_empty_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HTTPS_PROXY", "")
    assert list(host_agent.check_proxies()) == []
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")
    [finding] = host_agent.check_proxies()
    assert finding.level == "warn" and finding.text.startswith("http_proxy:") and finding.fix


def test_a_temporary_folder_that_is_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * MAX_FOLDER_LENGTH)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    finding = host_agent.check_temporary_folder()
    assert finding.level == "warn" and str(len(str(long))) in finding.text and "/tmp is used" in finding.text
    assert host_agent.check_temporary_folder([]).level == "fail"
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    assert "is not writable" in host_agent.check_temporary_folder().text
    monkeypatch.delenv("TMPDIR")
    assert host_agent.check_temporary_folder().text.startswith("/tmp: ")


def test_the_home_folder_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    finding = host_agent.check_home()
    assert finding.level == "fail" and finding.subject == "home folder" and "quota" in finding.fix
    monkeypatch.setenv("HOME", str(tmp_path))
    assert host_agent.check_home().level in ("ok", "warn") and list(tmp_path.iterdir()) == []


def test_what_quota_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "quota"
    tool.write_text("#!/bin/sh\necho 'Disk quotas for user me: Over block quota on /home'; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    [finding] = host_agent.check_quota()
    assert finding.level == "warn" and "Over block quota on /home" in finding.text
    tool.write_text("#!/bin/sh\n")
    assert list(host_agent.check_quota()) == []


def test_leftovers_are_processes_and_folders_without_a_job(tmp_path: Path) -> None:
    """A process that names a folder of ours: with somebody above it, it is a job's; without, it is left over."""
    folder, young = tmp_path / "pl-abcd1234", tmp_path / "pl-efgh5678"
    for path in (folder, young, tmp_path / "pl-ours_it_is_not"):
        path.mkdir()
        if path != young:
            os.utime(path, (1, 1))
    assert [f.fix for f in host_agent.check_leftovers([str(tmp_path)])][-1] == f"rm -r {folder}"
    watched = subprocess.Popen(["sh", "-c", "read line", str(folder)], stdin=subprocess.PIPE)  # we are above it
    assert not any(
        folder.name in f.fix or str(watched.pid) in f.fix for f in host_agent.check_leftovers([str(tmp_path)])
    )
    watched.communicate(timeout=10)
    # One whose parent ends, and that nobody adopts but the first of all processes.
    lost = subprocess.run(["sh", "-c", f"sh -c 'sleep 30; : {folder}' >&- 2>&- & echo $!"], stdout=-1, timeout=10)
    pid = int(lost.stdout)
    try:
        found = [f for f in host_agent.check_leftovers([str(tmp_path)]) if str(pid) in f.fix.split()]
        assert [f.level for f in found] == ["warn"] and found[0].fix.startswith("kill -9 ")
    finally:
        for child in psutil.Process(pid).children():
            child.kill()
        os.kill(pid, signal.SIGKILL)


def test_another_host_is_reached_at_the_address_where_it_says_its_number() -> None:
    listener, other = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.2", 0))
    for sock in (listener, other):
        threading.Thread(target=host_agent.greet, args=(sock, "me" * 16, threading.Event()), daemon=True).start()
    port = listener.getsockname()[1]
    assert host_agent.reach(["127.0.0.9", "127.0.0.1"], port, "me" * 16) == {"address": "127.0.0.1", "own": "127.0.0.1"}
    wrong = host_agent.reach(["127.0.0.2"], other.getsockname()[1], "you" + "x" * 29)
    assert "another program answers" in wrong["error"]
    assert "refused" in host_agent.reach(["127.0.0.9"], port, "me")["error"]
    assert host_agent.reach([], port, "me")["error"]


def test_the_program_tells_and_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Torch is left out: it takes seconds."""
    monkeypatch.setattr("paceline.doctor.checks.TORCH_PROGRAM", "pass")
    began, (reader, writer) = time.time(), os.pipe()
    os.write(writer, b"[]\n")
    os.close(writer)
    with os.fdopen(reader) as given:
        monkeypatch.setattr(sys, "stdin", given)
        assert host_agent.main(["--interface", "lo"]) == 0
    first, second = (json.loads(line.removeprefix(host_agent.MARK)) for line in capsys.readouterr().out.splitlines())
    assert first["addresses"] == {"127.0.0.1": "lo"} and first["versions"]["ray"] and first["port"]
    subjects = {each["subject"] for each in first["findings"]}
    assert {"LD_PRELOAD", "temporary files", "home folder"} <= subjects and "output folder" not in subjects
    assert began <= second["time"] <= time.time()
