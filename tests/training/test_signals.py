"""Signals before a run has begun."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.training.signals import ENDING, Interrupted, StartSignals, StopSignals, run_begins

IN_LOGGING: Any = SimpleNamespace(f_code=logging.getLogger.__code__)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_one_ends_the_start() -> None:
    with StartSignals() as signals, pytest.raises(Interrupted, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signals.exit_code == 143


def test_not_inside_of_logging_whose_lock_would_stay_locked() -> None:
    with StartSignals() as signals:
        with pytest.raises(Interrupted, match="SIGTERM"):
            signals._handle(signal.SIGTERM, IN_LOGGING)
            signals._handle(signal.SIGTERM, IN_LOGGING)  # the burst of a scheduler
            time.sleep(5)
        time.sleep(0.3)  # until both have arrived
    assert signals.received == "SIGTERM"


def test_an_exception_that_a_library_ignored_is_raised_before_the_run_begins() -> None:
    with StartSignals() as signals:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Interrupted:
            pass
        with pytest.raises(Interrupted, match="SIGTERM"):
            run_begins()
        assert not signals.begun


def test_a_signal_after_the_run_has_begun_reaches_the_run() -> None:
    with StartSignals():
        run_begins()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        with StopSignals() as signals:
            assert signals.received == "SIGTERM"
