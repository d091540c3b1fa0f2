"""Files that grow while they are read, and the points of a curve that are kept of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.files import open_plain

Row = dict[str, Any]

POINTS = 800
"""Of a curve; when there are more, every other one goes."""
TAIL = 64 << 10
CHUNK = 8 << 20
"""Bytes of one file that are read in one look: a file of hundreds of megabytes must not hold up the others."""


@dataclass
class Growing:
    """A file of JSON lines that is appended to, and rarely replaced by a shorter one."""

    path: Path
    offset: int = 0
    tail: bytes = b""
    """What stood before the offset: where it does no longer, the file is another one."""
    inode: int = 0
    behind: bool = False
    """More is there than was read."""

    def read(self) -> tuple[list[Row], bool]:
        """The rows added since, as far as a chunk holds them, and whether all that was read before is void. A line
        without its end waits."""
        self.behind = False
        try:
            with open_plain(self.path) as file:
                about = os.fstat(file.fileno())
                again = self.offset > 0 and not self._is_same(file, about)
                if again:
                    self.offset, self.tail = 0, b""
                self.inode = about.st_ino
                file.seek(self.offset)
                begin, rows = self.offset, []
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self.offset += len(line)
                    self.tail = (self.tail + line)[-64:]
                    if (row := _row(line)) is not None:
                        rows.append(row)
                    if self.offset - begin >= CHUNK:
                        self.behind = True
                        break
        except OSError:
            return [], False
        return rows, again

    def last(self, count: int) -> list[Row]:
        """The last whole rows, from the end of the file."""
        try:
            with open_plain(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                for held in (TAIL, CHUNK):  # a row that lists hundreds of workers is long
                    file.seek(max(0, size - held))
                    lines = file.read(held).split(b"\n")[0 if size <= held else 1 : -1]
                    if lines:
                        return [row for line in lines[-count:] if (row := _row(line)) is not None]
        except OSError:
            pass
        return []

    def forget(self) -> None:
        self.offset, self.tail, self.inode, self.behind = 0, b"", 0, False

    def _is_same(self, file: Any, about: os.stat_result) -> bool:
        if about.st_ino != self.inode or about.st_size < self.offset:
            return False
        file.seek(self.offset - len(self.tail))
        return bool(file.read(len(self.tail)) == self.tail)


@dataclass
class Curve:
    """Points of one run, thinned when they are many. `epoch` changes when those sent before are void."""

    epoch: int = 0
    points: list[list[float | None]] = field(default_factory=list)
    _stride: int = 1
    _skipped: int = 0

    def add(self, values: list[float | None]) -> None:
        self._skipped += 1
        if self.points and self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append(values)
        if len(self.points) > POINTS:
            self.points = self.points[::2]
            self._stride *= 2
            self.epoch += 1

    def clear(self) -> None:
        self.points, self._stride, self._skipped = [], 1, 0
        self.epoch += 1


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # half a line after a crash: the others are still worth showing
    return row if isinstance(row, dict) else None
