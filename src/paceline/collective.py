"""A group of several processes: they agree through shared memory on a host and through gloo between hosts.

gloo costs milliseconds on one host, more with each member; shared memory costs tens of microseconds. So the members of
a host add up in a file of `/dev/shm`, and one leader per host speaks to the other hosts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.board import SLICE_SECONDS, Array, Board
from paceline.group import CollectiveError, Group

__all__ = ["CollectiveError", "Group", "Membership", "SharedGroup", "join", "serve_store"]

LEADER_SECONDS = 1.0  # so much longer the others wait for their leader, whose error says more than theirs
SLOT_BYTES = 4 * 1024 * 1024  # a longer tensor goes in pieces: 64 members then need 260 MB, not gigabytes

_FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True)
class Membership:
    """What one member needs to know to join. Differs between members in `rank` and `address` alone."""

    generation: int
    rank: int
    hosts: tuple[tuple[int, ...], ...]
    """Ranks by host, rank 0 on the first; the first rank of each is the host's leader."""
    segment: str
    """Unique to the run and the generation."""
    store: tuple[str, int] | None
    """Host and port of the driver's store (`serve_store`); None with one host."""
    address: str
    """Our own, as the other hosts see it."""
    capacity_bytes: int
    """Of the largest tensor."""
    timeout_seconds: float
    """Limit of each wait."""

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts) or self.rank not in ranks or 0 not in self.hosts[0]:
            raise ValueError(f"rank {self.rank} of hosts {self.hosts}: each rank from 0 on must be there once, 0 first")
        if len(self.hosts) > 1 and self.store is None:
            raise ValueError("several hosts need a store, where their leaders meet")
        if not re.fullmatch(r"[\w.-]+", self.segment):
            raise ValueError(f"segment {self.segment!r}: only letters, digits, '.', '_' and '-' make a file name")

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def host(self) -> int:
        return next(index for index, ranks in enumerate(self.hosts) if self.rank in ranks)


def join(membership: Membership, *, cores: int | None = None) -> Group:
    """Every member calls it; returns when all are there. `cores`: those that the members of this host share."""
    if membership.size == 1:
        group = Group()
        group.generation = membership.generation
        return group
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return SharedGroup(membership, cores)


def serve_store(host: str) -> tuple[object, int]:
    """Where the leaders of several hosts meet: the server, which lives as long as it is held, and its port."""
    import torch.distributed

    dist: Any = torch.distributed  # its types leave out most of what is used here
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # listens on every interface
    return store, store.port


class SharedGroup(Group):
    """Members on one host or on several.

    Every element is added up in one place, on one host in the order of the ranks: all members get the same bits.
    """

    def __init__(self, membership: Membership, cores: int) -> None:
        self.rank, self.size, self.generation = membership.rank, membership.size, membership.generation
        self._host_count = len(membership.hosts)
        self._leaders: _Leaders | None = None
        self._board: Board | None = None
        self._lock = threading.Lock()
        hosted = membership.hosts[membership.host]
        memory = Path("/dev/shm")
        folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
        path = folder / f"paceline-{os.getuid()}-{membership.segment}-{membership.host}"
        slot_bytes = max(8 * self.size, min(membership.capacity_bytes, SLOT_BYTES))
        seconds, spin = membership.timeout_seconds, len(hosted) <= cores
        try:
            self._board = Board(path, tuple(sorted(hosted)), self.rank, slot_bytes, seconds, spin)
        except OSError as error:
            raise CollectiveError(f"rank {self.rank}: no shared memory at {path}: {error}") from error
        if self._host_count > 1:
            with _Verb(self) as board:
                if self.rank == hosted[0]:
                    self._leaders = _Leaders(membership, board.check)
                board.barrier(LEADER_SECONDS + 2 * seconds)  # the leader waits for the store, for others, for gloo
            self.seconds = 0.0

    def mean_(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"a mean of {tensor.dtype}: only float32 and float64 have one")
        with _Verb(self) as board, np.errstate(all="ignore"):  # inf and nan are the algorithm's to find
            array = tensor.numpy(force=True)  # the same memory, or a copy from a GPU; one call, since each takes long
            flat = array.reshape(-1)  # the same memory, or a copy without the gaps
            step = board.slot_bytes // flat.itemsize
            for start in range(0, flat.size, step):
                self._mean(board, flat[start : start + step])
            if tensor.data_ptr() != flat.ctypes.data:
                tensor.detach().copy_(torch.from_numpy(flat).view(tensor.shape))
            return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        with _Verb(self) as board:
            whole = tensor.detach().cpu().contiguous()
            flat = whole.view(-1).view(torch.uint8).numpy()
            for start in range(0, flat.size, board.slot_bytes):
                self._broadcast(board, flat[start : start + board.slot_bytes])
            if tensor.data_ptr() != whole.data_ptr():
                tensor.detach().copy_(whole)
            return tensor

    def all_ok(self, flag: bool) -> bool:
        return all(self.gather(float(flag)))

    def gather(self, value: float) -> list[float]:
        with _Verb(self) as board:
            self.bytes_moved += 8
            values = board.free_half(_FLOAT64)[:, 0]
            values[board.index] = value
            board.barrier()
            if self._host_count > 1:
                rows, values = values, board.result[_FLOAT64][: self.size]
                if self._leaders is not None:
                    values[:] = 0.0
                    values[list(board.ranks)] = rows
                self._exchange(board, values)
            gathered: list[float] = values.tolist()
            return gathered

    def abort(self) -> None:
        """Ends it for all members of this host, and for the hosts that wait for it. Not for one that waits for a member
        of its own: who knows of a loss tells every survivor."""
        self._aborted = True
        with self._lock:  # against close, which takes the memory away
            if self._board is not None:
                self._board.abort()
            if self._leaders is not None:
                self._leaders.cut()

    def close(self) -> None:
        self._aborted = True
        with self._lock:
            self._board = None
            if self._leaders is not None:
                self._leaders.close()
                self._leaders = None

    def _mean(self, board: Board, piece: Array) -> None:
        length, result = piece.size, board.result[piece.dtype][: piece.size]
        self.bytes_moved += piece.nbytes
        if piece.nbytes <= board.small_bytes:
            rows = board.free_half(piece.dtype)[:, :length]
            rows[board.index] = piece
            board.barrier()
            if self._host_count == 1:
                _sum(rows, piece)
                piece /= self.size
                return
            if self._leaders is not None:
                _sum(rows, result)
        else:
            rows = board.inputs[piece.dtype][:, :length]
            rows[board.index] = piece
            start, stop = (length * part // board.count for part in (board.index, board.index + 1))
            board.barrier()
            _sum(rows[:, start:stop], result[start:stop])
            board.barrier()
        if self._host_count > 1:
            self._exchange(board, result)
        np.divide(result, self.size, out=piece)

    def _exchange(self, board: Board, result: Array) -> None:
        """Add up the results of all hosts."""
        if self._leaders is not None:
            self._leaders.sum_(result)
            self.bytes_moved += 2 * result.nbytes * (self._host_count - 1) // self._host_count  # as in a ring
        board.barrier(LEADER_SECONDS)

    def _broadcast(self, board: Board, piece: Array) -> None:
        slot = board.inputs[piece.dtype][0, : piece.size]  # on its host, rank 0 has the first one
        if self.rank == 0:
            slot[:] = piece
            self.bytes_moved += piece.nbytes
        board.barrier()
        if self._host_count > 1:
            if self._leaders is not None:
                self._leaders.broadcast_(slot)
                self.bytes_moved += piece.nbytes
            board.barrier(LEADER_SECONDS)
        if self.rank != 0:
            piece[:] = slot
        board.barrier()  # the slot may be written again


class _Verb:
    """Around a verb: its time; and if it fails the group ends, since the members are no longer at the same place."""

    def __init__(self, group: SharedGroup) -> None:
        self._group, self._start = group, time.perf_counter()

    def __enter__(self) -> Board:
        self._group._check()
        board = self._group._board
        assert board is not None
        self._group.waiting = True
        return board

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._group.seconds += time.perf_counter() - self._start
        self._group.waiting = False
        if kind is not None:
            self._group.abort()


def _sum(rows: Array, out: Array) -> None:
    """Row after row: numpy does so unless there is a single column, which it adds up in pairs."""
    if len(out) == 1:
        out[0] = functools.reduce(np.add, rows[:, 0])
    else:
        np.add.reduce(rows, axis=0, out=out)


class _Leaders:
    """One member per host, over gloo. Its own `abort` leaves a waiting verb waiting, so we cut the connections."""

    def __init__(self, membership: Membership, check: Callable[[], None]) -> None:
        import torch.distributed

        dist: Any = torch.distributed
        assert membership.store is not None
        index, count, seconds = membership.host, len(membership.hosts), membership.timeout_seconds
        self._check, self._links = check, list[socket.socket]()
        try:
            socket.create_connection(membership.store, seconds).close()  # says in a line what TCPStore says in fifty
            limit = timedelta(seconds=seconds)
            client = dist.TCPStore(*membership.store, is_master=False, timeout=limit)
            store = dist.PrefixStore(membership.segment, client)
            before = set(_listening())
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=membership.address)]
            options._threads = 1
            options._timeout = limit / 5  # to connect it takes five times as long as told
            own = [place for place in _listening() if place not in before]
            store.set(f"leader-{index}", json.dumps(own))
            others = self._others(store, membership)
            self._group = dist.ProcessGroupGloo(store, index, count, options)
            self._group._set_default_timeout(limit)
        except (OSError, RuntimeError) as error:
            if isinstance(error, CollectiveError):
                raise
            place = "{}:{}".format(*membership.store)
            raise CollectiveError(
                f"rank {membership.rank}: no way to the other hosts ({place}): {_line(error)}"
            ) from error
        for link in _sockets():
            peer = _place(link.getpeername)  # none has the one that listens, and gloo ends the process if that is cut
            if peer in others or (peer and _place(link.getsockname) in own):
                self._links.append(link)
            else:
                link.close()

    def _others(self, store: Any, membership: Membership) -> list[tuple[Any, ...]]:
        """Where the other leaders listen, once all do."""
        until = time.monotonic() + membership.timeout_seconds
        names = {
            f"leader-{index}": ranks[0] for index, ranks in enumerate(membership.hosts) if index != membership.host
        }
        while late := [str(leader) for name, leader in names.items() if not store.check([name])]:
            self._check()
            if time.monotonic() > until:
                raise CollectiveError(f"rank {membership.rank}: leaders that did not arrive: {', '.join(late)}")
            time.sleep(0.01)
        return [tuple(place) for name in names for place in json.loads(store.get(name))]

    def sum_(self, array: Array) -> None:
        self._finish(self._group.allreduce([torch.from_numpy(array)]))

    def broadcast_(self, array: Array) -> None:
        self._finish(self._group.broadcast(torch.from_numpy(array), 0))

    def _finish(self, work: Any) -> None:
        """Wait in slices, to see that another member of the host gave up. The limit of all is gloo's own."""
        while True:
            finished = work.is_completed()
            try:
                work.wait(timedelta(seconds=SLICE_SECONDS))
                return
            except RuntimeError as error:
                self._check()
                if finished:
                    raise CollectiveError(f"another host is gone or late: {_line(error)}") from error

    def cut(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):  # the other side was faster
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        del self._group
        for link in self._links:
            link.close()


def _sockets() -> Iterator[socket.socket]:
    """Every TCP socket of this process, as a second handle: whoever closes the first is not in our way."""
    for entry in list(Path("/dev/fd").iterdir()):
        try:
            handle = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        try:
            found = socket.socket(fileno=handle)
        except OSError:  # no socket
            os.close(handle)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


def _listening() -> Iterator[tuple[Any, ...]]:
    for found in _sockets():
        with found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield _place(found.getsockname)


def _place(name: Callable[[], Any]) -> tuple[Any, ...]:
    """Host and port, or nothing if it isn't connected."""
    try:
        return tuple(name()[:2])
    except OSError:
        return ()


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
