"""RLlib's module and paceline's copy of it give the same outputs, for each kind of network. Ray is not started."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.code_bundle import CodeBundle
from paceline.config import UserError
from paceline.config.resolve import validate
from paceline.engines import RLLIB_PACKAGES
from paceline.engines.rllib import settings as rllib_settings
from paceline.engines.rllib.env import Encoded, OwnSeeds, with_rllib_spaces
from paceline.engines.rllib.weights import from_rllib, to_rllib
from paceline.envs import catalog
from paceline.spaces import ActionCodec, ObservationCodec

missing = [name for name in RLLIB_PACKAGES if not catalog.is_installed(name)]
needs_rllib = pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}")

Tree = dict[str, Any]
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (14, 11, 3), np.uint8)
PICTURE = spaces.Box(0, 255, (40, 44, 3), np.uint8)  # nature: features of 64 x 1 x 2
RELU = {"hidden": [128, 128], "activation": "relu"}  # the same width, so that only the first layer is transposed
BOX = spaces.Box(np.array([-1, 0], np.float32), np.array([3, 2], np.float32))
THREE: Any = spaces.Discrete(3)
PAIR = spaces.MultiDiscrete([3, 2])


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Has the given spaces, and records what it is sent."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action
        self.taken: list[Any] = []
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        return self.observation_space.sample(), 0.0, False, False, {}


def near(one: np.ndarray, other: np.ndarray) -> bool:
    """Relative to the largest value: sums over pixels are in the thousands."""
    return np.allclose(one, other, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(other).max())))


@needs_rllib
@pytest.mark.parametrize(
    ("tree", "observation", "action"),
    [
        ({}, VECTOR, THREE),
        ({"model": {"hidden": [5, 4], "shared": True}}, VECTOR, BOX),
        ({"model": {"hidden": [5, 4], "activation": "elu"}}, VECTOR, PAIR),
        ({"algo": "impala"}, VECTOR, BOX),
        ({"algo": "impala", "impala": {"surrogate_clip": 0.2}, "model": {"shared": True}}, VECTOR, PAIR),
        ({"algo": "dqn"}, VECTOR, THREE),
        ({"algo": "dqn", "dqn": {"dueling": True}, "model": {"shared": True}}, VECTOR, THREE),
        ({"algo": "sac", "model": {"hidden": [5, 4]}}, VECTOR, BOX),
        ({"algo": "sac"}, VECTOR, THREE),
        ({}, IMAGE, THREE),
        ({"model": RELU}, PICTURE, PAIR),
        ({"model": RELU | {"shared": True}}, PICTURE, BOX),
        ({"algo": "impala", "model": {"hidden": [32], "activation": "relu", "shared": True}}, IMAGE, THREE),
        ({"algo": "dqn", "dqn": {"dueling": True}}, IMAGE, THREE),
        ({"algo": "sac", "model": {"hidden": [16]}}, IMAGE, BOX),
    ],
    ids=lambda part: str(part) if isinstance(part, dict) else None,
)
def test_the_copy_gives_the_same_outputs(tree: Tree, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
    from paceline.engines.rllib.build import configure
    from paceline.engines.rllib.modules import Modules

    config = validate({"engine": {"name": "rllib"}, "stop": {"total_steps": 1000}} | tree)
    rllib_settings.check(config)
    codec, actions = ObservationCodec(observation), ActionCodec(action, squash=config.algo == "sac" and action is BOX)
    image = rllib_settings.convolutions_of(config, codec)
    modules = Modules(config, SpacesEnv(observation, action))
    theirs = configure(config, rllib_settings.settings_of(config, 0, seed=0), modules, CodeBundle())
    env = with_rllib_spaces(SpacesEnv(observation, action))
    spec = theirs.get_rl_module_spec(spaces={"default_policy": (env.observation_space, env.action_space)})
    torch.manual_seed(4)
    module = spec.build()
    for parameter in module.parameters():  # larger than at first, and biases that are not 0
        torch.nn.init.normal_(parameter, std=0.4)
    policy = config.algorithm.make_policy(config, codec, actions, seed=3)
    weights = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    own = policy.state()
    policy.load(from_rllib(config, image, weights, own))

    rows = np.stack([observation.sample() for _ in range(64)])
    ours = np.zeros((64, *codec.shape), codec.dtype)
    codec.encode(rows, ours)
    seen = torch.from_numpy(rows.astype(np.float32) / (255 if image else 1))
    with torch.no_grad():
        out = module.forward_inference({"obs": seen})
        if config.algo == "dqn":
            chosen = out["actions"].numpy().reshape(64, -1)
        else:
            dist = module.get_inference_action_dist_cls().from_logits(out["action_dist_inputs"])
            chosen = dist.to_deterministic().sample()
            chosen = np.stack(chosen, -1) if isinstance(chosen, tuple | list) else chosen.numpy().reshape(64, -1)
    best = policy.greedy(ours)
    if actions.is_continuous:
        assert near(best, np.asarray(chosen))  # SAC: before squashing, which RLlib omits here
    else:
        assert np.array_equal(best, chosen) and len(np.unique(chosen)) > 1
    if config.algo in ("ppo", "impala"):
        with torch.no_grad():
            values = module.compute_values({"obs": seen}).numpy()
        assert near(policy.value(ours), values) and values.std() > 0

    back = to_rllib(config, image, policy.state(), {name: np.zeros_like(value) for name, value in weights.items()})
    again = from_rllib(config, image, back, own)
    assert all(np.array_equal(again[name], value) for name, value in policy.state().items() if name != "epsilon")


def test_what_rllib_cannot_build_over_images() -> None:
    def look(tree: Tree, space: spaces.Space[Any]) -> None:
        rllib_settings.convolutions_of(validate({"engine": {"name": "rllib"}} | tree), ObservationCodec(space))

    with pytest.raises(
        UserError, match=r"^model.activation=tanh is not supported by --engine rllib with images and model.shared"
    ):
        look({"model": {"shared": True}}, IMAGE)
    with pytest.raises(UserError, match=r"^dqn.dueling=true shares layers on --engine rllib"):
        look({"algo": "dqn", "dqn": {"dueling": True}}, VECTOR)
    both = spaces.Dict({"picture": IMAGE, "speed": VECTOR})
    with pytest.raises(UserError, match="supports one image or one vector"):
        with_rllib_spaces(SpacesEnv(both, THREE))


def test_images_are_brought_to_the_last_axis_and_below_one() -> None:
    env = with_rllib_spaces(SpacesEnv(spaces.Box(0, 255, (2, 9, 8, 3), np.uint8), THREE))  # two frames
    assert env.observation_space == spaces.Box(0, 1, (9, 8, 6), np.float32)
    row, _ = env.reset()
    assert env.observation_space.contains(row) and row.max() > 0.9


def test_actions_arrive_in_the_units_of_the_env() -> None:
    half = spaces.Box(np.array([-1, -np.inf], np.float32), np.array([3, np.inf], np.float32))
    cases: list[tuple[Any, Any, Any]] = [
        (spaces.Box(np.array([[-1, 0]], np.float32), np.array([[3, 2]], np.float32)), [0.5, 9.0], [[2.0, 2.0]]),
        (half, [9.0, 9.0], [3.0, 9.0]),  # RLlib scales all or none; here it is told of none
        (spaces.Discrete(3, start=5), 2, 7),
        (spaces.MultiBinary(2), [1, 0], [1, 0]),
    ]
    for space, sent, taken in cases:
        room = SpacesEnv(VECTOR, space)
        env = with_rllib_spaces(room)
        assert isinstance(env, Encoded)
        env.step(np.asarray(sent))
        assert np.array_equal(room.taken[0], taken)
    for plain in (BOX, THREE, PAIR, spaces.Box(-np.inf, np.inf, (2,), np.float32)):
        assert not isinstance(with_rllib_spaces(SpacesEnv(VECTOR, plain)), Encoded)


def test_env_runners_do_not_share_seeds() -> None:
    seeds: list[int | None] = []
    for runner in (2, 3):
        for env in (0, 1):
            room = SpacesEnv(VECTOR, THREE)
            OwnSeeds(room, runner).reset(seed=0 + runner + env)  # as RLlib and Gymnasium have it
            seeds += room.seeds
    assert len(set(seeds)) == 4
