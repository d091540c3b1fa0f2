"""What `ray start` calls before it starts (RAY_START_HOOK): no servers that nobody asked for.

Ray's client server has a fixed port, so two jobs on one host would clash; the autoscaler's monitor has one too, answers
without a token, and has nothing to scale in an allocation.
"""

from __future__ import annotations

from typing import Any


def before_start(parameters: Any, head: bool) -> None:
    parameters.ray_client_server_port = None
    parameters.no_monitor = True
