"""Groups of real processes. Run as a script, this file is one member, which receives its commands over a pipe."""

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

from paceline import machine
from paceline.collective import shared_memory
from paceline.collective.gloo import serve_store
from paceline.collective.group import CollectiveError, Group, GroupSpec
from paceline.collective.process_group import join

MEMBERS = 4
HERE = ((0, 1, 2, 3),)
SHORT = 1.0
SLOW = 60.0  # how long a test waits for an answer at most, and starting takes long on a busy machine
SOON = 30.0  # how long an answer may take that does not wait for the end of SLOW


class Member:
    """The far side: calls answer with a result, or with an error and how long it took."""

    group = Group()

    def join(self, spec: GroupSpec, cores: int | None = None) -> int:
        self.group = join(spec, cores=cores or machine.cores())
        return self.group.size

    def call(self, operation: str, *arguments: Any) -> Any:
        return getattr(self.group, operation)(*arguments)

    def mean(self, array: Any) -> Any:
        tensor = torch.from_numpy(array.copy())
        assert self.group.mean_(tensor) is tensor
        return tensor.numpy()

    def many(self, rounds: int, seed: int) -> tuple[list[float], float, int]:
        """Small and large means and gathers, mixed as in an algorithm. Returns the sum of each result."""
        sums, rng = [], np.random.default_rng(seed)
        for turn in range(rounds):
            length = int(rng.integers(1, 30)) if turn % 50 else 40_000
            mean = self.group.mean_(torch.full((length,), float(self.group.rank + turn)))
            gathered = self.group.gather(float(turn * self.group.rank))
            assert (mean == mean[0]).all()
            sums.append(float(mean[0]) + sum(gathered))
        return sums, self.group.seconds, self.group.bytes_moved

    def gaps(self) -> list[list[float]]:
        """Tensors that are not contiguous or require a gradient."""
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
        before, shared_memory._FUTEX_CALLS = shared_memory._FUTEX_CALLS, calls
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


class Members:
    def __init__(self) -> None:
        self.processes: list[Any] = [None] * MEMBERS
        self.pipes: list[Any] = [None] * MEMBERS
        self.sent = [0] * MEMBERS
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
        self.sent[rank] += 1
        self.pipes[rank].send_bytes(pickle.dumps((self.sent[rank], name, arguments)))

    def hear(self, rank: int) -> tuple[bool, Any]:
        """The answer to the last command. Answers that a failed test did not wait for are dropped."""
        while True:
            assert self.pipes[rank].poll(SLOW), f"rank {rank} doesn't answer"
            number, ok, value = pickle.loads(self.pipes[rank].recv_bytes())
            if number == self.sent[rank]:
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

    def join(self, like: GroupSpec) -> None:
        assert self.each("join", lambda rank: (replace(like, rank=rank),)) == [MEMBERS] * MEMBERS


def spec(hosts: Any = HERE, *, capacity: int = 2**20, seconds: float = 20.0, store: Any = None) -> GroupSpec:
    return GroupSpec(3, 0, hosts, f"test-{uuid.uuid4().hex[:8]}", store, "127.0.0.1", capacity, seconds)


def left_behind() -> list[str]:
    return [str(path) for path in Path("/dev/shm").glob(f"paceline-{os.getuid()}-test-*")]


@pytest.fixture(scope="module")
def processes() -> Iterator[Members]:
    members = Members()
    yield members
    for rank, process in enumerate(members.processes):
        if process is not None:
            members.kill(rank)


@pytest.fixture
def members(processes: Members) -> Iterator[Members]:
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


def check_means(members: Members, exact: bool) -> None:
    rng = np.random.default_rng(1)
    for dtype in (np.float32, np.float64):
        for shape in ((1,), (7,), (3, 50), (9_000,), (135_000,), (0,)):
            arrays = [rng.normal(size=shape).astype(dtype) for _ in range(MEMBERS)]
            means = members.each("mean", lambda rank, arrays=arrays: (arrays[rank],))
            expected = rank_ordered_mean(arrays)
            assert {(mean.dtype, mean.shape, mean.tobytes()) for mean in means} == {
                (expected.dtype, expected.shape, (expected if exact else means[0]).tobytes())
            }
            np.testing.assert_allclose(means[0], expected, rtol=1e-5, atol=1e-6)


def test_the_mean_has_the_bits_of_a_sum_in_rank_order_whether_it_fits_or_goes_in_pieces(members: Members) -> None:
    members.join(spec(capacity=2**20))
    check_means(members, exact=True)
    members.each("call", lambda rank: ("close",))
    members.join(spec(capacity=100_000))
    check_means(members, exact=True)


@pytest.mark.parametrize("cores", [1, MEMBERS])  # sleeping at once; spinning first
def test_a_thousand_in_a_row(members: Members, cores: int) -> None:
    like = spec()
    members.each("join", lambda rank: (replace(like, rank=rank), cores))
    results = members.each("many", lambda rank: (1000, 7))
    expected = [turn + 1.5 + 6.0 * turn for turn in range(1000)]
    for sums, seconds, moved in results:
        assert sums == expected
        assert 0.0 < seconds < SLOW
        assert moved > 20 * 160_000


def test_without_futex(members: Members) -> None:
    (before, *_) = members.each("without_futex", lambda rank: ({},))
    try:
        members.join(spec())
        assert members.each("many", lambda rank: (60, 7))[3][0] == [turn + 1.5 + 6.0 * turn for turn in range(60)]
    finally:
        members.each("without_futex", lambda rank: (before,))


def test_members_of_a_host_meet_however_late_one_is(members: Members) -> None:
    """Each other wait has a limit; who waits here is released by an abort."""
    members.join(spec(seconds=2.0))  # joining has this limit too, and a busy machine is slow
    for rank in range(1, MEMBERS):
        members.tell(rank, "call", "meet")
    time.sleep(2.5)
    members.tell(0, "call", "meet")
    assert [members.answer(rank) for rank in range(MEMBERS)] == [None] * MEMBERS
    for rank in range(1, MEMBERS):
        members.tell(rank, "call", "meet")
    time.sleep(0.5)
    members.tell(0, "call", "abort")
    members.answer(0)
    assert all("aborted by rank 0" in members.error(rank)[0] for rank in range(1, MEMBERS))


def check_other_operations(members: Members) -> None:
    for first in (
        torch.arange(10),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.rand(400_000),
    ):
        others = torch.zeros_like(first)
        arguments = lambda rank, first=first, others=others: ("broadcast_", others if rank else first)  # noqa: E731
        assert all(torch.equal(got, first) for got in members.each("call", arguments))
    assert members.each("call", lambda rank: ("all_ok", True)) == [True] * MEMBERS
    for bad in range(MEMBERS):
        assert members.each("call", lambda rank, bad=bad: ("all_ok", rank != bad)) == [False] * MEMBERS
    assert members.each("call", lambda rank: ("gather", rank / 7)) == [[0.0, 1 / 7, 2 / 7, 3 / 7]] * MEMBERS
    assert members.each("gaps") == [[[rank, 1.5, rank]] * 2 + [[1.5, 1.5]] for rank in range(MEMBERS)]
    for infinite, unknown, large in members.each("odd_numbers"):
        assert np.isnan(infinite) and np.isnan(unknown) and np.isinf(large)


def test_the_other_operations(members: Members) -> None:
    members.join(spec())
    check_other_operations(members)


# All "hosts" are this machine. In the last case the leader of the first host does not have its lowest rank.
@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)), ((2, 0, 3), (1,))])
def test_several_hosts(members: Members, store: Any, hosts: Any) -> None:
    members.join(spec(hosts, capacity=300_000, store=store[1]))
    check_means(members, exact=False)
    check_other_operations(members)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_is_gone_ends_the_group_in_time(members: Members, ending: signal.Signals) -> None:
    members.join(spec(seconds=SHORT))
    if ending == signal.SIGKILL:
        members.kill(2)
    else:
        members.processes[2].send_signal(ending)
    for rank in (0, 1, 3):
        members.tell(rank, "call", "gather", 1.0)
    try:
        errors = [members.error(rank) for rank in (0, 1, 3)]
    finally:
        if ending == signal.SIGSTOP:
            members.processes[2].send_signal(signal.SIGCONT)
    assert all(seconds < SOON for _, seconds in errors)
    assert any("rank 2 did not arrive within 1 s" in text for text, _ in errors)
    assert all("rank 2" in text or "aborted by rank" in text for text, _ in errors)
    late = (2,) if ending == signal.SIGSTOP else ()
    for rank in (0, 1, 3, *late):  # it stays broken, even for a late member
        members.tell(rank, "call", "gather", 1.0)
        assert "did not arrive" not in members.error(rank)[0], "it waited again"


def test_a_member_that_never_comes(members: Members) -> None:
    like = spec(seconds=SHORT)
    for rank in (0, 2):
        members.tell(rank, "join", replace(like, rank=rank))
    errors = [members.error(rank) for rank in (0, 2)]
    assert all(seconds < SOON for _, seconds in errors)
    assert any("ranks 1, 3 did not arrive" in text for text, _ in errors)


TWO = ((0, 1), (2, 3))


@pytest.mark.parametrize(("hosts", "aborters"), [(HERE, [0]), (HERE, [2]), (TWO, [2]), (TWO, [0, 2]), (TWO, [1, 2])])
def test_abort_from_another_thread_releases_all(members: Members, store: Any, hosts: Any, aborters: list[int]) -> None:
    members.join(spec(hosts, store=store[1], seconds=SLOW))
    for rank in aborters:
        members.tell(rank, "abort_in", 0.3)
        members.answer(rank)
    for rank in (0, 1, 2):  # 3 stays away, so 2 waits for it, and on the other host 0 for 2 and 1 for 0
        members.tell(rank, "mean", np.ones(100_000))
    errors = [members.error(rank) for rank in (0, 1, 2)]
    assert all(seconds < SOON and "did not arrive" not in text for text, seconds in errors), errors
    assert any("aborted by rank" in text for text, _ in errors)
    members.tell(3, "call", "gather", 1.0)
    assert "did not arrive" not in members.error(3)[0]


def test_another_host_that_is_gone(members: Members, store: Any) -> None:
    members.join(spec(TWO, store=store[1]))
    for rank in (0, 1):
        members.tell(rank, "mean", np.ones(10))
    members.kill(2)
    errors = [members.error(rank) for rank in (0, 1)]
    assert "another host is gone" in errors[0][0] and "aborted by rank 0" in errors[1][0]


def test_another_host_that_is_late(members: Members, store: Any) -> None:
    members.join(spec(TWO, store=store[1], seconds=SHORT))
    for rank in (0, 1):
        members.tell(rank, "mean", np.ones(10))
    assert all(SHORT - 0.2 < members.error(rank)[1] < SOON for rank in (0, 1))


def test_hosts_that_do_not_meet(members: Members, store: Any) -> None:
    like = spec(TWO, store=store[1], seconds=SHORT)
    for rank in (0, 1):
        members.tell(rank, "join", replace(like, rank=rank))
    errors = [members.error(rank) for rank in (0, 1)]
    assert "leaders that did not arrive: 2" in errors[0][0] and all(seconds < SOON for _, seconds in errors)
    nobody = spec(TWO, store=("127.0.0.1", 9), seconds=SHORT)
    for rank in (0, 1):
        members.tell(rank, "join", replace(nobody, rank=rank))
    assert "no way to the other hosts (127.0.0.1:9)" in members.error(0)[0]
    assert "aborted by rank 0" in members.error(1)[0]


def test_alone() -> None:
    group = join(replace(spec(((0,),)), generation=5), cores=1)
    tensor = torch.ones(3)
    assert group.mean_(tensor) is tensor and group.broadcast_(tensor) is tensor
    assert (group.generation, group.size, group.gather(2.0), group.all_ok(False)) == (5, 1, [2.0], False)
    assert (group.seconds, group.bytes_moved) == (0.0, 0)
    group.abort()
    for operation, argument in (("mean_", tensor), ("broadcast_", tensor), ("all_ok", True), ("gather", 1.0)):
        with pytest.raises(CollectiveError, match="aborted"):
            getattr(group, operation)(argument)


def test_the_spec() -> None:
    like = spec(((0, 2), (1,)), store=("a", 1))
    assert pickle.loads(pickle.dumps(like)) == like
    assert [replace(like, rank=rank).host for rank in range(3)] == [0, 1, 0]
    for wrong in ({"rank": 3}, {"hosts": ((1,), (0, 2))}, {"hosts": ((0, 2),)}, {"store": None}, {"segment": "a/b"}):
        with pytest.raises(ValueError, match=r"rank|store|segment"):
            replace(like, **wrong)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the test is over
        serve(Connection(int(sys.argv[1])))
