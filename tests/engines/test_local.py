"""A few updates of the local engine on each Procgen game, from pixels to weights."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.resolve import validate
from paceline.engines.local import LocalEngine
from paceline.envs.procgen import GAMES
from paceline.training.clock import Clock

ENVS, STEPS, UPDATES = 4, 16, 3


@pytest.mark.needs("procgen")
@pytest.mark.parametrize("game", GAMES)
def test_a_few_updates(game: str) -> None:
    tree = {
        "env": {"id": game, "envs_per_worker": ENVS, "normalize_reward": True},
        "model": {"cnn": "small", "hidden": [16]},
        "ppo": {"rollout_steps": STEPS, "epochs": 2, "minibatch_size": 32},
    }
    engine = LocalEngine(validate(tree))
    seen: set[tuple[Any, ...]] = set()
    engine.policy.net.register_forward_pre_hook(
        lambda _net, x: seen.add((x[0].dtype, *x[0].shape[1:])),
    )
    before = [p.detach().clone() for p in engine.policy.net.parameters()]
    engine.start()
    clock, env_steps, ends = Clock(time.perf_counter()), 0, []
    for _ in range(UPDATES):
        env_steps += engine.iterate(1.0, clock).env_steps
        batch = engine.actor_learner.collector.batch  # type: ignore[union-attr]
        ends.append(batch.terminated | batch.truncated)
    engine.close()
    # The slot after each end is a reset, which is not a step.
    assert env_steps == UPDATES * STEPS * ENVS - np.concatenate(ends)[:-1].sum()
    assert seen == {(torch.uint8, 3, 64, 64)}
    assert engine.algorithm.optimizer_steps == UPDATES * 2 * 2
    after = list(engine.policy.net.parameters())
    assert all(torch.isfinite(p).all() and not torch.equal(p, q) for p, q in zip(after, before, strict=True))
