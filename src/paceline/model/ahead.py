"""Pieces of work that are needed one after the other, done ahead of that in a second thread."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from paceline.model.fast import Twin


class Ahead:
    """`work(k)` for each piece k, in order and never two at once. Leaving the block ends what is left of it."""

    def __init__(self, work: Callable[[int], None], pieces: int, helper: Twin | None) -> None:
        self._work, self._pieces, self._helper = work, pieces, helper
        self._done = 0
        self._stops = False

    def __enter__(self) -> Ahead:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._end()

    def need(self, piece: int) -> None:
        """Returns when it is done: here, if the other thread is not at it already."""
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
        """Of the other thread's work, after the piece that it is at."""
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
