"""The section `multi_agent` of the configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from paceline.config.values import Section

if TYPE_CHECKING:
    from paceline.config.run import RunConfig


class MultiAgentConfig(Section):
    """For environments of several agents."""

    policies: Literal["shared", "each"] | dict[str, str] = "shared"
    """`shared`: one policy for all agents, whose spaces must be equal; `each`: one for each agent; or policies by name,
    each with a pattern of agents' names: `{walkers: "walker_*", drone: drone_0}`."""
    frozen: dict[str, str] = {}
    """Policies that act but do not learn, by name: the run or checkpoint that their weights come from. For self-play
    against an earlier policy."""

    @model_validator(mode="after")
    def _known_policies(self) -> MultiAgentConfig:
        if self.frozen and self.policies == "shared":
            raise ValueError("multi_agent.frozen needs multi_agent.policies: the policies by name, or `each`")
        if isinstance(self.policies, dict):
            if not self.policies:
                raise ValueError("multi_agent.policies={}: name at least one policy, or use `shared`")
            for name in self.policies:
                if not re.fullmatch(r"[\w.+-]+", name):
                    raise ValueError(f"multi_agent.policies: {name!r} is no name; use letters, digits, _, +, - and .")
            for name in self.frozen:
                if name not in self.policies:
                    raise ValueError(f"multi_agent.frozen={name}: it is not one of {', '.join(self.policies)}")
            if set(self.frozen) == set(self.policies):
                raise ValueError("multi_agent.frozen: all policies are frozen; leave one out that learns")
        return self

    def check(self, config: RunConfig, able: str) -> None:
        """Raise ValueError for what several policies do not go together with. `able`: the algorithms that learn
        them."""
        if not config.algorithm.several_policies:
            raise ValueError(
                f"multi_agent.policies: {config.algo} learns one policy for all agents (`shared`); several: {able}"
            )
        if config.model.memory != "none":
            raise ValueError(
                f"model.memory={config.model.memory} is for one policy; agents with policies of their own "
                "(multi_agent.policies) have no memory"
            )
        if config.engine.device == "cuda":
            raise ValueError("engine.device=cuda: several policies (multi_agent.policies) learn on the CPU")
