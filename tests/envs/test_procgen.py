from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EnvConfig, ModelConfig, UserError
from paceline.envs import procgen
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.pool import PoolVector, env_seeds
from paceline.envs.procgen import EXPLORATION_LEVELS, EXTREME, GAMES, MEMORY, SCORE_RANGES, normalized
from paceline.envs.sync_vector import SyncVector
from paceline.models.policy import Policy
from paceline.rollout.collector import Collector

NOOP, RIGHT = 4, 7


def vector(game: str = "coinrun", envs: int = 4, **options: Any) -> PoolVector:
    seeding = {key: options.pop(key) for key in ("seed", "worker", "resumes", "first_env", "cores") if key in options}
    made, _ = make_vector(EnvConfig(id=game, kwargs=options), envs, **{"seed": 0, **seeding})
    assert isinstance(made, PoolVector)
    return made


def actions(env: Any, value: int) -> np.ndarray[Any, Any]:
    return np.full((env.num_envs, 1), value, np.int64)


def levels(env: PoolVector) -> set[int]:
    pool: Any = env.pool
    return set(pool.info["level_seed"].tolist())


# -- games and ids ---------------------------------------------------------------------------------------------------


@pytest.mark.needs("procgen")
@pytest.mark.parametrize("game", GAMES)
def test_every_game_steps(game: str) -> None:
    env = vector(game)
    first = env.reset()
    assert first.shape == (4, 3, 64, 64) and first.dtype == np.uint8 and env.action.nvec == (15,)
    kept, still = first.copy(), True
    rng = np.random.default_rng(0)
    for _ in range(30):
        obs, reward, terminated, truncated = env.step(rng.integers(15, size=(4, 1)))
        still &= bool((obs == kept).all())
        assert np.isfinite(reward).all() and terminated.dtype == truncated.dtype == np.bool_
    assert not still and (first == kept).all(), "what was given out may be kept"


@pytest.mark.needs("procgen")
def test_every_mode_of_every_game() -> None:
    seen = {}
    for mode, games in (("hard", GAMES), ("extreme", EXTREME), ("memory", MEMORY), ("exploration", EXPLORATION_LEVELS)):
        for game in games:
            env = vector(game, 1, distribution_mode=mode)
            env.reset()
            seen[mode, game] = levels(env)
    assert len(seen) == 16 + 4 + 6 + 8
    assert seen["exploration", "coinrun"] == {EXPLORATION_LEVELS["coinrun"]}


@pytest.mark.needs("procgen")
@pytest.mark.parametrize(
    "env_id", ["procgen:procgen-coinrun-v0", "procgen-coinrun-v0", "CoinRun", "procgen-CoinRun-v0"]
)
def test_spellings(env_id: str) -> None:
    expected = vector("coinrun").reset()
    np.testing.assert_array_equal(vector(env_id).reset(), expected)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "said"),
    [
        ("procgen:procgen-coinrum-v0", {}, "no game 'coinrum'; did you mean coinrun?"),
        ("procgen-zork-v0", {}, "no game 'zork'; the games are bigfish,"),
        ("starpillot", {}, "did you mean starpilot"),
        ("coinrun", {"num_levels": -1}, "num_levels=-1: expected a whole number from 0"),
        ("coinrun", {"num_levels": 2.5}, "num_levels=2.5: expected a whole number"),
        ("coinrun", {"num_levels": True}, "num_levels=True: expected a whole number"),
        ("coinrun", {"start_level": 2**31}, "start_level=2147483648"),
        ("coinrun", {"start_level": 2**31 - 1}, "exceeds the last level"),
        ("coinrun", {"num_levels": 0, "start_level": 5}, "start_level has no effect with num_levels=0"),
        ("coinrun", {"num_level": 5}, "no such option; did you mean num_levels?"),
        ("coinrun", {"xyz": 5}, "no such option; the options are distribution_mode, num_levels"),
        ("coinrun", {"use_backgrounds": "no"}, "use_backgrounds=no: expected true or false"),
        ("coinrun", {"use_sequential_levels": True}, "envpool's Procgen does not support it"),
        ("coinrun", {"distribution_mode": "memory"}, "coinrun has easy, hard, exploration"),
        ("chaser", {"distribution_mode": "Hard"}, "chaser has easy, hard, extreme"),
        ("maze", {"distribution_mode": "exploration", "num_levels": 3}, "exactly one level"),
    ],
)
def test_bad_input_is_one_line(env_id: str, kwargs: dict[str, Any], said: str) -> None:
    config = EnvConfig(id=env_id, kwargs=kwargs)
    for make in (make_scalar, lambda c: make_vector(c, 2, seed=0)):
        with pytest.raises(UserError) as error:
            make(config)
        assert said in str(error.value) and "\n" not in str(error.value)


def test_bad_input_writes_nothing(here: Path, cli: Callable[..., Any]) -> None:
    result = cli("train", "--env", "coinrun", "--set", "env.kwargs={num_levels: -1}", "--total-steps", "100")
    assert result.code == 2 and "num_levels=-1" in result.err and len(result.err.splitlines()) == 1
    assert list(here.iterdir()) == []


# -- levels and seeds ------------------------------------------------------------------------------------------------


@pytest.mark.needs("procgen")
def test_levels_are_those_that_were_asked_for() -> None:
    one = vector(envs=8, num_levels=1, start_level=77)
    first = one.reset()
    assert levels(one) == {77} and (first == first[0]).all()
    default, hard, everything = (
        vector(envs=512, cores=2, **options) for options in ({}, {"distribution_mode": "hard"}, {"num_levels": 0})
    )
    for env in (default, hard, everything):
        env.reset()
    assert max(levels(default)) < 200 and len(levels(default)) > 150
    assert 200 < max(levels(hard)) < 500
    assert len(levels(everything)) > 500 and max(levels(everything)) > 10**6


@pytest.mark.needs("procgen")
def test_the_train_levels_are_never_left() -> None:
    env = vector("starpilot", 16, num_levels=3, start_level=10)
    env.reset()
    seen, ends = levels(env), 0
    for _ in range(400):
        _, _, terminated, _ = env.step(actions(env, RIGHT))
        ends += int(terminated.sum())
        seen |= levels(env)
    assert ends > 16 and seen == {10, 11, 12}


@pytest.mark.needs("procgen")
def test_seeds_differ_between_environments_and_workers_and_repeat() -> None:
    def start(**options: int) -> Any:
        return vector(envs=6, num_levels=0, **options).reset().copy()

    first = start()
    assert len({row.tobytes() for row in first}) == 6
    np.testing.assert_array_equal(start(), first)
    for other in (start(seed=1), start(worker=1), start(resumes=1)):
        assert not any((row == known).all() for row in other for known in first)


@pytest.mark.needs("procgen")
def test_two_halves_are_the_whole() -> None:
    whole = vector(envs=6).reset()
    np.testing.assert_array_equal(vector(envs=2, first_env=4).reset(), whole[4:])
    assert env_seeds((1, 2, 3), 5) == env_seeds((1, 2, 3), 2) + env_seeds((1, 2, 3), 3, 2)


@pytest.mark.needs("procgen")
def test_a_reset_begins_again_and_a_reseed_elsewhere() -> None:
    env = vector(num_levels=0)
    first = env.reset()
    trace = [env.step(actions(env, RIGHT))[0] for _ in range(20)]
    np.testing.assert_array_equal(env.reset(), first)
    np.testing.assert_array_equal([env.step(actions(env, RIGHT))[0] for _ in range(20)], trace)
    env.reseed(0, 5, 0)
    assert not (env.reset() == first).all()


# -- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.needs("procgen")
def test_the_step_after_the_end_is_a_reset_and_the_clock_ends_an_episode_for_good() -> None:
    env = vector("maze", 2)
    env.reset()
    for step in range(1, 501):
        last, _, terminated, truncated = env.step(actions(env, NOOP))
        assert terminated.all() == terminated.any() == (step == 500) and not truncated.any()
    obs, reward, terminated, truncated = env.step(actions(env, NOOP))
    pool: Any = env.pool
    assert (reward == 0).all() and not (terminated | truncated).any() and (pool.info["elapsed_step"] == 0).all()
    assert not (obs == last).all()


@pytest.mark.needs("procgen")
def test_the_collector_takes_the_reset_for_what_it_is() -> None:
    env = vector("starpilot", 8)
    policy = Policy(env.observation, env.action, ModelConfig())
    collector = Collector([env], policy, steps=150, rng=np.random.default_rng(0))
    collector.start()
    batch = collector.collect()
    ends = np.argwhere(batch.terminated[:-1])
    assert len(ends) > 3
    for t, n in ends:
        assert batch.valid[t, n] and not batch.valid[t + 1, n] and batch.reward[t + 1, n] == 0
    assert batch.valid.sum() == batch.valid.size - len(ends)


@pytest.mark.needs("procgen")
def test_what_was_sent_is_stepped_while_the_caller_goes_on() -> None:
    whole, split = vector("bigfish"), vector("bigfish")
    whole.reset(), split.reset()
    for value in range(15):
        sent = actions(split, value)
        split.send(sent)
        sent[:] = 0  # the caller's buffer is the caller's
        for ours, theirs in zip(split.receive(), whole.step(actions(whole, value)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    split.send(actions(split, 0))
    assert split.reset().shape == (4, 3, 64, 64)  # what is under way is waited for
    split.send(actions(split, 0))
    split.close()


@pytest.mark.needs("procgen")
def test_one_alone_is_one_of_many() -> None:
    alone = make_scalar(EnvConfig(id="coinrun", kwargs={"num_levels": 1, "start_level": 9}), render_mode="rgb_array")
    many = vector(num_levels=1, start_level=9)
    obs, _ = alone.reset(seed=3)
    np.testing.assert_array_equal(obs, many.reset()[0])
    for _ in range(30):
        obs, reward, *_ = alone.step(RIGHT)
        theirs, their_reward, *_ = many.step(actions(many, RIGHT))
        np.testing.assert_array_equal(obs, theirs[0])
        assert reward == their_reward[0]
    picture: Any = alone.render()
    small = picture.reshape(64, 8, 64, 8, 3).mean((1, 3)).transpose(2, 0, 1)
    assert picture.shape == (512, 512, 3) and np.abs(small - obs).mean() < 8  # the same scene, drawn finer


@pytest.mark.needs("procgen")
def test_a_seed_repeats_an_episode_of_one() -> None:
    env = make_scalar(EnvConfig(id="coinrun", kwargs={"num_levels": 0}))
    first = env.reset(seed=1)[0]
    assert not (env.reset()[0] == first).all()
    np.testing.assert_array_equal(env.reset(seed=1)[0], first)


@pytest.mark.needs("procgen")
def test_wrappers_and_time_limits_go_around_single_ones() -> None:
    config = EnvConfig(id="coinrun", frame_stack=2, max_episode_steps=5)
    env, how = make_vector(config, 2, seed=0)
    assert isinstance(env, SyncVector) and "takes no wrappers" in how
    assert env.reset().shape == (2, 6, 64, 64)
    ends = [env.step(actions(env, NOOP))[3].tolist() for _ in range(6)]
    assert ends == [[False] * 2] * 4 + [[True] * 2, [False] * 2]
    env, how = make_vector(EnvConfig(id="coinrun", max_episode_steps=5), 2, seed=0)
    assert isinstance(env, SyncVector) and "takes no time limit" in how


@pytest.mark.needs("procgen")
@pytest.mark.parametrize(("processes", "cores", "threads"), [(0, 3, 3), (2, 3, 2), (9, 0, 4)])
def test_threads(processes: int, cores: int, threads: int) -> None:
    env, how = make_vector(EnvConfig(id="coinrun", processes=processes), 4, seed=0, cores=cores)
    assert how == f"easy, levels 0 to 199, in {threads} threads"
    env.reset()
    pool: Any = env.pool  # type: ignore[attr-defined]
    assert pool._pool.config["num_threads"] == threads


# -- scores, and what may be missing ---------------------------------------------------------------------------------


def test_normalized_scores() -> None:
    assert all(set(ranges) == set(GAMES) for ranges in SCORE_RANGES.values())
    assert normalized(EnvConfig(id="coinrun"), 7.5) == 0.5
    assert normalized(EnvConfig(id="starpilot", kwargs={"distribution_mode": "hard"}), 35) == 1
    assert normalized(EnvConfig(id="starpilot", kwargs={"distribution_mode": "extreme"}), 35) is None


def test_a_missing_library_comes_with_its_fix() -> None:
    said = procgen.explain_import_error(
        ImportError("libGL.so.1: cannot open shared object file: No such file or directory")
    )
    assert "libGL.so.1" in said and "apt-get install libgl1 libglib2.0-0" in said and "conda" in said
    assert 'pip install "paceline[procgen]"' in procgen.explain_import_error(
        ModuleNotFoundError("No module", name="optree")
    )
    assert "undefined symbol: x" in procgen.explain_import_error(ImportError("undefined symbol: x"))


@pytest.mark.needs("procgen")
def test_nothing_but_our_own_words() -> None:
    """envpool imports gym, which advertises on standard error."""
    code = "from paceline.envs.procgen import import_envpool; import_envpool(); import sys; assert 'gym' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.needs("procgen")
def test_envs_check(cli: Callable[..., Any]) -> None:
    result = cli("envs", "check", "coinrun")
    assert result.code == 0 and result.err == ""
    assert "coinrun: ready to train on" in result.out and "Warnings" not in result.out
    listed = cli("envs").out
    assert "Procgen: installed" in listed and "starpilot" in listed
