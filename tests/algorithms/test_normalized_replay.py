"""Normalisers and replay: rows are stored raw, and drawn with the statistics of all valid rows so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from paceline.config.resolve import validate
from paceline.rollout.batch import Batch
from paceline.spaces import ActionCodec, ObservationCodec

STEPS, ENVS, ROWS = 20, 3, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "dqn": {"replay_size": 500, "learning_starts": 0, "batch_size": ROWS},
    "sac": {"buffer_size": 500, "learning_starts": 0, "batch_size": ROWS},
    "td3": {"buffer_size": 500, "learning_starts": 0, "batch_size": ROWS},
}


def rollout(observation: ObservationCodec, action: ActionCodec, seed: int) -> Batch:
    """Far from 0 and of other units, with a reset row whose numbers must not count."""
    rng = np.random.default_rng(seed)
    batch = Batch.empty(STEPS, ENVS, observation, action)
    batch.obs[...] = rng.normal([100, -3], [20, 0.1], batch.obs.shape) + 10 * seed
    batch.action[...] = 0
    batch.reward[...] = rng.normal(50, 30, batch.reward.shape)
    batch.discounted[...] = rng.normal(500, 200, batch.reward.shape)
    batch.valid[...] = True
    batch.truncated[9] = True
    batch.valid[10], batch.discounted[10] = False, 1e9
    batch.obs[10] = 1e9  # the last observation of an episode: a successor, but of no step
    return batch


@pytest.mark.parametrize("algo", SETTINGS)
def test_a_draw_is_normalised_by_all_valid_rows_so_far(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = validate({"algo": algo, "env": {"normalize_observation": True}, algo: SETTINGS[algo]})
    space: spaces.Space[Any] = spaces.Discrete(2) if algo == "dqn" else spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation, action = ObservationCodec(spaces.Box(-np.inf, np.inf, (2,), np.float32)), ActionCodec(space)
    policy = config.algorithm.make_policy(config, observation, action)
    algorithm: Any = config.algorithm(policy, config.hyper, rng=np.random.default_rng(0), normalize_reward=True)
    first, second = (rollout(observation, action, seed) for seed in (1, 2))
    algorithm.update(first, 1.0)

    drawn, learned = [], []
    sample = algorithm.replay.sample

    def draw(rng: Any, *args: Any, scaled: Any = None, **options: Any) -> Any:
        state = rng.bit_generator.state
        raw = sample(rng, *args, **options)
        rng.bit_generator.state = state
        drawn.append((raw.obs.copy(), raw.next_obs.copy(), raw.reward.copy(), raw.discount.copy()))
        return sample(rng, *args, scaled=scaled, **options)

    def step(rows: Any, part: Any = slice(None), *_: Any) -> Any:
        learned.append([np.array(each[part]) for each in (rows.obs, rows.next_obs, rows.reward)])
        return np.zeros(len(rows.reward[part]), np.float32)

    monkeypatch.setattr(algorithm.replay, "sample", draw)
    monkeypatch.setattr(algorithm, "_step", step)
    algorithm.update(second, 1.0)

    seen = np.concatenate([batch.obs[:-1][batch.valid] for batch in (first, second)]).astype(np.float64)
    returns = np.concatenate([batch.discounted[batch.valid] for batch in (first, second)]).astype(np.float64)
    obs, next_obs, reward, discount = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    scaled = [np.concatenate(parts) for parts in zip(*learned, strict=True)]
    assert len(obs) >= ROWS and len(obs) == len(scaled[0]) and obs.max() < 1e6
    for raw, found in ((obs, scaled[0]), (next_obs, scaled[1])):
        expected = np.clip((raw - seen.mean(0)) / seen.std(0), -10, 10)
        rows = discount > 0
        np.testing.assert_allclose(found[rows], expected[rows], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(scaled[2], np.clip(reward / returns.std(), -10, 10), rtol=1e-3)
