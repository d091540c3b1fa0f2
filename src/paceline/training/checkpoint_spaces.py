"""The spaces of a run in its checkpoints, and a policy for them: of one agent, of agents that share a policy, or of
several policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.config import RunConfig, UserError
from paceline.spaces import codecs_from_json, codecs_to_json
from paceline.team_spaces import TeamSpaces

if TYPE_CHECKING:
    from paceline.models.team import TeamPolicy

Spaces = dict[str, Any]


def write_spaces(observation: Any, action: Any, team: TeamSpaces | None) -> Spaces:
    return {"team": team.to_json()} if team is not None else codecs_to_json(observation, action)


def read_spaces(tree: Spaces, config: RunConfig) -> tuple[Any, Any, TeamSpaces | None]:
    squash, channels = config.model.squash, config.env.channels
    if "team" in tree:
        team = TeamSpaces.from_json(tree["team"], squash=squash, channels=channels)
        return team.observation, team.action, team
    try:
        return *codecs_from_json(tree, channels, squash=squash), None
    except UserError:
        if channels != "auto":
            raise
        return *codecs_from_json(tree, "last", squash=squash), None  # how older runs read a shape that fits both


def make_team(config: RunConfig, team: TeamSpaces, *, seed: int = 0) -> TeamPolicy:
    from paceline.models.team import make_team_policy

    return make_team_policy(
        team,
        lambda part, own: config.algorithm.make_policy(config, part.observation, part.action, seed=own),
        seed,
    )
