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
import grpc, ray

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

def joined(address):
    # In a process of its own: Ray ends the process if the head refuses it.
    pid = os.fork()
    if pid == 0:
        os.environ.update(RAY_gcs_server_request_timeout_seconds="5", RAY_gcs_rpc_server_connect_timeout_s="5")
        sys.stdout = sys.stderr = open(os.devnull, "w")
        try:
            ray.init(address=address, log_to_driver=False)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

called("127.0.0.1", 9, "warm/up")
folder, address = sys.argv[1:]
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
print(json.dumps({"files": files, "environ": environ, "ports": ports, "joined": joined(address)}))
"""


# It takes the names that a job might want, before the job: folders, a link to a folder of the job's user, Ray's own.
SQUATTER = """
import os, pathlib, socket
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
for name in ("pl-aaaaaaaa/r", "pl-bbbbbbbb/r", "ray"):
    os.makedirs(f"/tmp/{name}", 0o777)
pathlib.Path("/tmp/pl-aaaaaaaa/lock").write_text(socket.gethostname())  # as if its owner were dead
pathlib.Path("/tmp/pl-aaaaaaaa/r/token").write_text("mine")
os.symlink("/tmp/own", "/tmp/pl-link")
"""


@pytest.fixture(scope="module", params=["launch", "train"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job with a dashboard, and what a stranger beside it found; one for all tests, as it takes seconds."""
    place = tmp_path_factory.mktemp("job")
    (place / "wait.py").write_text(WAIT)
    launch = f"launch --rehearse 1 --dashboard --log {place}/log -- {sys.executable} wait.py"
    train = "train --env CartPole-v1 --workers 2 --name x --total-steps 100M --set engine.dashboard=true"
    words, began = {"launch": (launch, "began"), "train": (train, "runs/x/metrics.jsonl")}[request.param]
    with Hosts(1, shared=[place]) as hosts:
        process = hosts.start(0, [PACELINE, *words.split()], cwd=str(place))
        wait_until(lambda: (place / began).exists(), "the command runs", 60)
        [folder] = (hosts.root(0) / "tmp").glob("pl-*")
        [token] = folder.rglob("token")
        secret = token.read_text()
        inside = f"/tmp/{token.parent.relative_to(hosts.root(0) / 'tmp')}"
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in hosts.pids(0)]
        address = next(found[1] for words in commands if (found := re.search(r"--gcs-address=([\d.]+:\d+)", words)))
        found = hosts.run(0, [sys.executable, "-c", STRANGER, inside, address], seconds=60)
        assert found.returncode == 0, found.stderr
        told = json.loads(found.stdout)
        told |= {"secret": secret, "is_private": request.param == "train", "commands": commands}
        logs = [path for path in [*folder.rglob("*"), *(place / "log").rglob("*")] if path.is_file()]
        told["logs"] = {str(path): path.read_text(errors="replace") for path in logs if path.name != "token"}
        hosts.signal(process, signal.SIGTERM)
        process.communicate(timeout=30)
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
        # With its dashboard, a private Ray has a server on all interfaces that knows none of these calls.
        refused = {"UNAUTHENTICATED"} if place.startswith("0.0.0.0") and not seen["is_private"] else set()
        assert refused <= {*answers["calls"]} <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}, (
            f"{place}: {answers}"
        )
        # Ray's autoscaler serves counters for Prometheus, the same whatever is asked, and takes no other request.
        ways = ("submit", "agent", "runtime") if answers["submit"] == 405 else ("get", "submit", "agent", "runtime")
        assert not [answers[way] for way in ways if answers[way] == 200], place
    assert any(answers["submit"] == 401 for answers in seen["ports"].values())  # the dashboard is among them
    web = [place for place, answers in seen["ports"].items() if answers["get"]]
    assert web and all(place.startswith("127.") for place in web)


def test_a_stranger_cannot_join(seen: Any) -> None:
    assert seen["joined"] != 0


def test_names_that_a_stranger_has_taken_do_not_matter(tmp_path: Path) -> None:
    with Hosts(1, shared=[tmp_path]) as hosts:
        tmp = hosts.root(0) / "tmp"
        (tmp / "own").mkdir()
        (tmp / "own/lock").write_text("node0")
        assert hosts.run(0, [sys.executable, "-c", SQUATTER]).returncode == 0
        before = sorted(str(path) for path in tmp.rglob("*") if tmp_path.name not in str(path))
        words = ["train", "--env", "CartPole-v1", "--workers", "2", "--name", "x", "--iterations", "2"]
        done = hosts.run(0, [PACELINE, *words], cwd=str(tmp_path), seconds=60)
        assert done.returncode == 0, done.stderr
        after = sorted(str(path) for path in tmp.rglob("*") if tmp_path.name not in str(path))
        assert after == before and (tmp / "pl-aaaaaaaa/r/token").read_text() == "mine"
