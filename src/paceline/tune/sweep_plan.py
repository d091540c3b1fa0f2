"""A search: its settings and its trials, checked before anything starts and kept in `tune.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import UserError
from paceline.config.algorithms import DEFAULT_ALGORITHM, algorithm_name
from paceline.config.plugins import absolute_everywhere
from paceline.config.resolve import put, resolve_tree
from paceline.run.directory import write_json
from paceline.run.metrics import check_metric
from paceline.tune.space import Point, Range, Space, parse_space, points

PENDING, RUNNING, STOPPED, DONE, EARLY, FAILED = "pending", "running", "stopped", "done", "stopped early", "failed"
FINAL = (DONE, EARLY, FAILED)
"""`stopped`: with the whole search, to be continued; `stopped early`: by the scheduler, for good."""
REDUCTION = 3  # asha: one trial in three continues from rung to rung
INTERVALS = 10  # by default the budget is divided into this many
FILE = "tune.json"
MAX_TRIALS = 10_000


@dataclass
class Trial:
    name: str
    point: int
    seed: int
    values: Point
    status: str = PENDING
    location: str = ""
    iteration: int = 0
    seconds: float = 0.0
    steps: int = 0
    return_mean: float | None = None
    score: float | None = None
    """The last value of the search's metric."""
    error: str = ""


@dataclass
class Sweep:
    folder: Path
    given: dict[str, Any]
    """The settings that all trials share, as the user gave them."""
    preset: str | None
    space: dict[str, Any]
    search: str
    metric: str
    mode: str
    interval: int
    """Steps to the first rung of asha, or between two exchanges of pbt; 0 for the others."""
    budget: int
    """Steps of a trial; 0: no such budget."""
    trials: list[Trial]

    @property
    def domains(self) -> Space:
        return parse_space(self.space, algorithm_name(self.given.get("algo") or DEFAULT_ALGORITHM))

    @property
    def milestones(self) -> list[int]:
        """The steps at which the scheduler decides."""
        if self.search == "pbt":
            return list(range(self.interval, self.budget, self.interval))
        rungs: list[int] = []
        while self.search == "asha" and self.interval * REDUCTION ** len(rungs) < self.budget:
            rungs.append(self.interval * REDUCTION ** len(rungs))
        return rungs

    def tree(self, trial: Trial, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings of a trial, as `paceline train` would be given them."""
        tree = deepcopy(self.given)
        for key, value in (trial.values if values is None else values).items():
            put(tree, key, deepcopy(value))
        return tree | {"seed": trial.seed}

    def save(self) -> None:
        write_json(self.folder / FILE, {**asdict(self), "folder": None})


def make_sweep(
    folder: Path,
    given: Mapping[str, Any],
    space: Mapping[str, Any],
    *,
    preset: str | None = None,
    search: str | None = None,
    trials: int | None = None,
    seeds: int = 1,
    metric: str = "return_mean",
    mode: str = "max",
    interval: int | None = None,
) -> Sweep:
    config, _ = resolve_tree(given, preset=preset)
    if config.engine.name not in ("auto", "local") or config.engine.workers > 1:
        raise UserError(
            f"engine.name={config.engine.name}, engine.workers={config.engine.workers}: a trial is one process, and "
            "--parallel sets how many run at once; leave both out"
        )
    domains = parse_space(space, config.algorithm_name, pbt=search == "pbt")
    if search is None:
        has_range = any(isinstance(domain, Range) for domain in domains.values())
        search = "random" if has_range or trials is not None else "grid"
    if search == "grid" and trials is not None:
        raise UserError(f"--trials {trials}: a grid tries all combinations; --search random draws {trials} of them")
    if search == "pbt" and seeds > 1:
        raise UserError(f"--seeds {seeds}: the members of a population already differ by seed; leave it out with pbt")
    if search == "pbt" and (trials or 0) < 4:
        raise UserError(f"--trials {trials or 'is missing'}: --search pbt needs the size of its population, at least 4")
    if (trials is not None and trials < 1) or seeds < 1:
        raise UserError("--trials and --seeds must be at least 1")
    if (trials or 1) * seeds > MAX_TRIALS:
        raise UserError(f"--trials and --seeds: {(trials or 1) * seeds:,} runs; at most {MAX_TRIALS:,} in one search")
    check_metric(metric, config.algo, f"--metric {metric}")
    budget = config.stop.total_steps or 0
    if search in ("asha", "pbt"):
        if not budget:
            raise UserError(f"--search {search} compares trials at equal steps: give a budget with --total-steps")
        interval = max(1, budget // INTERVALS) if interval is None else interval
        if not 0 < interval < budget:
            raise UserError(
                f"--interval {interval}: must be more than 0 and less than the budget of a trial, {budget:,} steps"
            )
    elif interval is not None:
        raise UserError(f"--interval {interval} is for asha and pbt; with {search}, every trial runs to its end")
    drawn = points(domains, trials, config.seed, repeat=search == "pbt")
    width = len(str(len(drawn) - 1))
    made = [
        Trial(f"{i:0{width}d}-seed{seed}", i, seed, dict(point))
        for i, point in enumerate(drawn)
        for seed in ([config.seed + i] if search == "pbt" else range(config.seed, config.seed + seeds))
    ]
    shared = {key: value for key, value in absolute_everywhere(given).items() if key not in ("out", "name", "seed")}
    sweep = Sweep(folder, shared, preset, dict(space), search, metric, mode, interval or 0, budget, made)
    for trial in made:
        resolve_tree(sweep.tree(trial), preset=preset)
    return sweep


def load_sweep(folder: Path) -> Sweep:
    path = folder / FILE
    try:
        tree = json.loads(path.read_bytes())
        return Sweep(**{**tree, "folder": folder, "trials": [Trial(**trial) for trial in tree["trials"]]})
    except FileNotFoundError:
        raise UserError(f"--resume {folder}: there is no {FILE} in it, so no search to continue") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: its runs are intact, but the search cannot be continued") from None
