"""The presets that are for many environments."""

from __future__ import annotations

import pytest

from paceline.bench.suite import known_range, load_suite
from paceline.config.resolve import resolve_tree
from paceline.envs import catalog
from paceline.envs.procgen import GAMES

FOR_GAMES = ("ppo", "a2c", "a3c", "impala", "dqn")
"""Algorithms with presets for Procgen and Atari; one of your own needs none."""


@pytest.mark.parametrize("algo", FOR_GAMES)
def test_every_game_of_procgen_has_its_preset_under_every_name(algo: str) -> None:
    for game in GAMES:
        for env_id in (game, f"procgen-{game}-v0", f"procgen:procgen-{game}-v0"):
            config, name = resolve_tree({"algo": algo, "env": env_id})
            assert name == f"{algo}/procgen-cpu"
            assert config.env.normalize_reward and config.model.cnn == "nature" and config.hyper.gamma == 0.999


@pytest.mark.parametrize("algo", FOR_GAMES)
def test_atari_has_a_preset_for_the_preprocessed_games_alone(algo: str) -> None:
    assert resolve_tree({"algo": algo, "env": "ALE/Pong-v5"})[1] == f"{algo}/atari"
    assert resolve_tree({"algo": algo, "env": "ale_py:ALE/Pong-v5"})[1] is None


@pytest.mark.parametrize("algo", ["ppo", "sac", "td3"])
def test_every_robot_of_mujoco_has_a_preset(algo: str) -> None:
    [family] = (each for each in catalog.families() if each.name == "MuJoCo")
    robots = [env_id for env_id in family.ids if env_id.endswith("-v5")]
    assert len(robots) == 11
    for env_id in robots:
        config, name = resolve_tree({"algo": algo, "env": env_id})
        assert name in (f"{algo}/mujoco", f"{algo}/mujoco-long", f"{algo}/{env_id}")
        assert config.stop.total_steps in (200_000, 1_000_000)
        assert config.env.normalize_observation == (algo == "ppo")


def test_the_suite_of_mujoco_gives_ranges_to_compare_by() -> None:
    suite = load_suite("mujoco")[1]
    assert len(suite.games) == 9 and all(game.range for game in suite.games.values())
    assert known_range("Hopper-v5", {}) == (17.0, 3542.0) and known_range("Pusher-v5", {}) is None


def test_what_only_looks_like_a_game_has_none() -> None:
    for env_id in ("mygame.py:Maze", "minigrid/maze-v0", "Coinrun2"):
        assert resolve_tree({"env": env_id})[1] is None


def test_the_recipe_of_the_procgen_paper() -> None:
    config, name = resolve_tree({"env": "starpilot"}, preset="procgen-paper")
    ppo, model = config.hyper, config.model
    assert name == "ppo/procgen-paper" and config.stop.total_steps == 25_000_000
    assert config.env.envs_per_worker * ppo.rollout_steps / ppo.minibatch_size == 8
    assert (config.env.envs_per_worker, ppo.rollout_steps, ppo.epochs) == (64, 256, 3)
    assert (ppo.learning_rate, ppo.gamma, ppo.gae_lambda, ppo.clip) == (5e-4, 0.999, 0.95, 0.2)
    assert (ppo.value_clip, ppo.entropy_coef, 2 * ppo.value_coef, ppo.max_grad_norm) == (0.2, 0.01, 0.5, 0.5)
    assert config.env.normalize_reward and ppo.normalize_advantage and ppo.learning_rate_schedule == "constant"
    assert (model.cnn, model.cnn_width, model.hidden, model.activation, model.shared) == (
        "impala",
        1,
        [256],
        "relu",
        True,
    )
