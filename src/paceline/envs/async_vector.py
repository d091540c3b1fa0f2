"""Slow Python environments in parallel processes, with a time limit on every wait.

Each process steps some of the environments as a `SyncVector` into shared memory, so that the results equal those of
`vector=sync`. (Gymnasium's AsyncVectorEnv uses one process per environment and can neither seed nor save episodes.)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import multiprocessing as mp
import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Unpack

import numpy as np

from paceline.config import UserError
from paceline.config.objects import pickled_objects
from paceline.envs.contract import close_env
from paceline.envs.env_process import CLOSE_SECONDS, serve, without_script
from paceline.envs.masks import MaskReader
from paceline.envs.multi_agent import spaces_of
from paceline.envs.restarts import FRESH_STEPS, PAUSE_SECONDS, EnvError, Restarts
from paceline.envs.vector import Env, State, StepResult, VectorEnv, VectorOptions, part_of, view
from paceline.spaces import Array

START_SECONDS = 120.0
EPISODES = 10**9  # numbers of episodes set aside for each start of a process: no two have the same seed


@dataclass(eq=False)
class _Process:
    """One process and its environments."""

    connection: Connection
    process: Any
    envs: slice
    starts: int  # how often these environments were given a new process
    first_step: int = 0  # of the vector, that it took part in
    missing: int = 1  # answers to come before it can step
    deadline: float = 0.0  # for these answers

    def kill(self) -> None:
        """End it at once, and the programs that its environments have started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(CLOSE_SECONDS)
        self.connection.close()


class AsyncVector(VectorEnv):
    def __init__(
        self,
        makers: Sequence[Callable[[], Env]],
        *,
        processes: int,
        timeout_seconds: float,
        restart_on_error: int = 0,
        **options: Unpack[VectorOptions],
    ) -> None:
        """`restart_on_error`: see `EnvConfig`. Environments that raise are started again inside their process, without
        the others in it; if the process dies or does not answer, it is replaced while the other processes go on."""
        self._timeout = timeout_seconds
        self._makers, self._options = makers, options.copy()
        self._attributes: dict[str, Any] = {}
        self._processes: list[_Process] = []
        self._in_flight = False
        self._steps = 0
        one = makers[0]()
        try:
            super().__init__(len(makers), **spaces_of(one, options), **options | {"masked": False})
        finally:
            close_env(one)
        # spawn, not fork: a forked child of a process with threads can deadlock.
        self._context = mp.get_context("spawn")
        action = np.zeros((self.rows, *self.action.shape), self.action.dtype)
        buffers = (*self._buffers(), action)
        self._shared = [(self._context.RawArray(ctypes.c_byte, max(1, a.nbytes)), a.dtype, a.shape) for a in buffers]
        *results, self._action = (view(*part) for part in self._shared)
        self._use_buffers(self._obs, results)
        room = self._obs.nbytes + self.rows * sum(self.action.nvec) * np.dtype(np.float32).itemsize
        self._shared_obs = self._context.RawArray(ctypes.c_byte, room)
        # At exit multiprocessing sends SIGTERM to its children, which these ignore, and waits for them forever.
        self._at_exit = atexit.register(functools.partial(_close, weakref.ref(self)))
        bounds = np.linspace(0, len(makers), min(processes, len(makers)) + 1).astype(int)
        self._restarts = Restarts(len(bounds) - 1, 0)  # at the start an error is raised at once
        self._limit = restart_on_error
        try:
            for start, stop in itertools.pairwise(bounds.tolist()):
                self._processes.append(self._start(slice(start, stop)))
            self._gather(START_SECONDS)
            self._use(list(self._gather(timeout_seconds).values()))
        except BaseException:
            self.close()
            raise

    def _use(self, wheres: list[str | None]) -> None:
        """Observations with or without masks, as the processes say: only they reset environments."""
        if len(set(wheres)) > 1:
            raise UserError("some environments give action masks and others do not: all of them must, or none")
        if wheres[0] is not None:
            self.masks = MaskReader(wheres[0], self.action.nvec)
            self.observation = self.observation.with_mask(self.action.nvec)
        if self.team is None:
            self._options["masked"] = self.masks is not None
        self._obs = view(self._shared_obs, self.observation.dtype, (self.rows, *self.observation.shape))

    def _start(self, envs: slice, starts: int = 0) -> _Process:
        here, there = self._context.Pipe()
        seed, worker, resumes = self._entropy
        own = self._options | {"first_env": self._first_env + envs.start}
        own |= {"seed": seed, "worker": worker, "resumes": resumes}
        place = (envs, self.num_envs, self._shared_obs, self._shared)
        envs_now = (pickled_objects(), self._makers[envs], self._attributes)
        arguments = (there, *envs_now, own, self._limit, starts * EPISODES, place)
        process = self._context.Process(target=serve, args=arguments, daemon=True, name=f"envs-{envs.start}")
        with without_script():
            process.start()
        there.close()
        return _Process(here, process, envs, starts)

    def reset(self) -> Array:
        self._call("reset")
        self._restarts.limit = self._limit
        self._await_all()
        return self._obs

    def send(self, action: Array) -> None:
        self._action[...] = action
        self._ask("step")
        self._in_flight = True

    def receive(self) -> StepResult:
        self._in_flight = False
        self._steps += 1
        answers = self._gather(self._timeout)
        for index, process in enumerate(self._processes):
            if index not in answers:
                for buffer in self._buffers():
                    part_of(buffer, process.envs, self.num_envs)[...] = 0
                self.failed += range(process.envs.start, process.envs.stop)
            elif (news := answers[index]) is not None:
                self.finished_metrics += [(process.envs.start + env, metrics) for env, metrics in news.metrics]
                self.failed += [process.envs.start + env for env in news.failed]
                self.env_restarts += news.restarts
                self._restarts.first_error = self._restarts.first_error or news.first_error
        return self._obs, self._reward, self._terminated, self._truncated

    def set_attribute(self, name: str, value: Any) -> None:
        self._attributes[name] = value
        self._call("set_attribute", [(name, value)] * len(self._processes))

    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        super().reseed(seed, worker, resumes)
        self._call("reseed", [self._entropy] * len(self._processes))

    def state(self) -> State | None:
        if self._restarts.down:
            return None
        parts = self._call("state")
        return {"shares": parts} if all(part is not None for part in parts) else None

    def restore(self, state: State, observation: Array) -> bool:
        if len(state["shares"]) != len(self._processes):
            return False
        own = [part_of(observation, process.envs, self.num_envs) for process in self._processes]
        if all(self._call("restore", list(zip(state["shares"], own, strict=True)))):
            self._restarts.limit = self._limit
            return True
        self.reseed(*self._entropy)  # also the processes that could restore theirs
        return False

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.connection.send(("close", None))
            process.connection.close()
            process.process.join(CLOSE_SECONDS)
            if process.process.is_alive():
                process.kill()
        self._processes = []
        atexit.unregister(self._at_exit)

    # -- asking and waiting -----------------------------------------------------------------------------------------

    def _call(self, command: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The answer of each process; None for one that failed, which is being replaced."""
        if self._in_flight:
            self.receive()  # its answers arrive first
        self._await_all()
        self._ask(command, arguments)
        answers = self._gather(self._timeout)
        return [answers.get(index) for index in range(len(self._processes))]

    def _ask(self, command: str, arguments: Sequence[Any] | None = None) -> None:
        if not self._processes:
            raise EnvError("these environments are closed")
        for index, process in enumerate(self._processes):
            if index not in self._restarts.down:
                with contextlib.suppress(OSError):  # the process died: `_gather` reports why
                    process.connection.send((command, arguments[index] if arguments else None))

    def _gather(self, timeout: float) -> dict[int, Any]:
        """The answers of the processes that are up, without those that fail now."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        down = self._restarts.down
        waiting = {process.connection: index for index, process in enumerate(self._processes) if index not in down}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(waiting.values())
                names = ", ".join(f"{rows.start}-{rows.stop - 1}" for rows in (self._processes[i].envs for i in silent))
                problem = f"environments {names} did not answer within {timeout:g} s (env.step_timeout_seconds)"
                for index in silent:
                    self._fail(index, problem)
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                index = waiting.pop(connection)
                kind, answer = self._read(self._processes[index])
                if kind == "replay":
                    waiting[connection] = index
                    deadline = time.monotonic() + timeout
                elif kind == "ok":
                    answers[index] = answer
                elif kind == "bad input":
                    self.close()
                    raise UserError(answer)
                else:
                    self._fail(index, answer, given_up=kind == "given up")
        if down:
            self._replace()
        return answers

    def _read(self, process: _Process) -> tuple[str, Any]:
        try:
            kind, answer = process.connection.recv()
        except (EOFError, OSError):
            process.process.join(CLOSE_SECONDS)  # before that there is no exit code
            code = process.process.exitcode
            reason = "; it was killed, most often for lack of memory" if code == -signal.SIGKILL else ""
            return "error", f"an environment process ended (exit code {code}{reason})"
        return kind, answer

    # -- replacing processes ----------------------------------------------------------------------------------------

    def _fail(self, index: int, error: str, *, given_up: bool = False) -> None:
        """End a process that failed. `given_up`: its environments failed after all attempts to start them again."""
        if not self._restarts.limit:
            self.close()
            raise EnvError(error)
        process = self._processes[index]
        process.kill()
        process.deadline = 0.0
        fresh = process.starts > 0 and self._steps - process.first_step < FRESH_STEPS
        self._note_failure(index, error, fresh=fresh, attempts=self._limit + 1 if given_up else 1)

    def _note_failure(self, index: int, error: str, *, fresh: bool, attempts: int = 1) -> None:
        try:
            self._restarts.fail(index, error, fresh=fresh, attempts=attempts)
        except EnvError:
            self.close()
            raise

    def _replace(self) -> None:
        """Start the replacements that are due, and take in those that are ready. If no process is left, wait for one
        of them."""
        while self._restarts.down:
            for index in list(self._restarts.down):
                if self._processes[index].deadline:
                    self._take_in(index)
                elif self._restarts.down[index] <= time.monotonic():
                    old = self._processes[index]
                    try:
                        new = self._processes[index] = self._start(old.envs, old.starts + 1)
                    except OSError as error:  # no memory, too many processes
                        self._note_failure(index, f"no process could be started: {error}", fresh=True)
                        continue
                    with contextlib.suppress(OSError):  # if it has died already, `_take_in` notices
                        new.connection.send(("reset", None))
                    new.missing, new.deadline = 3, time.monotonic() + START_SECONDS + self._timeout
            if not self._restarts.all_down:
                return
            starting = [process.connection for process in self._processes if process.deadline]
            wait(starting, PAUSE_SECONDS)

    def _take_in(self, index: int) -> None:
        process = self._processes[index]
        while process.connection.poll():
            kind, answer = self._read(process)
            if kind != "ok":
                self._fail(index, answer, given_up=kind == "given up")
                return
            process.missing -= 1
            if not process.missing:
                process.deadline, process.first_step = 0.0, self._steps
                self._restarts.started(index)
                self.env_restarts += process.envs.stop - process.envs.start
                return
        if time.monotonic() > process.deadline:
            self._fail(index, f"an environment process did not start within {START_SECONDS:g} s")

    def _await_all(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._restarts.down:
            self._replace()
            if self._restarts.down and time.monotonic() > deadline:
                error = self._restarts.first_error
                self.close()
                raise EnvError(f"environments could not be started again within {START_SECONDS:g} s:\n{error}")
            time.sleep(PAUSE_SECONDS if self._restarts.down else 0.0)


def _close(vector: weakref.ref[AsyncVector]) -> None:
    if (alive := vector()) is not None:
        alive.close()
