"""Users' networks whose outputs depend on more than the observation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import paceline
from paceline.algorithms.a3c import A3C
from paceline.algorithms.dqn import DQN
from paceline.config import ModelConfig, UserError
from paceline.config.resolve import resolve_tree
from paceline.engines.local import LocalEngine
from paceline.models.gpu import Acting, GpuPolicy
from paceline.models.policy import Policy
from paceline.models.q import QPolicy
from paceline.spaces import ActionCodec, ObservationCodec
from paceline.training.clock import Clock

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, outputs, layer=""):
        super().__init__()
        size = int(torch.tensor(shape).prod())
        layers = {"dropout": nn.Dropout(0.5), "batchnorm": nn.BatchNorm1d(16), "": nn.Identity()}
        self.torso = nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.ReLU(), layers[layer])
        self.policy, self.critic = nn.Linear(16, outputs), nn.Linear(16, 1)

    def forward(self, x):
        h = self.torso(x.float())
        return self.policy(h), self.critic(h)[:, 0]

class OverTheBatch(Net):
    def __init__(self, shape, outputs):
        super().__init__(shape, outputs)
        self.lstm = nn.LSTM(16, 16)

    def forward(self, x):
        h, _ = self.lstm(self.torso(x.float()))
        return self.policy(h), self.critic(h)[:, 0]

class Forgetful(Net):
    def forward(self, x):
        h = nn.functional.dropout(self.torso(x.float()))  # also in eval mode
        return self.policy(h), self.critic(h)[:, 0]

class Remembers(Net):
    calls = 0
    def forward(self, x):
        self.calls += 1
        policy, value = super().forward(x)
        return policy + self.calls, value

class Squeezes(Net):
    def forward(self, x):
        h = self.torso(x.float())
        return self.policy(h), self.critic(h).squeeze()

class Embeds(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.table, self.policy, self.critic = nn.Embedding(6, 4), nn.Linear(4, outputs), nn.Linear(4, 1)

    def forward(self, x):
        h = self.table(x.argmax(1))
        return self.policy(h), self.critic(h)[:, 0]
"""
VECTOR = ObservationCodec(spaces.Box(-np.inf, np.inf, (4,), np.float32))
IMAGE = ObservationCodec(spaces.Box(0, 255, (8, 8, 1), np.uint8))
THREE = ActionCodec(spaces.Discrete(3))


@pytest.fixture
def nets(here: Path) -> str:
    (here / "nets.py").write_text(NETS)
    return str(here / "nets.py")


def model(nets: str, name: str = "Net", layer: str = "") -> ModelConfig:
    return ModelConfig(class_=f"{nets}:{name}", kwargs={"layer": layer} if layer else {})


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(2, 3, (count, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OverTheBatch", "depend on the others in the batch"),
        ("Forgetful", "two passes over the same observations"),
        ("Remembers", "two passes over the same observations"),
        ("Squeezes", r"values \[B\], but returned \[1, 3\] and \[\] for B = 1"),
    ],
)
def test_a_network_that_gives_a_row_other_outputs_is_refused(nets: str, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Policy(VECTOR, THREE, model(nets, name))


def test_a_network_is_tried_with_observations_that_can_occur(nets: str) -> None:
    Policy(ObservationCodec(spaces.Discrete(6)), THREE, model(nets, "Embeds"))
    space = spaces.Discrete(6, seed=3)
    expected = spaces.Discrete(6, seed=3).sample()
    Policy(ObservationCodec(space), THREE, model(nets, "Embeds"))
    assert space.sample() == expected  # the env may draw from its space


@pytest.mark.parametrize("layer", ["dropout", "batchnorm"])
def test_acting_is_repeatable_and_learning_uses_the_layer(nets: str, layer: str) -> None:
    policy = Policy(VECTOR, THREE, model(nets, layer=layer))
    x = rows(16)
    first = np.array(policy.outputs(x)[0])
    learned = policy.forward(x).raw.detach().numpy()
    assert not np.allclose(learned.T, first)
    if layer == "dropout":
        np.testing.assert_array_equal(policy.outputs(x)[0], first)
    alone = policy.outputs(x[:1])[0]  # batch normalisation cannot learn from one row, but it can act
    np.testing.assert_allclose(alone, np.array(policy.outputs(x)[0])[:, :1], rtol=1e-5)
    policy.learn(x, np.ones_like, np.ones_like)
    assert policy.net.training
    policy.greedy(x)
    assert not policy.net.training


@pytest.mark.parametrize("layer", ["dropout", "batchnorm"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_an_agent_acts_alike_each_time(nets: str, here: Path, algo: str, layer: str, cli: Callable[..., Any]) -> None:
    tree = {
        "env": {"id": "CartPole-v1", "envs_per_worker": 4},
        "algo": algo,
        "model": {"class": f"{nets}:Net", "kwargs": {"layer": layer}},
        algo: {"rollout_steps": 32} | ({"learning_starts": 64} if algo == "dqn" else {"minibatch_size": 32}),
        "stop": {"iterations": 4},
        "name": "x",
    }
    run = paceline.train(tree, preset="none")
    agent = paceline.load(run)
    observation = rows(1)[0]
    values = [np.array(agent.policy.outputs(observation[None])[0]) for _ in range(3)]
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], values[2])
    agent.act(observation)
    agent.act(observation, deterministic=False)
    done = [cli("evaluate", "runs/x", "--episodes", 8, "--seed", 0).out.partition("written")[0] for _ in range(2)]
    assert done[0] == done[1]


def test_a_gpu_acts_with_the_statistics_that_learning_left(nets: str) -> None:
    policy = GpuPolicy(IMAGE, THREE, model(nets, layer="batchnorm"), device="cpu")
    acting = Acting(policy, 2)
    images = np.random.default_rng(0).integers(0, 256, (128, 1, 8, 8)).astype(np.uint8)
    for _ in range(3):
        policy.forward(images)
    acting.publish()
    acting.obs.copy_(torch.from_numpy(images[:2]))
    acting.run()
    np.testing.assert_allclose(acting.value.numpy(), policy.outputs(images[:2])[1], rtol=1e-5)
    assert policy.running_statistics()[0].abs().sum() > 1


def test_a_target_network_has_the_statistics_of_its_weights(nets: str) -> None:
    policy = QPolicy(VECTOR, THREE, model(nets, layer="batchnorm"), DQN.Settings())
    policy.online.forward(rows(64))
    state = {name: np.array(array) for name, array in policy.state().items()}
    policy.load(state)
    np.testing.assert_array_equal(policy.target.values(rows(8)), policy.online.values(rows(8)))


def test_a_learner_gets_the_statistics_of_its_actors(nets: str) -> None:
    tree = {
        "env": {"id": "CartPole-v1"},
        "algo": "a3c",
        "model": {"class": f"{nets}:Net", "kwargs": {"layer": "batchnorm"}},
    }
    config = resolve_tree(tree, preset="none")[0]
    engine = LocalEngine(config)
    try:
        engine.start()
        actor, (batch, _) = engine.algorithm, engine.actor_learner.collect()
        assert isinstance(actor, A3C)
        learner = A3C(Policy(actor.policy.observation, actor.policy.action, config.model), config.hyper,
                      rng=np.random.default_rng(0))  # fmt: skip
        learner.load_weights(actor.weights())
        learner.apply_contribution(actor.contribution(batch), 0, 1.0)
        for ours, theirs in zip(learner.policy.running_statistics(), actor.policy.running_statistics(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert learner.policy.running_statistics()[0].abs().sum() > 0
        engine.iterate(1.0, Clock(0.0))
    finally:
        engine.close()
