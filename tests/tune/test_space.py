from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.config import UserError
from paceline.config.resolve import resolve_tree
from paceline.tune.space import Range, parse_space, points, read_space

LR = "ppo.learning_rate"
CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_file_may_be_flat_or_nested(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("ppo:\n  learning_rate: {log: [1e-4, 1e-2]}\nppo.gamma: [0.9, 1.0]\n")
    assert read_space(tmp_path / "s.yaml") == {LR: {"log": [1e-4, 1e-2]}, "ppo.gamma": [0.9, 1.0]}
    (tmp_path / "s.yaml").write_text("")
    with pytest.raises(UserError, match="empty"):
        read_space(tmp_path / "s.yaml")
    with pytest.raises(UserError, match=r"--space .*no such file"):
        read_space(tmp_path / "none.yaml")


def test_a_grid_has_every_combination_once() -> None:
    space = parse_space({"ppo.gamma": [0.9, 0.99], "ppo.epochs": [1, 2, 3]}, "ppo")
    found = points(space, None, 0)
    assert len(found) == 6 and len({tuple(point.values()) for point in found}) == 6
    drawn = points(space, 4, 0)
    assert len({tuple(point.values()) for point in drawn}) == 4 and all(point in found for point in drawn)


def test_draws_are_in_range_and_repeat_with_the_seed() -> None:
    raw = {LR: {"log": [1e-4, 1e-2]}, "ppo.clip": {"uniform": [0.1, 0.3]}, "ppo.epochs": {"int": [1, 3]}}
    space = parse_space(raw, "ppo")
    found = points(space, 400, 7)
    assert found == points(space, 400, 7) != points(space, 400, 8)
    rates = np.array([point[LR] for point in found])
    assert rates.min() >= 1e-4 and rates.max() <= 1e-2
    assert 0.4 < (rates < 1e-3).mean() < 0.6  # half of the magnitudes
    assert {point["ppo.epochs"] for point in found} == {1, 2, 3}
    assert Range("log", 1e-4, 1e-2).clamp(0.5) == 1e-2 and Range("int", 1, 3).clamp(0.2) == 1


@pytest.mark.parametrize("kind", ["uniform", "log"])
def test_draws_from_a_narrow_range_differ_and_stay_inside(kind: str) -> None:
    narrow = Range(kind, 0.999, 0.99999)
    rng = np.random.default_rng(0)
    drawn = {narrow.draw(rng) for _ in range(200)}
    assert len(drawn) > 150 and all(0.999 <= value <= 0.99999 for value in drawn)
    assert narrow.clamp(1.2) == 0.99999 and narrow.clamp(0.99912345678) == 0.9991235
    odd = Range(kind, 0.123456, 0.765432)
    assert odd.clamp(0.0) == 0.123456 and odd.clamp(1.0) == 0.765432 and odd.clamp(0.3333333) == 0.3333


@pytest.mark.parametrize(
    ("name", "algo", "env"), [("cartpole", "ppo", "CartPole-v1"), ("pendulum", "sac", "Pendulum-v1")]
)
def test_the_spaces_in_configs_fit_their_settings(name: str, algo: str, env: str) -> None:
    space = parse_space(read_space(CONFIGS / f"spaces/{name}.yaml"), algo)
    for point in points(space, 20, 0):
        resolve_tree(
            {"algo": algo, "env": {"id": env}, algo: {key.partition(".")[2]: value for key, value in point.items()}}
        )
