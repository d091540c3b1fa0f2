from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EnvConfig, ModelConfig, UserError
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.sync_vector import SyncVector
from paceline.models.policy import Policy
from paceline.rollout import episodes as episodes_module
from paceline.rollout.baselines import ConstantPolicy, RandomPolicy
from paceline.rollout.batch import Episode
from paceline.rollout.episodes import MAX_EVAL_ENVS, env_metrics, eval_envs, play

ODD = Path(__file__).parents[1] / "odd_envs.py"


def fixed(*lengths: int) -> Any:
    configs = [EnvConfig(id=f"{ODD}:Fixed", kwargs={"length": length}) for length in lengths]
    return SyncVector([functools.partial(make_scalar, config) for config in configs], seed=0)


def script(num_envs: int, **kwargs: Any) -> Any:
    config = EnvConfig(id=f"{ODD}:Script", kwargs=kwargs)
    return SyncVector([functools.partial(make_scalar, config)] * num_envs, seed=0)


def policy_of(env: Any) -> Policy:
    return Policy(env.observation, env.action, ModelConfig(hidden=[8]), seed=1)


@pytest.mark.parametrize("episodes", [1, 3, 4, 7, 12])
def test_short_episodes_do_not_crowd_out_long_ones(episodes: int) -> None:
    """Environment i always plays i+1 steps or so; whoever took the first N to finish would see the short ones only."""
    lengths = [1, 30, 2, 17]
    env = fixed(*lengths)
    played = play(env, policy_of(env), episodes)
    share = [episodes // 4 + (i < episodes % 4) for i in range(4)]
    assert played == [Episode(float(n), n) for n, count in zip(lengths, share, strict=True) for _ in range(count)]


def test_returns_are_those_that_happened_in_order_of_environment_then_time() -> None:
    env = script(3)
    played = play(env, policy_of(env), 11, rng=np.random.default_rng(0))
    true = [e.history[k][:2] for e, share in zip(env.envs, (4, 4, 3), strict=True) for k in range(share)]
    np.testing.assert_allclose([(e.total, e.length) for e in played], true)


def test_the_same_seeds_play_the_same() -> None:
    def once(seed: int, rng: int | None) -> list[Episode]:
        env = script(3)
        env.reseed(seed, 0, 0)
        return play(env, policy_of(env), 7, rng=None if rng is None else np.random.default_rng(rng))

    assert once(1, None) == once(1, None) != once(2, None)
    assert once(1, 4) == once(1, 4)


def test_the_most_likely_action_or_a_sampled_one() -> None:
    env, _ = make_vector(EnvConfig(id="paceline/Identity-v0", kwargs={"n": 2, "length": 50}), 4, seed=0)
    policy = policy_of(env)
    policy.parameters.zero_()  # a coin: the most likely of equals is the first
    best = play(env, policy, 4)
    env.reseed(0, 0, 0)
    zeros = np.zeros((4, 1), np.int64)
    env.reset()
    assert sum(e.total for e in best) == sum(float(env.step(zeros)[1].sum()) for _ in range(50))
    sampled = play(env, policy, 40, rng=np.random.default_rng(0))
    # 2000 throws: five standard errors. Never the same answer, as the most likely one would be.
    assert abs(np.mean([e.total for e in sampled]) / 50 - 0.5) < 5 * 0.5 / np.sqrt(2000)
    assert len({e.total for e in sampled}) > 3


def test_metrics_of_played_episodes_are_theirs_and_not_left_for_training() -> None:
    env = script(3)
    marks: list[list[float]] = [[] for _ in range(3)]
    step = env.step

    def watched(action: Any) -> Any:
        result = step(action)
        for index, metrics in env.finished_metrics:
            marks[index].append(metrics["mark"])
        return result

    env.step = watched
    played = play(env, policy_of(env), 7)
    assert [e.metrics["mark"] for e in played] == [*marks[0][:3], *marks[1][:2], *marks[2][:2]]
    assert env_metrics(played)["env/mark"] == pytest.approx(np.mean([e.metrics["mark"] for e in played]))
    assert env.finished_metrics == [] and env_metrics([]) == {}


def test_an_endless_episode_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_module, "MAX_EPISODE_STEPS", 10)
    env = fixed(0, 3)
    assert play(env, policy_of(env), 6) == [Episode(10.0, 10)] * 3 + [Episode(3.0, 3)] * 3


def test_what_follows_a_cut_episode_begins_with_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it is no episode, whether the environment ends it by itself while others play on, or not."""
    monkeypatch.setattr(episodes_module, "MAX_EPISODE_STEPS", 10)
    for other in (3, 9):
        env = fixed(14, other)
        assert play(env, policy_of(env), 8) == [Episode(10.0, 10)] * 4 + [Episode(float(other), other)] * 4


def test_cut_episodes_of_an_own_vector_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_module, "MAX_EPISODE_STEPS", 10)
    config = EnvConfig(id="CartPole-v1", max_episode_steps=500)
    native, _ = make_vector(config, 4, seed=0)
    played = play(native, policy_of(native), 12, rng=np.random.default_rng(0))
    assert len(played) == 12 and all(episode.length <= 10 for episode in played)
    assert sum(episode.length == 10 for episode in played) >= 8  # CartPole hardly ever falls within 8 steps


@pytest.mark.parametrize(("env_id", "kwargs"), [
    ("paceline/Identity-v0", {"space": "discrete"}),
    ("paceline/Identity-v0", {"space": "multidiscrete"}),
    ("paceline/Identity-v0", {"space": "multibinary"}),
    ("paceline/Identity-v0", {"space": "box"}),
    ("CartPole-v1", {}),
    ("Pendulum-v1", {}),
])  # fmt: skip
def test_random_play_of_every_space(env_id: str, kwargs: dict[str, Any]) -> None:
    def once(seed: int) -> list[Episode]:
        env, _ = make_vector(EnvConfig(id=env_id, kwargs=kwargs, max_episode_steps=20), 3, seed=0)
        return play(env, RandomPolicy(env, seed), 4)

    assert once(1) == once(1) != once(2)


def test_a_random_player_is_uniform() -> None:
    env, _ = make_vector(EnvConfig(id="paceline/Identity-v0", kwargs={"n": 4, "length": 500}), 4, seed=0)
    played = play(env, RandomPolicy(env, 0), 8)
    # 4000 guesses of probability 1/4: five standard errors.
    assert abs(np.mean([e.total for e in played]) / 500 - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)


def test_how_many_environments_play() -> None:
    assert [eval_envs(n) for n in (1, 5, MAX_EVAL_ENVS, 1000)] == [1, 5, MAX_EVAL_ENVS, MAX_EVAL_ENVS]


@pytest.mark.parametrize(("space", "action", "done"), [
    ("discrete", 1, 1),
    ("multidiscrete", [1, 0], [1, 0]),
    ("multibinary", [1, 0], [1, 0]),
    ("box", 0.25, [0.25]),
])  # fmt: skip
def test_a_constant_player(space: str, action: Any, done: Any) -> None:
    env, _ = make_vector(EnvConfig(id="paceline/Identity-v0", kwargs={"space": space, "n": 2}), 2, seed=0)
    taken = env.action.decode(ConstantPolicy(env, action).greedy(np.zeros((2, *env.observation.shape), np.float32)))
    np.testing.assert_allclose(np.asarray(taken)[1], np.broadcast_to(done, np.asarray(taken)[1].shape))
    assert len(play(env, ConstantPolicy(env, action), 3)) == 3
    with pytest.raises(UserError, match="is not in"):
        ConstantPolicy(env, "left")
