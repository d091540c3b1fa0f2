"""Pieces of work that are needed one after the other, done ahead of that in a second thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from paceline.model.fast import Twin


class Ahead:
    """`work(k)` for each piece k, in order. Leaving the block ends the work that is left."""

    def __init__(self, work: Callable[[int], None], pieces: int, helper: Twin | None) -> None:
        self._work, self._helper = work, helper
        self._left = deque(range(pieces))
        self._done = [False] * pieces
        self._stops = False

    def __enter__(self) -> Ahead:
        if self._helper is not None:
            self._helper.begin(self._go_ahead)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._left.clear()
        if self._helper is not None:
            self._helper.join()

    def need(self, piece: int) -> None:
        """Returns when it is done."""
        if self._done[piece]:
            return
        if self._claims(piece):
            self._work(piece)
            self._done[piece] = True
        else:  # the other thread is at it
            assert self._helper is not None
            self._stops = True
            self._helper.join()
            self._stops = False
            self._helper.begin(self._go_ahead)

    def _claims(self, piece: int) -> bool:
        try:
            self._left.remove(piece)
        except ValueError:
            return False
        return True

    def _go_ahead(self) -> None:
        while not self._stops:
            try:
                piece = self._left.popleft()
            except IndexError:  # none is left
                return
            self._work(piece)
            self._done[piece] = True
