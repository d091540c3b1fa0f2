"""`paceline evaluate`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Literal

from paceline.commands.flags import Argument, Flag, Verb


class EvaluateVerb(Verb):
    """Play episodes with a trained agent."""

    target: Annotated[str, Argument("RUN|CHECKPOINT")]
    """A run directory, or a checkpoint in one."""
    checkpoint: Annotated[str | None, Flag("best|last|STEP")] = None
    """Checkpoint of the run; default: best if there is one, else last."""
    episodes: Annotated[int | None, Flag("N", least=1, most=1_000_000)] = None
    """Episodes to play; default: 100, or 1 for a video."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely one."""
    seed: int = 0
    """Seed of the environments and of sampled actions (default: 0)."""
    levels: Literal["train", "test", "both"] | None = None
    """Levels of a Procgen game; default: both."""
    video: Annotated[str | None, Flag("FILE")] = None
    """Record a video, as a .mp4 or .gif file; needs no display."""
    render: bool = False
    """Show the episodes in a window."""
    random: bool = False
    """Take uniformly random actions: the baseline."""

    def run(self) -> int:
        from paceline.config import UserError
        from paceline.evaluate import evaluate, record_video, render

        if self.random and self.stochastic:
            raise UserError("--random and --stochastic exclude each other: random actions do not come from the agent")
        options: dict[str, Any] = {"which": self.checkpoint, "stochastic": self.stochastic, "seed": self.seed}
        if not (self.video or self.render):
            episodes = 100 if self.episodes is None else self.episodes
            rows = evaluate(self.target, episodes=episodes, random=self.random, levels=self.levels, **options)
            print(render(rows))
            return 0
        if self.random:
            raise UserError("--random cannot be recorded or rendered: leave out --video and --render")
        if self.levels == "both":
            raise UserError("--levels both: a video shows either train or test levels; choose one")
        episodes = 1 if self.episodes is None else self.episodes
        path, mean = record_video(self.target, self.video, episodes=episodes, levels=self.levels, **options)
        drawn = f", rendered with MUJOCO_GL={os.environ.get('MUJOCO_GL', 'glfw')}" if "mujoco" in sys.modules else ""
        print(f"return {mean:.2f}" + (f", video in {path}{drawn}" if path else ""))
        return 0
