"""One leader per host, connected by gloo.

gloo's own `abort` does not release an operation that waits for a lost host. So the leader keeps a second handle on each
TCP connection that gloo opens, and shuts these down to abort.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.collective.group import CollectiveError, GroupSpec
from paceline.collective.shared_memory import SLICE_SECONDS, Array
from paceline.lazy import torch

Address = tuple[Any, ...]
"""Host and port, or empty for a socket that is not connected."""


def serve_store(host: str) -> tuple[object, int]:
    """Start the server through which leaders find each other. Returns it (it lives while referenced) and its port."""
    import torch.distributed

    dist: Any = torch.distributed  # its types leave out most of what is used here
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # listens on every interface
    return store, store.port


class HostLeaders:
    """The operations of one leader with the leaders of the other hosts."""

    def __init__(self, spec: GroupSpec, check: Callable[[], None]) -> None:
        """`check` raises if another member of this host has aborted."""
        import torch.distributed

        dist: Any = torch.distributed
        self._check, self._connections = check, list[socket.socket]()
        assert spec.store is not None
        limit = timedelta(seconds=spec.timeout_seconds)
        try:
            socket.create_connection(spec.store, spec.timeout_seconds).close()  # TCPStore's error has fifty lines
            client = dist.PrefixStore(spec.segment, dist.TCPStore(*spec.store, is_master=False, timeout=limit))
            before = set(_listening())
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=spec.address)]
            options._threads = 1
            options._timeout = limit / 5  # connecting takes up to five times this limit
            own = [listener for listener in _listening() if listener not in before]
            client.set(f"leader-{spec.host}", json.dumps(own))
            peers = self._await_peers(client, spec)
            self._group = dist.ProcessGroupGloo(client, spec.host, len(spec.hosts), options)
            self._group._set_default_timeout(limit)
        except (OSError, RuntimeError) as error:
            if isinstance(error, CollectiveError):
                raise
            raise CollectiveError(
                f"rank {spec.rank}: no way to the other hosts ({':'.join(map(str, spec.store))}): {_first_line(error)}"
            ) from error
        for connection in _sockets():
            # The listening socket has no peer; gloo ends the process if that one is shut down.
            peer = _address(connection.getpeername)
            if peer in peers or (peer and _address(connection.getsockname) in own):
                self._connections.append(connection)
            else:
                connection.close()

    def _await_peers(self, store: Any, spec: GroupSpec) -> list[Address]:
        """The addresses where the other leaders listen, once all of them do."""
        deadline = time.monotonic() + spec.timeout_seconds
        names = {f"leader-{index}": ranks[0] for index, ranks in enumerate(spec.hosts) if index != spec.host}
        while late := [str(rank) for name, rank in names.items() if not store.check([name])]:
            self._check()
            if time.monotonic() > deadline:
                raise CollectiveError(f"rank {spec.rank}: leaders that did not arrive: {', '.join(late)}")
            time.sleep(0.01)
        return [tuple(address) for name in names for address in json.loads(store.get(name))]

    def sum_(self, array: Array) -> None:
        self._wait(self._group.allreduce([torch.from_numpy(array)]))

    def broadcast_(self, array: Array) -> None:
        self._wait(self._group.broadcast(torch.from_numpy(array), 0))

    def _wait(self, work: Any) -> None:
        """Wait in short slices, to notice an abort by another member of this host. gloo enforces the time limit."""
        while True:
            finished = work.is_completed()
            try:
                work.wait(timedelta(seconds=SLICE_SECONDS))
                return
            except RuntimeError as error:
                self._check()
                if finished:
                    raise CollectiveError(f"another host is gone or late: {_first_line(error)}") from error

    def disconnect(self) -> None:
        """Shut down all connections, which ends pending operations on every host."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the other side was faster
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        del self._group
        for connection in self._connections:
            connection.close()


def _sockets() -> Iterator[socket.socket]:
    """A duplicate handle of every TCP socket of this process; the owner may close the original at any time."""
    for entry in list(Path("/dev/fd").iterdir()):
        try:
            handle = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        try:
            found = socket.socket(fileno=handle)
        except OSError:  # not a socket
            os.close(handle)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


def _listening() -> Iterator[Address]:
    for found in _sockets():
        with found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield _address(found.getsockname)


def _address(name: Callable[[], Any]) -> Address:
    try:
        return tuple(name()[:2])
    except OSError:
        return ()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
