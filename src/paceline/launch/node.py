"""Ray on one host: the folder, the token, the environment, the command that starts it, and how all of it ends."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from paceline import machine

TOKEN = "token"
LAUNCHED = "PACELINE_LAUNCHED"
"""The variable that tells COMMAND of a cluster that there is: a file, as long as that is so."""
OBJECT_STORE_BYTES = (80_000_000, 4_000_000_000)  # Ray refuses less than 75 MiB
OBJECT_STORE_SHARE = 0.15  # of the memory that is ours
SHM_SHARE = 0.7  # of what is free there: beyond it Ray would go to the disk
LONGEST_FOLDER = 37  # and Ray's own in it: 39, as the names of Unix sockets, which it puts below, have a limit
OPEN_FILES = 65_535
TAIL = 3000

# Profilers that are loaded into every process break Ray's; a process that is no rank of an MPI job must not be taken
# for one; proxies stand between the nodes.
MPI = re.compile(r"^(PMI_|PMI2_|PMIX_|OMPI_|PRTE_|ORTE_|MPI_LOCAL|HYDRA_|HYDI_|MV2_|MPIR_|PALS_|ALPS_)")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "grpc_proxy")

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # ours are not a background job; Ray's default is 15
}
"""For every Ray of ours, that of one machine (`engine/ray_cluster.py`) too."""
OURS = {**QUIET, "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
FOR_NODES = {
    "RAY_START_HOOK": "paceline.launch.hook.before_start",
    "DASHBOARD_METRIC_PORT": "-1",  # no server of metrics, which would ask nobody for a token
}


def make_folder() -> Path:
    """For Ray, of this host alone, and short: in a private one, as Ray lets everybody write into its own."""
    scratch = os.environ.get("TMPDIR", "")
    for place in (scratch, "/tmp", "/var/tmp"):
        if place and len(place) + 12 <= LONGEST_FOLDER:
            with contextlib.suppress(OSError):
                if place == scratch:  # the job's script has made it on its own host alone
                    Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(prefix="pl-", dir=place)) / "r"
                folder.mkdir()
                return folder
    raise OSError("no folder for Ray: /tmp and /var/tmp are not writable, TMPDIR is not or too long")


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)


def write_token(folder: Path, token: str) -> Path:
    path = folder / TOKEN
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return path


def without_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not MPI.match(name) and name != "LD_PRELOAD"}


def command_environment(environ: Mapping[str, str], folder: Path, address: str, hosts: list[str]) -> dict[str, str]:
    """For COMMAND: it finds the cluster, is no rank of MPI, and reaches the nodes without a proxy."""
    made = {**without_mpi(environ), **_ray_variables(folder), "RAY_ADDRESS": address, LAUNCHED: str(folder / TOKEN)}
    made.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer it to the file
    made.setdefault("PYTHONUNBUFFERED", "1")  # who follows the output of a job sees each line when it is written
    if any(name.lower() in PROXIES for name in made):
        known = [made.get("no_proxy", "") or made.get("NO_PROXY", ""), "127.0.0.1", "localhost", *hosts]
        made["no_proxy"] = made["NO_PROXY"] = ",".join(word for word in known if word)
    return made


def node_environment(environ: Mapping[str, str], folder: Path) -> tuple[dict[str, str], list[str]]:
    """For Ray's own processes, and what was taken out of it that somebody may miss."""
    made = without_mpi(environ)
    notices = [f"LD_PRELOAD={environ['LD_PRELOAD']} is not for Ray's processes"] if environ.get("LD_PRELOAD") else []
    proxies = [name for name in made if name.lower() in PROXIES]
    notices += [f"{', '.join(sorted(proxies))}: not for Ray's processes"] if proxies else []
    for name in (*proxies, "RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        made.pop(name, None)
    return {**made, **_ray_variables(folder), **FOR_NODES}, notices


def _ray_variables(folder: Path) -> dict[str, str]:
    return {**OURS, "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN), "RAY_TMPDIR": str(folder)}


def start_argv(folder: Path, order: Mapping[str, Any]) -> list[str]:
    """`ray start` as the launcher's order says; without --block: it returns when the node is in the cluster."""
    where = [f"--address={order['address']}"]
    if order["head"]:
        dashboard = ["--dashboard-host=127.0.0.1", "--dashboard-port=0"] if order["dashboard"] else []
        shown = f"--include-dashboard={'true' if order['dashboard'] else 'false'}"
        where = ["--head", f"--port={order['port']}", shown, *dashboard]
    gpus = [] if order["gpus"] is None else [f"--num-gpus={order['gpus']}"]
    return [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *where),  # -P: not what lies around here
        f"--node-ip-address={order['ip']}",
        f"--num-cpus={order['cpus']}",
        *gpus,
        f"--object-store-memory={object_store_bytes(order['neighbours'], order['memory'])}",
        f"--temp-dir={folder}",
        # Ports that the system picks: two jobs on a host never meet.
        *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
        "--disable-usage-stats",
    ]


def object_store_bytes(neighbours: int, given: int = 0) -> int:
    """Of one of so many nodes on this host, of whose memory the scheduler has given us so much (0: it did not say)."""
    low, high = OBJECT_STORE_BYTES
    memory = min(machine.memory_limit_bytes(), given or math.inf)
    bounds = [float(high), OBJECT_STORE_SHARE * memory / neighbours]
    with contextlib.suppress(OSError):
        bounds.append(SHM_SHARE * shutil.disk_usage("/dev/shm").free / neighbours)
    return int(max(low, min(bounds)))


def address(folder: Path) -> str:
    """Of the head that was started there."""
    return (folder / "ray_current_cluster").read_text().strip()


def failure(folder: Path, said: Path) -> str:
    """The last that `ray start` said, and its daemons' last words."""
    parts = []
    for path in (said, *(folder / "session_latest/logs" / name for name in ("gcs_server.out", "raylet.out"))):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace").strip()
            if text:
                parts.append(f"[{path.name}]\n{text[-TAIL:]}")
    return "\n".join(parts)


def check_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise OSError(f"--port {port}: {error.strerror}; without --port a free one is found") from None


def local_address(towards: str, port: int) -> str:
    """The address of this host on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))  # sends nothing
        return str(probe.getsockname()[0])


def interface_address(name: str) -> str | None:
    for found in psutil.net_if_addrs().get(name, ()):
        if found.family == socket.AF_INET:
            return str(found.address)
    return None


# -- processes ------------------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """What our children leave behind becomes ours, not init's: so nothing of Ray's gets out of sight."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_with(parent: int) -> None:
    """SIGTERM to us when our parent dies, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was quicker
            sys.exit(128 + signal.SIGTERM)


def raise_limits() -> None:
    """Each worker takes open files by the dozen."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def ours(folder: Path | None) -> list[psutil.Process]:
    """Our descendants, and (where orphans cannot be adopted) those of our user that name our folder."""
    found = psutil.Process().children(recursive=True)
    if sys.platform != "linux" and folder is not None:
        known = {process.pid for process in found} | {os.getpid()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in known and any(str(folder) in word for word in process.cmdline()):
                    found.append(process)
    return found


def end_all(folder: Path | None, seconds: float) -> int:
    """Kill all that is ours; how many are left. Ray's daemons keep nothing worth a goodbye, and take 30 s for one."""
    limit = time.monotonic() + seconds
    while True:
        reap()
        living = ours(folder)
        if not living or time.monotonic() > limit:
            return len(living)
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def reap() -> dict[int, int]:
    """The children that have ended, adopted ones too, and their exit codes."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
