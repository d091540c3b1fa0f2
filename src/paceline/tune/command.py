"""`paceline tune`: its words checked, before Ray and torch are imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import UserError, parse_count, parse_seconds
from paceline.resolve import tidy, validate
from paceline.tune.plan import FILE, Sweep, load_sweep, make_sweep
from paceline.tune.space import read_space

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
    """`asked`: what only a new search can be given, by the names of the flags."""
    seconds = _seconds(stop_after)
    sweep, new = _sweep(dict(given), preset, asked, resume)
    if retry and resume is None:
        raise UserError("--retry is for a search that is continued: give --resume too")
    _check_installed()
    from paceline.tune.sweep import run_sweep

    return run_sweep(sweep, parallel=parallel, gpus=gpus, max_seconds=seconds, retry=retry, new=new)


def _sweep(
    given: dict[str, Any], preset: str | None, asked: Mapping[str, Any], resume: str | None
) -> tuple[Sweep, bool]:
    """The one to continue, or a new one."""
    if resume not in (None, "auto"):
        extra = [f"--{name}" for name in asked] + (["--preset"] if preset else []) + sorted(given)
        if extra:
            raise UserError(f"--resume continues a search with its own settings: leave out {', '.join(extra)}")
        return load_sweep(Path(str(resume)).expanduser().absolute()), False
    where = validate({key: value for key, value in given.items() if key in ("out", "name")})
    if resume == "auto" and where.name is None:
        raise UserError("--resume auto needs --name: the search to continue if it exists, or to start if it does not")
    config = validate({key: value for key, value in tidy(given).items() if key in ("algo", "env")})
    name = where.name or f"tune_{config.algo}_{_word(config.env.id)}_{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (Path(where.out).expanduser() / name).absolute()
    if resume == "auto" and (folder / FILE).exists():
        return load_sweep(folder), False
    if "space" not in asked:
        raise UserError("--space is missing: a YAML file such as `ppo.learning_rate: {log: [1e-4, 1e-2]}`")
    interval = parse_count(asked["interval"]) if "interval" in asked else None
    if interval is not None and not isinstance(interval, int):
        raise UserError(f"--interval {asked['interval']}: a number of steps such as 10000, 10k or 1M")
    sweep = make_sweep(
        folder,
        given,
        preset=preset,
        space=read_space(asked["space"]),
        search=asked.get("search"),
        trials=asked.get("trials"),
        seeds=asked.get("seeds", 1),
        metric=asked.get("metric", "return_mean"),
        mode=asked.get("mode", "max"),
        interval=interval,
    )
    return sweep, True


def _seconds(said: str | None) -> float | None:
    try:
        seconds: float | None = parse_seconds(said)
    except ValueError as error:
        raise UserError(f"--stop-after {said}: {error}") from None
    if seconds is not None and seconds <= 0:
        raise UserError(f"--stop-after {said}: more than nothing")
    return seconds


def _check_installed() -> None:
    from paceline.env.catalog import is_installed

    missing = [name for name in PACKAGES if not is_installed(name)]
    if missing:
        raise UserError(f"paceline tune needs {', '.join(missing)}: pip install 'paceline[tune]'")


def _word(env_id: str) -> str:
    last = env_id.rpartition("/")[2].replace(".py:", "-")
    return "".join(letter if letter.isalnum() or letter in ".+-" else "-" for letter in last)[:60]
