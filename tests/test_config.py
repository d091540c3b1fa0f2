from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.algorithms.ppo import PPO
from paceline.config import (
    CheckpointConfig,
    EnvConfig,
    EvalConfig,
    ModelConfig,
    RunConfig,
    StopConfig,
    parse_count,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("30m", 1800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172_800),
        ("1h1m1s", 3661),
        ("01:30:00", 5400),
        ("01:30", 90),
        (" 5m ", 300),
        (0.25, 0.25),
    ],
)
def test_durations(given: Any, seconds: float) -> None:
    assert parse_seconds(given) == seconds
    assert StopConfig(max_time=given).max_time == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 apples", "1:2", "h", "-5", "0", 0, -1, "nan"])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(ValidationError):
        StopConfig(max_time=given)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("100000", 100_000),
        ("100_000", 100_000),
        ("100,000", 100_000),
        ("1e5", 100_000),
        ("100k", 100_000),
        ("1M", 1_000_000),
        ("2.5k", 2500),
        (1e6, 1_000_000),
        (7, 7),
    ],
)
def test_counts(given: Any, count: int) -> None:
    assert parse_count(given) == count
    steps = StopConfig(total_steps=given).total_steps
    assert steps == count and type(steps) is int


@pytest.mark.parametrize("given", ["1.5", "k", "", "1m", "ten", 1.5, "1e400", "nan", float("inf"), "-1k", 0])
def test_what_is_no_count(given: Any) -> None:
    with pytest.raises(ValidationError):
        StopConfig(total_steps=given)


def test_legal_zeros_are_kept() -> None:
    ppo = PPO.Settings(gamma=0, gae_lambda=0, entropy_coef=0, value_coef=0, max_grad_norm=0)
    assert (ppo.gamma, ppo.gae_lambda, ppo.value_coef, ppo.max_grad_norm) == (0, 0, 0, 0)
    stop = StopConfig(return_mean=0, confirm_episodes=0)
    assert (stop.return_mean, stop.confirm_episodes) == (0, 0)
    assert not stop.has_budget and StopConfig(max_time=1).has_budget
    checkpoint = CheckpointConfig(every_iterations=0, every_seconds=0)
    assert (checkpoint.every_iterations, checkpoint.every_seconds) == (0, 0)
    assert EvalConfig(every_steps=0).every_steps == 0 and RunConfig(seed="0").seed == 0


@pytest.mark.parametrize(
    ("text", "name", "true", "false"),
    [
        ("return_mean>=10", "return_mean", 10, 9.9),
        ("approx_kl < 1e-2", "approx_kl", 0.001, 0.01),
        (" env/a.b-c <= -1.5", "env/a.b-c", -1.5, -1.4),
        ("entropy>+0", "entropy", 0.1, 0),
    ],
)
def test_rules_on_a_metric(text: str, name: str, true: float, false: float) -> None:
    rule = StopConfig(metric=text).metric_rule
    assert rule is not None
    found, compare, bound = rule
    assert found == name and compare(true, bound) and not compare(false, bound)


@pytest.mark.parametrize("text", ["", "entropy", "entropy==1", "entropy>=", ">=1", "a>=b", "a>=.", "a>=1e", "a>=1-1"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(ValidationError):
        StopConfig(metric=text)


@pytest.mark.parametrize("value", ["nan", "inf", float("nan"), float("-inf")])
def test_numbers_are_finite(value: Any) -> None:
    for section, key in ((StopConfig, "return_mean"), (StopConfig, "max_time"), (PPO.Settings, "learning_rate")):
        with pytest.raises(ValidationError):
            section.model_validate({key: value})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        RunConfig().seed = 5  # type: ignore[misc]


def test_the_section_of_the_algorithm() -> None:
    assert RunConfig(algo="ppo").hyper == PPO.Settings()
    assert RunConfig.model_validate({"algo": "a2c", "a2c": {"gamma": 0.5}}).hyper.gamma == 0.5


def test_combinations() -> None:
    with pytest.raises(ValidationError, match="hidden has no effect"):
        ModelConfig.model_validate({"class": "file.py:Net", "hidden": [8]})
    with pytest.raises(ValidationError, match="processes"):
        EnvConfig(processes=-1)
    RunConfig.model_validate({"env": {"vector": "async", "processes": 2}})


def test_every_option_says_what_it_means() -> None:
    from paceline.config.resolve import keys

    rows = list(keys())
    assert len(rows) > 50 and len({key for key, *_ in rows}) == len(rows)
    for key, kind, default, meaning in rows:
        assert meaning.endswith(".") and kind and default, key


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"dqn": {"replay_size": 40}}, r"dqn\.replay_size=40 .* \(dqn\.rollout_steps \+ 2\) = 48"),
        ({"engine": {"device": "cuda"}}, r"engine\.device=cuda: dqn learns on the CPU"),
        ({"engine": {"learners": 2}}, r"engine\.learners=2 is for impala"),
        ({"engine": {"scaling": "weak"}}, r"engine\.scaling is for ppo(,| and) a2c"),
    ],
)
def test_what_dqn_is_not_for(tree: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        RunConfig.model_validate({"algo": "dqn", **tree})
