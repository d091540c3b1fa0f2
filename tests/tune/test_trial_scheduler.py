"""After an interruption ASHA knows the scores that the trials had at its rungs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from paceline.tune.sweep_plan import make_sweep
from paceline.tune.trial_scheduler import make_scheduler


def test_rungs_are_filled_from_the_runs(tmp_path: Path) -> None:
    given = {"env": "CartPole-v1", "stop": {"total_steps": 1000}}
    sweep = make_sweep(tmp_path, given, {"ppo.gamma": [0.9, 0.95, 0.99]}, search="asha")
    for trial, score, last in zip(sweep.trials, (50.0, 20.0, 30.0), (1000, 400, 100), strict=True):
        (tmp_path / trial.name).mkdir()
        lines = [json.dumps({"env_steps": steps, "return_mean": score}) for steps in range(50, last + 1, 50)]
        (tmp_path / trial.name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        trial.steps = last
    sweep.trials[0].status = "done"
    scheduler = make_scheduler(sweep)
    found = {name: Trial(name) for name in ("1-seed0", "2-seed0")}
    for trial in found.values():
        scheduler.on_trial_add(None, trial)  # type: ignore[arg-type]
    rungs = {int(steps): recorded for steps, recorded in scheduler._brackets[0]._rungs}  # type: ignore[attr-defined]
    assert rungs == {
        100: {"0-seed0": 50.0, "id 1-seed0": 20.0, "id 2-seed0": 30.0},
        300: {"0-seed0": 50.0, "id 1-seed0": 20.0},
        900: {"0-seed0": 50.0},
    }
    result = {"steps": 300, "score": 30.0}
    assert scheduler.on_trial_result(None, found["2-seed0"], result) == "STOP"  # type: ignore[arg-type]


class Trial(SimpleNamespace):
    """The parts of a Tune trial that the scheduler reads."""

    def __init__(self, name: str) -> None:
        super().__init__(trial_id=f"id {name}", name=name)

    def __str__(self) -> str:
        return str(self.name)
