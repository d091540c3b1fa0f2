"""When each phase of each host began: `timeline.jsonl` while it happens, `timeline.txt` at the end."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path


class Timeline:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events: list[tuple[float, str, str, str]] = []
        self._began = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "timeline.jsonl").open("a", buffering=1)

    def add(self, host: str, phase: str, detail: str = "") -> None:
        now = time.time()
        seconds = round(now - self._began, 3)  # since the launcher began
        self._events.append((seconds, host, phase, detail))
        line = {"seconds": seconds, "host": host, "phase": phase, "detail": detail, "timestamp": round(now, 3)}
        with contextlib.suppress(OSError):  # a full disk ends no job
            self._file.write(json.dumps(line) + "\n")

    @property
    def seconds(self) -> float:
        return time.time() - self._began

    def table(self) -> str:
        width = max((len(host) for _, host, _, _ in self._events), default=4)
        phases = max((len(phase) for _, _, phase, _ in self._events), default=5)
        rows = [f"{'seconds':>8}  {'host':<{width}}  {'phase':<{phases}}"]
        rows += [f"{at:8.2f}  {host:<{width}}  {phase:<{phases}}  {detail}" for at, host, phase, detail in self._events]
        return "\n".join(row.rstrip() for row in rows) + "\n"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            (self.folder / "timeline.txt").write_text(self.table())
