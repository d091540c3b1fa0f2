"""`paceline launch` on this machine: what it finds, refuses and starts. Several hosts are in `tests/cluster`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.launch.environment import passed_on
from paceline.launch.find_allocation import find_allocation, first_hosts
from paceline.launch.launch_command import is_inside
from paceline.ray_node import LAUNCHED
from paceline.schedulers.this_machine import is_this_machine, loopback, rehearsal

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
def leftovers(here: Path) -> Callable[[], list[str]]:
    """What the launch of this test has left: folders in its timeline, and processes that name them or run in `here`."""

    def left() -> list[str]:
        rows = [json.loads(line) for line in (here / "log/timeline.jsonl").read_text().splitlines()]
        folders = [Path(row["detail"].split(", ")[1]).parent for row in rows if row["phase"] == "starting"]
        found = [str(folder) for folder in folders if folder.exists()]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                in_here = process.cwd() == str(here) and process.pid != os.getpid()
                if any(str(folder) in words for folder in folders) or (in_here and "supervisor" in words):
                    found.append(words)
        return found

    return left


def test_two_rehearsed_nodes(here: Path, start: Callable[..., Any], leftovers: Callable[[], list[str]]) -> None:
    (here / "own.py").write_text(SCRIPT)
    environ = {**os.environ, "LD_PRELOAD": "libnothing.so", "OMPI_X": "1", "PACELINE_DEADLINE": "2000000000"}
    words = ["--rehearse", "2", "--cpus", "1", "--log", "log", "--", sys.executable, "own.py", "{address}"]
    process = start("launch", *words, env=environ)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    facts = json.loads(out)
    assert facts["nodes"] == {loopback(0): 1.0, loopback(1): 1.0}
    assert {node for node, *_ in facts["seen"]} == {*facts["nodes"]}
    assert all(preload is None and rank is None for _, preload, rank in facts["seen"]) and "LD_PRELOAD" in err
    assert facts["mode"] == 0o600 and facts["shown"] == [] and facts["address"].startswith(loopback(0))
    assert facts["deadline"] == "2000000000"
    rows = [json.loads(line) for line in (here / "log/timeline.jsonl").read_text().splitlines()]
    phases = [row["phase"] for row in rows if row["host"] == "rehearsal1"]
    assert phases == ["supervisor", "here", "starting", "ready", "stopped"]
    assert next(row["seconds"] for row in rows if row["phase"] == "formed") < 30
    assert "ready" in (here / "log/timeline.txt").read_text() and leftovers() == []


BOX = """#!/bin/bash
# A container in one line: its own variables and programs, and only the first three files of who starts it.
for each in /proc/$$/fd/*; do fd=${each##*/}; [ "$fd" -le 2 ] || eval "exec $fd>&-" 2>/dev/null; done
exec env -i HOME="$HOME" PATH=BIN:/bin:/usr/bin IN_BOX="$1" "${@:2}"
"""


IN_BOX = """
import json, os, psutil
parts = [process for process in psutil.process_iter() if process.name() in ("raylet", "gcs_server")]
mine = [process for process in parts if any(os.environ["RAY_TMPDIR"] in word for word in process.cmdline())]
ports = [each.laddr.port for process in mine for each in process.net_connections("tcp") if each.status == "LISTEN"]
environ = [os.environ.get(name) for name in ("IN_BOX", "OMP_X")]
print(json.dumps(dict(ports=ports, environ=environ, path=os.environ["PATH"])))
"""


def test_a_container_and_a_range_of_ports(
    here: Path, start: Callable[..., Any], leftovers: Callable[[], list[str]]
) -> None:
    """The launcher is outside; supervisor, Ray and COMMAND are inside, with the variables that are passed on."""
    (here / "box").write_text(BOX.replace("BIN", str(Path(sys.executable).parent)))
    (here / "box").chmod(0o755)
    (here / "own.py").write_text(IN_BOX)
    environ = {**os.environ, "OMP_X": "7", "PATH": f"/outside:{os.environ['PATH']}"}
    words = ["--cpus", "1", "--log", "log", "--container", f"{here}/box {{workdir}}", "--ports", "21000-21199"]
    process = start("launch", *words, "--", "python3", "own.py", env=environ)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    facts = json.loads(out)
    assert facts["environ"] == [str(here), "7"] and "/outside" not in facts["path"]
    assert len(facts["ports"]) >= 3 and all(21000 <= port < 21040 for port in facts["ports"]), facts
    assert "listening   port 210" in (here / "log/timeline.txt").read_text() and leftovers() == []


@pytest.mark.parametrize("ports", ["80", "20000-20010", "60000-70000", "a-b"])
def test_wrong_ranges_of_ports(ports: str, cli: Callable[..., Any]) -> None:
    result = cli("launch", "--ports", ports, "--", "true")
    assert result.code == 2 and f"--ports {ports}: give a range from 1024 to 65535" in result.err


def test_a_killed_launcher_leaves_nothing(
    here: Path, start: Callable[..., Any], leftovers: Callable[[], list[str]]
) -> None:
    (here / "wait.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(300)")
    process = start("launch", "--log", "log", "--", sys.executable, "wait.py")
    _wait(lambda: (here / "began").exists(), 120)
    assert len(leftovers()) > 3
    process.kill()
    _wait(lambda: leftovers() == [], 60)


SAVES = """
import os, signal, subprocess, sys, time
import ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=0)
class Keeper:
    def keep(self):
        return "kept"

    def end_a_program(self):  # as an environment does with its simulator
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait(timeout=10)

keeper = Keeper.remote()
assert ray.get(keeper.end_a_program.remote()) == -signal.SIGTERM
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
open("began", "w").close()
while not told:
    time.sleep(0.05)
time.sleep(6)
told_by = len(told)
with open("saving", "w") as file:
    file.write(f"{told_by} {ray.get(keeper.keep.remote(), timeout=10)} {os.environ['PACELINE_GRACE_SECONDS']}")
os.rename("saving", "saved")
sys.exit(99)
"""


@pytest.mark.parametrize("how", ["every process, twice", "the launcher, thrice, then kill -9"])
def test_the_command_has_its_time_to_save(
    how: str, here: Path, start: Callable[..., Any], leftovers: Callable[[], list[str]]
) -> None:
    """SLURM sends SIGTERM to every process of a job, Ray's too, twice within milliseconds."""
    (here / "save.py").write_text(SAVES)
    process = start("launch", "--log", "log", "--", sys.executable, "save.py")
    _wait(lambda: (here / "began").exists(), 120)
    every = how.startswith("every")
    signalled = [psutil.Process(process.pid)]
    signalled += signalled[0].children(recursive=True) if every else []
    for _ in range(2 if every else 3):
        for each in signalled:
            with contextlib.suppress(psutil.Error):
                each.terminate()
        time.sleep(0.2)
    if not every:
        process.kill()
    _wait(lambda: (here / "saved").exists(), 60)
    times, kept, grace = (here / "saved").read_text().split()
    assert kept == "kept" and grace == "25" and (every or times == "1")
    assert process.wait(timeout=30) == (99 if every else -signal.SIGKILL)
    _wait(lambda: leftovers() == [], 60)


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
        ([], "launch needs a command"),
        (["--rehearse", "0", "--", "true"], "--rehearse 0"),
        (["--rehearse", "2", "--hosts", "f", "--", "true"], "exclude each other"),
        (["--hosts", "none", "--", "true"], "No such file"),
        (["--min-nodes", "3", "--rehearse", "2", "--", "true"], "--min-nodes 3"),
        (["--timeout", "0", "--", "true"], "--timeout 0"),
        (["--cpus", "0", "--", "true"], "--cpus 0"),
        (["--port", "99999", "--", "true"], "--port 99999"),
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
    assert not is_inside({LAUNCHED: str(here / "gone")}) and not is_inside({})  # left over, by a job that submits


def test_nothing_secret_is_passed_on() -> None:
    environ = {"RAY_AUTH_TOKEN": "x", "PACELINE_SECRET": "x", "PACELINE_DEADLINE": "1", "HOME": "/h", "OMP_X": "2"}
    environ |= {"LM_LICENSE_FILE": "27@h", "API_KEY": "x", "OTHER": "x"}
    passed = passed_on({**environ, "PATH": "/bin"}, "LM_LICENSE_FILE API_KEY NOT_SET")
    assert passed == {"PACELINE_DEADLINE": "1", "OMP_X": "2", "PATH": "/bin", "LM_LICENSE_FILE": "27@h"}


def test_is_here() -> None:
    import platform

    assert is_this_machine("localhost") and is_this_machine(platform.node()) and is_this_machine("me@127.0.0.1")
    assert not is_this_machine("192.0.2.77") and not is_this_machine("no-such-host.invalid")


def test_help_is_quick_and_light() -> None:
    program = (
        "import sys; from paceline.commands.main import make_parser; make_parser(['launch', '-h']); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30).stdout.split()
    assert "paceline.commands.launch" in loaded and not {"psutil", "pydantic", "ray", "torch"} & {*loaded}


def test_the_first_hosts_alone(here: Path, cli: Callable[..., Any]) -> None:
    assert [host.name for host in first_hosts(rehearsal(3), 2).hosts] == ["rehearsal0", "rehearsal1"]
    result = cli("launch", "--rehearse", "2", "--nodes", "3", "--", "true")
    assert result.code == 2 and "--nodes 3: the allocation has 2" in result.err and not list(here.iterdir())
    assert "at least 1" in cli("launch", "--nodes", "0", "--", "true").err
