from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from paceline.rollout.batch import Batch
from paceline.spaces import ActionCodec, ObservationCodec


@pytest.mark.parametrize(
    ("observation", "shape", "dtype"),
    [
        (spaces.Box(-1.0, 1.0, (3,)), (3,), np.float32),
        (spaces.Box(0, 255, (9, 8, 3), np.uint8), (3, 9, 8), np.uint8),
        (spaces.Discrete(5), (5,), np.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("action", "width", "action_dtype"),
    [(spaces.Discrete(4), 1, np.int64), (spaces.MultiBinary(3), 3, np.int64), (spaces.Box(-1, 1, (2,)), 2, np.float32)],
    ids=str,
)
def test_shapes_and_types(
    observation: Any, shape: tuple[int, ...], dtype: Any, action: Any, width: int, action_dtype: Any
) -> None:
    batch = Batch.empty(7, 4, ObservationCodec(observation), ActionCodec(action))
    assert batch.obs.shape == (8, 4, *shape) and batch.obs.dtype == dtype
    assert batch.action.shape == (7, 4, width) and batch.action.dtype == action_dtype
    assert batch.value.shape == (8, 4)  # one more: the value of what comes after
    for floats in (batch.logp, batch.reward, batch.discounted):
        assert floats.shape == (7, 4) and floats.dtype == np.float32
    for flags in (batch.terminated, batch.truncated, batch.valid):
        assert flags.shape == (7, 4) and flags.dtype == np.bool_
    assert batch.env_steps == 0
    batch.valid[2:5, 1] = True
    assert batch.env_steps == 3 and type(batch.env_steps) is int


def test_two_batches_share_nothing() -> None:
    codecs = ObservationCodec(spaces.Discrete(2)), ActionCodec(spaces.Discrete(2))
    one, other = Batch.empty(2, 2, *codecs), Batch.empty(2, 2, *codecs)
    one.episodes.append(None)  # type: ignore[arg-type]
    one.env_metrics.append({})
    one.reward[:] = 5
    assert not other.episodes and not other.env_metrics and not other.reward.any()
