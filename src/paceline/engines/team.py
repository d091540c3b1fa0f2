"""Several policies in one training process: their algorithms, and the weights of those that do not learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.algorithms.team import TeamAlgorithm
from paceline.config import RunConfig, UserError
from paceline.models.team import TeamPolicy
from paceline.run import checkpoint
from paceline.run.state_tree import unpack


def make_team_algorithm(config: RunConfig, policy: TeamPolicy, rng: np.random.Generator) -> TeamAlgorithm:
    check_frozen(config, policy)
    members = {
        name: config.algorithm(member, config.hyper, rng=rng, normalize_reward=config.env.normalize_reward)
        for name, member in policy.members.items()
        if name not in config.multi_agent.frozen
    }
    return TeamAlgorithm(policy, members, rng)


def check_frozen(config: RunConfig, policy: TeamPolicy) -> None:
    """Each frozen policy is one of the team, and one learns."""
    frozen = config.multi_agent.frozen
    for name in frozen:
        if name not in policy.members:
            raise UserError(f"multi_agent.frozen={name}: it is not one of {', '.join(policy.members)}")
    if set(frozen) == set(policy.members):
        raise UserError("multi_agent.frozen: all policies are frozen; leave one out that learns")


def load_frozen(config: RunConfig, policy: TeamPolicy) -> None:
    """Frozen policies get the weights of their runs or checkpoints."""
    for name, source in config.multi_agent.frozen.items():
        if name in policy.members:
            try:
                policy.members[name].load(_weights(Path(source), name))
            except UserError as error:
                raise UserError(f"multi_agent.frozen.{name}={source}: {error}") from None


def _weights(source: Path, name: str) -> dict[str, Any]:
    """Of the policy of that name, or of the only one there is."""
    arrays, tree = checkpoint.load(checkpoint.find(source))
    weights: dict[str, Any] = unpack(arrays, {"engine": tree["engine"]})["engine"]["algorithm"]["policy"]
    names = list(dict.fromkeys(key.partition("/")[0] for key in weights if "/" in key))
    if not names:
        return weights
    if name not in names:
        raise UserError(f"it has no policy {name}; its policies are {', '.join(names)}")
    return {key.removeprefix(f"{name}/"): array for key, array in weights.items() if key.startswith(f"{name}/")}
