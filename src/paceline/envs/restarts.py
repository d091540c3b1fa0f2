"""When to start a failed environment again, and when to give up.

Simulators crash now and then, so a failure alone says little. What counts is an environment that fails soon after every
fresh start. Such failures are counted for each environment, with longer and longer pauses between the attempts, and the
error is raised only once all environments are down and have had their attempts.
"""

from __future__ import annotations

import time
import traceback

FRESH_STEPS = 10  # an environment that fails within so many steps of its start was never really running
PAUSE_SECONDS = 0.1  # before the second attempt in a row; doubled each time
MAX_PAUSE_SECONDS = 30.0


class EnvError(RuntimeError):
    """An environment failed or did not answer in time."""


class Restarts:
    """The failures of `count` environments, or of processes that step several each."""

    def __init__(self, count: int, limit: int) -> None:
        """`limit`: attempts in a row for each; 0: a failure is raised at once."""
        self.limit = limit
        self._in_a_row = [0] * count
        self.down: dict[int, float] = {}
        """The failed ones, and when to start each again."""
        self.first_error = ""
        """The first failure of all, with its traceback."""

    def fail(self, index: int, error: str | BaseException, *, fresh: bool, attempts: int = 1) -> None:
        """Note a failure. `fresh`: soon after a start. `attempts`: how many starts failed. Raises `EnvError` if this
        was the last attempt of the last one."""
        text = error if isinstance(error, str) else "".join(traceback.format_exception(error)).strip()
        self.first_error = self.first_error or text
        tries = self._in_a_row[index] = self._in_a_row[index] + attempts if fresh else attempts
        pause = min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * 2.0 ** min(tries - 2, 60)) if tries > 1 else 0.0
        self.down[index] = time.monotonic() + pause
        if len(self.down) == len(self._in_a_row) and min(self._in_a_row) > self.limit:
            raise EnvError(
                f"every environment failed {self.limit + 1} times in a row soon after a fresh start "
                f"(env.restart_on_error={self.limit}); the last error was:\n{text}"
            )

    @property
    def all_down(self) -> bool:
        return len(self.down) == len(self._in_a_row)

    def is_due(self, index: int) -> bool:
        """Whether to start it now. If there is nothing else to do, this waits for the next one that is due."""
        if self.all_down:
            time.sleep(max(0.0, min(self.down.values()) - time.monotonic()))
        return self.down[index] <= time.monotonic()

    def started(self, index: int) -> None:
        del self.down[index]
