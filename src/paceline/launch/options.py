"""What the user asks of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LaunchOptions:
    folder: Path
    """For the timeline and the logs of the hosts."""
    interface: str | None = None
    min_nodes: int | None = None
    timeout: float = 120.0
    keep: bool = False
    cpus: int | None = None
    port: int = 0
    ports: tuple[int, int] | None = None
    """First and last port that may be used on a host; None for any."""
    container: tuple[str, ...] = ()
    """Words before the command of every supervisor, which thus runs in a container, with Ray and COMMAND."""
    dashboard: bool = False
