"""A trial's run directory on its way between the host it runs on and the sweep's folder, where they share none."""

from __future__ import annotations

import io
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEAST_SECONDS = 5.0  # between two deliveries
SHARE = 0.05  # of the time may be spent on them
LIMIT_SECONDS = 300.0
_STAYS = ("replay", ".lock")  # large and not needed to continue; of this host alone


class Desk:
    """Beside the sweep's folder: takes in what trials elsewhere have written, and gives it out to go on from."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def fetch(self, name: str) -> bytes | None:
        return pack(self._folder / name)

    def take(self, name: str, content: bytes) -> None:
        unpack(content, self._folder / name)


class Courier:
    def __init__(self, desk: Any, name: str, folder: Path) -> None:
        self._desk, self._name, self._path = desk, name, folder / name
        self._next = 0.0

    def fetch(self) -> None:
        content = _get(self._desk.fetch.remote(self._name))
        if content is not None:
            unpack(content, self._path)

    def send(self, *, now: bool = False) -> None:
        began = time.monotonic()
        if began < self._next and not now:
            return
        content = pack(self._path)
        if content is not None:
            _get(self._desk.take.remote(self._name, content))
        ended = time.monotonic()
        self._next = ended + max(LEAST_SECONDS, (ended - began) / SHARE)


def pack(path: Path) -> bytes | None:
    _mend(path)
    if not path.is_dir():
        return None
    buffer = io.BytesIO()

    def chosen(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if item.name in _STAYS else item

    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for child in sorted(path.iterdir()):
            archive.add(child, child.name, filter=chosen)
    return buffer.getvalue()


def unpack(content: bytes, path: Path) -> None:
    """In the place of `path`, which is whole before and after."""
    _mend(path)
    new, old = _beside(path, "new"), _beside(path, "old")
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(new, filter="data")
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _mend(path: Path) -> None:
    """Where an unpack ended between its two renames."""
    old = _beside(path, "old")
    if old.exists() and not path.exists():
        old.rename(path)


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f".{path.name}.{word}")


def _get(reference: Any) -> Any:
    import ray

    get: Callable[..., Any] = ray.get
    return get(reference, timeout=LIMIT_SECONDS)
