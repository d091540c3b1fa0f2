"""Slow Python environments in parallel processes, with a limit on every wait.

Each process steps a share of the environments as a `SyncVector` into shared memory, so that the results are those of
`vector=sync`. (Gymnasium's AsyncVectorEnv has one process per environment and can neither seed episodes nor save them.)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import math
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium
import numpy as np

from paceline.env.vector import State, SyncVector, VectorEnv
from paceline.spaces import ActionCodec, Array, ObservationCodec

START_SECONDS = 120.0
CLOSE_SECONDS = 2.0


class EnvError(RuntimeError):
    """An environment failed or did not answer in time."""


class AsyncVector(VectorEnv):
    def __init__(
        self,
        makers: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        processes: int,
        timeout_seconds: float,
        seed: int,
        worker: int = 0,
        resumes: int = 0,
        first_env: int = 0,
        squash: bool = False,
    ) -> None:
        self._timeout = timeout_seconds
        self._entropy = (seed, worker, resumes)
        self._workers: list[tuple[Connection, Any, slice]] = []
        self._in_flight = False
        one = makers[0]()
        observation, act = ObservationCodec(one.observation_space), ActionCodec(one.action_space, squash=squash)
        one.close()  # type: ignore[no-untyped-call]
        self._allocate(len(makers), observation, act)
        # spawn, not fork: a forked child of a process with threads can deadlock.
        context = mp.get_context("spawn")
        like = (
            self._obs,
            self._reward,
            self._terminated,
            self._truncated,
            np.zeros((len(makers), *act.shape), act.dtype),
        )
        shared = [(context.RawArray(ctypes.c_byte, max(1, a.nbytes)), a.dtype, a.shape) for a in like]
        self._obs, self._reward, self._terminated, self._truncated, self._action = (_view(*part) for part in shared)
        # At exit multiprocessing asks its children to end by SIGTERM, which ours ignore, and waits for them for ever.
        self._at_exit = atexit.register(functools.partial(_close, weakref.ref(self)))
        bounds = np.linspace(0, len(makers), min(processes, len(makers)) + 1).astype(int)
        try:
            for start, stop in itertools.pairwise(bounds.tolist()):
                here, there = context.Pipe()
                options = {"seed": seed, "worker": worker, "resumes": resumes, "squash": squash}
                options["first_env"] = first_env + start
                arguments = (there, list(makers[start:stop]), options, slice(start, stop), shared)
                process = context.Process(target=_serve, args=arguments, daemon=True, name=f"envs-{start}")
                process.start()
                there.close()
                self._workers.append((here, process, slice(start, stop)))
            self._gather(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def reset(self) -> Array:
        self._call("reset")
        return self._obs

    def step(self, action: Array) -> tuple[Array, Array, Array, Array]:
        self.send(action)
        return self.receive()

    def send(self, action: Array) -> None:
        self._action[...] = action
        self._ask("step")
        self._in_flight = True

    def receive(self) -> tuple[Array, Array, Array, Array]:
        self._in_flight = False
        for metrics in self._gather(self._timeout):
            self.finished_metrics += metrics
        return self._obs, self._reward, self._terminated, self._truncated

    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        self._entropy = (seed, worker, resumes)
        self._call("reseed", [self._entropy] * len(self._workers))

    def state(self) -> State | None:
        parts = self._call("state")
        return {"shares": parts} if all(part is not None for part in parts) else None

    def restore(self, state: State, observation: Array) -> bool:
        if len(state["shares"]) != len(self._workers):
            return False
        arguments = [
            (part, observation[share]) for part, (_, _, share) in zip(state["shares"], self._workers, strict=True)
        ]
        if all(self._call("restore", arguments)):
            return True
        self.reseed(*self._entropy)  # also those that could be restored
        return False

    def close(self) -> None:
        for connection, process, _ in self._workers:
            with contextlib.suppress(OSError):
                connection.send(("close", None))
            connection.close()
            process.join(CLOSE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join(CLOSE_SECONDS)
        self._workers = []
        atexit.unregister(self._at_exit)

    def _call(self, command: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        if self._in_flight:
            self.receive()  # its answers come first
        self._ask(command, arguments)
        return self._gather(self._timeout)

    def _ask(self, command: str, arguments: Sequence[Any] | None = None) -> None:
        if not self._workers:
            raise EnvError("these environments are closed")
        for index, (connection, _, _) in enumerate(self._workers):
            with contextlib.suppress(OSError):  # it died: its last words are read below
                connection.send((command, arguments[index] if arguments else None))

    def _gather(self, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        waiting = {connection: index for index, (connection, _, _) in enumerate(self._workers)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                shares = [self._workers[index][2] for index in waiting.values()]
                names = ", ".join(f"{share.start}-{share.stop - 1}" for share in shares)
                self.close()
                raise EnvError(f"environments {names} did not answer within {timeout:g} s (env.step_timeout_seconds)")
            for connection in ready:
                assert isinstance(connection, Connection)
                index = waiting.pop(connection)
                try:
                    kind, answer = connection.recv()
                except (EOFError, OSError):
                    process = self._workers[index][1]
                    process.join(CLOSE_SECONDS)  # until then it has no exit code
                    kind, answer = "error", f"the process of environments ended (exit code {process.exitcode})"
                if kind == "replay":
                    waiting[connection] = index
                    deadline = time.monotonic() + timeout
                    continue
                if kind == "error":
                    self.close()
                    raise EnvError(answer)
                answers[index] = answer
        return [answers[index] for index in sorted(answers)]


def _close(vector: weakref.ref[AsyncVector]) -> None:
    if (alive := vector()) is not None:
        alive.close()


def _view(raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.frombuffer(raw, dtype, count=math.prod(shape)).reshape(shape)


def _serve(
    connection: Connection, makers: list[Callable[[], Any]], options: dict[str, Any], rows: slice, shared: list[Any]
) -> None:
    """A process of environments. It ends when the pipe closes, so with its parent, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The parent answers signals: it saves the run, then closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    vector: SyncVector | None = None
    try:
        vector = SyncVector(makers, **options)
        action = vector.write_into(*(_view(*part)[rows] for part in shared))
        vector.on_replay = lambda: connection.send(("replay", None))
        connection.send(("ok", None))
        while True:
            command, argument = connection.recv()
            answer: Any = None
            if command == "close":
                return
            if command == "reset":
                vector.reset()
            elif command == "step":
                vector.step(action)
                answer, vector.finished_metrics = vector.finished_metrics, []
            elif command == "reseed":
                vector.reseed(*argument)
            elif command == "state":
                answer = vector.state()
            elif command == "restore":
                answer = vector.restore(*argument)
            connection.send(("ok", answer))
    except (EOFError, BrokenPipeError):
        return
    except Exception:
        connection.send(("error", f"an environment failed:\n{traceback.format_exc()}"))
    finally:
        if vector is not None:
            vector.close()


def _end_with_parent() -> None:
    """An environment that hangs does not see the pipe close."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)
