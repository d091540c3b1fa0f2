"""`paceline tune`: checks its arguments before Ray and torch are imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import UserError, parse_count, parse_seconds
from paceline.config.resolve import tidy, validate
from paceline.tune.space import read_space
from paceline.tune.sweep_plan import FILE, Sweep, load_sweep, make_sweep

PACKAGES = ("ray", "pandas", "pyarrow")


def run_tune(
    given: Mapping[str, Any],
    *,
    preset: str | None,
    asked: Mapping[str, Any],
    resume: str | None,
    retry: bool,
    parallel: int | None,
    gpus: float,
    stop_after: str | None,
) -> int:
    """Start or continue a search, and return the exit code. `asked`: the flags that only a new search takes."""
    seconds = _seconds(stop_after)
    folder, is_new = _folder(given, preset, asked, resume)
    sweep = _new_sweep(folder, given, preset, asked) if is_new else load_sweep(folder)
    if retry and resume is None:
        raise UserError("--retry is for continuing a search: also give --resume")
    _check_installed()
    from paceline.tune.sweep import run_sweep

    return run_sweep(sweep, parallel=parallel, gpus=gpus, max_seconds=seconds, retry=retry, new=is_new)


def _folder(
    given: Mapping[str, Any], preset: str | None, asked: Mapping[str, Any], resume: str | None
) -> tuple[Path, bool]:
    """The folder of the search, and whether the search is new."""
    if resume is not None and resume != "auto":
        extra = [f"--{name}" for name in asked] + (["--preset"] if preset else []) + sorted(given)
        if extra:
            raise UserError(f"--resume continues a search with its own settings: leave out {', '.join(extra)}")
        return Path(resume).expanduser().absolute(), False
    config = validate({key: value for key, value in tidy(given).items() if key in ("out", "name", "algo", "env")})
    if resume == "auto" and config.name is None:
        raise UserError("--resume auto needs --name: the search to continue if it exists, or to start if it does not")
    name = config.name or f"tune_{config.algorithm_name}_{_word(config.env.id)}_{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (Path(config.out).expanduser() / name).absolute()
    return folder, resume != "auto" or not (folder / FILE).exists()


def _new_sweep(folder: Path, given: Mapping[str, Any], preset: str | None, asked: Mapping[str, Any]) -> Sweep:
    if "space" not in asked:
        raise UserError("--space is missing: a YAML file such as `ppo.learning_rate: {log: [1e-4, 1e-2]}`")
    options = {**asked, "space": read_space(asked["space"])}
    if "interval" in asked:
        options["interval"] = parse_count(asked["interval"])
        if not isinstance(options["interval"], int):
            raise UserError(f"--interval {asked['interval']}: expected a number of steps such as 10000, 10k or 1M")
    return make_sweep(folder, given, preset=preset, **options)


def _seconds(text: str | None) -> float | None:
    try:
        seconds: float | None = parse_seconds(text)
    except ValueError as error:
        raise UserError(f"--stop-after {text}: {error}") from None
    if seconds is not None and seconds <= 0:
        raise UserError(f"--stop-after {text}: must be more than 0")
    return seconds


def _check_installed() -> None:
    from paceline.envs.catalog import is_installed

    missing = [name for name in PACKAGES if not is_installed(name)]
    if missing:
        raise UserError(f"paceline tune needs {', '.join(missing)}: pip install 'paceline[tune]'")


def _word(env_id: str) -> str:
    last = env_id.rpartition("/")[2].replace(".py:", "-")
    return "".join(letter if letter.isalnum() or letter in ".+-" else "-" for letter in last)[:60]
