"""What was asked for → a sweep: its settings and its trials, checked before anything starts and kept in `tune.json`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, UserError
from paceline.plugins import absolute_everywhere
from paceline.resolve import put, resolve_tree
from paceline.run.directory import write_json
from paceline.run.metrics import METRICS
from paceline.tune.space import Point, Range, Space, parse_space, points

SEARCHES = ("grid", "random", "asha", "pbt")
PENDING, RUNNING, STOPPED, DONE, EARLY, FAILED = "pending", "running", "stopped", "done", "stopped early", "failed"
FINAL = (DONE, EARLY, FAILED)
"""`stopped`: with the sweep, to be continued; `stopped early`: by the scheduler, for good."""
REDUCTION = 3  # of asha: one in so many goes on from rung to rung
SHARE = 10  # of the budget: the first rung of asha, the time between two exchanges of pbt
FILE = "tune.json"


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
    """The metric that is searched by, as it was last."""
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
    """Steps: of asha to its first rung, of pbt between two exchanges; 0 for the others."""
    budget: int
    """Steps of a trial, where there is such a budget; else 0."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def domains(self) -> Space:
        return parse_space(self.space, self.given.get("algo") or RunConfig.model_fields["algo"].default)

    @property
    def milestones(self) -> list[int]:
        """Steps at which the scheduler looks."""
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
        tree["seed"] = trial.seed
        return tree

    def save(self) -> None:
        write_json(self.folder / FILE, {**asdict(self), "folder": None})


def make_sweep(
    folder: Path,
    given: Mapping[str, Any],
    *,
    preset: str | None,
    space: Mapping[str, Any],
    search: str | None,
    trials: int | None,
    seeds: int,
    metric: str,
    mode: str,
    interval: int | None,
) -> Sweep:
    first, _ = resolve_tree(given, preset=preset)
    _check_engine(first)
    domains = parse_space(space, first.algo, pbt=search == "pbt")
    ranged = any(isinstance(domain, Range) for domain in domains.values())
    search = search or ("random" if ranged or trials is not None else "grid")
    if search == "grid" and trials is not None:
        raise UserError(f"--trials {trials}: a grid is all combinations; --search random draws {trials} of them")
    if search == "pbt" and seeds > 1:
        raise UserError(f"--seeds {seeds}: the members of a population differ by seed already; leave it out with pbt")
    if search == "pbt" and (trials or 0) < 4:
        raise UserError(f"--trials {trials or 'is missing'}: --search pbt needs the size of its population, at least 4")
    if (trials is not None and trials < 1) or seeds < 1:
        raise UserError("--trials and --seeds are whole numbers from 1 up")
    if metric not in METRICS and not metric.startswith("env/"):
        near = difflib.get_close_matches(metric, METRICS, 1) or ["return_mean"]
        raise UserError(f"--metric {metric}: there is no such metric; did you mean {near[0]!r}?")
    drawn = points(domains, trials, first.seed, again=search == "pbt")
    width = len(str(len(drawn) - 1))
    made = [
        Trial(f"{i:0{width}d}-seed{seed}", i, seed, dict(point))
        for i, point in enumerate(drawn)
        for seed in ([first.seed + i] if search == "pbt" else range(first.seed, first.seed + seeds))
    ]
    budget = first.stop.total_steps or 0
    if search in ("asha", "pbt"):
        if not budget:
            raise UserError(f"--search {search} compares trials at the same steps: give a budget with --total-steps")
        interval = max(1, budget // SHARE) if interval is None else interval
        if not 0 < interval < budget:
            raise UserError(f"--interval {interval}: more than 0 and less than the budget of a trial, {budget:,} steps")
    elif interval is not None:
        raise UserError(f"--interval {interval} is for asha and pbt; {search} lets every trial run to its end")
    tree = {key: value for key, value in absolute_everywhere(dict(given)).items() if key not in ("out", "name", "seed")}
    sweep = Sweep(folder, tree, preset, dict(space), search, metric, mode, interval or 0, budget, made)
    for trial in made:
        resolve_tree(sweep.tree(trial), preset=preset)
    return sweep


def load_sweep(folder: Path) -> Sweep:
    path = folder / FILE
    try:
        tree = json.loads(path.read_bytes())
        tree["folder"] = folder
        tree["trials"] = [Trial(**trial) for trial in tree["trials"]]
        return Sweep(**tree)
    except FileNotFoundError:
        raise UserError(f"--resume {folder}: there is no {FILE} in it, so no search to continue") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged: the runs beside it are whole, but the search cannot be continued"
        ) from None


def _check_engine(config: RunConfig) -> None:
    engine = config.engine
    if engine.name not in ("auto", "local") or engine.workers > 1:
        raise UserError(
            f"engine.name={engine.name}, engine.workers={engine.workers}: a trial is one process, and --parallel says "
            "how many run at once; leave both out"
        )
