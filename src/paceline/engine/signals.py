"""SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 (OAR's) ask a run to save and stop; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

STOPPED_EARLY = 99
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """`received` is the name of the signal, if one came. Outside the main thread it stays None."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(STOPPED_EARLY)  # the last checkpoint is whole, whatever was going on
        self.received = signal.Signals(number).name
        with suppress(OSError):  # nobody may be reading any more: Ctrl-C also ends the `tee` behind a pipe
            # Not print: a handler may have interrupted one.
            os.write(2, f"\n{self.received}: saving after this iteration; once more stops at once\n".encode())
