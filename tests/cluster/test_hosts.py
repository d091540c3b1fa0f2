"""The test bed itself: hosts apart from each other and from the machine, Ray over them, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import PREFIX, Hosts, wait_until
from raycluster import QUICK_HEALTH, RayCluster

pytestmark = pytest.mark.cluster

PYTHON = sys.executable
ECHO = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    while True:
        connection, (peer, _) = server.accept()
        with connection:
            connection.sendall(f"{socket.gethostname()} {peer}".encode())
"""
ASK = """
import socket, sys, time
start = time.perf_counter()
with socket.create_connection((sys.argv[1], 5000), timeout=0.5) as connection:
    answer = connection.recv(100).decode()
print(answer, time.perf_counter() - start)
"""
WHO = """
import socket
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(log_to_driver=False)

@ray.remote(num_cpus=1)
def who():
    return ray.util.get_node_ip_address() + " " + socket.gethostname()

on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes() if node["Alive"]]
for line in ray.get([who.options(scheduling_strategy=one).remote() for one in on], timeout=40):
    print(line)
"""


def serve(hosts: Hosts, host: int) -> subprocess.Popen[str]:
    server = hosts.start(host, [PYTHON, "-c", ECHO])
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return server


def ask(hosts: Hosts, host: int, name: str) -> tuple[str, str, float]:
    """Who answered, whom they saw, and the seconds it took: a round trip to connect, half of one for the answer."""
    done = hosts.run(host, [PYTHON, "-c", ASK, name])
    assert done.returncode == 0, done.stderr
    answered, saw, seconds = done.stdout.split()
    return answered, saw, float(seconds)


def ours() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(PREFIX)}


def gone(pids: list[int]) -> bool:
    return not any(Path("/proc", str(pid)).exists() for pid in pids)


def test_hosts_have_names_and_reach_each_other_by_them(hosts: Hosts) -> None:
    for here, there in ((0, 1), (1, 0)):
        serve(hosts, there)
        answered, saw, _ = ask(hosts, here, hosts.names[there])
        assert (answered, saw) == (hosts.names[there], hosts.ips[here])
    assert len({*hosts.names, os.uname().nodename}) == 3
    assert hosts.run(0, ["ip", "route", "show", "default"]).stdout == ""


def test_a_host_has_its_own_processes_and_temporary_files(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("seen by both")
    for folder in ("/tmp", "/dev/shm"):
        assert hosts.run(0, ["touch", f"{folder}/mine"]).returncode == 0
        assert (hosts.root(0) / folder.lstrip("/") / "mine").exists()
        assert hosts.run(1, ["test", "-e", f"{folder}/mine"]).returncode == 1
        assert not Path(folder, "mine").exists()
    for host in (0, 1):
        seen = hosts.run(host, ["sh", "-c", f"cat {tmp_path}/shared; echo; ls -d /proc/[0-9]* | wc -l"])
        text, processes = seen.stdout.split("\n")[:2]
        assert text == "seen by both" and int(processes) <= 4
    sleeper = hosts.start(0, ["sleep", "100"])
    wait_until(lambda: len(hosts.pids(0, "sleep 100")) == 1, "the sleeper runs")
    assert hosts.pids(1, "sleep 100") == []
    hosts.signal(sleeper, signal.SIGTERM)
    assert sleeper.wait(timeout=5) == -signal.SIGTERM


def test_a_folder_can_be_hidden_from_one_host(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1")
    hosts.hide(1, tmp_path)
    assert hosts.run(0, ["ls", str(tmp_path)]).stdout == "code.py\n"
    assert hosts.run(1, ["ls", str(tmp_path)]).stdout == ""


def test_a_command_past_its_limit_is_killed(hosts: Hosts) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run(0, ["sh", "-c", "sleep 100; true"], seconds=0.3)
    wait_until(lambda: hosts.pids(0, "sleep 100") == [], "the command is gone", seconds=5)


def test_a_cut_link_and_a_slow_one(hosts: Hosts) -> None:
    serve(hosts, 1)
    usual = ask(hosts, 0, "node1")[2]
    hosts.link(1, up=False)
    assert "timed out" in hosts.run(0, [PYTHON, "-c", ASK, "node1"]).stderr
    hosts.link(1, up=True)
    ask(hosts, 0, "node1")
    hosts.delay(1, 60)
    slow = ask(hosts, 0, "node1")[2]
    hosts.delay(0, 60)
    slower = ask(hosts, 0, "node1")[2]
    hosts.delay(0, 0)
    hosts.delay(1, 0)
    assert usual < 0.05 and 0.06 <= slow < 0.2
    assert slower >= 0.12
    assert ask(hosts, 0, "node1")[2] < 0.05


def test_a_killed_host_is_gone_at_once_and_can_boot_again(hosts: Hosts) -> None:
    server = serve(hosts, 1)
    pids = hosts.pids(1)
    assert len(pids) == 2
    hosts.kill(1)
    assert gone(pids)
    assert server.wait(timeout=5) == -signal.SIGKILL
    assert hosts.run(0, [PYTHON, "-c", ASK, "node1"]).returncode == 1
    hosts.boot(1)
    serve(hosts, 1)
    assert ask(hosts, 0, "node1")[0] == "node1"


def test_nothing_is_left_after_a_failure() -> None:
    before = ours()
    with pytest.raises(ZeroDivisionError), Hosts(2) as hosts:
        for host in (0, 1):
            hosts.start(host, ["sh", "-c", "setsid sleep 100 & setsid sleep 100 & wait"])
            wait_until(lambda: len(hosts.pids(host, "sleep 100")) >= 2, "the sleepers run")  # noqa: B023
        pids = hosts.pids(0) + hosts.pids(1)
        links = ours() - before
        assert len(links) == 3  # the bridge and a link for each
        hosts.delay(1, 5)
        links = ours() - before
        assert len(links) == 5
        raise ZeroDivisionError
    assert gone(pids) and not ours() & links


def test_nothing_is_left_of_a_killed_test_run() -> None:
    code = (
        "import time; from hosts import Hosts; hosts = Hosts(2).__enter__();"
        "print(hosts.bridge, *hosts.pids(0), *hosts.pids(1), flush=True); time.sleep(100)"
    )
    with subprocess.Popen([PYTHON, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        bridge, *pids = other.stdout.readline().split()
        with Hosts(1):
            assert bridge in ours()  # a neighbour's is left alone
        other.kill()
    wait_until(lambda: gone([int(pid) for pid in pids]), "the hosts ended with their maker", seconds=5)
    with Hosts(1):
        assert bridge not in ours()


@pytest.mark.timeout(300)
def test_ray_forms_loses_and_regains_a_node(hosts: Hosts, tmp_path: Path) -> None:
    def answers(cluster: RayCluster) -> list[str]:
        done = cluster.driver([PYTHON, "-c", WHO])
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    both = [f"{ip} {name}" for ip, name in zip(hosts.ips, hosts.names, strict=True)]
    with RayCluster(hosts, [1, 1], tmp_path, env=QUICK_HEALTH) as cluster:
        assert answers(cluster) == both
        hosts.kill(1)
        cluster.wait_alive(1)
        assert answers(cluster) == both[:1]
        hosts.boot(1)
        cluster.start_node(1)
        cluster.wait_alive(2)
        assert answers(cluster) == both
        start = time.monotonic()
        cluster.stop_node(1)
        assert hosts.pids(1, "ray") == [] and time.monotonic() - start < 35
