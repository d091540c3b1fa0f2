"""The Ray that a run uses: an existing cluster, or a private one on this machine that starts and ends with the run."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline import machine, ray_folder
from paceline.config import EngineConfig, UserError
from paceline.engines.ray.ray_watch import RayWatch
from paceline.ray_node import QUIET
from paceline.training.engine import TrainingError
from paceline.training.placement import cluster_address

CONNECT_SECONDS = 10.0
OBJECT_STORE_SHARE = 0.1  # of the available memory
OBJECT_STORE_BYTES = (80_000_000, 1_000_000_000)
PLACEMENT_SECONDS = 60.0
SHUTDOWN_SECONDS = 15.0


@dataclass(frozen=True)
class RayNode:
    id: str
    address: str
    cpus: float


class RayCluster:
    def __init__(self, config: EngineConfig, cpus: int, *, gpus: int = 0) -> None:
        """`cpus`, `gpus`: the size of a private Ray; ignored for an existing cluster."""
        self.ray: Any = ray  # its stubs lack much of what is used here
        if ray.is_initialized():
            raise UserError(
                f"engine.name={config.name}: this process is already connected to Ray; call ray.shutdown() first"
            )
        self._folder: Path | None = None
        self._variables: dict[str, str | None] = {}
        self._group: Any = None
        self._guard: subprocess.Popen[str] | None = None
        self._watch: RayWatch | None = None
        self._earlier = _descendants()
        self.address = cluster_address(config) or "local"
        self.is_own = self.address == "local"
        try:
            # Ray ends this process at once, without a word, when a call fails and the raylet of this pid is gone. Given
            # our own pid, its calls raise instead, and `RayWatch` tells why. Raylets set it anew for their workers.
            self._set(QUIET | {"RAY_RAYLET_PID": str(os.getpid())})
            if self.is_own:
                self._start(cpus, gpus, config.dashboard)
            else:
                self._connect()
            self.nodes = self._nodes()
            node: Any = ray._private.worker.global_worker.node
            self._watch = RayWatch(node.raylet_socket_name, node.get_session_dir_path())
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, UserError):  # Ray raises many types
                raise TrainingError(f"Ray did not start: {_one_line(error)}") from error
            raise

    def check(self) -> None:
        """Raise TrainingError if Ray's raylet has died. Call it in every loop that waits for workers."""
        if self._watch is not None and self._watch.is_over:
            raise TrainingError(self.failure())

    def on_failure(self, call: Callable[[str], None]) -> None:
        """Call it at once, in another thread, if a daemon of Ray dies."""
        if self._watch is not None:
            self._watch.on_failure = call

    def failure(self) -> str | None:
        """Which daemon of Ray has died, if one has."""
        return self._watch.failure if self._watch is not None else None

    def _start(self, cpus: int, gpus: int, dashboard: bool) -> None:
        ray_folder.remove_abandoned()
        self._folder = ray_folder.make_folder()
        token = ray_folder.write_token(self._folder, secrets.token_hex(32))
        self._set({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(self._folder)})
        self.guard()
        low, high = OBJECT_STORE_BYTES
        with _quiet(), _loopback(), _own_signal_handlers():
            self.ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=dashboard,
                object_store_memory=int(min(high, max(low, OBJECT_STORE_SHARE * machine.memory_limit_bytes()))),
                _node_ip_address="127.0.0.1",
                _temp_dir=str(self._folder),
                log_to_driver=False,
                configure_logging=False,
            )
        self.guard()

    def _connect(self) -> None:
        named = "engine.address" if self.address != os.environ.get("RAY_ADDRESS") else "RAY_ADDRESS"
        what = f"{named}={self.address}"
        if self.address != "auto":
            host, _, port = self.address.rpartition(":")
            if not host or not port.isdecimal():
                raise UserError(f"{what}: expected host:port, for example 10.0.0.1:6379")
            try:
                _probe(host, int(port))
            except OSError as error:
                raise UserError(
                    f"{what}: no Ray answered within {CONNECT_SECONDS:g} s ({error}); is the head of the cluster "
                    "running (`ray start --head`), and can this machine reach it?"
                ) from None
        # Ray would otherwise retry a wrong service or a wrong token for minutes.
        self._set({"RAY_gcs_server_request_timeout_seconds": "8", "RAY_gcs_rpc_server_connect_timeout_s": "8"})
        try:
            with _quiet(), _own_signal_handlers():
                self.ray.init(address=self.address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray raises many types
            raise UserError(
                f"{what}: Ray refused the connection: {_one_line(error)} (Ray and Python versions, RAY_AUTH_MODE and "
                "RAY_AUTH_TOKEN_PATH must be those of its head)"
            ) from None

    def _nodes(self) -> list[RayNode]:
        """The driver's node first."""
        own = self.ray.get_runtime_context().get_node_id()
        found = [
            RayNode(n["NodeID"], n["NodeManagerAddress"], n["Resources"].get("CPU", 0.0))
            for n in self.ray.nodes()
            if n["Alive"]
        ]
        return sorted(found, key=lambda node: (node.id != own, node.address))

    def address_of(self, node: str) -> str:
        """The address of a node, which may have joined after the start."""
        if node not in {known.id for known in self.nodes}:
            self.nodes = self._nodes()
        return next((known.address for known in self.nodes if known.id == node), "?")

    def __str__(self) -> str:
        return "a private Ray" if self.is_own else f"the Ray cluster at {self.address}"

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def logs(self) -> Path | None:
        """Folder with the logs of a private Ray."""
        return None if self._folder is None else self._folder / "session_latest/logs"

    @property
    def own_address(self) -> str:
        return self.nodes[0].address

    def reserve(self, places: int, on_head: int) -> None:
        """Reserve `places` shares of CPU, spread over the nodes, and `on_head` more on the driver's node."""
        share = _share([node.cpus for node in self.nodes], places + on_head)
        head = f"node:{self.own_address}"
        bundles = [{"CPU": share, head: 0.001} for _ in range(on_head)] + [{"CPU": share}] * places
        self._group = placement_group(bundles, strategy="SPREAD")
        self._share = share
        if not self._group.wait(PLACEMENT_SECONDS):
            raise TrainingError(
                f"the Ray cluster at {self.address} did not give {places + on_head} x {share:g} of its {self.cpus:g} "
                f"CPUs within {PLACEMENT_SECONDS:g} s; has it lost a host, or is another job using it? See `ray status`"
            )
        self.guard()

    def guard(self) -> None:
        """Make sure that the processes of a private Ray end with this one, even if it is killed."""
        if not self.is_own:
            return
        if self._guard is None:
            words = [sys.executable, "-P", ray_folder.__file__]
            quiet = subprocess.DEVNULL
            self._guard = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True, start_new_session=True
            )
        assert self._guard.stdin is not None
        with suppress(OSError):  # somebody killed the guard
            self._guard.stdin.write(json.dumps((str(self._folder), [*self._children()])) + "\n")  # the last line counts
            self._guard.stdin.flush()

    def _children(self) -> set[tuple[int, float]]:
        """Processes that were started since this object was made, as (pid, start time)."""
        found = _descendants() - self._earlier
        return {child for child in found if self._guard is None or child[0] != self._guard.pid}

    def spawn(self, place: int | None) -> Any:
        """Start a worker process at a reserved place, or anywhere. Returns at once."""
        from paceline.engines.ray.worker import Worker

        remote = self.ray.remote(concurrency_groups={"control": 1}, max_restarts=0, max_task_retries=0)(Worker)
        if place is None:
            return remote.options(num_cpus=0, scheduling_strategy="SPREAD").remote()
        strategy = PlacementGroupSchedulingStrategy(self._group, place)
        return remote.options(num_cpus=self._share, scheduling_strategy=strategy).remote()

    def lost_places(self) -> set[int]:
        """Reserved places on dead nodes. Ray moves them only if it has room for all of them at once."""
        self.nodes = self._nodes()
        alive = {node.id for node in self.nodes}
        where: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        return {place for place, node in where.items() if node not in alive}

    def close(self) -> None:
        """End the workers, and Ray itself if it is private."""
        is_dead = self.failure() is not None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if ray.is_initialized() and self._group is not None and not self.is_own and not is_dead:
            with suppress(self.ray.exceptions.RayError):
                remove_placement_group(self._group)
        self._shut_down()
        if self._folder is not None:  # an interrupted start and a dead raylet leave processes behind
            ray_folder.kill_processes(self._folder, self._children())
            ray_folder.remove_folder(self._folder)
            self._folder = None
        if self._guard is not None:
            self._guard.kill()  # nothing is left to guard
            self._guard.communicate()
            self._guard = None
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._variables = {}

    def _shut_down(self) -> None:
        """Shut Ray down; if that takes too long and the Ray is private, kill its processes."""
        ending = threading.Thread(target=self.ray.shutdown, daemon=True)
        ending.start()
        ending.join(SHUTDOWN_SECONDS)
        if ending.is_alive() and self._folder is not None:
            ray_folder.kill_processes(self._folder, self._children())
            ending.join(SHUTDOWN_SECONDS)

    def _set(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self._variables.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        # Ray read its variables when it was imported, and cached the token.
        raylet: Any = ray._raylet
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _descendants() -> set[tuple[int, float]]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found.add((process.pid, process.create_time()))
    return found


def _probe(host: str, port: int) -> None:
    """Raise OSError unless an HTTP/2 server, such as Ray's, answers. Ray itself would retry for a minute."""
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        if len(connection.recv(9)) < 4:
            raise OSError("the server hung up")


def _share(cpus: list[float], places: int) -> float:
    """The largest share of a CPU, at most one, that the nodes have `places` times."""
    for processes_per_cpu in range(1, places + 1):
        if sum(int(cpu * processes_per_cpu) for cpu in cpus) >= places:
            return int(1000 / processes_per_cpu) / 1000
    raise UserError(f"engine.workers: the Ray cluster has {sum(cpus):g} CPUs; {places} processes cannot share them")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Ray's warnings, and later the messages of its daemons, such as dumps of their state: for developers."""
    before = ray._private.worker.listen_error_messages
    ray._private.worker.listen_error_messages = lambda worker, threads_stopped: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ray._private.worker.listen_error_messages = before


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep Ray from replacing our handler of SIGTERM: by one that raises SystemExit, even inside of its C++ calls, and
    by one in C++ that prints a stack trace first."""
    handler, is_disabled = ray._private.utils.set_sigterm_handler, ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER
    ray._private.utils.set_sigterm_handler = lambda handler: None
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = handler
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = is_disabled


@contextmanager
def _loopback() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1. On Linux it uses the machine's address instead, unless clusters are turned off."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
