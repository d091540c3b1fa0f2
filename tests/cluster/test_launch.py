"""`paceline launch` over hosts with their own names, addresses and processes, by ssh and by mpirun; and its faults."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, wait_until
from sshd import start_sshd

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PACELINE = str(Path(sys.executable).with_name("paceline"))
SHOW = """
import json, os, socket, sys, time
import ray
ray.init(log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=1)
def where():
    time.sleep(0.5)
    return socket.gethostname(), os.environ.get("LD_PRELOAD"), os.environ.get("http_proxy"), os.environ.get("LICENSE")

seen = ray.get([where.remote() for _ in range(6)])
print(json.dumps({"seen": seen, "address": os.environ["RAY_ADDRESS"], "host": socket.gethostname(),
                  "cpus": ray.cluster_resources()["CPU"]}), flush=True)
sys.exit(5)
"""
WAIT = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(float(sys.argv[2]))\n"
SHOWN = ("-x", "PACELINE_RENDEZVOUS", "-x", "PATH")  # to the processes of Open MPI on other hosts
OURS = ("raylet", "gcs_server", "ray::", "paceline.launch", "wait.py")


@pytest.fixture
def place(hosts: Hosts, tmp_path: Path) -> Path:
    """A folder of the first host alone, with a hosts file and two programs: nothing is shared."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "hosts").write_text("node0 cpus=1\nnode1 cpus=1\n")
    (folder / "show.py").write_text(SHOW)
    (folder / "wait.py").write_text(WAIT)
    hosts.hide(1, folder)
    return folder


def left(hosts: Hosts) -> list[str]:
    """Of ours, on any host that lives: processes and folders."""
    found = []
    for host in list(hosts._firsts):
        found += [f"{hosts.names[host]}: {word}" for word in OURS if hosts.pids(host, word)]
        found += [f"{hosts.names[host]}: {path.name}" for path in (hosts.root(host) / "tmp").glob("pl-*")]
    return found


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log/timeline.jsonl").read_text().splitlines()]


def launch(place: Path, *words: str) -> list[str]:
    return [PACELINE, "launch", "--hosts", str(place / "hosts"), "--log", str(place / "log"), *words]


def test_two_hosts_by_ssh_with_nothing_shared(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    """Also: a site's preloaded library, a proxy, and a /tmp/ray that belongs to somebody else."""
    env = start_sshd(hosts, tmp_path / "ssh") | {"LD_PRELOAD": "libnothing.so", "http_proxy": "http://192.0.2.1:1"}
    for host in (0, 1):
        folder = hosts.root(host) / "tmp/ray"
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, 65534)
        (folder / "ray_current_cluster").write_text("192.0.2.1:6379")
    argv = launch(place, "--", sys.executable, "show.py")
    began = time.monotonic()
    done = hosts.run(0, argv, env=env, cwd=str(place), seconds=90)
    assert done.returncode == 5, done.stderr
    facts = json.loads(done.stdout)
    assert {name for name, *_ in facts["seen"]} == {"node0", "node1"} and facts["cpus"] == 2.0
    assert all(preload is None and proxy is None for _, preload, proxy, _ in facts["seen"])
    assert facts["address"].startswith(hosts.ips[0]) and facts["host"] == "node0" and "LD_PRELOAD" in done.stderr
    formed = next(row["seconds"] for row in events(place) if row["phase"] == "formed")
    assert formed < 30 and time.monotonic() - began < 80
    assert left(hosts) == []


def test_training_over_ssh(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh")
    train = f"{PACELINE} train --engine ray --workers 2 --env CartPole-v1 --preset none --iterations 5 --name x".split()
    done = hosts.run(0, launch(place, "--", *train), env=env, cwd=str(place), seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((place / "runs/x/summary.json").read_text())
    assert summary["nodes"] == 2 and {host["host"] for host in summary["hosts"]} == {"node0", "node1"}
    rows = [json.loads(line) for line in (place / "runs/x/metrics.jsonl").read_text().splitlines()]
    most = 100 * (os.cpu_count() or 1)  # imports and set-up of the workers are no part of it
    assert all(0 < row["cpu_percent"] < 1.3 * most for row in rows), [row["cpu_percent"] for row in rows]
    assert left(hosts) == []


def test_a_host_that_never_comes_up(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh", only=[0])
    argv = launch(place, "--timeout", "20", "--", sys.executable, "wait.py", "began", "0")
    done = hosts.run(0, argv, env=env, cwd=str(place), seconds=60)
    assert done.returncode == 1 and "node1" in done.stderr and "refused" in done.stderr, done.stderr
    assert left(hosts) == [] and not (place / "began").exists()
    argv = launch(place, "--timeout", "20", "--min-nodes", "1", "--", sys.executable, "wait.py", "began", "0")
    done = hosts.run(0, argv, env=env, cwd=str(place), seconds=60)
    assert done.returncode == 0 and "going on without node1" in done.stderr, done.stderr
    assert left(hosts) == [] and (place / "began").exists()


def test_a_host_that_dies_in_the_middle(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh")
    argv = launch(place, "--", sys.executable, "wait.py", "began", "4")
    process = hosts.start(0, argv, env=env, cwd=str(place))
    wait_until(lambda: (place / "began").exists(), "the command runs")
    hosts.kill(1)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 0 and "lost node1" in err, err
    assert left(hosts) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_the_launcher_is_ended(number: signal.Signals, hosts: Hosts, place: Path, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh")
    argv = launch(place, "--", sys.executable, "wait.py", "began", "60")
    process = hosts.start(0, argv, env=env, cwd=str(place))
    wait_until(lambda: (place / "began").exists(), "the command runs")
    hosts.signal(process, number)
    code = process.wait(timeout=20)
    assert code == (128 + signal.SIGTERM if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: left(hosts) == [], "nothing is left", 10)


def test_two_jobs_on_the_same_hosts(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh")
    first = hosts.start(0, launch(place, "--", sys.executable, "wait.py", "began", "60"), env=env, cwd=str(place))
    wait_until(lambda: (place / "began").exists(), "the first job runs")
    argv = [word.replace("/log", "/log2") for word in launch(place, "--", sys.executable, "show.py")]
    second = hosts.run(0, argv, env=env, cwd=str(place), seconds=60)
    assert second.returncode == 5 and json.loads(second.stdout)["cpus"] == 2.0, second.stderr
    assert first.poll() is None and len(hosts.pids(0, "raylet/raylet")) == len(hosts.pids(1, "raylet/raylet")) == 1
    hosts.signal(first, signal.SIGTERM)
    first.wait(timeout=20)
    assert left(hosts) == []


def test_one_machine_under_two_names(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh")
    (place / "hosts").write_text(f"node0\nnode1\n{hosts.ips[1]}\n")
    done = hosts.run(0, launch(place, "--", "true"), env=env, cwd=str(place), seconds=60)
    assert done.returncode == 1 and "the same machine" in done.stderr, done.stderr
    assert left(hosts) == []


@pytest.mark.parametrize("scheduler", ["oar", "pbs"])
def test_hosts_that_a_scheduler_reaches(scheduler: str, hosts: Hosts, place: Path, tmp_path: Path) -> None:
    """Its own command is a stand-in here: as oarsh's, standard input arrives; as pbs_tmrsh's, there is none."""
    env = start_sshd(hosts, tmp_path / "ssh")
    nodes = tmp_path / "nodes"
    nodes.write_text("node0\nnode0\nnode1\nnode1\n")
    if scheduler == "oar":
        tool, script = "oarsh", 'exec ssh "$@"'
        env |= {"OAR_JOB_ID": "7", "OAR_NODEFILE": str(nodes), "OAR_NODE_FILE": str(nodes)}
    else:
        tool, script = "pbs_tmrsh", 'host=$1; shift 3; exec ssh -n "$host" "$1"'
        env |= {"PBS_JOBID": "7.head", "PBS_NODEFILE": str(nodes)}
        (tmp_path / "ssh/pbs_attach").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/attached\n')
        (tmp_path / "ssh/pbs_attach").chmod(0o755)
    env |= {"LICENSE": "27@server", "PACELINE_PASS_ON": "LICENSE"}
    (tmp_path / "ssh" / tool).write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh" / tool).chmod(0o755)
    (tmp_path / "show.py").write_text(SHOW)
    argv = [PACELINE, "launch", "--cpus", "1", "--log", str(tmp_path / "log"), "--", sys.executable, "show.py"]
    done = hosts.run(0, argv, env=env, cwd=str(tmp_path), seconds=60)
    assert done.returncode == 5, done.stderr
    assert {(name, license) for name, *_, license in json.loads(done.stdout)["seen"]} == {
        ("node0", "27@server"),
        ("node1", "27@server"),
    }
    if scheduler == "pbs":  # on the first host, the sessions of the supervisor and of the command
        attached = [line.split() for line in (tmp_path / "attached").read_text().splitlines()]
        assert len(attached) == 2 and all(words[:3] == ["-j", "7.head", "-p"] for words in attached)
    assert any(row["detail"] == f"by {tool}" for row in events(tmp_path)) and not (tmp_path / "log/contact").exists()
    assert left(hosts) == []


def mpich(folder: Path, env: dict[str, str], *words: str) -> list[str]:
    options = ["-launcher", "ssh", "-launcher-exec", f"{folder}/ssh", "-iface", "eth0"]
    shown = [word for name, value in env.items() for word in ("-genv", name, value)]
    return ["mpiexec.mpich", *options, *shown, *words]


def mpirun(folder: Path, *words: str) -> list[str]:
    options = ["--allow-run-as-root", "--oversubscribe"]
    agent = ["--mca", "plm_rsh_agent", f"{folder}/ssh", "--mca", "btl_tcp_if_include", "eth0"]
    agent += ["--mca", "oob_tcp_if_include", "eth0"]
    return ["mpirun", *options, *agent, *words]


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpirun_over_two_hosts(kind: str, hosts: Hosts, place: Path, tmp_path: Path) -> None:
    """Four processes, two on a host: one Ray node a host."""
    env = start_sshd(hosts, tmp_path / "ssh") | {"PACELINE_RENDEZVOUS": str(tmp_path / "meet")}
    if kind == "mpich":
        start = mpich(tmp_path / "ssh", env, "-np", "4", "-hosts", "node0:2,node1:2")
    else:
        start = mpirun(tmp_path / "ssh", "-np", "4", "--host", "node0:2,node1:2", *SHOWN)
    argv = [*start, PACELINE, "launch", "--log", str(place / "log"), "--"]
    (tmp_path / "show.py").write_text(SHOW)
    done = hosts.run(0, [*argv, sys.executable, "show.py"], env=env, cwd=str(tmp_path), seconds=90)
    assert done.returncode == 5, done.stdout + done.stderr
    facts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert {name for name, *_ in facts["seen"]} == {"node0", "node1"}, done.stderr
    assert sum(row["phase"] == "spare" for row in events(place)) == 2
    assert left(hosts) == [] and list((tmp_path / "meet").iterdir()) == []


def test_one_rank_a_host_has_all_its_cores_and_prints_lines(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    """Open MPI binds each rank to a core and gives it a pseudo-terminal."""
    env = start_sshd(hosts, tmp_path / "ssh") | {"PACELINE_RENDEZVOUS": str(tmp_path / "meet"), "TERM": "xterm"}
    start = mpirun(tmp_path / "ssh", "-np", "2", "--host", "node0:2,node1:2", "--map-by", "ppr:1:node", *SHOWN)
    train = f"{PACELINE} train --engine ray --workers 2 --env CartPole-v1 --preset none --iterations 5 --name x".split()
    argv = [*start, PACELINE, "launch", "--log", str(place / "log"), "--", *train]
    done = hosts.run(0, argv, env=env, cwd=str(tmp_path), seconds=120)
    said, cores = done.stdout + done.stderr, len(os.sched_getaffinity(0))
    assert done.returncode == 0 and f"2 node(s), {2 * cores} CPU(s)" in said, said
    assert said.count(f"mpirun bound each process to 1 of {cores} cores") == 1, said
    assert "Iteration 5 reward" in said and "\x1b" not in said, said
    assert left(hosts) == []


def test_a_killed_first_process_of_mpirun(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    env = start_sshd(hosts, tmp_path / "ssh") | {"PACELINE_RENDEZVOUS": str(tmp_path / "meet")}
    words = ["-np", "2", "--host", "node0,node1", *SHOWN]
    argv = mpirun(tmp_path / "ssh", *words, PACELINE, "launch", "--log", str(place / "log"), "--")
    (tmp_path / "wait.py").write_text(WAIT)
    process = hosts.start(0, [*argv, sys.executable, "wait.py", "began", "60"], env=env, cwd=str(tmp_path))
    wait_until(lambda: (tmp_path / "began").exists(), "the command runs")
    first = [pid for pid in hosts.pids(0, "paceline launch") if b"mpirun" not in _cmdline(pid)]
    os.kill(first[0], signal.SIGKILL)
    process.wait(timeout=30)
    wait_until(lambda: left(hosts) == [], "nothing is left", 15)


def _cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_stranger_cannot_join(hosts: Hosts, place: Path, tmp_path: Path) -> None:
    """Somebody without the key knocks at the launcher's port and at Ray's: neither lets him in."""
    env = start_sshd(hosts, tmp_path / "ssh")
    argv = launch(place, "--", sys.executable, "wait.py", "began", "60")
    process = hosts.start(0, argv, env=env, cwd=str(place))
    wait_until(lambda: (place / "began").exists(), "the command runs")
    address = next(row["detail"] for row in events(place) if row["phase"] == "formed").split()[-1]
    port = int(next(row["detail"] for row in events(place) if row["phase"] == "listening").split()[1].rstrip(","))
    knock = (
        "from paceline.launch.link import *; from paceline.launch.rendezvous import Contact\n"
        f"connect(Contact(['{hosts.ips[0]}'], {port}, '00' * 32), dict(kind='hello', index=1), 3)"
    )
    done = hosts.run(1, [sys.executable, "-c", knock], seconds=30)
    assert done.returncode == 1 and "was not reached" in done.stderr, done.stderr
    assert any(row["phase"] == "refused" for row in events(place)) and process.poll() is None
    (hosts.root(1) / "tmp/guess").write_text("00" * 32)
    hasty = {"RAY_gcs_server_request_timeout_seconds": "3", "RAY_gcs_rpc_server_connect_timeout_s": "3"}
    for given in ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/tmp/guess"}, {}):
        env = {**hasty, **given, "RAY_TMPDIR": "/tmp/g"}
        program = f"import ray; ray.init(address={address!r}); print('in')"
        done = hosts.run(1, [sys.executable, "-c", program], env=env, seconds=40)
        assert done.returncode != 0 and "in" not in done.stdout.split(), done.stdout + done.stderr
    hosts.signal(process, signal.SIGTERM)
    process.wait(timeout=20)
