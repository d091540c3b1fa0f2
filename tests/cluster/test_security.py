"""Another user of the same host: what he sees of a job, and what he gets by asking. docs/security.md says the same."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PACELINE = str(Path(sys.executable).with_name("paceline"))
WAIT = "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(60)\n"
# It becomes nobody once its libraries are loaded: they may lie where nobody can read.
STRANGER = """
import encodings.idna, http.client, json, os, socket, sys
from pathlib import Path
import grpc

METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo", "JobInfoGcsService/GetAllJobInfo", "InternalKVGcsService/InternalKVKeys",
    "NodeManagerService/GetNodeStats", "NodeManagerService/RequestWorkerLease", "ObjectManagerService/Pull",
    "ReporterService/GetTraceback",
)

def tried(what, *given):
    try:
        return repr(what(*given))[:200]
    except OSError as error:
        return type(error).__name__

def asked(host, port, verb, path, body=None):
    try:
        link = http.client.HTTPConnection(host, port, timeout=3)
        link.request(verb, path, body, {"Content-Type": "application/json"})
        return link.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0

def called(host, port, method):
    try:
        with grpc.insecure_channel(f"{host}:{port}") as channel:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=3)
        return "OK"
    except grpc.RpcError as error:
        return error.code().name

def listening():
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, _, port = words[1].partition(":")
                outside = name == "tcp6" or set(address) == {"0"}
                yield "0.0.0.0" if outside else socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)

called("127.0.0.1", 9, "warm/up")
folder = sys.argv[1]
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
files = {
    "token": tried(Path(folder, "token").read_text),
    "list": tried(os.listdir, folder),
    "move": tried(os.rename, f"{folder}/token", f"{folder}/gone"),
    "make": tried(os.mkdir, f"{folder}/mine"),
}
environ = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()
           and tried(Path("/proc", pid, "environ").read_bytes) != "PermissionError"]
ports = {}
for host, port in sorted(set(listening())):
    at = "127.0.0.1" if host == "0.0.0.0" else host
    job = json.dumps({"entrypoint": "id"})
    ports[f"{host}:{port}"] = {
        "get": asked(at, port, "GET", "/nodes?view=summary"),
        "submit": asked(at, port, "POST", "/api/jobs/", job),
        "agent": asked(at, port, "POST", "/api/job_agent/jobs/", job),
        "runtime": asked(at, port, "POST", "/get_or_create_runtime_env", b""),
        "calls": sorted({called(at, port, method) for method in METHODS}),
    }
print(json.dumps({"files": files, "environ": environ, "ports": ports}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job with a dashboard, and what a stranger beside it found; one for all tests, as it takes seconds."""
    place = tmp_path_factory.mktemp("job")
    (place / "wait.py").write_text(WAIT)
    with Hosts(1, shared=[place]) as hosts:
        argv = [PACELINE, "launch", "--rehearse", "1", "--dashboard", "--log", str(place / "log"), "--"]
        process = hosts.start(0, [*argv, sys.executable, "wait.py"], cwd=str(place))
        wait_until(lambda: (place / "began").exists(), "the command runs")
        [folder] = (hosts.root(0) / "tmp").glob("pl-*")
        [token] = folder.rglob("token")
        secret = token.read_text()
        found = hosts.run(
            0, [sys.executable, "-c", STRANGER, f"/tmp/{token.parent.relative_to(hosts.root(0) / 'tmp')}"], seconds=60
        )
        assert found.returncode == 0, found.stderr
        told = json.loads(found.stdout)
        told["secret"] = secret
        told["commands"] = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in hosts.pids(0)]
        logs = [path for path in [*folder.rglob("*"), *(place / "log").rglob("*")] if path.is_file()]
        told["logs"] = {str(path): path.read_text(errors="replace") for path in logs if path.name != "token"}
        hosts.signal(process, signal.SIGTERM)
        process.communicate(timeout=20)
        yield told


def test_files_and_sockets_of_a_job_are_its_users_alone(seen: Any) -> None:
    assert set(seen["files"].values()) == {"PermissionError"}, seen["files"]


def test_the_token_is_in_no_command_no_log_and_no_environment_that_others_read(seen: Any) -> None:
    assert len(seen["commands"]) > 5 and len(seen["logs"]) > 10
    assert seen["environ"] == []
    assert not [words for words in seen["commands"] if re.search(r"[0-9a-f]{64}", words)]
    assert not [path for path, text in seen["logs"].items() if seen["secret"] in text]


def test_whoever_asks_without_the_token_is_refused(seen: Any) -> None:
    """Every port of the host is asked to show nodes, to run a job and to lease a worker."""
    assert len(seen["ports"]) >= 6
    for place, answers in seen["ports"].items():
        refused = {"UNAUTHENTICATED"} if place.startswith("0.0.0.0") else set()
        assert refused <= {*answers["calls"]} <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}, (
            f"{place}: {answers}"
        )
        assert not [answers[way] for way in ("get", "submit", "agent", "runtime") if answers[way] == 200], place
    assert any(answers["submit"] == 401 for answers in seen["ports"].values())  # the dashboard is among them
    web = [place for place, answers in seen["ports"].items() if answers["get"]]
    assert web and all(place.startswith("127.") for place in web)
