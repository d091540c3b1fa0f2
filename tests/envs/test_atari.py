from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.config import EnvConfig, UserError
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.pool import PoolVector
from paceline.envs.sync_vector import SyncVector

PONG = "ALE/Pong-v5"


def actions(env: Any, value: int = 0) -> np.ndarray[Any, Any]:
    return np.full((env.num_envs, 1), value, np.int64)


def test_the_usual_preprocessing_in_threads() -> None:
    env, how = make_vector(EnvConfig(id=PONG), 3, seed=0, cores=2)
    assert isinstance(env, PoolVector) and how == "in 2 threads"
    first = env.reset()
    assert first.shape == (3, 4, 84, 84) and first.dtype == np.uint8 and env.action.nvec == (6,)
    obs, _, _, _ = env.step(actions(env, 2))
    np.testing.assert_array_equal(obs[:, :-1], first[:, 1:])  # the oldest of the 4 frames goes


def test_seeds_differ_between_environments_and_workers_and_repeat() -> None:
    def after(cores: int = 2, **options: int) -> Any:
        env, _ = make_vector(EnvConfig(id=PONG), 3, cores=cores, **{"seed": 0, **options})
        env.reset()
        return [env.step(actions(env, 2 + step // 5 % 2))[0] for step in range(40)][-1]

    first = after()
    assert len({row.tobytes() for row in first}) == 3
    np.testing.assert_array_equal(after(cores=1), first)
    for other in (after(seed=1), after(worker=1), after(resumes=1)):
        assert not any((row == known).all() for row in other for known in first)


def test_the_step_after_the_end_is_a_reset_and_rewards_are_the_score() -> None:
    config = EnvConfig(id="ALE/MsPacman-v5", max_episode_steps=120)
    env, _ = make_vector(config, 2, seed=0)
    env.reset()
    rewards = []
    for step in range(1, 121):
        _, reward, terminated, truncated = env.step(actions(env, 3))
        rewards.append(reward.max())
        assert not terminated.any() and truncated.all() == truncated.any() == (step == 120)
    assert max(rewards) == 10  # a pellet
    _, reward, terminated, truncated = env.step(actions(env, 3))
    assert (reward == 0).all() and not (terminated | truncated).any()
    assert not env.step(actions(env, 3))[3].any()


def test_one_alone_sees_what_many_see_and_people_see_the_game() -> None:
    config = EnvConfig(id=PONG, max_episode_steps=30)
    alone = make_scalar(config, render_mode="rgb_array")
    obs, _ = alone.reset(seed=4)
    env, _ = make_vector(config, 2, seed=0)
    assert isinstance(env, PoolVector) and env.pool is not None
    many = env.pool.reset([int(np.random.default_rng(4).integers(2**31)), 1])
    np.testing.assert_array_equal(obs, many[0])
    rng = np.random.default_rng(0)
    for _ in range(30):
        action = rng.integers(6, size=(2, 1))
        obs, reward, terminated, truncated, _ = alone.step(action[0, 0])
        theirs = env.step(action)
        np.testing.assert_array_equal(obs, theirs[0][0])
        assert (reward, terminated, truncated) == tuple(part[0] for part in theirs[1:])
    picture: Any = alone.render()
    assert picture.shape == (210, 160, 3) and truncated
    gray = picture @ [0.299, 0.587, 0.114]
    columns = [int(160 * (part + 0.5) / 84) for part in range(84)]
    rows = [int(210 * (part + 0.5) / 84) for part in range(84)]
    assert np.abs(gray[np.ix_(rows, columns)] - obs[-1]).mean() < 5  # the newest frame


def test_options() -> None:
    kwargs = {"grayscale": False, "stack_num": 2, "img_height": 64, "img_width": 48, "full_action_space": True}
    env, _ = make_vector(EnvConfig(id=PONG, kwargs=kwargs), 2, seed=0)
    assert env.reset().shape == (2, 6, 64, 48) and env.action.nvec == (18,)
    assert env.step(actions(env))[0].shape == (2, 6, 64, 48)
    lives, _ = make_vector(EnvConfig(id="ALE/Breakout-v5", kwargs={"episodic_life": True, "noop_max": 0}), 1, seed=0)
    lives.reset()
    ends = [step for step in range(300) if lives.step(actions(lives, 1))[2][0]]
    assert len(ends) > 3 and min(np.diff(ends)) > 1  # five lives would last for longer; a reset after each


def test_the_bare_game_is_there_too() -> None:
    env = make_scalar(EnvConfig(id="ale_py:ALE/Pong-v5"))
    assert env.observation_space.shape == (210, 160, 3)
    stacked, how = make_vector(
        EnvConfig(id=PONG, wrappers=[{"ClipReward": {"min_reward": -1, "max_reward": 1}}]), 1, seed=0
    )
    assert isinstance(stacked, SyncVector) and "takes no wrappers" in how and stacked.reset().shape == (1, 4, 84, 84)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "said"),
    [
        ("ALE/Pongg-v5", {}, "did you mean ALE/Pong-v5"),
        (PONG, {"img_height": 0}, "img_height=0: expected a number from 8 to 210"),  # ALE itself would crash
        (PONG, {"frameskip": 2.5}, "frameskip=2.5: expected a number"),
        (PONG, {"repeat_action_probability": 2}, "a number from 0 to 1"),
        (PONG, {"grayscale": 1}, "grayscale=1: expected true or false"),
        (PONG, {"stack_num": True}, "stack_num=True"),
        (PONG, {"frame_skip": 2}, "no such option; did you mean frameskip?"),
        (PONG, {"life_loss_info": True}, "no such option"),
    ],
)
def test_bad_input_is_one_line(env_id: str, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        make_vector(EnvConfig(id=env_id, kwargs=kwargs), 2, seed=0)
    assert said in str(error.value) and "\n" not in str(error.value)
