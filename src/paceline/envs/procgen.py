"""Procgen: the 16 games of Cobbe et al. (2020), each with procedurally generated levels, stepped by envpool's threads.

`coinrun`, `procgen-coinrun-v0` and `procgen:procgen-coinrun-v0` are the same game. `env.kwargs` takes the original
package's options. By default training uses the paper's levels: the first 200 in easy mode, the first 500 in others.
`num_levels=0` means all levels, on which agents are tested.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.config import EnvConfig, UserError
from paceline.envs.pool import Pool
from paceline.envs.vector import StepResult
from paceline.machine import ENVPOOL_LIBRARIES_FIX
from paceline.spaces import Array

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip

# Returns of a trivial and of a perfect agent, from the paper's appendix. (In the published code the minimum of jumper
# and leaper in easy mode is 1 and 1.5.)
SCORE_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "easy": {
        "bigfish": (1, 40), "bossfight": (0.5, 13), "caveflyer": (3.5, 12), "chaser": (0.5, 13),
        "climber": (2, 12.6), "coinrun": (5, 10), "dodgeball": (1.5, 19), "fruitbot": (-1.5, 32.4),
        "heist": (3.5, 10), "jumper": (3, 10), "leaper": (3, 10), "maze": (5, 10),
        "miner": (1.5, 13), "ninja": (3.5, 10), "plunder": (4.5, 30), "starpilot": (2.5, 64),
    },
    "hard": {
        "bigfish": (0, 40), "bossfight": (0.5, 13), "caveflyer": (2, 13.4), "chaser": (0.5, 14.2),
        "climber": (1, 12.6), "coinrun": (5, 10), "dodgeball": (1.5, 19), "fruitbot": (-0.5, 27.2),
        "heist": (2, 10), "jumper": (1, 10), "leaper": (1.5, 10), "maze": (4, 10),
        "miner": (1.5, 20), "ninja": (2, 10), "plunder": (3, 30), "starpilot": (1.5, 35),
    },
}  # fmt: skip

# Games with a mode beside easy and hard. Exploration mode is one level of hard mode per game.
EXTREME = ("chaser", "dodgeball", "leaper", "starpilot")
MEMORY = ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner")
EXPLORATION_LEVELS = {
    "caveflyer": 1259048185, "climber": 1561126160, "coinrun": 1949448038, "heist": 876640971,
    "jumper": 1434825276, "leaper": 1318677581, "maze": 158988835, "ninja": 1123500215,
}  # fmt: skip
TRAIN_LEVELS = {"easy": 200}
OTHER_TRAIN_LEVELS = 500
LAST_LEVEL = 2**31 - 1
NUMBERS = ("num_levels", "start_level")
SWITCHES = (
    "center_agent", "use_backgrounds", "use_monochrome_assets", "restrict_themes", "use_generated_assets",
    "paint_vel_info",
)  # fmt: skip
IGNORED = ("use_sequential_levels", "use_easy_jump")  # envpool 1.0.1 accepts them without any effect
FRAME_SIDE = 512

_SPELLINGS = re.compile(r"(?:procgen:)?procgen-(?P<game>[^:/]*?)(?:-v0)?", re.IGNORECASE)


def bare_name(env_id: str) -> str:
    """`procgen-coinrun-v0` → `coinrun`; any other id is returned unchanged."""
    match = _SPELLINGS.fullmatch(env_id)
    return match["game"] if match else env_id


def game_of(env_id: str) -> str | None:
    """The game that an id names, ignoring case; None if it is not a Procgen id."""
    name = bare_name(env_id).lower()
    if name in GAMES:
        return name
    if not env_id.lower().startswith("procgen-"):
        return None
    near = difflib.get_close_matches(name, GAMES, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the games are {', '.join(GAMES)}"
    raise UserError(f"env.id={env_id}: Procgen has no game '{name}'; {hint}")


def options_of(game: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The mode and envpool's other options from the user's `env.kwargs`, which are checked: envpool checks nothing."""
    mode = kwargs.get("distribution_mode", "easy")
    special = {"extreme": EXTREME, "memory": MEMORY, "exploration": tuple(EXPLORATION_LEVELS)}
    modes = ["easy", "hard", *(name for name, games in special.items() if game in games)]
    if mode not in modes:
        raise UserError(f"env.kwargs.distribution_mode={mode}: {game} has {', '.join(modes)}")
    options: dict[str, Any] = {"num_levels": TRAIN_LEVELS.get(mode, OTHER_TRAIN_LEVELS), "start_level": 0}
    for name, value in kwargs.items():
        if name == "distribution_mode":
            continue
        if name in IGNORED:
            raise UserError(f"env.kwargs.{name}: envpool's Procgen does not support it; remove it")
        if name not in (*NUMBERS, *SWITCHES):
            known = ("distribution_mode", *NUMBERS, *SWITCHES)
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
            raise UserError(f"env.kwargs.{name}: Procgen has no such option; {hint}")
        if name in SWITCHES and not isinstance(value, bool):
            raise UserError(f"env.kwargs.{name}={value}: expected true or false")
        if name in NUMBERS and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LAST_LEVEL):
            zero = "; 0 means all levels" if name == "num_levels" else ""
            raise UserError(f"env.kwargs.{name}={value}: expected a whole number from 0 to {LAST_LEVEL}{zero}")
        options[name] = value
    if mode == "exploration":
        if given := [name for name in NUMBERS if name in kwargs]:
            raise UserError(f"env.kwargs.{given[0]}: exploration mode has exactly one level; remove it")
        options |= {"num_levels": 1, "start_level": EXPLORATION_LEVELS[game]}
    if options["num_levels"] == 0 and options["start_level"]:
        raise UserError("env.kwargs.start_level has no effect with num_levels=0, which means all levels; remove it")
    if options["start_level"] + options["num_levels"] > LAST_LEVEL:
        raise UserError(f"env.kwargs: start_level + num_levels exceeds the last level, {LAST_LEVEL}")
    return mode, options


def describe(config: EnvConfig) -> str:
    """`easy, levels 0 to 199`."""
    game = game_of(config.id)
    assert game is not None
    mode, options = options_of(game, config.kwargs)
    first, count = options["start_level"], options["num_levels"]
    if count == 0:
        return f"{mode}, all levels"
    return f"{mode}, level {first}" if count == 1 else f"{mode}, levels {first} to {first + count - 1}"


def all_levels(config: EnvConfig) -> EnvConfig | None:
    """The same game on all levels, as agents are tested; None in exploration mode, which has only one level."""
    game = game_of(config.id)
    assert game is not None
    mode, _ = options_of(game, config.kwargs)
    if mode == "exploration":
        return None
    kept = {name: value for name, value in config.kwargs.items() if name != "start_level"}
    return config.model_copy(update={"kwargs": {**kept, "num_levels": 0}})


def normalized(config: EnvConfig, score: float) -> float | None:
    """`score` on the paper's scale, from 0 (trivial agent) to 1 (perfect agent); None if the paper gives no range."""
    game = game_of(config.id)
    mode = config.kwargs.get("distribution_mode", "easy")
    if game is None or mode not in SCORE_RANGES:
        return None
    low, high = SCORE_RANGES[mode][game]
    return (score - low) / (high - low)


class ProcgenPool(Pool):
    def __init__(
        self, game: str, kwargs: Mapping[str, Any], num_envs: int, *, threads: int = 1, render: bool = False
    ) -> None:
        mode, self._options = options_of(game, kwargs)
        task = "hard" if mode == "exploration" else mode
        self._task = f"{game.capitalize()}{task.capitalize()}-v0"
        self._options |= {"num_envs": num_envs, "num_threads": min(threads, num_envs)}
        if render:
            self._options |= {"render_mode": "rgb_array", "render_width": FRAME_SIDE, "render_height": FRAME_SIDE}
        self._make = import_envpool()
        self._pool: Any = None
        self.observation_space = spaces.Box(0, 255, (3, 64, 64), np.uint8)
        self.action_space = spaces.Discrete(15)

    def reset(self, seeds: Sequence[int]) -> Array:
        # envpool takes seeds only in `make`, which is quick; the default is 42 in every process.
        self._pool = self._make(self._task, env_type="gymnasium", seed=list(seeds), **self._options)
        observation, self.info = self._pool.reset()
        return observation  # type: ignore[no-any-return]

    def send(self, action: Array) -> None:
        self._pool.send(action.astype(np.int32))

    def receive(self) -> StepResult:
        observation, reward, terminated, truncated, self.info = self._pool.recv()
        # A time limit is part of each game. The original reports only `done`, so the paper's agents treat a timeout as
        # termination. To be comparable, so do these.
        return observation, reward, terminated | truncated, np.zeros_like(truncated)

    def frame(self) -> NDArray[np.uint8]:
        return self._pool.render()[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        self._pool = None


def import_envpool() -> Any:
    """`envpool.make`, after checking that its Procgen module loads."""
    with contextlib.suppress(ImportError):
        from gym_notices import notices

        notices.notices.clear()  # envpool imports gym, which prints a notice about Gymnasium
    try:
        import envpool
        import envpool.procgen  # envpool alone hides why this fails
    except ImportError as error:
        raise UserError(explain_import_error(error)) from error
    return envpool.make


def explain_import_error(error: ImportError) -> str:
    """Why envpool does not load and what to do, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        return f'Procgen needs the package {error.name}, which is not installed: pip install "paceline[procgen]"'
    if match := re.match(r"(\S+\.so[.\d]*): cannot open shared object", text):
        return f"Procgen needs the system library {match[1]}, which is not on this machine: {ENVPOOL_LIBRARIES_FIX}"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"Procgen does not load with Python {version} on {sys.platform}: {text}; run `paceline doctor` to find out why"
    )
