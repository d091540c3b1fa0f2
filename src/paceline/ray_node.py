"""One Ray node on this host: its environment, and the command that starts it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import machine
from paceline.ray_folder import TOKEN

LAUNCHED = "PACELINE_LAUNCHED"
"""Variable that `paceline launch` sets for COMMAND: a file that exists as long as the cluster does."""
OBJECT_STORE_BYTES = (80_000_000, 4_000_000_000)  # Ray refuses less than 75 MiB
OBJECT_STORE_SHARE = 0.15  # of the usable memory
SHM_SHARE = 0.7  # of the free shared memory; beyond it Ray would use the disk
TAIL_CHARACTERS = 3000
AGENT_PORT = "dashboard-agent-listen-port"
PORTS = (
    *("node-manager-port", "object-manager-port", AGENT_PORT, "dashboard-agent-grpc-port", "runtime-env-agent-port"),
    "metrics-export-port",
)
"""Options of `ray start` for the ports of a node, except the head's and those of workers."""
DAEMON_PORTS = 40  # of a range of ports; the others are for workers

# Ray's processes must not load a profiler, be taken for MPI ranks or talk to each other through a proxy.
MPI = re.compile(r"^(PMI_|PMI2_|PMIX_|OMPI_|PRTE_|ORTE_|MPI_LOCAL|HYDRA_|HYDI_|MV2_|MPIR_|PALS_|ALPS_)")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "grpc_proxy")

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # workers are no background job; Ray's default is 15
}
"""Variables of every Ray that paceline starts, on one machine or on many."""
NODE_VARIABLES = {
    "RAY_START_HOOK": "paceline.ray_node.before_start",
    "DASHBOARD_METRIC_PORT": "-1",  # the metrics server asks for no token
    "RAY_preload_python_modules": "paceline.ray_worker",
}


def before_start(parameters: Any, head: bool) -> None:
    """Called by `ray start` (RAY_START_HOOK): turns off two servers that nobody needs.

    Ray's client server has a fixed port, so that two jobs on one host would clash. The autoscaler's monitor answers
    without a token and has nothing to scale in an allocation.
    """
    parameters.ray_client_server_port = None
    parameters.no_monitor = True


def command_environment(environ: Mapping[str, str], folder: Path, address: str, hosts: list[str]) -> dict[str, str]:
    """Variables of COMMAND: it finds the cluster, is not an MPI rank and reaches the nodes without a proxy."""
    variables = {**_without_mpi(environ), **_ray_variables(folder)}
    variables |= {"RAY_ADDRESS": address, LAUNCHED: str(folder / TOKEN)}
    variables.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer it to the file
    variables.setdefault("PYTHONUNBUFFERED", "1")  # so that `paceline logs -f` shows each line at once
    if any(name.lower() in PROXIES for name in variables):
        known = [variables.get("no_proxy", "") or variables.get("NO_PROXY", ""), "127.0.0.1", "localhost", *hosts]
        variables["no_proxy"] = variables["NO_PROXY"] = ",".join(word for word in known if word)
    return variables


def node_environment(environ: Mapping[str, str], folder: Path) -> tuple[dict[str, str], list[str]]:
    """Variables of Ray's own processes, and notices about those that were removed."""
    variables = _without_mpi(environ)
    proxies = sorted(name for name in variables if name.lower() in PROXIES)
    removed = [f"LD_PRELOAD={environ['LD_PRELOAD']}"] if environ.get("LD_PRELOAD") else []
    removed += [", ".join(proxies)] if proxies else []
    for name in (*proxies, "RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        variables.pop(name, None)
    notices = [f"{names} removed for Ray's processes" for names in removed]
    return {**variables, **_ray_variables(folder), **NODE_VARIABLES}, notices


def _without_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not MPI.match(name) and name != "LD_PRELOAD"}


def _ray_variables(folder: Path) -> dict[str, str]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN)}
    return {**QUIET, **token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_TMPDIR": str(folder)}


def start_argv(folder: Path, request: Mapping[str, Any]) -> list[str]:
    """`ray start` as the launcher requests it. Without --block it returns when the node has joined the cluster."""
    role, ports = [f"--address={request['address']}"], dict.fromkeys(PORTS, 0)
    workers = 0, 0
    if request["ports"] is not None:
        first, last = request["ports"]
        found = free_ports(request["ports"], len(PORTS) + 1)
        ports, workers = dict(zip(PORTS, found[1:], strict=True)), (first + DAEMON_PORTS, last)
        request = {**request, "port": request["port"] or found[0]}
    if request["head"]:
        dashboard = ["--dashboard-host=127.0.0.1", "--dashboard-port=0"] if request["dashboard"] else []
        shown = f"--include-dashboard={'true' if request['dashboard'] else 'false'}"
        role = ["--head", f"--port={request['port']}", shown, *dashboard]
    store = object_store_bytes(request["neighbours"], request["memory"], request["granted_cores"])
    return [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *role),  # -P: no modules of the working folder
        f"--node-ip-address={request['ip']}",
        f"--num-cpus={request['cpus']}",
        *([] if request["gpus"] is None else [f"--num-gpus={request['gpus']}"]),
        f"--object-store-memory={store}",
        f"--temp-dir={folder}",
        # Without a range the system picks free ports, so that two jobs on a host never clash.
        *(f"--min-worker-port={workers[0]}", f"--max-worker-port={workers[1]}"),
        *(f"--{name}={port}" for name, port in ports.items() if request["ports"] or name == AGENT_PORT),
        "--disable-usage-stats",
    ]


def free_ports(ports: tuple[int, int], count: int) -> list[int]:
    """Free ports of this host in the part of the range that Ray's workers leave to others."""
    start, found = os.getpid() % DAEMON_PORTS, list[int]()  # two jobs that start at once hardly take the same ones
    for at in range(DAEMON_PORTS):
        port = ports[0] + (start + at) % DAEMON_PORTS
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"--ports {ports[0]}-{ports[1]}: its first {DAEMON_PORTS} ports are in use; choose another range")


def object_store_bytes(neighbours: int, given: int = 0, cores: int = 0) -> int:
    """Size for one of `neighbours` nodes on this host. `given`, `cores`: memory and cores that the scheduler grants, or
    0. On a host shared with other jobs, memory is taken in proportion to the cores."""
    low, high = OBJECT_STORE_BYTES
    share = min(1.0, cores / (os.cpu_count() or 1)) if cores else 1.0
    memory = min(machine.memory_limit_bytes(), given or share * machine.physical_memory_bytes())
    bounds = [float(high), OBJECT_STORE_SHARE * memory / neighbours]
    with contextlib.suppress(OSError):
        bounds.append(SHM_SHARE * shutil.disk_usage("/dev/shm").free / neighbours)
    return int(max(low, min(bounds)))


def head_address(folder: Path) -> str:
    """Address of the head that was started in this folder."""
    return (folder / "ray_current_cluster").read_text().strip()


def start_logs(folder: Path, start_log: Path) -> str:
    """The ends of the logs of `ray start` and of Ray's daemons."""
    parts = []
    for path in (start_log, *(folder / "session_latest/logs" / name for name in ("gcs_server.out", "raylet.out"))):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace").strip()
            if text:
                parts.append(f"[{path.name}]\n{text[-TAIL_CHARACTERS:]}")
    return "\n".join(parts)


def check_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise OSError(f"--port {port}: {error.strerror}; leave out --port to use a free one") from None
