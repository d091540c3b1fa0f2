from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline import machine, ray_node

FOLDER = Path("/tmp/pl-x")
REQUEST: dict[str, Any] = {"head": True, "ip": "10.0.0.1", "address": None, "port": 0, "cpus": 3, "gpus": None,
                         "memory": 0, "neighbours": 1, "dashboard": False, "ports": None,
                         "granted_cores": 0}  # fmt: skip


def test_rays_processes_get_no_preload_no_mpi_and_no_proxy() -> None:
    dirty = {
        "LD_PRELOAD": "/opt/darshan.so",
        "PMI_RANK": "1",
        "OMPI_MCA_x": "1",
        "http_proxy": "http://p",
        "HOME": "/h",
    }
    dirty |= {"HTTPS_PROXY": "http://p", "RAY_ADDRESS": "old:1", "RAY_AUTH_TOKEN": "stale", "SLURM_JOB_ID": "7"}
    clean, notices = ray_node.node_environment(dirty, FOLDER)
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
    assert ray_node.node_environment({"HOME": "/h"}, FOLDER)[1] == []


def test_the_command_keeps_its_proxy_but_not_for_the_hosts() -> None:
    given = {"http_proxy": "http://p", "no_proxy": "intra", "PMI_RANK": "0", "RAY_AUTH_TOKEN": "stale"}
    made = ray_node.command_environment(given, FOLDER, "10.0.0.1:5", ["node1", "10.0.0.2"])
    assert made["http_proxy"] == "http://p" and made["no_proxy"] == "intra,127.0.0.1,localhost,node1,10.0.0.2"
    assert made["RAY_ADDRESS"] == "10.0.0.1:5" and "PMI_RANK" not in made and "RAY_AUTH_TOKEN" not in made
    assert made["PYTHONUNBUFFERED"] == "1"  # who follows the output sees it
    assert "no_proxy" not in ray_node.command_environment({}, FOLDER, "a:1", [])


def test_what_ray_is_started_with() -> None:
    head = ray_node.start_argv(FOLDER, REQUEST)
    assert {"--head", "--port=0", "--node-ip-address=10.0.0.1", "--num-cpus=3", "--temp-dir=/tmp/pl-x"} <= {*head}
    assert "--include-dashboard=false" in head and not any("--num-gpus" in word for word in head)
    worker = ray_node.start_argv(FOLDER, {**REQUEST, "head": False, "address": "10.0.0.1:5", "gpus": 0})
    assert "--address=10.0.0.1:5" in worker and "--num-gpus=0" in worker and "--head" not in worker
    shown = ray_node.start_argv(FOLDER, {**REQUEST, "dashboard": True})
    assert "--dashboard-host=127.0.0.1" in shown


def test_a_range_of_ports() -> None:
    words = ray_node.start_argv(FOLDER, {**REQUEST, "ports": (21000, 21199)})
    ports = {
        name: int(value)
        for name, _, value in (word.removeprefix("--").partition("=") for word in words)
        if "port" in name
    }
    assert ports.pop("min-worker-port") == 21000 + ray_node.DAEMON_PORTS and ports.pop("max-worker-port") == 21199
    assert {"port", *ray_node.PORTS} == {*ports} and len({*ports.values()}) == len(ports)
    assert all(21000 <= port < 21000 + ray_node.DAEMON_PORTS for port in ports.values())
    taken = [socket.create_server(("", port)) for port in ray_node.free_ports((21000, 21199), ray_node.DAEMON_PORTS)]
    with pytest.raises(OSError, match="--ports 21000-21199: its first 40 ports are in use"):
        ray_node.free_ports((21000, 21199), 1)
    for each in taken:
        each.close()


def test_on_a_shared_host_memory_goes_with_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "physical_memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr(machine, "cgroup_memory_bytes", lambda root=None: None)
    whole, half = ray_node.object_store_bytes(1), ray_node.object_store_bytes(1, cores=32)
    assert half < whole and half == min(whole, int(ray_node.OBJECT_STORE_SHARE * (4 << 30)))


def test_the_object_store_is_bounded_and_shared_between_neighbours() -> None:
    low, high = ray_node.OBJECT_STORE_BYTES
    alone = ray_node.object_store_bytes(1)
    assert low <= alone <= high and low <= ray_node.object_store_bytes(4) <= max(low, alone // 4 + 1)
    assert ray_node.object_store_bytes(10**6) == low


def test_the_store_is_a_share_of_what_the_scheduler_gives() -> None:
    own = ray_node.object_store_bytes(1)
    assert ray_node.object_store_bytes(1, 10**15) == own  # more than there is
    assert ray_node.object_store_bytes(1, 10**9) == min(own, int(ray_node.OBJECT_STORE_SHARE * 10**9))
