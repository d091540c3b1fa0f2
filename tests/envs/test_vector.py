from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EnvConfig
from paceline.envs import sync_vector as vector_module
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.native_vector import NativeVector
from paceline.envs.sync_vector import SyncVector
from paceline.run.state_tree import pack, unpack

ODD = Path(__file__).parents[1] / "odd_envs.py"
NESTED = Path(__file__).parents[1] / "space_envs.py"


def odd(name: str, count: int, *, seed: int = 0, worker: int = 0, resumes: int = 0, **kwargs: Any) -> Any:
    config = EnvConfig(id=f"{ODD}:{name}", kwargs=kwargs)
    makers = [functools.partial(make_scalar, config)] * count
    return SyncVector(makers, seed=seed, worker=worker, resumes=resumes)


def make(env_id: str, count: int = 3, *, seed: int = 0, worker: int = 0, resumes: int = 0, **options: Any) -> Any:
    env, _ = make_vector(EnvConfig(id=env_id, **options), count, seed=seed, worker=worker, resumes=resumes)
    return env


def actions(env: Any, steps: int, seed: int = 5) -> Any:
    rng = np.random.default_rng(seed)
    if env.action.is_continuous:
        return rng.normal(size=(steps, env.num_envs, *env.action.shape)).astype(np.float32)
    return np.stack([rng.integers(n, size=(steps, env.num_envs)) for n in env.action.nvec], -1)


def follow(env: Any, acts: Any) -> list[Any]:
    """Copies of all that came out of each step."""
    return [[np.array(part, copy=True) for part in env.step(act)] for act in acts]


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for t, (a, b) in enumerate(zip(one, other, strict=True)):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right, err_msg=f"at step {t}")


def through_a_checkpoint(state: Any) -> Any:
    """Arrays and JSON, and not the same objects any more."""
    arrays, tree = pack(state)
    return unpack({name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(tree)))


# -- the step after the end -----------------------------------------------------------------------------------------


def check_next_step(env: Any, steps: int) -> int:
    """The rules of NEXT_STEP for an env that shows the step in obs[:, 1] and a mark of the episode in obs[:, 0]."""
    obs = env.reset().copy()
    assert (obs[:, 1] == 0).all()
    done, ended = np.zeros(env.num_envs, bool), 0
    for act in actions(env, steps):
        before = obs
        obs, reward, terminated, truncated = (np.array(part, copy=True) for part in env.step(act))
        assert not (terminated & truncated).any()
        for i in range(env.num_envs):
            if done[i]:  # only resets
                assert (reward[i], terminated[i], truncated[i], obs[i, 1]) == (0.0, False, False, 0.0)
                assert obs[i, 0] != before[i, 0]
            else:  # the true successor, also where the episode ends
                assert (obs[i, 0], obs[i, 1]) == (before[i, 0], before[i, 1] + 1)
                assert obs[i, 2] == pytest.approx(float(np.sum(env.action.decode(act)[i])), abs=1e-6)
        done = terminated | truncated
        ended += int(done.sum())
    return ended


@pytest.mark.parametrize("continuous", [False, True])
def test_sync_resets_in_the_step_after_the_end(continuous: bool) -> None:
    env = odd("Script", 5, continuous=continuous)
    ended = check_next_step(env, 100)
    histories = [e.history for e in env.envs]
    assert ended == sum(map(len, histories)) > 50
    assert {terminated for history in histories for _, _, terminated in history} == {True, False}


def test_an_action_for_a_finished_episode_is_never_seen() -> None:
    env = odd("Script", 3)
    env.reset()
    acts, done, expected = actions(env, 60), np.zeros(3, bool), [[], [], []]  # type: ignore[var-annotated]
    for act in acts:
        for i in np.flatnonzero(~done):
            expected[i].append(int(act[i, 0]))
        _, _, terminated, truncated = env.step(act)
        done = terminated | truncated
    assert [e.actions for e in env.envs] == expected


def test_metrics_come_once_for_each_finished_episode() -> None:
    env = odd("Script", 3)
    env.reset()
    marks, seen = [], []
    for act in actions(env, 40):
        before = [len(e.history) for e in env.envs]
        env.step(act)
        marks += [e.mark for e, n in zip(env.envs, before, strict=True) if len(e.history) > n]
        assert all(env.envs[index].mark == metrics["mark"] for index, metrics in env.finished_metrics)
        seen += [metrics for _, metrics in env.finished_metrics]
        env.finished_metrics = []
    assert [m["mark"] for m in seen] == marks and len(marks) > 10
    assert all(type(value) is float for m in seen for value in m.values())


def cartpole_successor(state: Any, action: Any) -> Any:
    """One Euler step of the equations of Barto, Sutton and Anderson, in the float64 of the env."""
    x, x_dot, theta, theta_dot = state
    force = 10.0 if action == 1 else -10.0
    temp = (force + 0.05 * theta_dot**2 * np.sin(theta)) / 1.1
    acc = (9.8 * np.sin(theta) - np.cos(theta) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(theta) ** 2 / 1.1))
    return np.array([x + 0.02 * x_dot, x_dot + 0.02 * (temp - 0.05 * acc * np.cos(theta) / 1.1),
                     theta + 0.02 * theta_dot, theta_dot + 0.02 * acc])  # fmt: skip


@pytest.mark.parametrize("limit", [None, 12])
def test_native_cartpole_resets_in_the_step_after_the_end(limit: int | None) -> None:
    env = make("CartPole-v1", 6, max_episode_steps=limit)
    assert isinstance(env, NativeVector)
    obs = env.reset().copy()
    done, length, ends = np.zeros(6, bool), np.zeros(6, int), {"terminated": 0, "truncated": 0}
    for act in actions(env, 150):
        before = obs
        obs, reward, terminated, truncated = (np.array(part, copy=True) for part in env.step(act))
        for i in range(6):
            if done[i]:
                assert (reward[i], terminated[i], truncated[i]) == (0.0, False, False)
                assert (np.abs(obs[i]) <= 0.05).all()
                length[i] = 0
            else:
                length[i] += 1
                assert reward[i] == 1.0
                np.testing.assert_allclose(obs[i], cartpole_successor(before[i], act[i, 0]), rtol=2e-5, atol=2e-6)
                assert terminated[i] == (abs(obs[i, 0]) > 2.4 or abs(obs[i, 2]) > 12 * np.pi / 180)
                assert truncated[i] == (length[i] >= (limit or 500))
        done = terminated | truncated
        ends["terminated"] += int(terminated.sum())
        ends["truncated"] += int(truncated.sum())
    assert ends["terminated"] > 10 or limit
    assert ends["truncated"] > 10 or not limit


# -- seeds ----------------------------------------------------------------------------------------------------------

KINDS = ["CartPole-v1", "Acrobot-v1", f"{ODD}:Script"]


@pytest.mark.parametrize("env_id", KINDS)
def test_the_same_seed_gives_the_same_trajectories(env_id: str) -> None:
    traces = []
    for seed, worker, resumes in ((7, 0, 0), (7, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 1)):
        env = make(env_id, seed=seed, worker=worker, resumes=resumes)
        traces.append((env.reset().copy(), follow(env, actions(env, 60))))
    np.testing.assert_array_equal(traces[0][0], traces[1][0])
    assert_same(traces[0][1], traces[1][1])
    for first, _ in traces[2:]:  # not one environment in common
        assert not (first[:, None] == traces[0][0][None]).all(-1).any()
    for first, _ in traces:  # and no two environments alike
        assert len(np.unique(first, axis=0)) == len(first)


def test_every_episode_has_a_seed_of_its_own() -> None:
    seeds: list[int] = []
    for seed in (0, 1):
        for worker in (0, 1):
            env = odd("Script", 4, seed=seed, worker=worker)
            env.reset()
            follow(env, actions(env, 50))
            seeds += [s for e in env.envs for s in e.seeds]
    assert None not in seeds and len(set(seeds)) == len(seeds) > 150


@pytest.mark.parametrize("env_id", KINDS)
def test_reseeding_starts_that_seed_from_its_first_episode(env_id: str) -> None:
    env = make(env_id, seed=1)
    env.reset()
    follow(env, actions(env, 30))
    env.reseed(9, 4, 2)
    other = make(env_id, seed=9, worker=4, resumes=2)
    np.testing.assert_array_equal(env.reset(), other.reset())
    assert_same(follow(env, actions(env, 30)), follow(other, actions(other, 30)))


# -- saving and restoring in mid-episode ----------------------------------------------------------------------------

RESTORABLE: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "CartPole-v1 sync": {"vector": "sync"},
    "Acrobot-v1": {"max_episode_steps": 11},
    "Pendulum-v1": {"max_episode_steps": 7},
    "MountainCarContinuous-v0": {"frame_stack": 3, "max_episode_steps": 9},
    "paceline/Identity-v0": {"kwargs": {"length": 6}},
    "paceline/Identity-v0 box": {"kwargs": {"length": 6, "space": "box"}},
    "paceline/Identity-v0 multibinary, cut": {"kwargs": {"space": "multibinary"}, "max_episode_steps": 4},
    "paceline/DelayedReward-v0": {},
    "paceline/KnownReturn-v0": {"kwargs": {"length": 4}},
    "paceline/ImageSide-v0": {"kwargs": {"size": 8, "length": 5}},
    "paceline/Mixed-v0": {"kwargs": {"size": 8, "length": 5}},
    f"{ODD}:Script": {},
    f"{ODD}:Script continuous": {"kwargs": {"continuous": True}},
    f"{NESTED}:Nested": {},
    f"{NESTED}:Nested numbers": {"kwargs": {"kind": "numbers"}},
}


@pytest.mark.parametrize(("name", "options"), RESTORABLE.items(), ids=[name.split("/")[-1] for name in RESTORABLE])
def test_a_restored_vector_goes_on_exactly(name: str, options: dict[str, Any]) -> None:
    env_id = name.split(" ")[0]
    env = make(env_id, seed=3, **options)
    obs = env.reset().copy()
    acts = actions(env, 70)
    saved = []
    trace = []
    for t in range(40):
        if t % 3 == 0 or t < 12:  # also in the step where an episode has just ended, or just begun
            saved.append((t, through_a_checkpoint(env.state()), obs.copy()))
        trace += follow(env, acts[t : t + 1])
        obs = trace[-1][0]
    trace += follow(env, acts[40:])
    dones = sum(int((step[2] | step[3]).sum()) for step in trace)
    assert dones > 4
    for t, state, seen in saved:
        other = make(env_id, seed=99, resumes=1, **options)
        assert other.restore(state, seen) is True
        assert_same(trace[t : t + 30], follow(other, acts[t : t + 30]))


def test_a_restored_vector_can_be_saved_again() -> None:
    for env_id in ("paceline/Identity-v0", "Acrobot-v1", "CartPole-v1"):
        env = make(env_id, seed=3)
        env.reset()
        acts = actions(env, 30)
        obs = follow(env, acts[:7])[-1][0]
        second = make(env_id, seed=4)
        assert second.restore(through_a_checkpoint(env.state()), obs)
        obs = follow(second, acts[7:12])[-1][0]
        third = make(env_id, seed=5)
        assert third.restore(through_a_checkpoint(second.state()), obs)
        follow(env, acts[7:12])
        assert_same(follow(env, acts[12:]), follow(third, acts[12:]))


def test_a_saved_state_does_not_follow_the_env() -> None:
    for env_id in ("paceline/Identity-v0", "Acrobot-v1", "CartPole-v1"):
        env = make(env_id)
        obs = env.reset().copy()
        state = env.state()
        acts = actions(env, 9)
        expected = follow(env, acts)
        assert env.restore(state, obs)
        assert_same(follow(env, acts), expected)


@pytest.mark.parametrize("fickle", [False, True])
def test_an_env_that_is_not_reproducible_is_not_restored(fickle: bool) -> None:
    env = odd("Unseeded", 3, seed=3, fickle=fickle)
    obs = env.reset().copy()
    for act in actions(env, 6):
        obs = env.step(act)[0].copy()
    state = through_a_checkpoint(env.state())
    other = odd("Unseeded", 3, seed=3, resumes=1, fickle=fickle)
    assert other.restore(state, obs) is False
    other.reset()
    fresh = odd("Unseeded", 3, seed=3, resumes=1, fickle=fickle)
    fresh.reset()
    assert [e.seeds[-1] for e in other.envs] == [e.seeds[-1] for e in fresh.envs]
    assert not {s for e in env.envs for s in e.seeds} & {e.seeds[-1] for e in other.envs}


def test_another_observation_is_not_taken_for_the_same() -> None:
    env = make("Acrobot-v1", seed=3)
    env.reset()
    obs = follow(env, actions(env, 5))[-1][0]
    obs[1, 0] = np.nextafter(obs[1, 0], np.float32(9))
    assert make("Acrobot-v1").restore(env.state(), obs) is False


def test_long_episodes_are_not_replayed_and_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_module, "MAX_REPLAY_STEPS", 8)
    env = odd("Fixed", 2, length=0)
    env.reset()
    acts = actions(env, 40)
    follow(env, acts[:8])
    assert env.state() is not None
    follow(env, acts[8:])
    assert env.state() is None
    assert max(len(own) for own in env._actions) < 12


@pytest.mark.parametrize(
    ("env_id", "vector"), [("CartPole-v1", "auto"), ("Acrobot-v1", "sync"), ("Acrobot-v1", "async")]
)
def test_a_step_in_two_halves(env_id: str, vector: str) -> None:
    options = {"processes": 2} if vector == "async" else {}
    whole, split = (make(env_id, 3, vector=vector, **options) for _ in range(2))
    try:
        np.testing.assert_array_equal(whole.reset(), split.reset())
        for value in (0, 1, 1, 0):
            sent = np.full((3, 1), value, np.int64)
            split.send(sent)
            sent[:] = 1 - value  # the caller's buffer is the caller's
            for ours, theirs in zip(split.receive(), whole.step(np.full((3, 1), value, np.int64)), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        split.send(np.ones((3, 1), np.int64))
        np.testing.assert_array_equal(split.reset(), whole.reset())  # what is under way is not mistaken for it
        np.testing.assert_array_equal(split.step(sent)[0], whole.step(sent)[0])
    finally:
        whole.close()
        split.close()
