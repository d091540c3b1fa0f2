"""The ceilings of this machine: arithmetic, memory bandwidth, loopback network, and stepping an environment alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.config import RunConfig

if TYPE_CHECKING:
    from paceline.engines.actor_learner import ActorLearner

SECONDS = 0.5
"""Length of each measurement. The best of many short ones counts."""
WAIT_SECONDS = 20.0
COPY_BYTES = 64 * 2**20
MESSAGE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Ceilings:
    env_steps_per_second: float
    """One process that only steps as many environments as a worker has."""
    gemm_gflops: float
    """Matrix products of 1024 x 1024, with as many threads as a run has."""
    net_gflops: float
    """The network's widest product, with as many rows as an optimizer step has."""
    conv_gflops: float | None
    """3 x 3 convolutions of 32 to 32 channels; None unless observations are images."""
    copy_gbytes_per_second: float
    network_gbytes_per_second: float
    """TCP on 127.0.0.1, one connection."""
    round_trip_microseconds: float
    """One byte there and back on that connection."""
    threads: int
    forward_flop: int
    """Operations of the network for one row."""
    observation_bytes: int


def measure(config: RunConfig, envs: int, cores: int) -> Ceilings:
    """Measure in this process, for a few seconds. `envs`, `cores`: of one worker; 0 cores: all available ones."""
    import torch

    from paceline.engines.actor_learner import ActorLearner

    replica = ActorLearner(config, envs=envs, cores=cores, on_device=False)
    try:
        assert replica.collector is not None
        replica.collector.start()
        stepping = _stepping(replica)
        observation = replica.policy.observation
        forward = _forward_flop(replica)
        bytes_each = int(np.prod(observation.shape)) * observation.dtype.itemsize
        rows, width = (
            config.hyper.rows_per_step(max(envs, 1) * config.hyper.rollout_steps),
            max([*config.model.hidden, 1]),
        )
        image, threads = observation.is_image, replica.threads
    finally:
        replica.close()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gemm, net = _gemm(1024, 1024), _gemm(rows, width)
        conv = _conv() if image else None
    finally:
        torch.set_num_threads(before)
    network, trip = _loopback()
    return Ceilings(stepping, gemm, net, conv, _copy(), network, trip, threads, forward, bytes_each)


def _best_rate(work: Callable[[], object], amount: float) -> float:
    """`amount` over the shortest time of `work`, repeated for `SECONDS`."""
    work()  # the first call faults memory in
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return amount / best


def _stepping(replica: ActorLearner) -> float:
    """Replay the actions of one rollout, so that choosing actions is not measured."""
    assert replica.collector is not None
    batch = replica.collector.collect(0)
    (env,) = replica.envs
    actions = [action.copy() for action in batch.action]
    env.reset()

    def work() -> None:
        for action in actions:
            env.step(action)

    return _best_rate(work, len(actions) * env.num_envs)


def _forward_flop(replica: ActorLearner) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from paceline.models.q import QPolicy

    policy = replica.policy
    net = policy.online.net if isinstance(policy, QPolicy) else policy.net
    x = torch.zeros((1, *policy.observation.shape), dtype=torch.float32)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        net(x)
    return int(counter.get_total_flops())


def _gemm(rows: int, width: int) -> float:
    import torch

    a, b, c = torch.randn(rows, width), torch.randn(width, width), torch.empty(rows, width)
    return _best_rate(lambda: torch.mm(a, b, out=c), 2.0 * rows * width * width / 1e9)


def _conv() -> float:
    import torch

    x = torch.randn(16, 32, 32, 32).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(32, 32, 3, 3).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        return _best_rate(
            lambda: torch.nn.functional.conv2d(x, kernel, padding=1), 2.0 * 16 * 32 * 32 * 32 * 32 * 9 / 1e9
        )


def _copy() -> float:
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    return _best_rate(lambda: np.copyto(target, source), COPY_BYTES / 1e9)


def _loopback() -> tuple[float, float]:
    """(GB/s, round trip in µs)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_SECONDS)
        client = socket.create_connection(server.getsockname(), timeout=WAIT_SECONDS)
        peer, _ = server.accept()
    with client, peer:
        for end in (client, peer):
            end.settimeout(WAIT_SECONDS)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=_answer, args=(peer,), daemon=True)
        echo.start()
        payload = bytes(MESSAGE_BYTES)

        def send() -> None:
            client.sendall(b"m" + payload)
            client.recv(1)

        def ping() -> None:
            client.sendall(b"p")
            client.recv(1)

        found = _best_rate(send, MESSAGE_BYTES / 1e9), 1e6 / _best_rate(ping, 1.0)
        client.sendall(b"e")
        echo.join(WAIT_SECONDS)
    return found


def _answer(peer: socket.socket) -> None:
    """Answer each message with one byte. A message is `p`, `m` followed by its payload, or `e` for the end."""
    buffer = bytearray(2**20)
    try:
        while (kind := peer.recv(1)) not in (b"", b"e"):
            left = MESSAGE_BYTES if kind == b"m" else 0
            while left:
                got = peer.recv_into(buffer, min(left, len(buffer)))
                if not got:
                    return
                left -= got
            peer.sendall(b"a")
    except OSError:
        return  # the connection was closed
