"""A process that steps some of the environments of an `AsyncVector`."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from paceline.config import UserError
from paceline.config.objects import PickledObject, adopt
from paceline.envs.agents_vector import sync_vector
from paceline.envs.restarts import EnvError
from paceline.envs.sync_vector import SyncVector
from paceline.envs.vector import Env, VectorOptions, part_of, view

CLOSE_SECONDS = 2.0


@contextlib.contextmanager
def without_script() -> Iterator[None]:
    """A spawned process runs the user's script again, for what it defines. Here such things travel by value, and
    a script that trains when it is imported would never end."""
    main = sys.modules["__main__"]
    kept = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    try:
        for name in kept:
            setattr(main, name, None)
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


class News(NamedTuple):
    """What happened in a step besides its results. Most steps have none."""

    metrics: list[tuple[int, dict[str, float]]]
    failed: list[int]
    restarts: int
    first_error: str


def serve(
    connection: Connection,
    objects: dict[str, PickledObject],
    makers: Sequence[Callable[[], Env]],
    attributes: dict[str, Any],
    options: VectorOptions,
    restart_on_error: int,
    first_episode: int,
    place: tuple[slice, int, Any, list[Any]],
) -> None:
    """Main function of an environment process. It ends when the pipe closes, which happens however the parent ends."""
    os.setpgrp()  # so that programs which environments start can be ended with this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The parent handles signals: it saves the run, then closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    adopt(objects)
    vector: SyncVector | None = None
    try:
        made = lambda: connection.send(("ok", None))  # noqa: E731
        own: dict[str, Any] = {"restart_on_error": restart_on_error, "first_episode": first_episode, "on_made": made}
        vector = sync_vector(makers, **own, **options)
        for name, value in attributes.items():
            vector.set_attribute(name, value)
        envs, num_envs, raw, parts = place
        each = vector.rows // vector.num_envs
        obs = view(raw, vector.observation.dtype, (num_envs * each, *vector.observation.shape))
        *buffers, action = (part_of(view(*part), envs, num_envs) for part in parts)
        vector._use_buffers(part_of(obs, envs, num_envs), buffers)
        vector.on_replay = lambda: connection.send(("replay", None))
        connection.send(("ok", None if vector.masks is None else vector.masks.where))
        while True:
            command, argument = connection.recv()
            answer: Any = None
            if command == "close":
                return
            if command == "reset":
                vector.reset()
            elif command == "step":
                vector.step(action)
                if vector.finished_metrics or vector.failed:
                    answer = News(vector.finished_metrics, vector.failed, vector.env_restarts, vector.first_error)
                    vector.finished_metrics, vector.failed, vector.env_restarts = [], [], 0
            elif command == "reseed":
                vector.reseed(*argument)
            elif command == "set_attribute":
                vector.set_attribute(*argument)
            elif command == "state":
                answer = vector.state()
            elif command == "restore":
                answer = vector.restore(*argument)
            connection.send(("ok", answer))
    except (EOFError, BrokenPipeError):
        return
    except UserError as error:
        connection.send(("bad input", str(error)))
    except EnvError as error:
        connection.send(("given up", str(error)))
    except Exception:
        connection.send(("error", f"an environment failed:\n{traceback.format_exc()}"))
    finally:
        if vector is not None:
            vector.close()


def _end_with_parent() -> None:
    """Needed where an environment hangs and therefore never reads the closed pipe."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(CLOSE_SECONDS)
    os.killpg(0, signal.SIGKILL)
