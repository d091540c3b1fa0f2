"""Copies a trial's run directory between its host and the search's folder, where the two share no file system."""

from __future__ import annotations

import io
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

INTERVAL_SECONDS = 5.0  # at least, between two uploads
MAX_SHARE = 0.05  # of the time may be spent on uploads
LIMIT_SECONDS = 300.0
LEFT_OUT = ("replay", ".lock")  # large and not needed to continue; meaningless on another host


class RunStore:
    """An actor on the host that has the search's folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def get(self, name: str) -> bytes | None:
        return pack_run(self._folder / name)

    def put(self, name: str, content: bytes) -> None:
        unpack_run(content, self._folder / name)


class RunTransfer:
    """A trial's side. `store`: the handle of a `RunStore`."""

    def __init__(self, store: Any, path: Path) -> None:
        self._store, self._path = store, path
        self._next = 0.0

    def download(self) -> None:
        """Fetch what an earlier attempt has saved."""
        content = _wait(self._store.get.remote(self._path.name))
        if content is not None:
            unpack_run(content, self._path)

    def upload(self, *, now: bool = False) -> None:
        began = time.monotonic()
        if began < self._next and not now:
            return
        content = pack_run(self._path)
        if content is not None:
            _wait(self._store.put.remote(self._path.name, content))
        ended = time.monotonic()
        self._next = ended + max(INTERVAL_SECONDS, (ended - began) / MAX_SHARE)


def pack_run(path: Path) -> bytes | None:
    """None: there is no run yet."""
    _finish_renaming(path)
    if not path.is_dir():
        return None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for child in sorted(path.iterdir()):
            if child.name not in LEFT_OUT:
                archive.add(child, child.name)
    return buffer.getvalue()


def unpack_run(content: bytes, path: Path) -> None:
    """Replace the run at `path`. A process killed meanwhile leaves the old one or the new one, never a mixture."""
    _finish_renaming(path)
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(new, filter="data")
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _finish_renaming(path: Path) -> None:
    """Undo an `unpack_run` that was killed between its two renames."""
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)


def _wait(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=LIMIT_SECONDS)
