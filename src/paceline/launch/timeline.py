"""When each phase of each host happened: `timeline.jsonl` while it happens, `timeline.txt` to be read."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Event:
    seconds: float
    """Since the launcher began."""
    host: str
    phase: str
    detail: str


class Timeline:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self._began = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "timeline.jsonl").open("a", buffering=1)

    def add(self, host: str, phase: str, detail: str = "") -> None:
        now = time.time()
        event = Event(round(now - self._began, 3), host, phase, detail)
        self.events.append(event)
        line = {"seconds": event.seconds, "host": host, "phase": phase, "detail": detail, "timestamp": round(now, 3)}
        with contextlib.suppress(OSError):  # a disk that is full ends no job
            self._file.write(json.dumps(line) + "\n")

    @property
    def seconds(self) -> float:
        return time.time() - self._began

    def table(self) -> str:
        width = max((len(event.host) for event in self.events), default=4)
        phases = max((len(event.phase) for event in self.events), default=5)
        rows = [f"{'seconds':>8}  {'host':<{width}}  {'phase':<{phases}}"]
        rows += [f"{e.seconds:8.2f}  {e.host:<{width}}  {e.phase:<{phases}}  {e.detail}" for e in self.events]
        return "\n".join(row.rstrip() for row in rows) + "\n"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            (self.folder / "timeline.txt").write_text(self.table())
