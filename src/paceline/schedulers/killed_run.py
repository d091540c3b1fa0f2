"""The status of a run whose process was killed, corrected by whoever knows that it has ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path


def mark_ended(run: Path, reason: str) -> None:
    """Where `status.json` still says `running` and no process has locked the run, say `stopped` and why."""
    path = run / "status.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # another's run, or in use, or no run at all
        if json.loads(path.read_bytes()).get("state") != "running":
            return
        fd = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = json.loads(path.read_bytes())
            if status.get("state") == "running":
                status |= {"state": "stopped", "reason": reason, "updated_at": datetime.now(UTC).isoformat()}
                temporary = path.with_name(f".{path.name}.{os.getpid()}")
                temporary.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
                temporary.replace(path)
        finally:
            os.close(fd)
