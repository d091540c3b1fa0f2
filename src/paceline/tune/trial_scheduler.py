"""Ray Tune's schedulers, as a search uses them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler

from paceline.run.directory import RunDirectory
from paceline.tune.space import Choice
from paceline.tune.sweep_plan import FINAL, REDUCTION, Sweep, Trial
from paceline.tune.trial import TRIAL


class ResumableASHA(ASHAScheduler):
    """Knows the scores that the trials of an interrupted search had at the rungs."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(
            time_attr="steps",
            metric="score",
            mode=sweep.mode,
            max_t=sweep.budget,
            grace_period=sweep.interval,
            reduction_factor=REDUCTION,
        )
        self._scores = {trial.name: _rung_scores(sweep, trial) for trial in sweep.trials}
        for trial in sweep.trials:
            if trial.status in FINAL:
                self._record(self._brackets[0], SimpleNamespace(trial_id=trial.name), trial.name)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        self._record(self._trial_info[trial.trial_id], trial, str(trial))

    def _record(self, bracket: Any, trial: Any, name: str) -> None:
        sign = 1.0 if self._mode == "max" else -1.0
        for steps, score in self._scores[name]:
            bracket.on_result(trial, steps, sign * score)


def _rung_scores(sweep: Sweep, trial: Trial) -> list[tuple[int, float]]:
    """Steps and score of the first row at or past each rung."""
    found: list[tuple[int, float]] = []
    rungs = sweep.milestones
    for row in RunDirectory(sweep.folder / trial.name).read_metrics() if trial.steps else ():
        score = row.get(sweep.metric)
        if len(found) < len(rungs) and row["env_steps"] >= rungs[len(found)] and score is not None:
            found.append((row["env_steps"], float(score)))
    return found


def make_scheduler(sweep: Sweep) -> TrialScheduler:
    if sweep.search == "asha":
        return ResumableASHA(sweep)
    if sweep.search != "pbt":
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    domains, rng = sweep.domains, np.random.default_rng(sweep.trials[0].seed)
    return PopulationBasedTraining(
        time_attr="steps",
        metric="score",
        mode=sweep.mode,
        perturbation_interval=sweep.interval,
        hyperparam_mutations={
            key: list(domain.values) if isinstance(domain, Choice) else partial(domain.draw, rng)
            for key, domain in domains.items()
        },
        custom_explore_fn=lambda config: {
            key: domains[key].clamp(value) if key in domains else value for key, value in config.items()
        },
        log_config=False,
        require_attrs=False,
    )


def param_space(sweep: Sweep, todo: list[Trial]) -> dict[str, Any]:
    """Tune draws nothing, since the points are drawn already. With pbt it gets their values, to change them."""
    space: dict[str, Any] = {TRIAL: tune.grid_search([trial.name for trial in todo])}
    for key in sweep.space if sweep.search == "pbt" else ():
        values = {trial.name: trial.values[key] for trial in todo}
        space[key] = tune.sample_from(partial(_value, values))
    return space


def _value(values: dict[str, Any], spec: Any) -> Any:
    return values[spec.config[TRIAL]]
