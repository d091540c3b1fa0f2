from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from paceline.config import UserError
from paceline.envs import check
from paceline.envs.check import CheckReport, check_env
from paceline.envs.probe import Identity, KnownReturn, Mixed


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SPEED_SECONDS", 0.05)


class Plain(gymnasium.Env[Any, Any]):
    """Without fault; each test breaks one thing."""

    def __init__(self) -> None:
        self.observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.steps = 0

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reward(self) -> Any:
        return 1.0

    def over(self) -> Any:
        return self.steps >= 20

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), self.reward(), self.over(), False, {}


def run(make: Callable[[], Any]) -> CheckReport:
    return check_env(make, "Test-v0")


@pytest.mark.parametrize(
    "make", [Plain, Identity, lambda: Identity("box"), lambda: Mixed(size=12), KnownReturn], ids=lambda m: m.__name__
)
def test_a_good_env_passes(make: Callable[[], Any]) -> None:
    report = run(make)
    assert report.problems == [] and report.warnings == []
    assert report.steps_per_second > 100
    assert 0 < report.reset_share < 1
    assert "ready to train on" in report.text()


def test_gymnasium_envs_pass() -> None:
    report = check_env(lambda: gymnasium.make("CartPole-v1", disable_env_checker=True), "CartPole-v1")
    assert report.problems == [] and report.warnings == []
    text = report.text()
    assert "observation: Box[4] of float32" in text and "steps/s" in text


def test_the_random_episode_is_shown() -> None:
    lines = run(lambda: KnownReturn(length=3)).text().splitlines()
    table = lines[lines.index("A random episode:") + 1 :][:5]
    assert table[0].split() == ["step", "action", "observation", "reward", "end"]
    assert table[1].split() == ["reset", "0"]
    assert [row.split()[0] for row in table[2:]] == ["1", "2", "3"]
    assert table[4].split()[2:] == ["3", "1", "terminated"]


def test_random_actions_are_independent_of_the_env() -> None:
    rewards = [row[3] for row in run(Identity).episode[1:]]
    assert len(rewards) == 10 and "0" in rewards


def test_global_numpy_randomness_is_caught() -> None:
    class Global(Plain):
        def observe(self) -> Any:
            return np.random.uniform(-1, 1, 2).astype(np.float32)

    report = run(Global)
    assert any("global random or numpy.random" in text and "at the reset" in text for text in report.warnings)
    assert report.problems == []


def test_global_python_randomness_in_a_reward_is_caught() -> None:
    class Global(Plain):
        def reward(self) -> Any:
            return random.random()

    assert any("global random or numpy.random" in text for text in run(Global).warnings)


def test_a_generator_that_ignores_the_seed_is_caught() -> None:
    class Own(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.own = np.random.default_rng(0)

        def observe(self) -> Any:
            return self.own.uniform(-1, 1, 2).astype(np.float32)

    assert any("does not repeat an episode" in text for text in run(Own).warnings)


def test_the_seed_test_leaves_the_global_generators_as_they_were() -> None:
    np.random.seed(5)
    random.seed(5)
    expected = np.random.random(), random.random()
    np.random.seed(5)
    random.seed(5)
    run(Plain)
    assert (np.random.random(), random.random()) == expected


def test_wrong_dtype_is_a_problem() -> None:
    class Wide(Plain):
        def observe(self) -> Any:
            return self.np_random.uniform(-1, 1, 2)

    assert any("dtype float64" in text and "float32" in text for text in run(Wide).problems)


def test_a_step_that_raises_is_a_problem_with_its_place() -> None:
    class Breaks(Plain):
        def reward(self) -> Any:
            if self.steps == 7:
                raise ZeroDivisionError("no fuel")
            return 1.0

    report = run(Breaks)
    assert len(report.problems) == 1
    assert "step 7 raised ZeroDivisionError: no fuel (test_check.py:" in report.problems[0]
    assert "1 problem(s)" in report.text()


def bad(**parts: Callable[[Any], Any]) -> Callable[[], Any]:
    return type("Bad", (Plain,), parts)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (bad(observe=lambda self: np.full(2, 3, np.float32)), "outside the bounds"),
        (bad(observe=lambda self: np.full(2, np.nan, np.float32)), "NaN"),
        (bad(observe=lambda self: np.zeros(3, np.float32)), "shape (3,)"),
        (bad(observe=lambda self: [0.0, 0.0]), "is a list"),
        (bad(reward=lambda self: float("inf")), "the reward is inf"),
        (bad(reward=lambda self: np.zeros(1)), "the reward is a ndarray"),
        (bad(over=lambda self: int(self.steps >= 20)), "terminated is a int"),
        (bad(reset=lambda self, *, seed=None, options=None: np.zeros(2, np.float32)), "reset must return"),
        (bad(step=lambda self, action: (self.observe(), 1.0, False, {})), "4 values"),
        # seen by Gymnasium's check alone
        (bad(reset=lambda self, *, seed=None: Plain.reset(self, seed=seed)), "does not provide an `options`"),
    ],
)
def test_broken_contracts(make: Callable[[], Any], said: str) -> None:
    report = run(make)
    assert any(said in text for text in report.problems), report.problems


def test_numpy_bools_are_as_good_as_bools() -> None:
    report = run(bad(step=lambda self, action: (*Plain.step(self, action)[:3], np.bool_(False), {})))
    assert report.problems == [] and report.warnings == []


def test_episodes_cut_at_once_are_warned_of() -> None:
    report = run(bad(step=lambda self, action: (self.observe(), 1.0, False, True, {})))
    assert report.problems == []
    assert any("truncated after one step" in text for text in report.warnings)


def with_spaces(observation: Any = None, action: Any = None) -> Callable[[], Any]:
    class Spaces(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = observation or self.observation_space
            self.action_space = action or self.action_space

        def observe(self) -> Any:
            return super().observe() if observation is None else self.observation_space.sample()

    return Spaces


def test_unsupported_spaces_are_problems() -> None:
    nested = spaces.Dict({"name": spaces.Sequence(spaces.Discrete(3)), "place": spaces.Box(0, 1, (2,))})
    problems = run(with_spaces(observation=nested)).problems
    assert any("observation space['name'] is a Sequence" in text for text in problems)
    problems = run(with_spaces(action=spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Text(3)}))).problems
    assert any("action space['b'] is a Text, which is not supported" in text for text in problems)


def test_text_is_dropped_with_a_warning() -> None:
    nested = spaces.Dict({"name": spaces.Text(3), "place": spaces.Box(0, 1, (2,))})
    report = run(with_spaces(observation=nested))
    assert any("observation['name'] is text, which the policy does not see" in text for text in report.warnings)
    assert not report.problems


def test_the_entry_that_is_wrong_is_named() -> None:
    class Keys(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Dict({"a": spaces.Box(0, 1, (2,), np.float32), "b": spaces.Discrete(2)})

        def observe(self) -> Any:
            return {"a": np.zeros(2, np.float32), "b": 5}

    assert any("the observation['b']" in text for text in run(Keys).problems)


def test_unbounded_actions_are_warned_of_but_allowed() -> None:
    report = run(with_spaces(action=spaces.Box(-np.inf, np.inf, (1,), np.float32)))
    assert report.problems == []
    assert [text for text in report.warnings if "action bounds are infinite" in text] == report.warnings


def test_huge_observations_are_warned_of() -> None:
    class Huge(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def observe(self) -> Any:
            return np.array([5e4, 1.0], np.float32)

    report = run(Huge)
    assert report.problems == []
    assert any("5e+04" in text and "env.normalize_observation" in text for text in report.warnings)


def test_an_episode_without_end_is_warned_of_unless_limited() -> None:
    endless = bad(over=lambda self: False, observe=lambda self: np.zeros(2, np.float32))
    assert any("10,001 random steps" in text and "max_episode_steps" in text for text in run(endless).warnings)
    assert run(lambda: gymnasium.wrappers.TimeLimit(endless(), 30)).warnings == []


def test_a_slow_step_cuts_the_check_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SLOW_SECONDS", 0.05)
    stepped = []

    class Slow(Plain):
        def step(self, action: Any) -> Any:
            stepped.append(action)
            time.sleep(0.06)
            return super().step(action)

    report = run(Slow)
    assert len(stepped) < 6
    assert any("a step takes over" in text for text in report.warnings)
    assert 1 < report.steps_per_second < 20


def test_a_slow_reset_still_shows_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SLOW_SECONDS", 0.05)
    resets = []

    class Slow(Plain):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            resets.append(seed)
            time.sleep(0.06)
            return super().reset(seed=seed)

    report = run(Slow)
    assert len(resets) == 1
    assert len(report.episode) == 11
    assert report.reset_share > 0.5


def test_an_env_that_cannot_be_made() -> None:
    def make() -> Any:
        raise OSError("no display")

    assert "cannot be made: OSError: no display" in run(make).problems[0]

    def unknown() -> Any:
        raise UserError("no such env")

    with pytest.raises(UserError):
        run(unknown)


def test_missing_spaces() -> None:
    class Bare(Plain):
        def __init__(self) -> None:
            pass

    assert len(run(Bare).problems) == 2


def test_the_envs_own_warnings_are_gathered_once() -> None:
    class Warns(Plain):
        def step(self, action: Any) -> Any:
            warnings.warn("the fuel is low", stacklevel=1)
            return super().step(action)

    assert run(Warns).warnings.count("the fuel is low") == 1


def test_every_instance_is_closed() -> None:
    opened: list[Any] = []
    closed: list[Any] = []

    class Closes(Plain):
        def __init__(self) -> None:
            super().__init__()
            opened.append(self)

        def close(self) -> None:
            closed.append(self)

    run(Closes)
    assert len(opened) == 2 and opened == list(reversed(closed))
