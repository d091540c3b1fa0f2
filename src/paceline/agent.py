"""A trained agent, from a checkpoint alone: no environment and no training script needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from paceline.config import RunConfig, UserError
from paceline.env.make import make_scalar
from paceline.model.q import make_policy
from paceline.resolve import validate
from paceline.run import checkpoint
from paceline.run.tree import unpack
from paceline.spaces import ActionCodec, ObservationCodec, space_from_json


class Agent:
    """`act(observation)` takes what the environment gives and returns what it takes."""

    def __init__(self, path: Path, *, seed: int = 0) -> None:
        arrays, tree = checkpoint.load(path)
        try:
            state = unpack(arrays, {key: tree[key] for key in ("engine", "loop")})
            self.config: RunConfig = validate(tree["config"])
            observation = ObservationCodec(space_from_json(state["engine"]["spaces"]["observation"]))
            if state["engine"].get("squash"):  # by the algorithm, whatever the settings say
                model = self.config.model.model_copy(update={"squash": True})
                self.config = self.config.model_copy(update={"model": model})
            action = ActionCodec(space_from_json(state["engine"]["spaces"]["action"]), squash=self.config.model.squash)
            weights = state["engine"]["algorithm"]["policy"]
        except (KeyError, TypeError) as error:
            raise UserError(f"checkpoint {path} is not one of a paceline run: {error} is missing in it") from None
        self.path, self.state = path, state
        self.has_noise = not state["engine"].get("without_noise", False)
        """Whether it can sample. Of RLlib's SAC only the most likely actions are known here."""
        self.policy = make_policy(self.config, observation, action)
        self.policy.load(weights)
        self._rng = np.random.default_rng(seed)

    @property
    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.state["loop"]["counters"]
        return counters

    def act(self, observation: Any, *, stochastic: bool = False) -> Any:
        """The action for one observation: the most likely one, or a sampled one."""
        self.check(stochastic=stochastic)
        codec = self.policy.observation
        row = np.zeros((1, *codec.shape), codec.dtype)
        codec.encode_one(observation, row[0])
        if stochastic:
            action, _, _ = self.policy.act(row, self.policy.head.noise(self._rng, (1,)))
        else:
            action = self.policy.best(row)
        return self.policy.action.split(action)[0]

    def check(self, *, stochastic: bool) -> None:
        if stochastic and not self.has_noise:
            raise UserError(
                f"the policy in {self.path} cannot sample: RLlib's SAC spreads its actions by the observation, and our "
                "copy has the most likely ones alone"
            )

    def make_env(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """One environment as in training, with its wrappers."""
        return make_scalar(self.config.env, render_mode=render_mode)
