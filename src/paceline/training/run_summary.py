"""What `summary.json` says about a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.rollout.episodes import statistics, team_row
from paceline.verdict import Verdict, verdict

if TYPE_CHECKING:
    from paceline.training.loop import Loop

WINDOW = 100  # episodes in the reported return


def verdict_of(loop: Loop) -> Verdict:
    """What has limited the speed of the run so far."""
    engine, clock = loop.engine, loop.clock
    training = max(clock.train_seconds, 1e-9)
    return verdict(
        clock.split(),
        engine.actor_time_split(),
        algo=loop.config.algo,
        workers=engine.workers,
        nodes=engine.nodes,
        cpu_share=loop.usage.cpu_seconds / training / engine.cores,
        cores=engine.cores,
        straggling=engine.straggling_seconds / training,
        stepping=loop.usage.stepping,
        other_share=loop.usage.other_share,
        device=engine.device,
        overlap=loop.config.engine.overlap,
        share=engine.name != "rllib",
    )


def summarize_run(loop: Loop, status: str) -> dict[str, Any]:
    counters, config, wall = loop.counters, loop.config, loop.clock.wall_seconds
    split = loop.clock.split(wall)
    training, stepping = wall - split["start"], loop.usage.stepping
    recent = statistics(list(loop.recent)[-WINDOW:])
    return {
        "status": status,
        "algo": config.algorithm_name,
        "env": config.env.id,
        "engine": loop.engine.name,
        "workers": loop.engine.workers,
        "threads": loop.engine.threads,
        "device": loop.engine.device,
        "seed": config.seed,
        "env_steps": counters.env_steps,
        "iterations": counters.iteration,
        "episodes": counters.episodes,
        "env_restarts": counters.env_restarts,
        "optimizer_steps": loop.engine.optimizer_steps,
        "parameters": loop.engine.parameters,
        "wall_seconds": wall,
        "train_seconds": training,
        "steps_per_second": counters.env_steps / training if counters.env_steps else None,
        "time_split": split,
        **{name: recent.get(name) for name in ("return_episodes", "return_mean", "return_std", "length_mean")},
        **team_row(counters.agent_steps, list(loop.recent)[-WINDOW:]),
        "best_return": loop.best_return,
        "peak_memory_bytes": loop.usage.peak_memory,
        "cpu_percent": 100.0 * loop.usage.cpu_seconds / training if training > 0 else None,
        "other_cpu_percent": loop.usage.other_cpu_percent,
        "stepping_cpu_seconds": stepping.cpu_seconds if stepping else None,
        "waited_seconds": stepping.waited_seconds if stepping else None,
        "resumed": loop.resumes,
        **loop.engine.accounts(),
        "verdict": verdict_of(loop).text,
    }
