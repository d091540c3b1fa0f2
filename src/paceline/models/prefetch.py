"""Work in pieces that a second thread does ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from paceline.models.numpy_mlp import HelperThread


class Prefetch:
    """Runs `work(k)` for each piece k, in order and never two at once. Leaving the block cancels the rest."""

    def __init__(self, work: Callable[[int], None], pieces: int, helper: HelperThread | None) -> None:
        self._work, self._pieces, self._helper = work, pieces, helper
        self._done = 0
        self._stops = False

    def __enter__(self) -> Prefetch:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._end()

    def need(self, piece: int) -> None:
        """Wait for a piece; it is done here unless the other thread has begun it."""
        if piece < self._done:
            return
        self._end()
        while self._done <= piece:
            self._do_next()
        self._begin()

    def _begin(self) -> None:
        if self._helper is not None and self._done < self._pieces:
            self._helper.begin(self._go_ahead)

    def _end(self) -> None:
        """Stop the other thread after its current piece."""
        if self._helper is not None:
            self._stops = True
            self._helper.join()
            self._stops = False

    def _go_ahead(self) -> None:
        while self._done < self._pieces and not self._stops:
            self._do_next()

    def _do_next(self) -> None:
        self._work(self._done)
        self._done += 1
