"""Workers that only act: the same actions as with the whole algorithm, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paceline.config.resolve import validate
from paceline.engines.actor_learner import ActorLearner

WITHOUT_TORCH = """
import sys
import paceline.api
import paceline.engines.ray.asynchronous
import paceline.engines.ray.synchronous
import paceline.engines.ray.worker
from paceline.config.resolve import validate
from paceline.engines.actor_learner import ActorLearner

config = validate({"algo": "impala", "env": {"id": "CartPole-v1"}, "impala": {"rollout_steps": 64}})
actor = ActorLearner(config, envs=8, cores=1, on_device=False, in_worker=True)
actor.collector.start()
actor.collect()
actor.evaluate(2, stochastic=False, number=0)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "torch")[:5])
"""


def test_neither_the_driver_nor_an_actor_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_an_actor_acts_as_the_whole_algorithm(env: str, activation: str, shared: bool) -> None:
    tree: dict[str, Any] = {
        "algo": "impala",
        "env": {"id": env, "normalize_observation": True, "normalize_reward": True},
        "impala": {"rollout_steps": 16},
        "model": {"shared": shared, "activation": activation, "hidden": [32, 16]},
    }
    parts = [ActorLearner(validate(tree), envs=4, cores=1, on_device=False, in_worker=light) for light in (False, True)]
    whole, light = parts
    whole.policy.moments.mean[...], whole.policy.moments.var[...] = 0.1, 2.0
    whole.policy.normalizer_changed()
    light.algorithm.load_weights(whole.algorithm.weights())
    for part in parts:
        part.collector.start()
    (mine, _), (theirs, _) = (part.collect() for part in parts)
    for name in ("obs", "action", "logp", "value", "reward"):
        np.testing.assert_allclose(getattr(theirs, name), getattr(mine, name), rtol=1e-4, atol=1e-5, err_msg=name)
    assert type(light.policy).__name__ == "MlpActor" and light.policy.parameters.size == whole.policy.parameters.numel()
    for part in parts:
        part.close()


@pytest.mark.parametrize("change", [{"algo": "a3c"}, {"model": {"accelerate": False}}, {"model": {"memory": "gru"}}])
def test_other_actors_have_the_whole_algorithm(change: dict[str, Any]) -> None:
    config = validate({"algo": "impala", "env": {"id": "CartPole-v1"}} | change)
    part = ActorLearner(config, envs=2, cores=1, on_device=False, in_worker=True)
    assert hasattr(part.algorithm, "optimizer")
    part.close()
