"""Every form of an environment with several agents becomes rows, and what is no such form is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from paceline.config import EnvConfig, UserError
from paceline.envs.agents_vector import AgentsVector
from paceline.envs.make import make_env, make_vector
from paceline.envs.multi_agent import AgentsEnv

TEAMS = Path(__file__).parents[1] / "team_envs.py"


def vector(name: str, num_envs: int = 2, *, seed: int = 0, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    made, _ = make_vector(EnvConfig(id=f"{TEAMS}:{name}", kwargs=kwargs, **(config or {})), num_envs, seed=seed)
    return made


def run(env: Any, steps: int, action: int = 0) -> list[dict[str, Any]]:
    """What each step returned."""
    log = []
    for _ in range(steps):
        obs, reward, terminated, truncated = env.step(np.full((env.rows, 1), action))
        step = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        log.append(
            {k: v.copy() for k, v in (step | {"valid": env.valid, "over": env.over, "stepped": env.stepped}).items()}
        )
    return log


def test_agents_that_die_and_come_are_rows_that_are_valid_while_they_live() -> None:
    env = vector("Relay", 1)
    assert isinstance(env, AgentsVector) and env.agents == ("a", "b", "c", "d") and env.rows == 4
    first = env.reset().copy()
    assert first[:, 0].tolist() == [0, 1, 0, 0] and not first[2:].any()
    log = run(env, 8)
    valid = np.array([step["valid"] for step in log])
    #              t  0  1  2  3  4  5  reset 0
    assert valid[:, 0].tolist() == [True, True, True, True, True, True, False, True]
    assert valid[:, 1].tolist() == [True, True, True, False, False, False, False, True]
    assert valid[:, 2].tolist() == [False, False, True, True, True, True, False, False]
    assert not valid[:, 3].any()
    assert [step["over"][0] for step in log] == [False] * 5 + [True] + [False] * 2
    assert [step["stepped"][0] for step in log] == [True] * 6 + [False, True]
    dead, cut = (np.array([step[name] for step in log]) for name in ("terminated", "truncated"))
    assert np.argwhere(dead).tolist() == [[2, 1]]
    assert np.argwhere(cut).tolist() == [[5, 0], [5, 2]]
    reward = np.array([step["reward"] for step in log])
    assert reward[:, 1].tolist() == [11, 12, 13, 0, 0, 0, 0, 11]
    assert not reward[~valid].any()


def test_the_last_observation_of_an_agent_stays_for_one_step() -> None:
    env = vector("NanAtTheEnd", 1)
    env.reset()
    log = run(env, 5)
    assert np.isnan(log[2]["obs"][1]).all()
    assert not log[3]["obs"][1].any() and not log[4]["obs"][1].any()


def test_an_agent_that_died_may_come_back() -> None:
    env = vector("Relay", 1, again=2)
    env.reset()
    log = run(env, 6)
    assert [bool(step["valid"][1]) for step in log] == [True, True, True, False, False, True]
    assert log[4]["obs"][1, 2] == 2  # its second life


@pytest.mark.parametrize("names", [(0, 1), ("left", "right")])
def test_a_gymnasium_env_with_spaces_by_agent(names: Any) -> None:
    env = vector("InGymnasium", 2, names=names)
    assert env.agents == names
    env.reset()
    log = run(env, 6)
    assert [step["valid"].tolist() for step in log] == [[True] * 4] * 4 + [[False] * 4] + [[True] * 4]
    assert log[3]["truncated"].all() and log[3]["over"].all() and not log[3]["terminated"].any()
    # Nothing was seen at the end: the last observation is what the value after it is of.
    np.testing.assert_array_equal(log[3]["obs"], log[2]["obs"])
    assert env.finished_metrics == [(0, {"load": 3.0}), (1, {"load": 3.0})]


def test_dict_spaces_with_equal_keys_and_one_reward_are_of_one_agent(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import gymnasium\nfrom gymnasium import spaces\n"
        "class One(gymnasium.Env):\n"
        "    observation_space = spaces.Dict({'arm': spaces.Discrete(2), 'leg': spaces.Discrete(2)})\n"
        "    action_space = observation_space\n"
        "    def reset(self, *, seed=None, options=None): return {'arm': 0, 'leg': 0}, {}\n"
        "    steps = 0\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        return {'arm': 0, 'leg': 0}, 1.0, True, False, {}\n"
    )
    env = make_env(EnvConfig(id=f"{tmp_path}/one.py:One"))
    assert isinstance(env, gymnasium.Env)
    assert env.unwrapped.steps == 1  # type: ignore[attr-defined]


def test_rllibs_form() -> None:
    env = vector("InRllib", 1, steps=3)
    env.reset()
    log = run(env, 4)
    assert [bool(step["over"][0]) for step in log] == [False, False, True, False]
    assert log[2]["terminated"].all() and not log[2]["truncated"].any()


def test_an_env_without_agents_for_a_while_goes_on() -> None:
    env = vector("InRllib", 1, steps=1000, wait=True)
    env.reset()
    with pytest.raises(UserError, match="came back"):
        run(env, 3)


def test_somebody_must_be_there_after_a_reset() -> None:
    env = vector("Relay", 1)
    env.reset()
    env.envs[0].env.reset = lambda seed=None: ({}, {})
    with pytest.raises(UserError, match="at least one agent must be there"):
        env.reset()


def test_agents_that_take_turns_are_refused() -> None:
    env = vector("InRllib", 1, steps=10, turns=True)
    env.reset()
    with pytest.raises(UserError, match="agents that take turns are not supported"):
        run(env, 4)


def test_a_time_limit_cuts_all_agents() -> None:
    env = vector("Relay", 1, config={"max_episode_steps": 4})
    env.reset()
    log = run(env, 5)
    assert log[3]["truncated"].tolist() == [True, False, True, False] and log[3]["over"][0]
    assert not log[4]["stepped"][0]


def test_each_episode_has_its_own_seed_and_sync_equals_async() -> None:
    logs = []
    for kind in ("sync", "async"):
        env = vector("Relay", 3, seed=4, config={"vector": kind, "processes": 2 if kind == "async" else 0})
        first = env.reset().copy()
        logs.append((first, run(env, 20, action=2)))
        env.close()
    np.testing.assert_array_equal(logs[0][0], logs[1][0])
    for one, other in zip(logs[0][1], logs[1][1], strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    draws = logs[0][0].reshape(3, 4, 4)[:, 0, 3]
    assert len(set(draws.tolist())) == 3


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("steps", [0, 2, 4, 6, 7])
def test_a_replay_brings_back_who_is_there(steps: int, kind: str) -> None:
    config = {"vector": kind, "processes": 2 if kind == "async" else 0}
    env, other = vector("Relay", 3, config=config), vector("Relay", 3, config=config)
    env.reset()
    run(env, steps, action=1)
    assert other.restore(env.state(), env._obs.copy())
    for one, again in zip(run(env, 12), run(other, 12), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], again[name])
    env.close()
    other.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_env_that_fails_is_started_again(kind: str) -> None:
    config = {"vector": kind, "restart_on_error": 3, "processes": 1 if kind == "async" else 0}
    env = vector("Relay", 2, config=config, fails=4)
    env.reset()
    log = []
    for _ in range(6):
        log += run(env, 1)
        log[-1]["failed"] = list(env.failed)
        env.failed.clear()
    assert log[3]["failed"] == [0, 1] and env.env_restarts == 2
    assert not log[3]["valid"].any() and not log[3]["stepped"].any() and not log[3]["reward"].any()
    assert log[4]["valid"].tolist() == [True, True, False, False] * 2
    env.close()


def test_different_spaces_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"the observation space of b is .*equal spaces") as error:
        vector("Unequal")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"frame_stack": 2}, "env.frame_stack=2 is for envs of one agent"),
        ({"wrappers": ["FlattenObservation"]}, "env.wrappers=FlattenObservation is for envs of one agent"),
    ],
)
def test_settings_for_one_agent_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        vector("Relay", config=settings)


FAULTS = {
    "observations of strangers": ("{'z': 0}, {}, {}, {}, {}", "not in possible_agents"),
    "four values": ("{}, {}, {}, {}", "five dictionaries by agent"),
    "no dictionary of rewards": ("{'a': X}, 1.0, {}, {}, {}", "a float as rewards"),
    "a reward in words": ("{'a': X}, {'a': 'much'}, {}, {}, {}", "a str as the reward of a"),
    "an observation of another shape": ("{'a': X[:1]}, {'a': 1.0}, {}, {}, {}", r"has shape \(1,\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_step_must_not_return(tmp_path: Path, fault: str) -> None:
    returned, text = FAULTS[fault]
    (tmp_path / "own.py").write_text(
        "import numpy as np\nfrom gymnasium import spaces\nX = np.zeros(3, np.float32)\n"
        "class Own:\n"
        "    possible_agents = ['a', 'b']\n"
        "    def observation_space(self, agent): return spaces.Box(-1, 1, (3,), np.float32)\n"
        "    def action_space(self, agent): return spaces.Discrete(2)\n"
        "    def reset(self, seed=None, options=None): return {'a': X, 'b': X}, {}\n"
        f"    def step(self, actions): return {returned}\n"
        "    def close(self): pass\n"
    )
    env, _ = make_vector(EnvConfig(id=f"{tmp_path}/own.py:Own"), 1, seed=0)
    env.reset()
    with pytest.raises(UserError, match=text):
        env.step(np.zeros((2, 1), np.int64))


@pytest.mark.parametrize(
    "name",
    [
        "pettingzoo.mpe:simple_spread_v3",
        "pettingzoo.mpe.simple_spread_v3:parallel_env",
        "pettingzoo.mpe.simple_spread_v3:env",
    ],
)
def test_pettingzoo_by_module_and_by_function(name: str) -> None:
    env = make_env(EnvConfig(id=name, kwargs={"N": 2, "max_cycles": 5}))
    assert isinstance(env, AgentsEnv) and env.agents == ("agent_0", "agent_1")
    made, _ = make_vector(EnvConfig(id=name, kwargs={"N": 2, "max_cycles": 5}), 2, seed=1)
    made.reset()
    log = run(made, 6)
    assert log[4]["truncated"].all() and log[4]["over"].all() and not log[5]["valid"].any()
    made.close()


def test_a_turn_based_game_of_pettingzoo_is_refused() -> None:
    with pytest.raises(UserError, match="its agents take turns"):
        make_env(EnvConfig(id="pettingzoo.classic.tictactoe_v3:env"))


def test_mobile_env_by_its_id() -> None:
    env, _ = make_vector(EnvConfig(id="mobile_env:mobile-small-ma-v0"), 2, seed=0)
    assert len(env.agents) == 5 and env.rows == 10
    env.reset()
    log = run(env, 3)
    assert log[2]["valid"].all()
    env.close()
