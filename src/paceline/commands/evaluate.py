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
    constant: Annotated[str | None, Flag("ACTION")] = None
    """Take this action at every step, such as 1 or [0.5,0]: another baseline."""
    set: Annotated[tuple[str, ...], Flag("env.KEY=VALUE")] = ()
    """A setting of the environment that differs from training, such as env.kwargs.map=other."""

    def run(self) -> int:
        from paceline.config import UserError
        from paceline.config.resolve import parse_sets
        from paceline.evaluate import evaluate, record_video, render

        if self.random and self.stochastic:
            raise UserError("--random and --stochastic exclude each other: random actions do not come from the agent")
        if self.constant is not None and (self.random or self.stochastic):
            raise UserError(f"--constant {self.constant} excludes --random and --stochastic: give one of them")
        options: dict[str, Any] = {"which": self.checkpoint, "stochastic": self.stochastic, "seed": self.seed}
        options["env"] = self._changes()
        if not (self.video or self.render):
            episodes = 100 if self.episodes is None else self.episodes
            constant = None if self.constant is None else parse_sets([f"action={self.constant}"])["action"]
            baseline: dict[str, Any] = {"random": self.random, "constant": constant}
            print(render(evaluate(self.target, episodes=episodes, levels=self.levels, **baseline, **options)))
            return 0
        if self.random or self.constant is not None:
            raise UserError("--random and --constant cannot be recorded or rendered: leave out --video and --render")
        if self.levels == "both":
            raise UserError("--levels both: a video shows either train or test levels; choose one")
        episodes = 1 if self.episodes is None else self.episodes
        path, mean = record_video(self.target, self.video, episodes=episodes, levels=self.levels, **options)
        drawn = f", rendered with MUJOCO_GL={os.environ.get('MUJOCO_GL', 'glfw')}" if "mujoco" in sys.modules else ""
        print(f"return {mean:.2f}" + (f", video in {path}{drawn}" if path else ""))
        return 0

    def _changes(self) -> dict[str, Any]:
        from paceline.config import UserError
        from paceline.config.resolve import parse_sets

        tree = parse_sets(self.set)
        if any(key != "env" for key in tree) or not isinstance(tree.get("env", {}), dict):
            raise UserError(f"--set {self.set[0]}: an evaluation can change settings of the environment only: env.…")
        return dict(tree.get("env", {}))
