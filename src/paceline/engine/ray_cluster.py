"""A Ray to run on: the one that is named, or one of our own on this machine, started and stopped with the run."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline import machine
from paceline.config import EngineConfig, UserError
from paceline.engine import cluster_address
from paceline.launch.node import QUIET

CONNECT_SECONDS = 10.0
OBJECT_STORE_SHARE = 0.1  # of the memory that is ours
OBJECT_STORE_BYTES = (80_000_000, 1_000_000_000)
PLACEMENT_SECONDS = 60.0
SHUTDOWN_SECONDS = 15.0

# Waits for the end of the driver, then ends those of its processes that are left, and removes its folder: the kernel
# ends most of them with it, but two helpers of Ray stay for minutes when the driver is killed.
WATCH = """
import json, shutil, sys, time
import psutil
lines = [line for line in sys.stdin]
time.sleep(2)
folder, ours = json.loads(lines[-1]) if lines else (None, ())
for pid, born in ours:
    try:
        process = psutil.Process(pid)
        if process.create_time() == born:
            process.kill()
    except psutil.Error:
        pass
if folder is not None:
    shutil.rmtree(folder, ignore_errors=True)
"""


@dataclass(frozen=True)
class Node:
    id: str
    address: str
    cpus: float


class Cluster:
    def __init__(self, config: EngineConfig, cpus: int, *, gpus: int = 0) -> None:
        """`cpus`, `gpus`: how many places a Ray of our own has; another has what it has."""
        import ray

        self.ray: Any = ray
        if ray.is_initialized():
            raise UserError(
                f"engine.name={config.name}: this process is connected to a Ray already; call ray.shutdown() first"
            )
        self._folder: Path | None = None
        self._variables: dict[str, str | None] = {}
        self._group: Any = None
        self._watch: subprocess.Popen[str] | None = None
        self.address = cluster_address(config) or "local"
        self.is_own = self.address == "local"
        try:
            self._set(QUIET)
            if self.is_own:
                self._start(cpus, gpus, config.dashboard)
            else:
                self._connect()
            self.nodes = self._nodes()
        except BaseException:
            self.close()
            raise

    def _start(self, cpus: int, gpus: int, dashboard: bool) -> None:
        # Unix sockets have short names, so the folder must too; it is private, like the token in it. Ray opens its own
        # to everybody, so that is another one, inside.
        self._folder = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp" if Path("/tmp").is_dir() else None))
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self._set({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(self._folder / "r")})
        low, high = OBJECT_STORE_BYTES
        with _quiet(), _loopback():
            self.ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=dashboard,
                object_store_memory=int(min(high, max(low, OBJECT_STORE_SHARE * machine.memory_limit_bytes()))),
                _node_ip_address="127.0.0.1",
                _temp_dir=str(self._folder / "r"),
                log_to_driver=False,
                configure_logging=False,
            )

    def _connect(self) -> None:
        named = "engine.address" if self.address != os.environ.get("RAY_ADDRESS") else "RAY_ADDRESS"
        what = f"{named}={self.address}"
        if self.address != "auto":
            host, _, port = self.address.rpartition(":")
            if not host or not port.isdecimal():
                raise UserError(f"{what}: host:port is expected, for example 10.0.0.1:6379")
            try:
                _knock(host, int(port))
            except OSError as error:
                raise UserError(
                    f"{what}: no Ray answers there within {CONNECT_SECONDS:g} s ({error}); is the head of the cluster "
                    "running (`ray start --head`), and can this machine reach it?"
                ) from None
        # A reachable port that is no Ray, or another token, would otherwise be tried for minutes.
        self._set({"RAY_gcs_server_request_timeout_seconds": "8", "RAY_gcs_rpc_server_connect_timeout_s": "8"})
        try:
            with _quiet():
                self.ray.init(address=self.address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # of many kinds, by what is wrong
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"{what}: Ray does not let us in: {reason} (the same Ray and Python versions are needed, and "
                "RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as on its head)"
            ) from None

    def _nodes(self) -> list[Node]:
        """Ours first."""
        own = self.ray.get_runtime_context().get_node_id()
        found = [
            Node(n["NodeID"], n["NodeManagerAddress"], n["Resources"].get("CPU", 0.0))
            for n in self.ray.nodes()
            if n["Alive"]
        ]
        return sorted(found, key=lambda node: (node.id != own, node.address))

    def address_of(self, node: str) -> str:
        """Of a node that may have come since."""
        if node not in {known.id for known in self.nodes}:
            self.nodes = self._nodes()
        return next((known.address for known in self.nodes if known.id == node), "?")

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def logs(self) -> Path | None:
        """Of its processes, if the Ray is our own."""
        return None if self._folder is None else self._folder / "r/session_latest/logs"

    @property
    def own_address(self) -> str:
        return self.nodes[0].address

    def reserve(self, places: int, on_head: int) -> None:
        """`places` shares of CPU, spread over the nodes, and `on_head` more beside the driver."""
        from ray.util.placement_group import placement_group

        share = _share([node.cpus for node in self.nodes], places + on_head)
        head = f"node:{self.own_address}"
        bundles = [{"CPU": share, head: 0.001} for _ in range(on_head)] + [{"CPU": share}] * places
        self._group = placement_group(bundles, strategy="SPREAD")
        self._share = share
        if not self._group.wait(PLACEMENT_SECONDS):
            raise UserError(
                f"engine.workers={places}: the Ray cluster at {self.address} did not give {places + on_head} x "
                f"{share:g} of its {self.cpus:g} CPUs within {PLACEMENT_SECONDS:g} s; is another job using it? "
                "`ray status` tells"
            )
        self.watch_over()

    def watch_over(self) -> None:
        """See to it that what we have started ends with us, even if we are killed."""
        if not self.is_own:
            return
        words = [sys.executable, "-c", WATCH]
        quiet = subprocess.DEVNULL
        self._watch = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True, start_new_session=True
        )
        ours = [(p.pid, p.create_time()) for p in psutil.Process().children(recursive=True) if p.pid != self._watch.pid]
        assert self._watch.stdin is not None
        self._watch.stdin.write(json.dumps((str(self._folder), ours)) + "\n")
        self._watch.stdin.flush()

    def spawn(self, place: int | None) -> Any:
        """A worker process at one of the reserved places, or anywhere; it is not waited for."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from paceline.engine.worker import Worker

        remote = self.ray.remote(concurrency_groups={"control": 1}, max_restarts=0, max_task_retries=0)(Worker)
        if place is None:
            return remote.options(num_cpus=0, scheduling_strategy="SPREAD").remote()
        strategy = PlacementGroupSchedulingStrategy(self._group, place)
        return remote.options(num_cpus=self._share, scheduling_strategy=strategy).remote()

    def lost_places(self) -> set[int]:
        """Those whose node is dead. Ray finds new ones only where it has room for all of them at once."""
        from ray.util.placement_group import placement_group_table

        self.nodes = self._nodes()
        alive = {node.id for node in self.nodes}
        where: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        return {place for place, node in where.items() if node not in alive}

    def close(self) -> None:
        """Ends our workers; and Ray itself, if it is ours."""
        if self.ray.is_initialized():
            if self._group is not None and not self.is_own:
                from ray.util.placement_group import remove_placement_group

                with suppress(self.ray.exceptions.RayError):
                    remove_placement_group(self._group)
            self._shut_down()
        if self._watch is not None:
            self._watch.kill()  # there is nothing left to watch over
            self._watch.communicate()
            self._watch = None
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._variables = {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _shut_down(self) -> None:
        """Ray's own way, and if that takes too long and it is ours, the processes that we started."""
        ours = psutil.Process().children(recursive=True) if self.is_own else []
        ending = threading.Thread(target=self.ray.shutdown, daemon=True)
        ending.start()
        ending.join(SHUTDOWN_SECONDS)
        if ending.is_alive():
            for process in ours:
                with suppress(psutil.Error):
                    process.kill()  # it looks whether the number still means the same process
            ending.join(SHUTDOWN_SECONDS)

    def _set(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self._variables.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        # Ray has read its variables when it was imported, and keeps the token it found then.
        raylet: Any = self.ray._raylet
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _knock(host: str, port: int) -> None:
    """An OSError unless a server of HTTP/2, as Ray's is, answers: Ray itself would try for a minute."""
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        if len(link.recv(9)) < 4:
            raise OSError("it hung up")


def _share(cpus: list[float], places: int) -> float:
    """The largest part of a CPU, one at most, of which all nodes together hold so many."""
    for crowd in range(1, places + 1):
        if sum(int(cpu * crowd) for cpu in cpus) >= places:
            return int(1000 / crowd) / 1000
    raise UserError(f"engine.workers: the Ray cluster has {sum(cpus):g} CPUs; {places} processes cannot share them")


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's advice to its developers is not for our users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _loopback() -> Iterator[None]:
    """On Linux Ray puts the machine's address in the place of 127.0.0.1, unless it takes clusters to be turned off."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
