"""How a supervisor finds its launcher; what it starts and ends is in `test_launch.py`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.launch import rendezvous, supervisor
from paceline.launch.link import Link, LinkClosed
from paceline.launch.rendezvous import Contact, new_key


def serve(server: socket.socket, key: str, heard: list[Any]) -> threading.Thread:
    def run() -> None:
        link = Link(server.accept()[0], bytes.fromhex(key), "launcher")
        heard.append(link.wait(10))
        link.send(kind="welcome")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_rendezvous_file_from_yesterday_is_overcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RETRY_SECONDS", 0.3)
    path, key = tmp_path / "job", new_key()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        rendezvous.write(path, Contact(["127.0.0.1"], gone.getsockname()[1], new_key()))
    heard: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = serve(server, key, heard)

        def come() -> None:
            time.sleep(0.5)
            rendezvous.write(path, Contact(["127.0.0.1"], server.getsockname()[1], key))

        threading.Thread(target=come, daemon=True).start()
        link, used = supervisor._find_launcher(str(path), 3, 10)
        thread.join(5)
    assert used.hex() == key and heard[0]["index"] == 3 and heard[0]["identity"] == supervisor.machine_identity()
    link.close()


def test_nobody_comes(tmp_path: Path) -> None:
    with pytest.raises(LinkClosed, match="no file"):
        supervisor._find_launcher(str(tmp_path / "none"), 0, 0.3)


def test_what_it_says_about_its_host() -> None:
    hello = supervisor.hello(2, "lo")
    assert hello["index"] == 2 and hello["cores"] >= 1 and hello["interface"] == "127.0.0.1"
    assert hello["affinity"] == sorted(os.sched_getaffinity(0)) and hello["versions"]["ray"] != "none"
    assert supervisor.hello(0, None)["interface"] is None and supervisor.hello(0, "hsn9")["interface"] == ""


GUARDED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline import ray_folder
from paceline.launch import processes, supervisor
def work(tell_folder):
    folder = ray_folder.make_folder()
    tell_folder(folder)
    subprocess.run([sys.executable, "-c", "import os,time\\nif os.fork() == 0:\\n os.setsid()\\n time.sleep(60)"])
    orphan, = processes.descendants(None)
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    print(os.getppid(), os.getpid(), orphan.pid, folder, flush=True)
    while not told:
        time.sleep(0.05)
    processes.kill_all(folder, 5)
    ray_folder.remove_folder(folder)
    return 5
sys.exit(supervisor._run_guarded(work))
"""


@pytest.mark.parametrize(("killed", "code"), [("child", 128 + 9), ("guard", -9)])
def test_each_of_its_two_processes_cleans_up_after_the_other(killed: str, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        guard, child, orphan, folder = process.stdout.readline().split()
        assert int(guard) == process.pid and Path(folder).is_dir()
        os.kill(int(child if killed == "child" else guard), signal.SIGKILL)
        assert process.wait(timeout=30) == code
        limit = time.monotonic() + 30
        while any(psutil.pid_exists(int(pid)) for pid in (child, orphan)) or Path(folder).parent.exists():
            assert time.monotonic() < limit
            time.sleep(0.05)


def test_a_signal_to_the_first_of_them_reaches_the_second() -> None:
    with subprocess.Popen([sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.terminate()
        assert process.wait(timeout=30) == 5


def test_rays_token_does_not_tell_the_key() -> None:
    key = bytes.fromhex(new_key())
    token = supervisor.ray_token(key)
    assert token == supervisor.ray_token(key) != supervisor.ray_token(bytes(32)) and key.hex() not in token
    assert len(token) == 64
