"""Action masks reach the observation array, in every way that an environment gives them and in every vector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import masked_envs
from paceline.config import EnvConfig, UserError
from paceline.envs import check, restarts
from paceline.envs.check import check_env
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.masks import MaskReader, random_actions
from paceline.envs.native_vector import NativeVector
from paceline.envs.sync_vector import SyncVector
from paceline.envs.vector import VectorEnv
from paceline.rollout.baselines import RandomPolicy
from paceline.rollout.episodes import play

FILE = str(Path(masked_envs.__file__))


def config(name: str, vector: str = "sync", **options: Any) -> EnvConfig:
    more = {key: options.pop(key) for key in ("wrappers", "frame_stack", "action_mask") if key in options}
    return EnvConfig(id=f"{FILE}:{name}", vector=vector, kwargs=options, processes=2 * (vector == "async"), **more)


@pytest.fixture
def made() -> Iterator[Any]:
    open_: list[VectorEnv] = []

    def make(*args: Any, envs: int = 3, seed: int = 4, masked: bool | None = None, **options: Any) -> VectorEnv:
        open_.append(make_vector(config(*args, **options), envs, seed=seed, masked=masked)[0])
        return open_[-1]

    yield make
    for env in open_:
        env.close()


def masks(env: VectorEnv, obs: Any) -> Any:
    return obs[:, env.observation.mask_columns].copy()


def walk(env: VectorEnv, steps: int = 40, seed: int = 0) -> list[Any]:
    """Valid random actions; the environments refuse others. Returns all observations and ends."""
    rng, seen = np.random.default_rng(seed), [env.reset().copy()]
    for _ in range(steps):
        action = random_actions(rng, masks(env, seen[-1]), env.action.nvec)
        obs, _, terminated, truncated = env.step(action)
        seen.append(obs.copy())
        ended = terminated | truncated
        assert (masks(env, obs)[terminated] == 1).all()  # no action is taken there
        assert ended.any() == bool(ended.all())
    return seen


@pytest.mark.parametrize(("nvec", "vector"), [((5,), "sync"), ((2, 4, 3), "sync"), ((2, 4, 3), "async")])
def test_all_ways_and_vectors_give_the_same_rows(made: Any, nvec: tuple[int, ...], vector: str) -> None:
    runs = []
    for name in ("ByInfo", "ByMethod", "ByKey", "ByTuple") if vector == "sync" else ("ByTuple",):
        env = made(name, vector, nvec=nvec)
        assert env.observation.shape == (3 + sum(nvec),) and env.observation.net_shape == (3,)
        assert env.observation.mask == nvec
        runs.append(walk(env))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    if vector == "async":
        for a, b in zip(runs[0], walk(made("ByInfo", "sync", nvec=nvec)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_actions_with_an_offset_and_wrappers_around_the_method(made: Any) -> None:
    env = made("ByMethod", start=-2, wrappers=[{"ClipReward": {"max_reward": 2}}], frame_stack=2)
    assert env.observation.net_shape == (6,)
    walk(env)
    stacked = made("ByKey", frame_stack=2)
    assert stacked.observation.net_size == 6 and stacked.observation.size == 11
    walk(stacked)


def test_a_picture_stays_bytes(made: Any) -> None:
    env = made("Picture")
    assert env.observation.is_image and env.observation.net_shape == (1, 12, 12)
    assert env.observation.shape == (149,) and env.observation.dtype == np.uint8
    seen = walk(env)[-1]
    inputs, mask = env.observation.split(seen)
    assert inputs.shape == (3, 1, 12, 12) and mask.shape == (3, 5)
    assert inputs.base is not None and inputs.max() > 1  # a view


def test_no_environment_is_reset_twice_to_find_masks() -> None:
    resets: list[Any] = []

    class Counted(masked_envs.ByInfo):
        def reset(self, **options: Any) -> Any:
            resets.append(self)
            return super().reset(**options)

    env = SyncVector([Counted] * 3, seed=4)
    assert resets == [env.envs[0]]
    first = env.reset().copy()
    assert resets == env.envs
    known = SyncVector([Counted] * 3, seed=4, masked=True)
    assert len(resets) == 3
    np.testing.assert_array_equal(known.reset(), first)


def test_an_env_without_masks_is_as_before(made: Any) -> None:
    env, _ = make_vector(EnvConfig(id="CartPole-v1", vector="sync"), 2, seed=3)
    plain, _ = make_vector(EnvConfig(id="CartPole-v1", vector="sync"), 2, seed=3, masked=False)
    assert env.masks is None and env.observation.mask == () and env.observation.shape == (4,)
    for _ in range(3):
        np.testing.assert_array_equal(env.reset(), plain.reset())
        for _ in range(30):
            for a, b in zip(env.step(np.zeros((2, 1), int)), plain.step(np.zeros((2, 1), int)), strict=True):
                np.testing.assert_array_equal(a, b)
        env.reseed(5, 0, 1)
        plain.reseed(5, 0, 1)


def test_off_ignores_masks(made: Any) -> None:
    for name in ("ByInfo", "ByMethod"):
        assert made(name, action_mask="ignore").observation.shape == (3,)
    assert made("ByKey", action_mask="ignore").observation.shape == (8,)  # part of the observation
    assert made("Late", action_mask="ignore").reset().shape == (3, 3)


@pytest.mark.parametrize(
    ("name", "vector"), [("ByInfo", "sync"), ("ByMethod", "sync"), ("ByKey", "sync"), ("ByInfo", "async")]
)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("none", "allows no action"),
        ("shape", "has shape (3,); expected 5 numbers of 0 and 1, one for each action"),
        ("missing", "is missing: give it with every reset and step"),
        ("text", "is a str"),
        ("numbers", "contains numbers other than 0 and 1"),
    ],
)
def test_a_fault_is_told_with_its_step(made: Any, vector: str, name: str, fault: str, words: str) -> None:
    if vector == "async" and fault != "missing":
        return  # one error of a process stands for all
    env = made(name, vector, fault=fault)
    with pytest.raises(UserError) as error:
        walk(env)
    assert words in str(error.value) and "(at step 3 of an episode)" in str(error.value), error.value
    assert env.masks.where in str(error.value) and "\n" not in str(error.value)


def test_an_empty_choice_is_named(made: Any) -> None:
    reader = MaskReader("mask", (2, 3))
    assert reader.find_fault(np.array([[1, 0, 1, 0, 0], [1, 1, 0, 0, 0]])) == (
        1,
        "allows no value of choice 1: allow one, or end the episode with this step (terminated=True)",
    )
    many = MaskReader("mask", (600,))
    assert many.find_fault(np.ones((2, 600), np.uint8)) is None  # a sum of bytes would overflow to 88, or to 0
    assert many.find_fault(np.ones((2, 512), np.uint8)) is None
    assert many.find_fault(np.full((1, 600), np.nan)) is not None


def test_a_mask_that_comes_late_or_for_continuous_actions_is_refused(made: Any) -> None:
    env = made("Late")
    env.reset()
    with pytest.raises(UserError, match="is not there from the first reset on"):
        env.step(np.array([[np.argmax(one.mask[0])] for one in env.envs]))
    with pytest.raises(UserError, match=r"masks are for Discrete and MultiDiscrete actions.*env\.action_mask=ignore"):
        made("Continuous", way="key")
    with pytest.raises(UserError, match="masks are for Discrete and MultiDiscrete"):
        made("Continuous").reset()
    assert made("Continuous", action_mask="ignore").reset().shape == (3, 3)


@pytest.mark.parametrize(("ends", "vector"), [("terminate", "sync"), ("truncate", "sync"), ("terminate", "async")])
def test_a_running_episode_is_replayed_with_its_masks(made: Any, ends: str, vector: str) -> None:
    env = made("ByInfo", vector, ends=ends)
    for steps in (5, masked_envs.LENGTH):  # amid an episode, and after its last step
        last = walk(env, steps)[-1]
        state = env.state()
        other = made("ByInfo", vector, ends=ends, seed=9)
        other.reset()
        assert other.restore(state, last)
        action = random_actions(np.random.default_rng(1), masks(env, last), (5,))
        for a, b in zip(env.step(action), other.step(action), strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_environment_that_is_started_again_has_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", 0.0)
    masked_envs.Fails.made = 0
    env = SyncVector([masked_envs.Fails] * 3, seed=2, restart_on_error=3)
    rng, obs, failed = np.random.default_rng(0), env.reset().copy(), 0
    for _ in range(30):
        obs = env.step(random_actions(rng, masks(env, obs), (5,)))[0].copy()
        failed += len(env.failed)
        env.failed.clear()
        assert masks(env, obs).any(axis=1).all()
    assert failed == 2 and env.env_restarts == 2


@pytest.mark.parametrize("way", ["info", "method"])
def test_a_native_vector(way: str) -> None:
    env = NativeVector(masked_envs.VectorMasked(way=way), seed=1)
    assert env.observation.size == 8 and env.masks is not None
    first = env.reset().copy()
    assert masks(env, walk(env, 30)[-1]).any()
    env.reseed(1, 0, 0)
    np.testing.assert_array_equal(env.reset(), first)
    assert NativeVector(masked_envs.VectorMasked(way=way), seed=1, masked=False).observation.size == 3
    for fault, words in (("none", "allows no action"), ("shape", "has shape (3,)"), ("missing", "allows no action")):
        with pytest.raises(UserError) as error:
            walk(NativeVector(masked_envs.VectorMasked(fault=fault), seed=1))
        assert words in str(error.value) and "environment 0 of the vector" in str(error.value)


def test_random_actions_are_valid_and_uniform() -> None:
    rng = np.random.default_rng(0)
    mask = np.array([[0, 1, 1, 0, 1]] * 3000)
    drawn = random_actions(rng, mask, (2, 3))
    assert (drawn[:, 0] == 1).all() and set(drawn[:, 1]) == {0, 2}
    assert 0.45 < (drawn[:, 1] == 0).mean() < 0.55


def test_the_random_baseline_and_the_check_take_valid_actions(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SPEED_SECONDS", 0.02)
    env = made("ByInfo")
    assert len(play(env, RandomPolicy(env, 0), 7)) == 7
    for name in ("ByInfo", "ByMethod", "ByKey", "ByTuple"):
        for nvec in ((5,), (2, 4, 3)):
            report = check_env(lambda name=name, nvec=nvec: make_scalar(config(name, nvec=nvec)), name)
            assert not report.problems, report.text()
            assert "of the actions valid" in report.text()
    for fault in ("none", "shape", "missing"):
        report = check_env(lambda fault=fault: make_scalar(config("ByInfo", fault=fault)), "x")
        assert any("at step 3 of an episode" in problem for problem in report.problems), report.text()
    report = check_env(lambda: make_scalar(config("Continuous", way="key")), "x")
    assert any("masks are for Discrete" in problem for problem in report.problems)


def test_the_method_is_found_behind_any_wrapper() -> None:
    env = gymnasium.wrappers.TimeLimit(masked_envs.ByMethod(), 5)
    env.reset(seed=0)
    reader = MaskReader("action_masks()", (5,))
    np.testing.assert_array_equal(reader.read(env, None, {}, str), env.unwrapped.mask[0])  # type: ignore[attr-defined]
