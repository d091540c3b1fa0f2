"""`paceline launch` on this machine: what it finds, refuses and starts. Several hosts are in `tests/cluster`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.launch import cluster, local
from paceline.launch.launch import _is_inside, find_allocation
from paceline.launch.node import LAUNCHED

SCRIPT = """
import json, os, sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")  # as a user's own script does
nodes = {node["NodeManagerAddress"]: node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"]}

@ray.remote(num_cpus=1)
def where():
    time.sleep(0.3)
    return ray.util.get_node_ip_address(), os.environ.get("LD_PRELOAD"), os.environ.get("OMPI_X")

seen = ray.get([where.remote() for _ in range(4)])
token = open(os.environ["RAY_AUTH_TOKEN_PATH"]).read()
shown = [path for path in os.listdir("/proc") if path.isdecimal()
         and token.encode() in open(f"/proc/{path}/cmdline", "rb").read()]
mode = os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode & 0o777
facts = dict(nodes=nodes, seen=seen, shown=shown, mode=mode, address=os.environ["RAY_ADDRESS"],
             deadline=os.environ.get("PACELINE_DEADLINE"))
print(json.dumps(facts), flush=True)
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI", "PBS_", "OAR_", "RAY_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def leftovers() -> Iterator[Callable[[], list[str]]]:
    """What the test has started and what is still there: processes and folders of Ray."""
    before = {*Path("/tmp").glob("pl-*")}

    def left() -> list[str]:
        new = [str(path) for path in {*Path("/tmp").glob("pl-*")} - before]
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue
            new += [words for folder in new if folder in words]
            if "paceline.launch.supervisor" in words:
                new.append(words)
        return new

    yield left


def test_two_rehearsed_nodes(here: Path, start: Callable[..., Any], leftovers: Callable[[], list[str]]) -> None:
    (here / "own.py").write_text(SCRIPT)
    environ = {**os.environ, "LD_PRELOAD": "libnothing.so", "OMPI_X": "1", "PACELINE_DEADLINE": "2000000000"}
    words = ["--rehearse", "2", "--cpus", "1", "--log", "log", "--", sys.executable, "own.py", "{address}"]
    process = start("launch", *words, env=environ)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    facts = json.loads(out)
    assert facts["nodes"] == {local.loopback(0): 1.0, local.loopback(1): 1.0}
    assert {node for node, *_ in facts["seen"]} == {*facts["nodes"]}
    assert all(preload is None and rank is None for _, preload, rank in facts["seen"]) and "LD_PRELOAD" in err
    assert facts["mode"] == 0o600 and facts["shown"] == [] and facts["address"].startswith(local.loopback(0))
    assert facts["deadline"] == "2000000000"
    rows = [json.loads(line) for line in (here / "log/timeline.jsonl").read_text().splitlines()]
    phases = [row["phase"] for row in rows if row["host"] == "rehearsal1"]
    assert phases == ["supervisor", "here", "starting", "ready", "stopped"]
    assert next(row["seconds"] for row in rows if row["phase"] == "formed") < 30
    assert "ready" in (here / "log/timeline.txt").read_text() and leftovers() == []


def test_a_killed_launcher_leaves_nothing(
    here: Path, start: Callable[..., Any], leftovers: Callable[[], list[str]]
) -> None:
    (here / "wait.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(60)")
    process = start("launch", "--log", "log", "--", sys.executable, "wait.py")
    _wait(lambda: (here / "began").exists(), 30)
    assert len(leftovers()) > 3
    process.kill()
    _wait(lambda: leftovers() == [], 10)


def test_a_port_that_is_taken(here: Path, command: Callable[..., Any]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        result = command("launch", "--port", str(port), "--timeout", "40", "--log", "log", "--", "true")
    assert result.code == 1 and str(port) in result.err and result.err.count("\n") <= 2, result.err


def _wait(true: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "not in time"
        time.sleep(0.05)


# -- without starting anything --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a command is needed"),
        (["--rehearse", "0", "--", "true"], "--rehearse 0"),
        (["--rehearse", "2", "--hosts", "f", "--", "true"], "one of them"),
        (["--hosts", "none", "--", "true"], "No such file"),
        (["--min-nodes", "3", "--rehearse", "2", "--", "true"], "--min-nodes 3"),
        (["--timeout", "0", "--", "true"], "--timeout 0"),
        (["--cpus", "0", "--", "true"], "--cpus 0"),
    ],
    ids=str,
)
def test_bad_input_writes_nothing(words: list[str], said: str, here: Path, cli: Callable[..., Any]) -> None:
    result = cli("launch", *words)
    assert result.code == 2 and said in result.err and list(here.iterdir()) == []


def test_an_interface_that_is_not_there(here: Path, cli: Callable[..., Any]) -> None:
    (here / "hosts").write_text("192.0.2.77\n")
    result = cli("launch", "--hosts", "hosts", "--interface", "hsn7", "--", "true")
    assert result.code == 1 and "hsn7" in result.err and "lo" in result.err


def test_the_allocation_is_found() -> None:
    assert find_allocation({}, None, None)[0].scheduler == "local"
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert find_allocation(ranks, None, None)[0].rank == 1
    nodefile = {"OAR_JOB_ID": "5"}  # without its list of hosts
    assert find_allocation({**nodefile, **ranks}, None, 3)[0].scheduler == "rehearsal"


def test_inside_another_launch_the_command_runs_on_its_cluster(here: Path, command: Callable[..., Any]) -> None:
    (here / "token").touch()
    inside = {**os.environ, "RAY_ADDRESS": "10.0.0.1:5", LAUNCHED: str(here / "token")}
    done = command("launch", "--", "sh", "-c", 'echo "at {address}"; exit 6', env=inside)
    assert (done.code, done.out) == (6, "at 10.0.0.1:5\n") and "inside `paceline launch`" in done.err
    assert not _is_inside({LAUNCHED: str(here / "gone")}) and not _is_inside({})  # left over, by a job that submits


def test_nothing_secret_is_passed_on() -> None:
    environ = {"RAY_AUTH_TOKEN": "x", "PACELINE_SECRET": "x", "PACELINE_DEADLINE": "1", "HOME": "/h", "OMP_X": "2"}
    assert cluster.passed_on({**environ, "PATH": "/bin"}) == {"PACELINE_DEADLINE": "1", "OMP_X": "2", "PATH": "/bin"}


def test_is_here() -> None:
    import platform

    assert local.is_here("localhost") and local.is_here(platform.node()) and local.is_here("me@127.0.0.1")
    assert not local.is_here("192.0.2.77") and not local.is_here("no-such-host.invalid")


def test_help_is_quick_and_light() -> None:
    program = "import sys; from paceline.cli import make_parser; make_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30).stdout.split()
    assert "paceline.launch.launch" in loaded and not {"psutil", "pydantic", "ray", "torch"} & {*loaded}


def test_the_first_hosts_alone(here: Path, cli: Callable[..., Any]) -> None:
    from paceline.launch.launch import _first

    assert [host.name for host in _first(local.rehearsal(3), 2).hosts] == ["rehearsal0", "rehearsal1"]
    result = cli("launch", "--rehearse", "2", "--nodes", "3", "--", "true")
    assert result.code == 2 and "--nodes 3: the allocation has 2" in result.err and not list(here.iterdir())
    assert "at least 1" in cli("launch", "--nodes", "0", "--", "true").err
