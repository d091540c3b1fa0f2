"""SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 (sent by OAR) end a command: a run saves and stops, anything else stops.

Schedulers, job scripts and `timeout` each pass a signal on, so one request arrives as two or three signals. Signals
within `BURST_SECONDS` of the first are therefore the same request. A later one, or a second Ctrl-C, ends the process at
once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Self

STOPPED_EARLY = 99
BURST_SECONDS = 3.0
AGAIN_SECONDS = 0.01
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(KeyboardInterrupt):
    """A signal ended the command before its run began. Its text is the name of the signal.

    A KeyboardInterrupt, because libraries pass that on from the inside of their calls, and hardly any other exception.
    """


class EndingSignals(ABC):
    """`received`: name of the first signal, or None. Signals are only seen in the main thread."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._first: tuple[int, float] = (0, 0.0)  # number and time
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in ENDING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._first = signal.Signals(number).name, (number, now)
            self.first(number, frame)
        elif number == self._first[0] == signal.SIGINT or now - self._first[1] > BURST_SECONDS:
            self.again(number)

    @abstractmethod
    def first(self, number: int, frame: FrameType | None) -> None: ...

    @abstractmethod
    def again(self, number: int) -> NoReturn: ...


class StartSignals(EndingSignals):
    """Before its run has begun, the first signal ends a command: it raises `Interrupted`."""

    begun = False
    """Whether a run has begun. From then on, and while it closes what it used, signals no longer raise."""

    def first(self, number: int, frame: FrameType | None) -> None:
        if self.begun:
            return
        if frame is not None and frame.f_code.co_filename == logging.__file__:
            # An exception here would leave logging's lock locked, and be ignored where Python forks. Try again soon.
            self.received = None
            threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()
            return
        raise Interrupted(self.received)

    def again(self, number: int) -> NoReturn:
        os._exit(STOPPED_EARLY if self.begun else self.exit_code)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self.received is not None:  # the rest of the burst must not kill a command that is about to exit
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)

    @property
    def exit_code(self) -> int:
        """As a shell reports the signal."""
        return 128 + self._first[0]


class StopSignals(EndingSignals):
    """During a run, the first signal only sets `received`. Before the process ends at once, `before_end` is called."""

    def __init__(self, before_end: Callable[[str], None] = lambda reason: None) -> None:
        super().__init__()
        self._before_end = before_end
        self._ending = False

    def __enter__(self) -> Self:
        starting = run_begins()
        super().__enter__()
        if starting is not None and starting.received is not None:
            self.received, self._first = starting.received, starting._first
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        starting = _starting()
        if starting is not None and starting.received is None:
            starting.received, starting._first = self.received, self._first

    def first(self, number: int, frame: FrameType | None) -> None:
        _say(f"\n{self.received}: saving after this iteration; a second Ctrl-C or a later signal stops at once\n")

    def again(self, number: int) -> NoReturn:
        if not self._ending:
            self._ending = True  # if it blocks, the next signal ends the process without it
            with suppress(OSError):
                self._before_end(f"{signal.Signals(number).name} after {self.received}: ended at once")
        os._exit(STOPPED_EARLY)  # the last checkpoint is complete: saving is atomic


def run_begins() -> StartSignals | None:
    """From now on a signal no longer raises: `StopSignals` will see it, and the run saves before it ends."""
    if (starting := _starting()) is not None and not starting.begun:
        if starting.received is not None:  # a library ignored the exception
            raise Interrupted(starting.received)
        starting.begun = True
    return starting


def interrupted_by() -> str | None:
    """The signal that interrupted the start, whatever exception a library made of `Interrupted`."""
    starting = _starting()
    return starting.received if starting is not None and not starting.begun else None


def _starting() -> StartSignals | None:
    handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StartSignals) else None


def _say(text: str) -> None:
    with suppress(OSError):  # the reader may be gone: Ctrl-C also ends the `tee` behind a pipe
        # print is not safe in a handler, which may have interrupted another print.
        os.write(2, text.encode())
