"""Ray over `Hosts`: the head on the first, the others join it, all with one token."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hosts import SECONDS, Hosts, wait_until

PORT = 6379
OBJECT_STORE_BYTES = 80_000_000  # Ray refuses less than 75 MiB
START_SECONDS = 60.0
STOP_SECONDS = 40.0  # on SIGTERM a raylet drains for up to 30 s
TOKEN = "/tmp/token"
TEMP = "/tmp/r"  # short: Ray's sockets lie below it, and their names have a limit
# A silent node is dead after about 10 s. With Ray's own settings: 30 s after a crash of the host, 65 s after a cut.
QUICK_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}

_WAIT = """
import sys, time
import ray
ray.init(log_to_driver=False, logging_level="error")
wanted, limit = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while (alive := sum(node["Alive"] for node in ray.nodes())) != wanted:
    if time.monotonic() > limit:
        sys.exit(f"{alive} of {wanted} nodes are alive")
    time.sleep(0.05)
"""


class RayCluster:
    """`cpus[i]` processors on host i; `env` is for the nodes and the drivers. The nodes' output is in `folder`."""

    def __init__(
        self, hosts: Hosts, cpus: Sequence[int], folder: Path, *, env: Mapping[str, str] | None = None
    ) -> None:
        self.hosts = hosts
        self.cpus = list(cpus)
        self.folder = folder
        self.address = f"{hosts.ips[0]}:{PORT}"
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            **(env or {}),
        }
        self._token = secrets.token_hex(32)
        self._nodes: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        for node in range(len(self.cpus)):
            self.start_node(node)
        self.wait_alive(len(self.cpus))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing: the nodes end with their hosts, and much faster."""

    def start_node(self, node: int) -> None:
        """Starts Ray on a host; waiting for it is `wait_alive`."""
        token = self.hosts.root(node) / TOKEN.lstrip("/")
        token.touch(mode=0o600)
        token.write_text(self._token)
        where = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"] if node == 0 else [f"--address={self.address}"]
        )
        argv = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block"),
            f"--node-ip-address={self.hosts.ips[node]}",
            f"--num-cpus={self.cpus[node]}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={TEMP}",
        ]
        self._nodes[node] = self.hosts.start(node, argv, env=self.env, output=self.folder / f"node{node}.log")
        if node == 0:
            wait_until(self._answers, f"the head listens on {self.address}", START_SECONDS)

    def stop_node(self, node: int) -> int:
        """Ends Ray on a host as a scheduler would, with SIGTERM; its exit status. A crash is `hosts.kill`."""
        process = self._nodes.pop(node)
        self.hosts.signal(process, signal.SIGTERM)
        return process.wait(timeout=STOP_SECONDS)

    def wait_alive(self, count: int, seconds: float = START_SECONDS) -> None:
        """Returns as soon as `count` nodes are alive."""
        done = self.driver([sys.executable, "-c", _WAIT, str(count), str(seconds)], seconds=seconds + SECONDS)
        if done.returncode != 0:
            said = "".join(self.said(node) for node in self._nodes)
            raise RuntimeError(f"the cluster did not form: {done.stderr}\n{said}")

    def said(self, node: int) -> str:
        """What `ray start` printed there so far."""
        return (self.folder / f"node{node}.log").read_text()

    def driver(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        seconds: float = START_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """A command on the head's host that finds the cluster; waited for, with a limit."""
        return self.hosts.run(0, argv, env=self._driver_env(env), cwd=cwd, seconds=seconds)

    def start_driver(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        output: Path | None = None,
    ) -> subprocess.Popen[str]:
        """The same, not waited for."""
        return self.hosts.start(0, argv, env=self._driver_env(env), cwd=cwd, output=output)

    def _driver_env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**self.env, "RAY_ADDRESS": self.address, **(env or {})}

    def _answers(self) -> bool:
        if self._nodes[0].poll() is not None:
            raise RuntimeError(f"the head ended with {self._nodes[0].returncode}:\n{self.said(0)}")
        # Its sockets: the local address and port in hexadecimal, and state 0A, listening.
        rows = (f"/proc/{self.hosts.pids(0)[0]}/net/{name}" for name in ("tcp", "tcp6"))
        lines = [line.split() for path in rows for line in Path(path).read_text().splitlines()[1:]]
        return any(words[1].endswith(f":{PORT:04X}") and words[3] == "0A" for words in lines)
