"""A checkpoint → episodes → statistics, `eval.jsonl`, a CSV with a row per episode, a video."""

from __future__ import annotations

import csv
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline.agent import Agent
from paceline.config import EnvConfig, UserError
from paceline.env import procgen
from paceline.env.make import make_scalar, make_vector
from paceline.rollout.batch import Episode
from paceline.rollout.episodes import EVAL_WORKER, RandomPlayer, eval_envs, play
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory, append_line
from paceline.stats import summarize

VIDEO_SUFFIXES = (".mp4", ".gif")
MAX_VIDEO_FRAMES = 3000


def evaluate(
    target: str | Path,
    *,
    which: str | None = None,
    episodes: int = 100,
    stochastic: bool = False,
    seed: int = 0,
    random: bool = False,
    levels: str | None = None,
) -> list[dict[str, Any]]:
    """Play exactly `episodes` episodes and return their statistics; a run gets them in its files too.

    One row; for Procgen one for each set of levels, `train` (those of the run) and `test` (all there are), unless
    `levels` names one of them.
    """
    _check(episodes, seed)
    agent = Agent(checkpoint.find(target, which), seed=seed)
    agent.check(stochastic=stochastic)
    kind = "random" if random else "stochastic" if stochastic else "deterministic"
    rows: list[dict[str, Any]] = []
    for name, config in _level_sets(agent.config.env, levels).items():
        began = time.perf_counter()
        played = _play(agent, config, episodes, kind=kind, seed=seed)
        row: dict[str, Any] = {
            "kind": kind,
            "checkpoint": str(agent.path),
            "iteration": agent.counters["iteration"],
            "env_steps": agent.counters["env_steps"],
            "seed": seed,
            **summarize([e.total for e in played], [e.length for e in played]),
        }
        if name:
            row["levels"] = name
            row["return_normalized"] = procgen.normalized(config, row["return_mean"])
        if rows:
            row["generalization_gap"] = rows[0]["return_mean"] - row["return_mean"]
        row["eval_seconds"] = time.perf_counter() - began
        rows.append(row | {"files": _write(agent.path.parent.parent, row, played)})
    return rows


def _level_sets(config: EnvConfig, levels: str | None) -> dict[str, EnvConfig]:
    """Name → environment. An environment without level sets has one, without a name."""
    if procgen.game_of(config.id) is None:
        if levels is not None:
            raise UserError(f"--levels {levels}: {config.id} has no level sets; they are of Procgen")
        return {"": config}
    sets = {"train": config}
    if (everything := procgen.all_levels(config)) is not None:
        sets["test"] = everything
    if levels in (None, "both"):
        return sets
    if levels not in sets:
        reason = "exploration mode has one level" if levels == "test" else "train, test or both is expected"
        raise UserError(f"--levels {levels}: {reason}")
    return {levels: sets[levels]}


def _play(agent: Agent, config: EnvConfig, episodes: int, *, kind: str, seed: int) -> list[Episode]:
    squash = agent.config.model.squash
    env, _ = make_vector(config, eval_envs(episodes), seed=seed, worker=EVAL_WORKER, squash=squash)
    try:
        if kind == "random":
            return play(env, RandomPlayer(env, seed), episodes)
        rng = np.random.default_rng(seed) if kind == "stochastic" else None
        return play(env, agent.policy, episodes, rng=rng)
    finally:
        env.close()


def _write(run: Path, row: dict[str, Any], played: list[Episode]) -> list[str]:
    """Into the files of the run, if the checkpoint is one of a run: their names."""
    if not (run / "config.yaml").is_file():
        return []
    directory = RunDirectory(run)
    try:
        append_line(directory.eval_path, row)
        _append_episodes(run / "eval_episodes.csv", played, row)
        return [str(directory.eval_path), str(run / "eval_episodes.csv")]
    except OSError as error:  # somebody else's run: the figures are still worth showing
        return [f"nothing: {error.strerror} ({error.filename})"]


def render(rows: list[dict[str, Any]]) -> str:
    """The statistics as a person reads them."""
    first = rows[0]
    lines = [f"{first['kind']} policy, {first['episodes']} episodes, checkpoint {first['checkpoint']}"]
    for row in rows:
        if name := row.get("levels"):
            lines.append(f"{name} levels: {'those of the run' if name == 'train' else 'all there are'}")
        low, high = row["return_ci_low"], row["return_ci_high"]
        lines += [
            f"  return   {row['return_mean']:.2f} ± {row['return_std']:.2f}   (mean: 95 % in {low:.2f} to {high:.2f})",
            f"           median {row['return_median']:.2f}   IQM {row['return_iqm']:.2f}   "
            f"min {row['return_min']:.2f}   max {row['return_max']:.2f}",
            f"  length   {row['length_mean']:.1f} ± {row['length_std']:.1f}   "
            f"min {row['length_min']:.0f}   max {row['length_max']:.0f}",
        ]
        if row.get("return_normalized") is not None:
            lines.append(f"  score    {row['return_normalized']:.3f}   (0 a trivial agent, 1 a perfect one)")
    for row in rows:
        if "generalization_gap" in row:
            error = math.hypot(*((r["return_ci_high"] - r["return_ci_low"]) / 2 for r in rows))
            lines.append(
                f"generalisation gap {row['generalization_gap']:.2f} ± {error:.2f} (95 %): return on train levels less "
                "that on test levels"
            )
    if "levels" in first and first["kind"] == "deterministic":
        lines.append("published Procgen scores are of sampled actions: compare with --stochastic")
    return "\n".join([*lines, *(f"  written  {path}" for path in first["files"])])


def record_video(
    target: str | Path,
    output: str | Path | None,
    *,
    which: str | None,
    episodes: int,
    stochastic: bool,
    seed: int,
    levels: str | None = None,
) -> tuple[Path | None, float]:
    """Play and film (`output` is .mp4 or .gif, no display needed) or, without `output`, show in a window.

    Of Procgen: on the levels of the run, unless `levels` says otherwise."""
    _check(episodes, seed)
    agent = Agent(checkpoint.find(target, which), seed=seed)
    path = Path(output).expanduser() if output is not None else None
    if path is not None:
        _check_video(path)
        for driver in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
            os.environ.setdefault(driver, "dummy")  # pygame draws without a display, and looks for no sound card
    config = next(iter(_level_sets(agent.config.env, levels).values()))
    env = make_scalar(config, render_mode="human" if path is None else "rgb_array")
    frames: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    total = 0.0
    try:
        for episode in range(episodes):
            observation, _ = env.reset(seed=seed + episode)
            ended = False
            while not ended and len(frames) < MAX_VIDEO_FRAMES:
                if path is not None:
                    frames.append(_frame(env.render(), agent.config.env.id))
                action = agent.act(observation, stochastic=stochastic)
                observation, reward, terminated, truncated, _ = env.step(action)
                total += float(reward)
                ended = terminated or truncated
    finally:
        fps = int(env.metadata.get("render_fps") or 30)
        env.close()  # type: ignore[no-untyped-call]
    if path is not None:
        _write_video(path, frames, fps)
    return path, total / episodes


def _check(episodes: int, seed: int) -> None:
    if episodes < 1:
        raise UserError(f"--episodes {episodes}: at least 1")
    if seed < 0:
        raise UserError(f"--seed {seed}: at least 0")


def _check_video(path: Path) -> None:
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        raise UserError(f"--video {path}: the name must end in {' or '.join(VIDEO_SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--video {path}: there is no folder {path.resolve().parent}")
    try:
        import imageio.v2  # noqa: F401
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise UserError('--video needs imageio and imageio-ffmpeg: pip install "paceline[video]"') from None


def _frame(image: Any, env_id: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        raise UserError(f"--video: {env_id} does not render to an RGB image (render_mode='rgb_array')")
    height, width = image.shape[0] // 2 * 2, image.shape[1] // 2 * 2  # the codec takes even sizes
    return image[:height, :width].astype(np.uint8)


def _write_video(path: Path, frames: list[Any], fps: int) -> None:
    import imageio.v2 as imageio

    temporary = path.with_name(f".{path.stem}-partial{path.suffix}")
    try:
        if path.suffix.lower() == ".gif":
            imageio.mimwrite(temporary, frames, duration=1000.0 / fps, loop=0)
        else:
            imageio.mimwrite(temporary, frames, fps=fps, macro_block_size=2)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _append_episodes(path: Path, played: list[Episode], row: dict[str, Any]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["evaluated_at", "env_steps", "kind", "seed", "episode", "return", "length", "levels"])
        about = [f"{time.time():.0f}", row["env_steps"], row["kind"], row["seed"]]
        for number, episode in enumerate(played):
            writer.writerow([*about, number, episode.total, episode.length, row.get("levels", "")])
