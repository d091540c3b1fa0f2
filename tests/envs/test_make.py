from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from paceline.config import EnvConfig, UserError
from paceline.envs.async_vector import AsyncVector
from paceline.envs.make import make_scalar, make_vector
from paceline.envs.native_vector import NativeVector
from paceline.envs.sync_vector import SyncVector

ODD = Path(__file__).parents[1] / "odd_envs.py"


def config(env_id: str = "CartPole-v1", **options: Any) -> EnvConfig:
    return EnvConfig(id=env_id, **options)


def lengths(env: Any, steps: int) -> set[int]:
    """Lengths of the episodes of a vector env under a constant action."""
    env.reset()
    length, seen, done = np.zeros(env.num_envs, int), set(), np.zeros(env.num_envs, bool)
    for _ in range(steps):
        length += ~done
        _, _, terminated, truncated = env.step(np.zeros((env.num_envs, 1), np.int64))
        done = terminated | truncated
        seen |= set(length[done].tolist())
        length[done] = 0
    return seen


# -- ids ------------------------------------------------------------------------------------------------------------


def test_a_gymnasium_id() -> None:
    env: Any = make_scalar(config("CartPole-v1"))
    assert env.spec.id == "CartPole-v1" and env.spec.max_episode_steps == 500
    assert make_scalar(config("paceline/KnownReturn-v0", kwargs={"length": 4})).observation_space == spaces.Discrete(5)


def test_a_class_in_a_file() -> None:
    env: Any = make_scalar(config(f"{ODD}:Fixed", kwargs={"length": 9}))
    assert type(env).__name__ == "Fixed" and env.length == 9


def test_a_module_that_registers_or_just_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_for_a_test.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "gymnasium.register('ForATest-v3', entry_point=PendulumEnv, max_episode_steps=7)\n"
    )
    monkeypatch.chdir(tmp_path)
    registered: Any = make_scalar(config("registers_for_a_test:ForATest-v3"))
    assert registered.spec.max_episode_steps == 7
    plain: Any = make_scalar(config("registers_for_a_test:PendulumEnv"))
    assert type(plain).__name__ == "PendulumEnv"


@pytest.mark.parametrize(
    ("env_id", "kwargs", "named"),
    [
        ("CartPole-v7", {}, "CartPole-v7"),
        ("Cartpole-v1", {}, "did you mean CartPole-v1"),
        ("CartPole", {}, "CartPole"),
        ("", {}, "no such environment"),
        ("no_such_module_xyz:Env-v0", {}, "no module 'no_such_module_xyz'"),
        ("collections:OrderedDict", {}, "makes an OrderedDict"),
        ("math:pi", {}, "expected a class or function"),
        (f"{ODD}:Nothing", {}, "has no 'Nothing'"),
        (f"{ODD}:Fixed", {"width": 3}, "TypeError.*width"),
        ("paceline/Identity-v0", {"space": "graph"}, "graph"),
        ("CartPole-v1", {"gravitas": 1}, "gravitas"),
        ("Pendulum-v1", {"gravitas": 1}, "gravitas"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(env_id: str, kwargs: dict[str, Any], named: str) -> None:
    for make in (make_scalar, lambda c: make_vector(c, 2, seed=0)):
        with pytest.raises(UserError, match=named) as caught:
            make(config(env_id, kwargs=kwargs))
        assert "\n" not in str(caught.value)


# -- wrappers -------------------------------------------------------------------------------------------------------


def test_wrappers_in_order(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import gymnasium\n"
        "class Add(gymnasium.RewardWrapper):\n"
        "    def __init__(self, env, much=1.0):\n        super().__init__(env)\n        self.much = much\n"
        "    def reward(self, r):\n        return r + self.much\n"
        "class Double(gymnasium.RewardWrapper):\n    def reward(self, r):\n        return 2 * r\n"
    )
    for wrappers, expected in (
        ([f"{own}:Double", f"{own}:Add"], 3.0),
        ([f"{own}:Add", f"{own}:Double"], 4.0),
        ([{f"{own}:Add": {"much": 0.5}}], 1.5),
        (["FlattenObservation", {"ClipReward": {"max_reward": 0.25}}], 0.25),
    ):
        env = make_scalar(config(wrappers=wrappers))
        env.reset(seed=0)
        assert env.step(0)[1] == expected


@pytest.mark.parametrize(
    ("wrapper", "named"),
    [
        ("ClipRewards", "did you mean ClipReward"),
        ("no_such_module_xyz:Wrap", "no module"),
        ({"ClipReward": {"most": 1}}, "most"),
        ("collections:OrderedDict", "could not be made|no observation_space|expected"),
    ],
)
def test_wrong_wrappers(wrapper: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        make_scalar(config(wrappers=[wrapper]))


def test_frames_are_stacked() -> None:
    env = make_scalar(config(frame_stack=3))
    first, _ = env.reset(seed=1)
    second, *_ = env.step(1)
    assert first.shape == (3, 4)
    np.testing.assert_array_equal(second[:2], first[1:])


# -- vectors --------------------------------------------------------------------------------------------------------


def test_which_vector_is_used() -> None:
    env, how = make_vector(config(), 3, seed=0)
    assert isinstance(env, NativeVector) and how == "its own vector env" and env.num_envs == 3
    env, how = make_vector(config(vector="sync"), 3, seed=0)
    assert isinstance(env, SyncVector) and how == "in this process"
    wrapped: tuple[dict[str, Any], ...] = ({"frame_stack": 2}, {"wrappers": [{"ClipReward": {"max_reward": 1.0}}]})
    for options in wrapped:
        env, how = make_vector(config(**options), 3, seed=0)
        assert isinstance(env, SyncVector) and "takes no wrappers" in how
    env, how = make_vector(config("Acrobot-v1"), 2, seed=0)
    assert isinstance(env, SyncVector) and how == "in this process"


def test_a_vector_env_that_resets_in_another_way_is_not_used() -> None:
    class SameStep(gymnasium.vector.VectorEnv[Any, Any, Any]):
        metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

        def __init__(self, num_envs: int, **kwargs: Any) -> None:
            self.num_envs = num_envs

    gymnasium.register(
        "SameStepForATest-v0",
        entry_point="gymnasium.envs.classic_control:PendulumEnv",
        vector_entry_point=SameStep,  # type: ignore[arg-type]
        max_episode_steps=50,
    )
    try:
        env, how = make_vector(config("SameStepForATest-v0"), 2, seed=0)
    finally:
        del gymnasium.registry["SameStepForATest-v0"]
    assert isinstance(env, SyncVector) and "resets in another way" in how


@pytest.mark.parametrize("vector", ["auto", "sync"])
def test_kwargs_reach_the_env(vector: str) -> None:
    env, _ = make_vector(config(vector=vector, kwargs={"sutton_barto_reward": True}), 2, seed=0)
    env.reset()
    assert env.step(np.zeros((2, 1), np.int64))[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("env_id", "vector"), [("CartPole-v1", "auto"), ("CartPole-v1", "sync"), (f"{ODD}:Fixed", "sync")]
)
def test_episodes_are_cut_at_the_length_asked_for(env_id: str, vector: str) -> None:
    kwargs = {"length": 0} if "Fixed" in env_id else {}
    env, _ = make_vector(config(env_id, vector=vector, max_episode_steps=5, kwargs=kwargs), 4, seed=0)
    assert lengths(env, 30) == {5}


def test_processes() -> None:
    env, how = make_vector(config(f"{ODD}:Fixed", vector="async", processes=5), 2, seed=0)
    try:
        assert isinstance(env, AsyncVector) and how == "in 2 processes"
        assert lengths(env, 10) == {3}
    finally:
        env.close()
