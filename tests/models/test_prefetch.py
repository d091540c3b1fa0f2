"""Work in a second thread: done once, in time, by whoever has a core."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from paceline.models.numpy_mlp import HelperThread
from paceline.models.prefetch import Prefetch


@pytest.fixture
def lonely() -> Iterator[None]:
    """The other thread does not come to run while this one does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)
    yield
    sys.setswitchinterval(before)


def names_of(pieces: int, helper: HelperThread | None, *, seconds: float) -> list[list[str]]:
    """The threads that did each piece, where the one who needs them takes so long for something else."""
    names: list[list[str]] = [[] for _ in range(pieces)]
    with Prefetch(lambda piece: names[piece].append(threading.current_thread().name), pieces, helper) as ahead:
        for piece in range(pieces):
            if seconds:
                time.sleep(seconds)
            for _ in range(2):
                ahead.need(piece)
                assert len(names[piece]) == 1
    return names


def test_pieces_are_done_by_the_other_thread_before_they_are_needed() -> None:
    assert names_of(4, HelperThread(), seconds=0.05) == [["paceline-helper"]] * 4


@pytest.mark.usefixtures("lonely")
def test_or_here_if_it_has_not_begun() -> None:
    assert names_of(4, HelperThread(), seconds=0) == [["MainThread"]] * 4
    assert names_of(4, None, seconds=0) == [["MainThread"]] * 4


def test_what_is_under_way_is_waited_for_and_the_rest_goes_on() -> None:
    done, begun = [], threading.Event()

    def work(piece: int) -> None:
        begun.set()
        time.sleep(0.05)
        done.append(piece)

    helper = HelperThread()
    with Prefetch(work, 3, helper) as ahead:
        assert begun.wait(10)
        ahead.need(0)
        assert done == [0]
        time.sleep(0.3)
        assert done == [0, 1, 2]
    with Prefetch(work, 1000, helper):
        time.sleep(0.01)
    assert len(done) <= 5  # nobody needs the others any more


def test_there_are_never_two_at_work() -> None:
    """They may share what they work with, as the network of the targets does."""
    at_work = threading.Lock()

    def work(piece: int) -> None:
        assert at_work.acquire(blocking=False)
        time.sleep(0.001 * (piece % 3))
        at_work.release()

    with Prefetch(work, 60, HelperThread()) as ahead:
        for piece in range(60):
            time.sleep(0.001 * (piece % 4 == 0))
            ahead.need(piece)


def test_an_error_ahead_comes_out_where_the_piece_is_needed() -> None:
    def work(piece: int) -> None:
        raise FloatingPointError(str(piece))

    with pytest.raises(FloatingPointError, match="0"), Prefetch(work, 2, HelperThread()) as ahead:
        time.sleep(0.05)
        ahead.need(0)


def test_the_other_thread_is_one() -> None:
    """Torch would give it a team of its own, whose members spin while they wait."""
    torch.set_num_threads(2)
    seen: list[int] = []
    twin = HelperThread()
    twin.begin(lambda: seen.append(torch.get_num_threads()))
    time.sleep(0.05)
    twin.join()
    torch.set_num_threads(1)
    assert seen == [1]
