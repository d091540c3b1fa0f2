"""Imported by each Ray worker of `paceline launch` before it works (RAY_preload_python_modules): it outlives SIGTERM.

A scheduler that ends a job sends SIGTERM to every process, and Ray's would end before COMMAND has saved. So Ray is
started with SIGTERM blocked; the supervisor kills it at the end. A worker unblocks the signal and ignores it, so that
the programs which an environment starts still end by SIGTERM.
"""

from __future__ import annotations

import os
import signal


def outlive_sigterm() -> None:
    from ray._private import utils

    utils.set_sigterm_handler = lambda handler: None  # Ray's own, set later, ends the worker
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # a handler, not SIG_IGN: programs do not inherit it
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    outlive_sigterm()
