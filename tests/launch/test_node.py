from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import node

FOLDER = Path("/tmp/pl-x")
ORDER: dict[str, Any] = {"head": True, "ip": "10.0.0.1", "address": None, "port": 0, "cpus": 3, "gpus": None,
                         "memory": 0, "neighbours": 1, "dashboard": False}  # fmt: skip


def test_rays_processes_get_no_preload_no_mpi_and_no_proxy() -> None:
    dirty = {
        "LD_PRELOAD": "/opt/darshan.so",
        "PMI_RANK": "1",
        "OMPI_MCA_x": "1",
        "http_proxy": "http://p",
        "HOME": "/h",
    }
    dirty |= {"HTTPS_PROXY": "http://p", "RAY_ADDRESS": "old:1", "RAY_AUTH_TOKEN": "stale", "SLURM_JOB_ID": "7"}
    clean, notices = node.node_environment(dirty, FOLDER)
    assert not {
        "LD_PRELOAD",
        "PMI_RANK",
        "OMPI_MCA_x",
        "http_proxy",
        "HTTPS_PROXY",
        "RAY_ADDRESS",
        "RAY_AUTH_TOKEN",
    } & {*clean}
    assert clean["HOME"] == "/h" and clean["SLURM_JOB_ID"] == "7"
    assert clean["RAY_AUTH_MODE"] == "token" and clean["RAY_AUTH_TOKEN_PATH"] == "/tmp/pl-x/token"
    assert any("darshan" in text for text in notices) and any("http_proxy" in text for text in notices)
    assert node.node_environment({"HOME": "/h"}, FOLDER)[1] == []


def test_the_command_keeps_its_proxy_but_not_for_the_hosts() -> None:
    given = {"http_proxy": "http://p", "no_proxy": "intra", "PMI_RANK": "0", "RAY_AUTH_TOKEN": "stale"}
    made = node.command_environment(given, FOLDER, "10.0.0.1:5", ["node1", "10.0.0.2"])
    assert made["http_proxy"] == "http://p" and made["no_proxy"] == "intra,127.0.0.1,localhost,node1,10.0.0.2"
    assert made["RAY_ADDRESS"] == "10.0.0.1:5" and "PMI_RANK" not in made and "RAY_AUTH_TOKEN" not in made
    assert made["PYTHONUNBUFFERED"] == "1"  # who follows the output sees it
    assert "no_proxy" not in node.command_environment({}, FOLDER, "a:1", [])


def test_what_ray_is_started_with() -> None:
    head = node.start_argv(FOLDER, ORDER)
    assert {"--head", "--port=0", "--node-ip-address=10.0.0.1", "--num-cpus=3", "--temp-dir=/tmp/pl-x"} <= {*head}
    assert "--include-dashboard=false" in head and not any("--num-gpus" in word for word in head)
    worker = node.start_argv(FOLDER, {**ORDER, "head": False, "address": "10.0.0.1:5", "gpus": 0})
    assert "--address=10.0.0.1:5" in worker and "--num-gpus=0" in worker and "--head" not in worker
    shown = node.start_argv(FOLDER, {**ORDER, "dashboard": True})
    assert "--dashboard-host=127.0.0.1" in shown


def test_the_object_store_is_bounded_and_shared_between_neighbours() -> None:
    low, high = node.OBJECT_STORE_BYTES
    alone = node.object_store_bytes(1)
    assert low <= alone <= high and low <= node.object_store_bytes(4) <= max(low, alone // 4 + 1)
    assert node.object_store_bytes(10**6) == low


def test_the_folder_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 60)))  # too long for sockets
    folder = node.make_folder()
    try:
        assert folder.parent.parent == Path("/tmp") and len(str(folder.parent)) <= node.LONGEST_FOLDER
        folder.chmod(0o777)  # as Ray does
        token = node.write_token(folder, "secret")
        assert folder.parent.stat().st_mode & 0o077 == 0 and token.stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError):  # one that somebody else has put there
            node.write_token(folder, "secret")
    finally:
        node.remove_folder(folder)
    assert not folder.parent.exists()


def test_a_scratch_folder_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's script makes it on the first host alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setenv("TMPDIR", f"{place}/me")
        assert str(node.make_folder()).startswith(f"{place}/me/pl-")


def test_orphans_are_found_and_ended() -> None:
    """A grandchild in a session of its own, whose parent is gone; in a process of its own, as it changes that one."""
    orphan = "import os,time\nif os.fork() == 0:\n os.setsid()\n time.sleep(60)"
    program = f"""
import subprocess, sys, time
from pathlib import Path
from paceline.launch import node
node.adopt_orphans()
subprocess.run([sys.executable, "-c", {orphan!r}])
found = node.ours(None)
left = node.end_all(None, 5.0)
print(len(found), left, *(process.pid for process in found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    count, left, pid = done.stdout.split()
    assert (count, left) == ("1", "0"), done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_the_store_is_a_share_of_what_the_scheduler_gives() -> None:
    own = node.object_store_bytes(1)
    assert node.object_store_bytes(1, 10**15) == own  # more than there is
    assert node.object_store_bytes(1, 10**9) == min(own, int(node.OBJECT_STORE_SHARE * 10**9))
