"""RLlib's results of an iteration → our metrics; and as they are, a line each, in `logs/rllib.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engine.rllib_env import EPISODES
from paceline.rollout.batch import Episode
from paceline.run.directory import plain, read_lines, replacing

MODULE = "default_policy"  # RLlib's name for the network of the one agent

# Ours → theirs, the first that is there.
LEARNER_METRICS: dict[str, tuple[str, ...]] = {
    "policy_loss": ("mean_pi_loss", "policy_loss"),
    "value_loss": ("mean_vf_loss", "vf_loss", "qf_loss"),
    "entropy": ("entropy",),
    "total_loss": ("total_loss",),
    "approx_kl": ("mean_kl_loss",),
    "explained_variance": ("vf_explained_var",),
    "gradient_norm": ("gradients_default_optimizer_global_norm", "gradients_policy_global_norm"),
    "q_mean": ("qf_mean",),
    "q_min": ("qf_min",),
    "q_max": ("qf_max",),
    "td_error_mean": ("td_error_mean",),
    "target_updates": ("num_target_updates",),
    "learning_rate": ("default_optimizer_learning_rate", "policy_learning_rate"),
}
CLASSIC = {
    "episode_reward_mean": "episode_return_mean",
    "episode_reward_min": "episode_return_min",
    "episode_reward_max": "episode_return_max",
    "episode_len_mean": "episode_len_mean",
    "episodes_this_iter": "num_episodes",
    "episodes_total": "num_episodes_lifetime",
    "timesteps_total": "num_env_steps_sampled_lifetime",
}
"""The names of before the new API stack, and those of today among the results of the env runners."""


def number(value: Any, *, keep: bool = False) -> float | None:
    """A finite number, or None; `keep`: also one that is not finite."""
    if isinstance(value, int | float | np.number):
        found = float(value)
        return found if keep or math.isfinite(found) else None
    return None


def episodes_of(runners: Mapping[str, Any]) -> tuple[list[Episode], list[dict[str, float]]]:
    """Those that ended, and what their environments measured."""
    found = runners.get(EPISODES)  # NaN if there is none, and of one alone not a list
    ended = found if isinstance(found, list) else [found] if isinstance(found, tuple) else []
    return [Episode(total, length) for total, length, _ in ended], [own for *_, own in ended if own]


def learned(learner: Mapping[str, Any]) -> dict[str, float]:
    """Our metrics of the learner."""
    metrics = {}
    for ours, names in LEARNER_METRICS.items():
        value = next((number(learner[name], keep=True) for name in names if name in learner), None)
        if value is not None:
            metrics[ours] = value
    return metrics


def optimizer_steps(learner: Mapping[str, Any]) -> int:
    rows, batch = (number(learner.get(name)) for name in ("num_module_steps_trained", "module_train_batch_size_mean"))
    return round(rows / batch) if rows and batch else 0


def env_share(runners: Mapping[str, Any]) -> float:
    """Of the time of the env runners, by their timers, which are running means; the rest chooses actions."""
    env = number(runners.get("env_step_timer")) or 0.0
    pipes = [runners.get(name, {}) for name in ("env_to_module_connector", "module_to_env_connector")]
    act = (number(runners.get("rlmodule_inference_timer")) or 0.0) + sum(
        number(pipe.get("connector_pipeline_timer")) or 0.0 for pipe in pipes
    )
    return env / (env + act) if env + act > 0 else 0.5


def append(path: Path, result: Mapping[str, Any]) -> None:
    """RLlib's own words, with the classic names beside them."""
    runners = result.get("env_runners", {})
    row = {key: _said(value) for key, value in result.items() if key != "config"}
    row["env_runners"] = {key: _said(value) for key, value in runners.items() if key != EPISODES}
    row |= {old: row["env_runners"][new] for old, new in CLASSIC.items() if new in runners}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def cut(path: Path, iteration: int) -> None:
    """Rows of after the checkpoint go, as those of the other files do."""
    if path.exists():
        rows = [row for row in read_lines(path) if row.get("training_iteration", 0) <= iteration]
        with replacing(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _said(value: Any) -> Any:
    """For JSON; of what it cannot hold, the text."""
    try:
        return plain(value)
    except TypeError:
        return str(value)
