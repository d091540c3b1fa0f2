"""Read JSON-lines files that may be damaged, cut short, or still growing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.config import UserError

Row = dict[str, Any]

TAIL_BYTES = 64 << 10
CHUNK_BYTES = 8 << 20
"""Most that one call of `GrowingFile.read` reads: a file of hundreds of megabytes must not delay the others."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; OSError for anything else, since reading a pipe would block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(fd, "rb")


def parse_row(line: bytes) -> Row | None:
    """The JSON object on a complete line; None if the line is damaged or has no newline yet."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def scan(path: Path, take: Callable[[Row], None]) -> tuple[list[int], int]:
    """Pass every row to `take`. Return the numbers of the damaged lines, and that of an incomplete last line or 0.

    A missing file has no rows; OSError if it cannot be read.
    """
    damaged: list[int] = []
    number = 0
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            if (row := parse_row(line)) is not None:
                take(row)
            elif line.strip():
                damaged.append(number)
    if damaged and damaged[-1] == number:
        return damaged[:-1], number
    return damaged, 0


def read_rows(path: Path) -> list[Row]:
    """All rows, without an incomplete last line: the run may still be writing it. UserError if another is damaged."""
    rows: list[Row] = []
    try:
        damaged, _ = scan(path, rows.append)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if damaged:
        raise UserError(f"{path}: line {damaged[0]} is not a JSON object; delete that line")
    return rows


@dataclass
class GrowingFile:
    """A JSON-lines file that is appended to, and rarely replaced by a shorter one."""

    path: Path
    offset: int = 0
    tail: bytes = b""
    """The bytes before `offset`. If the file no longer has them there, it has been replaced."""
    inode: int = 0
    has_more: bool = False
    """The file holds complete rows that were not read yet."""

    def read(self) -> tuple[list[Row], bool]:
        """The rows added since the last call (at most one chunk), and whether the file was replaced meanwhile."""
        self.has_more = False
        rows: list[Row] = []
        try:
            with open_regular(self.path) as file:
                about = os.fstat(file.fileno())
                replaced = self.offset > 0 and not self._is_same(file, about)
                if replaced:
                    self.offset, self.tail = 0, b""
                self.inode = about.st_ino
                file.seek(self.offset)
                begin = self.offset
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self.offset += len(line)
                    self.tail = (self.tail + line)[-64:]
                    if (row := parse_row(line)) is not None:
                        rows.append(row)
                    if self.offset - begin >= CHUNK_BYTES:
                        self.has_more = True
                        break
        except OSError:
            return [], False
        return rows, replaced

    def last_rows(self, count: int) -> list[Row]:
        """The last complete rows, read from the end of the file."""
        with contextlib.suppress(OSError), open_regular(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            for length in (TAIL_BYTES, CHUNK_BYTES):  # a row that lists hundreds of workers is long
                file.seek(max(0, size - length))
                lines = file.read(length).split(b"\n")[0 if size <= length else 1 : -1]
                if lines:
                    return [row for line in lines[-count:] if (row := parse_row(line + b"\n")) is not None]
        return []

    def rewind(self) -> None:
        self.offset, self.tail, self.inode, self.has_more = 0, b"", 0, False

    def _is_same(self, file: BinaryIO, about: os.stat_result) -> bool:
        if about.st_ino != self.inode or about.st_size < self.offset:
            return False
        file.seek(self.offset - len(self.tail))
        return file.read(len(self.tail)) == self.tail
