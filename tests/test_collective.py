"""Real processes: this file, run as a script, is one member that does what it is told over a pipe."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import board
from paceline.collective import CollectiveError, Group, Membership, join, serve_store

MEMBERS = 4
HERE = ((0, 1, 2, 3),)
SHORT = 1.0
SLOW = 60.0  # how long a test waits for an answer at most, and starting takes long on a busy machine


class Member:
    """The far side. A verb's result, or the error and how long it took."""

    group = Group()

    def join(self, membership: Membership, cores: int | None = None) -> int:
        self.group = join(membership, cores=cores)
        return self.group.size

    def call(self, verb: str, *arguments: Any) -> Any:
        return getattr(self.group, verb)(*arguments)

    def mean(self, array: Any) -> Any:
        tensor = torch.from_numpy(array.copy())
        assert self.group.mean_(tensor) is tensor
        return tensor.numpy()

    def many(self, rounds: int, seed: int) -> tuple[list[float], float, int]:
        """Small ones, large ones and numbers in any order, as an algorithm mixes them: the sum of each outcome."""
        sums, rng = [], np.random.default_rng(seed)
        for turn in range(rounds):
            length = int(rng.integers(1, 30)) if turn % 50 else 40_000
            mean = self.group.mean_(torch.full((length,), float(self.group.rank + turn)))
            gathered = self.group.gather(float(turn * self.group.rank))
            assert (mean == mean[0]).all()
            sums.append(float(mean[0]) + sum(gathered))
        return sums, self.group.seconds, self.group.bytes_moved

    def gaps(self) -> list[list[float]]:
        """Columns of a larger tensor, and one that requires a gradient."""
        whole = torch.full((4, 3), float(self.group.rank))
        self.group.mean_(whole[:, 1])
        leaf = torch.full((2,), float(self.group.rank), requires_grad=True)
        self.group.broadcast_(self.group.mean_(leaf))
        return [whole[0].tolist(), whole[3].tolist(), leaf.tolist()]

    def odd_numbers(self) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = [float("inf") if self.group.rank else float("-inf"), float("nan"), 3e38]
            return self.group.mean_(torch.tensor(values)).tolist()

    def abort_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.group.abort).start()

    def without_futex(self, calls: dict[str, int]) -> dict[str, int]:
        before, board._FUTEX_CALLS = board._FUTEX_CALLS, calls
        return before


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    member = Member()
    while True:
        number, name, arguments = pickle.loads(pipe.recv_bytes())
        start = time.monotonic()
        try:
            answer = number, True, getattr(member, name)(*arguments)
        except Exception as error:
            answer = number, False, (type(error).__name__, str(error), time.monotonic() - start)
        pipe.send_bytes(pickle.dumps(answer))  # `send` would share the memory of tensors


class Crew:
    def __init__(self) -> None:
        self.processes: list[Any] = [None] * MEMBERS
        self.pipes: list[Any] = [None] * MEMBERS
        self.told = [0] * MEMBERS
        self.fill()

    def fill(self) -> None:
        for rank, process in enumerate(self.processes):
            if process is None:
                self.pipes[rank], far = Pipe()
                words = [sys.executable, __file__, str(far.fileno())]
                self.processes[rank] = subprocess.Popen(words, pass_fds=[far.fileno()])
                far.close()
        self.each("call", lambda rank: ("close",))  # when they answer, they have started

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait(timeout=SLOW)
        self.pipes[rank].close()
        self.processes[rank] = None

    def tell(self, rank: int, name: str, *arguments: Any) -> None:
        self.told[rank] += 1
        self.pipes[rank].send_bytes(pickle.dumps((self.told[rank], name, arguments)))

    def hear(self, rank: int) -> tuple[bool, Any]:
        """The answer to the last that was told; those that a failed test did not wait for are dropped."""
        while True:
            assert self.pipes[rank].poll(SLOW), f"rank {rank} doesn't answer"
            number, ok, value = pickle.loads(self.pipes[rank].recv_bytes())
            if number == self.told[rank]:
                return ok, value

    def answer(self, rank: int) -> Any:
        ok, value = self.hear(rank)
        assert ok, value
        return value

    def error(self, rank: int) -> tuple[str, float]:
        ok, value = self.hear(rank)
        assert not ok and value[0] == "CollectiveError", value
        return value[1], value[2]

    def each(self, name: str, arguments: Callable[[int], tuple[Any, ...]] = lambda rank: ()) -> list[Any]:
        for rank in range(MEMBERS):
            self.tell(rank, name, *arguments(rank))
        return [self.answer(rank) for rank in range(MEMBERS)]

    def join(self, like: Membership) -> None:
        assert self.each("join", lambda rank: (replace(like, rank=rank),)) == [MEMBERS] * MEMBERS


def membership(hosts: Any = HERE, *, capacity: int = 2**20, seconds: float = 20.0, store: Any = None) -> Membership:
    return Membership(3, 0, hosts, f"test-{uuid.uuid4().hex[:8]}", store, "127.0.0.1", capacity, seconds)


def left_behind() -> list[str]:
    return [str(path) for path in Path("/dev/shm").glob(f"paceline-{os.getuid()}-test-*")]


@pytest.fixture(scope="module")
def processes() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    for rank, process in enumerate(crew.processes):
        if process is not None:
            crew.kill(rank)


@pytest.fixture
def crew(processes: Crew) -> Iterator[Crew]:
    processes.fill()
    yield processes
    for rank, process in enumerate(processes.processes):
        if process is not None:
            processes.tell(rank, "call", "close")
            processes.answer(rank)
    assert left_behind() == []


@pytest.fixture(scope="module")
def store() -> tuple[object, tuple[str, int]]:
    held, port = serve_store("127.0.0.1")
    return held, ("127.0.0.1", port)


def rank_ordered_mean(arrays: list[Any]) -> Any:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total / len(arrays)


def check_means(crew: Crew, exact: bool) -> None:
    rng = np.random.default_rng(1)
    for dtype in (np.float32, np.float64):
        for shape in ((1,), (7,), (3, 50), (9_000,), (135_000,), (0,)):
            arrays = [rng.normal(size=shape).astype(dtype) for _ in range(MEMBERS)]
            means = crew.each("mean", lambda rank, arrays=arrays: (arrays[rank],))
            expected = rank_ordered_mean(arrays)
            assert {(mean.dtype, mean.shape, mean.tobytes()) for mean in means} == {
                (expected.dtype, expected.shape, (expected if exact else means[0]).tobytes())
            }
            np.testing.assert_allclose(means[0], expected, rtol=1e-5, atol=1e-6)


def test_the_mean_has_the_bits_of_a_sum_in_rank_order_whether_it_fits_or_goes_in_pieces(crew: Crew) -> None:
    crew.join(membership(capacity=2**20))
    check_means(crew, exact=True)
    crew.each("call", lambda rank: ("close",))
    crew.join(membership(capacity=100_000))
    check_means(crew, exact=True)


@pytest.mark.parametrize("cores", [1, MEMBERS])  # sleeping at once; spinning first
def test_a_thousand_in_a_row(crew: Crew, cores: int) -> None:
    like = membership()
    crew.each("join", lambda rank: (replace(like, rank=rank), cores))
    results = crew.each("many", lambda rank: (1000, 7))
    expected = [turn + 1.5 + 6.0 * turn for turn in range(1000)]
    for sums, seconds, moved in results:
        assert sums == expected
        assert 0.0 < seconds < SLOW
        assert moved > 20 * 160_000


def test_without_futex(crew: Crew) -> None:
    (before, *_) = crew.each("without_futex", lambda rank: ({},))
    try:
        crew.join(membership())
        assert crew.each("many", lambda rank: (60, 7))[3][0] == [turn + 1.5 + 6.0 * turn for turn in range(60)]
    finally:
        crew.each("without_futex", lambda rank: (before,))


def check_other_verbs(crew: Crew) -> None:
    for first in (
        torch.arange(10),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.rand(400_000),
    ):
        others = torch.zeros_like(first)
        arguments = lambda rank, first=first, others=others: ("broadcast_", others if rank else first)  # noqa: E731
        assert all(torch.equal(got, first) for got in crew.each("call", arguments))
    assert crew.each("call", lambda rank: ("all_ok", True)) == [True] * MEMBERS
    for bad in range(MEMBERS):
        assert crew.each("call", lambda rank, bad=bad: ("all_ok", rank != bad)) == [False] * MEMBERS
    assert crew.each("call", lambda rank: ("gather", rank / 7)) == [[0.0, 1 / 7, 2 / 7, 3 / 7]] * MEMBERS
    assert crew.each("gaps") == [[[rank, 1.5, rank]] * 2 + [[1.5, 1.5]] for rank in range(MEMBERS)]
    for infinite, unknown, large in crew.each("odd_numbers"):
        assert np.isnan(infinite) and np.isnan(unknown) and np.isinf(large)


def test_the_other_verbs(crew: Crew) -> None:
    crew.join(membership())
    check_other_verbs(crew)


# Between "hosts" that are all this machine. The last one's leaders are not the first of their ranks.
@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)), ((2, 0, 3), (1,))])
def test_several_hosts(crew: Crew, store: Any, hosts: Any) -> None:
    crew.join(membership(hosts, capacity=300_000, store=store[1]))
    check_means(crew, exact=False)
    check_other_verbs(crew)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_is_gone_ends_the_group_in_time(crew: Crew, ending: signal.Signals) -> None:
    crew.join(membership(seconds=SHORT))
    if ending == signal.SIGKILL:
        crew.kill(2)
    else:
        crew.processes[2].send_signal(ending)
    for rank in (0, 1, 3):
        crew.tell(rank, "call", "gather", 1.0)
    try:
        errors = [crew.error(rank) for rank in (0, 1, 3)]
    finally:
        if ending == signal.SIGSTOP:
            crew.processes[2].send_signal(signal.SIGCONT)
    assert all(seconds < SHORT + 1.0 for _, seconds in errors)
    assert any("rank 2 did not arrive within 1 s" in text for text, _ in errors)
    assert all("rank 2" in text or "given up by rank" in text for text, _ in errors)
    late = (2,) if ending == signal.SIGSTOP else ()
    for rank in (0, 1, 3, *late):  # it stays broken, also for the one that comes late
        crew.tell(rank, "call", "gather", 1.0)
        assert crew.error(rank)[1] < 0.5


def test_a_member_that_never_comes(crew: Crew) -> None:
    like = membership(seconds=SHORT)
    for rank in (0, 2):
        crew.tell(rank, "join", replace(like, rank=rank))
    errors = [crew.error(rank) for rank in (0, 2)]
    assert all(seconds < SHORT + 1.0 for _, seconds in errors)
    assert any("ranks 1, 3 did not arrive" in text for text, _ in errors)


TWO = ((0, 1), (2, 3))


@pytest.mark.parametrize(("hosts", "aborters"), [(HERE, [0]), (HERE, [2]), (TWO, [2]), (TWO, [0, 2]), (TWO, [1, 2])])
def test_abort_from_another_thread_releases_all(crew: Crew, store: Any, hosts: Any, aborters: list[int]) -> None:
    crew.join(membership(hosts, store=store[1]))
    for rank in aborters:
        crew.tell(rank, "abort_in", 0.3)
        crew.answer(rank)
    for rank in (0, 1, 2):  # 3 stays away, so 2 waits for it, and on the other host 0 for 2 and 1 for 0
        crew.tell(rank, "mean", np.ones(100_000))
    errors = [crew.error(rank) for rank in (0, 1, 2)]
    assert all(seconds < 0.3 + 0.5 for _, seconds in errors), errors
    assert any("given up by rank" in text for text, _ in errors)
    crew.tell(3, "call", "gather", 1.0)
    assert crew.error(3)[1] < 0.5


def test_another_host_that_is_gone(crew: Crew, store: Any) -> None:
    crew.join(membership(TWO, store=store[1]))
    for rank in (0, 1):
        crew.tell(rank, "mean", np.ones(10))
    crew.kill(2)
    errors = [crew.error(rank) for rank in (0, 1)]
    assert "another host is gone" in errors[0][0] and "given up by rank 0" in errors[1][0]


def test_another_host_that_is_late(crew: Crew, store: Any) -> None:
    crew.join(membership(TWO, store=store[1], seconds=SHORT))
    for rank in (0, 1):
        crew.tell(rank, "mean", np.ones(10))
    assert all(SHORT - 0.2 < crew.error(rank)[1] < SHORT + 1.0 for rank in (0, 1))


def test_hosts_that_do_not_meet(crew: Crew, store: Any) -> None:
    like = membership(TWO, store=store[1], seconds=SHORT)
    for rank in (0, 1):
        crew.tell(rank, "join", replace(like, rank=rank))
    errors = [crew.error(rank) for rank in (0, 1)]
    assert "leaders that did not arrive: 2" in errors[0][0] and all(seconds < 3 * SHORT for _, seconds in errors)
    nobody = membership(TWO, store=("127.0.0.1", 9), seconds=SHORT)
    for rank in (0, 1):
        crew.tell(rank, "join", replace(nobody, rank=rank))
    assert "no way to the other hosts (127.0.0.1:9)" in crew.error(0)[0]
    assert "given up by rank 0" in crew.error(1)[0]


def test_alone() -> None:
    group = join(replace(membership(((0,),)), generation=5))
    tensor = torch.ones(3)
    assert group.mean_(tensor) is tensor and group.broadcast_(tensor) is tensor
    assert (group.generation, group.size, group.gather(2.0), group.all_ok(False)) == (5, 1, [2.0], False)
    assert (group.seconds, group.bytes_moved) == (0.0, 0)
    group.abort()
    for verb, argument in (("mean_", tensor), ("broadcast_", tensor), ("all_ok", True), ("gather", 1.0)):
        with pytest.raises(CollectiveError, match="aborted"):
            getattr(group, verb)(argument)


def test_membership() -> None:
    like = membership(((0, 2), (1,)), store=("a", 1))
    assert pickle.loads(pickle.dumps(like)) == like
    assert [replace(like, rank=rank).host for rank in range(3)] == [0, 1, 0]
    for wrong in ({"rank": 3}, {"hosts": ((1,), (0, 2))}, {"hosts": ((0, 2),)}, {"store": None}, {"segment": "a/b"}):
        with pytest.raises(ValueError, match=r"rank|store|segment"):
            replace(like, **wrong)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the test is over
        serve(Connection(int(sys.argv[1])))
