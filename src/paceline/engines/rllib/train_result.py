"""The result of RLlib's `train()` as paceline's metrics, and unchanged as a line of `logs/rllib.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engines.rllib.env import EPISODES
from paceline.rollout.batch import Episode
from paceline.run.directory import plain, read_lines, replacing

# paceline's name → RLlib's names; the first one present is used
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
OLD_NAMES = {
    "episode_reward_mean": "episode_return_mean",
    "episode_reward_min": "episode_return_min",
    "episode_reward_max": "episode_return_max",
    "episode_len_mean": "episode_len_mean",
    "episodes_this_iter": "num_episodes",
    "episodes_total": "num_episodes_lifetime",
    "timesteps_total": "num_env_steps_sampled_lifetime",
}
"""Names from before RLlib's new API stack → today's names in the results of the env runners."""


def number(value: Any, *, finite: bool = True) -> float | None:
    """`value` as a float, or None if it is no number, or not finite although `finite` asks for it."""
    if not isinstance(value, int | float | np.number):
        return None
    return float(value) if math.isfinite(value) or not finite else None


def episodes_of(runners: Mapping[str, Any]) -> tuple[list[Episode], list[dict[str, float]]]:
    """Finished episodes, and the metrics of their environments."""
    found = runners.get(EPISODES)  # NaN without episodes, a bare tuple for one
    ended = found if isinstance(found, list) else [found] if isinstance(found, tuple) else []
    episodes = [
        Episode(total, length, agents=agents, policies=policies) for total, length, agents, policies, _ in ended
    ]
    return episodes, [metrics for *_, found in ended for metrics in found if metrics]


def agent_steps(runners: Mapping[str, Any]) -> int:
    """Of all agents, since the start of the run."""
    by_agent = runners.get("num_agent_steps_sampled_lifetime", {})
    return int(sum(number(steps) or 0.0 for steps in by_agent.values()))


def learner_metrics(learner: Mapping[str, Any]) -> dict[str, float]:
    metrics = {}
    for metric, names in LEARNER_METRICS.items():
        value = next((number(learner[name], finite=False) for name in names if name in learner), None)
        if value is not None:
            metrics[metric] = value
    return metrics


def optimizer_steps(learner: Mapping[str, Any]) -> int:
    rows, batch = (number(learner.get(name)) for name in ("num_module_steps_trained", "module_train_batch_size_mean"))
    return round(rows / batch) if rows and batch else 0


def env_share(runners: Mapping[str, Any]) -> float:
    """Share of sampling time spent in environments, by the env runners' timers; the rest chooses actions."""
    env = number(runners.get("env_step_timer")) or 0.0
    pipes = [runners.get(name, {}) for name in ("env_to_module_connector", "module_to_env_connector")]
    act = (number(runners.get("rlmodule_inference_timer")) or 0.0) + sum(
        number(pipe.get("connector_pipeline_timer")) or 0.0 for pipe in pipes
    )
    return env / (env + act) if env + act > 0 else 0.5


def append(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result to the file, with the old names added."""
    runners = result.get("env_runners", {})
    row = {key: _json_value(value) for key, value in result.items() if key != "config"}
    row["env_runners"] = {key: _json_value(value) for key, value in runners.items() if key != EPISODES}
    row |= {old: row["env_runners"][new] for old, new in OLD_NAMES.items() if new in runners}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def cut(path: Path, iteration: int) -> None:
    """Remove rows from after the checkpoint, as in the other metrics files."""
    if path.exists():
        rows = [row for row in read_lines(path) if row.get("training_iteration", 0) <= iteration]
        with replacing(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _json_value(value: Any) -> Any:
    """A JSON value, or the text of an object that JSON cannot hold."""
    try:
        return plain(value)
    except TypeError:
        return str(value)
