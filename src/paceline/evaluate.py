"""Play episodes with a checkpoint: statistics, rows in `eval.jsonl` and `eval_episodes.csv`, a video."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import numpy as np

from paceline.agent import Agent
from paceline.callable_module import make_callable
from paceline.config import EnvConfig, RunConfig, UserError
from paceline.config.resolve import leaves, to_tree, validate
from paceline.envs import procgen
from paceline.envs.contract import close_env, layers, same_folder
from paceline.envs.make import make_env, make_vector
from paceline.envs.multi_agent import AgentsEnv
from paceline.envs.solved import solved_return
from paceline.envs.vector import VectorEnv
from paceline.rollout.baselines import ConstantPolicy, RandomPolicy
from paceline.rollout.batch import Episode
from paceline.rollout.episodes import EVAL_WORKER, MAX_EPISODE_STEPS, env_metrics, eval_envs, per_agent, play
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory, append_line
from paceline.stats import summarize

VIDEO_SUFFIXES = (".mp4", ".gif")
MAX_VIDEO_FRAMES = 3000


def evaluate(
    target: str | os.PathLike[str],
    *,
    which: str | None = None,
    episodes: int = 100,
    stochastic: bool = False,
    seed: int = 0,
    random: bool = False,
    constant: Any = None,
    levels: str | None = None,
    env: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Play exactly `episodes` episodes and return their statistics, which are also added to the files of the run.

    The result is one row; for Procgen one row for each of `train` (the levels of the run) and `test` (all levels),
    unless `levels` names one of them. `env`: settings of the section `env` that differ from those of the run, such as
    `{"kwargs": {"map": "other"}}`. `constant`: an action to take at every step, instead of the agent's.
    """
    _check(episodes, seed)
    agent = Agent(checkpoint.find(target, which), seed=seed)
    agent.check(stochastic=stochastic)
    kind = "random" if random else "stochastic" if stochastic else "deterministic"
    kind = kind if constant is None else "constant"
    own = changed_env(agent.config, env or {})
    rows: list[dict[str, Any]] = []
    for name, config in _level_sets(own, levels).items():
        began = time.perf_counter()
        played, restarts = _play(agent, config, episodes, kind=kind, seed=seed, constant=constant)
        row: dict[str, Any] = {
            "kind": kind,
            "checkpoint": str(agent.path),
            "iteration": agent.counters["iteration"],
            "env_steps": agent.counters["env_steps"],
            "seed": seed,
            **summarize([e.total for e in played], [e.length for e in played]),
            **env_metrics(played),
        }
        if constant is not None:
            row["action"] = str(constant)
        if env:
            row["env_settings"] = dict(leaves(env))
        goal = agent.config.stop.return_mean
        threshold = solved_return(config.id) if goal is None else goal
        if threshold is not None:
            row |= {"solved_return": threshold, "solved": row["return_mean"] >= threshold}
        if any(episode.agents > 1 for episode in played):
            row |= per_agent(played)
        if restarts:
            row["env_restarts"] = restarts
        if name:
            row["levels"] = name
            row["return_normalized"] = procgen.normalized(config, row["return_mean"])
        if rows:
            row["generalization_gap"] = rows[0]["return_mean"] - row["return_mean"]
        row["eval_seconds"] = time.perf_counter() - began
        rows.append(row | {"files": _write(agent.place, row, played)})
    return rows


def changed_env(config: RunConfig, changes: Mapping[str, Any]) -> EnvConfig:
    """The environment of a run with other settings; arguments that are not named stay."""
    if not changes:
        return config.env
    tree = to_tree(config)
    return validate({**tree, "env": _over(tree["env"], changes)}).env


def _over(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _level_sets(config: EnvConfig, levels: str | None) -> dict[str, EnvConfig]:
    """Name → environment. An environment other than Procgen has one unnamed set."""
    if procgen.game_of(config.id) is None:
        if levels is not None:
            raise UserError(f"--levels {levels}: {config.id} has no level sets; only Procgen has them")
        return {"": config}
    sets = {"train": config}
    if (everything := procgen.all_levels(config)) is not None:
        sets["test"] = everything
    if levels in (None, "both"):
        return sets
    if levels not in sets:
        reason = "exploration mode has one level" if levels == "test" else "expected train, test or both"
        raise UserError(f"--levels {levels}: {reason}")
    return {levels: sets[levels]}


def _play(
    agent: Agent, config: EnvConfig, episodes: int, *, kind: str, seed: int, constant: Any
) -> tuple[list[Episode], int]:
    """The episodes, and how many environments failed and were started again."""
    squash = agent.config.model.squash
    with same_folder():
        policies, masked = agent.config.multi_agent.policies, bool(agent.policy.observation.mask)
        env, _ = make_vector(
            config,
            eval_envs(episodes),
            seed=seed,
            worker=EVAL_WORKER,
            squash=squash,
            policies=policies,
            masked=masked,
        )
        try:
            _check_spaces(agent, env, config)
            if kind in ("random", "constant"):
                baseline = RandomPolicy(env, seed) if kind == "random" else ConstantPolicy(env, constant)
                return play(env, baseline, episodes), env.env_restarts
            rng = np.random.default_rng(seed) if kind == "stochastic" else None
            return play(env, agent.policy, episodes, rng=rng), env.env_restarts
        finally:
            env.close()


def _check_spaces(agent: Agent, env: VectorEnv, config: EnvConfig) -> None:
    """UserError if a changed environment has other spaces than the agent was trained on."""
    if env.team is not None or config == agent.config.env:
        return
    for name, mine, given in (
        ("observation", agent.policy.observation, env.observation),
        ("action", agent.policy.action, env.action),
    ):
        if (mine.shape, mine.dtype) != (given.shape, given.dtype) or getattr(mine, "nvec", ()) != getattr(
            given, "nvec", ()
        ):
            raise UserError(
                f"env: the changed environment has the {name} space {given.space}, but the agent was trained on "
                f"{mine.space}"
            )


def _write(run: Path, row: dict[str, Any], played: list[Episode]) -> list[str]:
    """Add to the files of the run, if the checkpoint is in one. Returns their names."""
    if not (run / "config.yaml").is_file():
        return []
    directory = RunDirectory(run)
    try:
        append_line(directory.eval_path, row)
        _append_episodes(run / "eval_episodes.csv", played, row)
        return [str(directory.eval_path), str(run / "eval_episodes.csv")]
    except OSError as error:  # a run of another user, for example: still show the statistics
        return [f"nothing: {error.strerror} ({error.filename})"]


def render(rows: list[dict[str, Any]]) -> str:
    """The statistics as text."""
    first = rows[0]
    action = f" ({first['action']})" if "action" in first else ""
    lines = [f"{first['kind']} policy{action}, {first['episodes']} episodes, checkpoint {first['checkpoint']}"]
    if changes := first.get("env_settings"):
        lines.append("with " + ", ".join(f"env.{key}={value}" for key, value in changes.items()))
    for row in rows:
        if name := row.get("levels"):
            lines.append(f"{name} levels: {'those of the run' if name == 'train' else 'all'}")
        interval = f"95 % CI of the mean: {row['return_ci_low']:.2f} to {row['return_ci_high']:.2f}"
        lines += [
            f"  return   {row['return_mean']:.2f} ± {row['return_std']:.2f}   ({interval})",
            f"           median {row['return_median']:.2f}   IQM {row['return_iqm']:.2f}   "
            f"min {row['return_min']:.2f}   max {row['return_max']:.2f}",
            *_team_line(row),
            f"  length   {row['length_mean']:.1f} ± {row['length_std']:.1f}   "
            f"min {row['length_min']:.0f}   max {row['length_max']:.0f}",
        ]
        if row.get("env_restarts"):
            lines.append(
                f"  {row['env_restarts']} environment(s) failed and were started again; their episodes do not count"
            )
        lines += [f"  {name:<8} {value:.4g}" for name, value in row.items() if name.startswith("env/")]
        lines += _solved_line(row)
        if row.get("return_normalized") is not None:
            lines.append(f"  score    {row['return_normalized']:.3f}   (0: trivial agent, 1: perfect agent)")
    for row in rows:
        if "generalization_gap" in row:
            error = math.hypot(*((r["return_ci_high"] - r["return_ci_low"]) / 2 for r in rows))
            gap = f"generalisation gap {row['generalization_gap']:.2f} ± {error:.2f} (95 %)"
            lines.append(f"{gap}: return on train levels minus return on test levels")
    if any(row["length_max"] >= MAX_EPISODE_STEPS for row in rows):
        lines.append(
            f"episodes were cut at {MAX_EPISODE_STEPS:,} steps: env.max_episode_steps sets a limit of your own"
        )
    if "levels" in first and first["kind"] == "deterministic":
        lines.append("published Procgen scores use sampled actions: compare them with --stochastic")
    return "\n".join([*lines, *(f"  written  {path}" for path in first["files"])])


def _solved_line(row: dict[str, Any]) -> list[str]:
    if "solved" not in row:
        return []
    needed = f"{row['solved_return']:g}"
    if not row["solved"]:
        return [f"  solved   no: a mean of {needed} is needed"]
    sure = row["return_ci_low"] >= row["solved_return"]
    return [f"  solved   yes: the mean reaches {needed}" + ("" if sure else ", but its interval goes below it")]


def _team_line(row: dict[str, Any]) -> list[str]:
    mean = row.get("return_per_agent_mean")
    if mean is None:
        return []
    lines = [f"           of all agents together; per agent {mean:.2f}"]
    own = {name.split("/")[1]: value for name, value in row.items() if name.startswith("policy/")}
    return lines + [f"           per agent of {name} {value:.2f}" for name, value in own.items()]


def record_video(
    target: str | Path,
    output: str | Path | None,
    *,
    which: str | None,
    episodes: int,
    stochastic: bool,
    seed: int,
    levels: str | None = None,
    env: Mapping[str, Any] | None = None,
) -> tuple[Path | None, float]:
    """Play and record a video (`output` is .mp4 or .gif, no display needed) or, without `output`, show a window.

    Procgen uses the levels of the run unless `levels` is given. Returns the path and the mean return."""
    _check(episodes, seed)
    agent = Agent(checkpoint.find(target, which), seed=seed)
    path = Path(output).expanduser() if output is not None else None
    if path is not None:
        _check_video(path)
        for driver in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
            os.environ.setdefault(driver, "dummy")  # pygame then needs no display and no sound card
        use_offscreen_mujoco()
    config = next(iter(_level_sets(changed_env(agent.config, env or {}), levels).values()))
    frames: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    total = 0.0
    with same_folder():
        played = make_env(config, render_mode="human" if path is None else "rgb_array")
        advance = _advance_team if isinstance(played, AgentsEnv) else _advance
        try:
            for episode in range(episodes):
                observation, info = played.reset(seed=seed + episode)
                agent.reset()
                ended = False
                while not ended and len(frames) < MAX_VIDEO_FRAMES:
                    if path is not None:
                        frames.append(_frame(_render(played, config.id), config.id))
                    observation, info, reward, ended = advance(played, agent, observation, info, stochastic)
                    total += reward
        finally:
            fps = int(played.metadata.get("render_fps") or 30)
            close_env(played)
    if path is not None:
        _write_video(path, frames, fps)
    return path, total / episodes


def _advance(env: Any, agent: Agent, observation: Any, info: Any, stochastic: bool) -> tuple[Any, Any, float, bool]:
    """One step: the next observation and info, the reward, and whether the episode ended."""
    mask = agent.mask_of(env, observation, info)
    action = agent.act(observation, deterministic=not stochastic, mask=mask)
    observation, reward, terminated, truncated, info = env.step(action)
    return observation, info, float(reward), bool(terminated or truncated)


def _advance_team(env: Any, agent: Agent, here: Any, infos: Any, stochastic: bool) -> tuple[Any, Any, float, bool]:
    """The same for several agents: observations of those that are there, and the sum of the rewards."""
    result = env.step(agent.act_for(here, infos, deterministic=not stochastic))
    here, reward, over = env.after(result)
    return here, result[4], reward, over


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


def use_offscreen_mujoco() -> None:
    """Without a display, let MuJoCo render with EGL or OSMesa, if one of them is there. It reads MUJOCO_GL when it is
    imported, and would look for a display by default."""
    if "MUJOCO_GL" in os.environ or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    for name, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
        if find_library(library):
            os.environ["MUJOCO_GL"] = name
            return


def _render(env: Any, env_id: str) -> Any:
    try:
        return env.render()
    except Exception as error:  # of OpenGL, GLFW or MuJoCo, each with its own types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        hint = ""
        if any(type(layer).__module__.startswith("gymnasium.envs.mujoco") for layer in layers(env)):
            hint = (
                f"; MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}: without a display MuJoCo needs MUJOCO_GL=egl (a GPU "
                "driver or the library libEGL) or MUJOCO_GL=osmesa (the library libOSMesa)"
            )
        raise UserError(f"--video: {env_id} cannot render: {reason}{hint}") from error


def _frame(image: Any, env_id: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        raise UserError(f"--video: {env_id} does not render to an RGB image (render_mode='rgb_array')")
    height, width = image.shape[0] // 2 * 2, image.shape[1] // 2 * 2  # the codec needs even sizes
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


make_callable(__name__, "evaluate")
