"""Run directories with known figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import __version__
from paceline.resolve import merge, resolve_tree, to_tree
from paceline.run.directory import append_line

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run of ten iterations of 100 steps, a second each after 5 s of start; `returns` by iteration."""

    def make(
        name: str,
        returns: list[float] | None = None,
        *,
        config: dict[str, Any] | None = None,
        state: str = "done",
        reason: str = "10 of 10 iterations done",
        seconds: float = 1.0,
        engine: str = "local",
        workers: int = 1,
        version: str = __version__,
        **summary: Any,
    ) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True)
        returns = returns if returns is not None else [10.0 * number for number in range(1, 11)]
        given = merge({"env": {"id": "CartPole-v1"}, "stop": {"iterations": 10}}, config or {})
        settings = to_tree(resolve_tree(given)[0])
        (path / "config.yaml").write_text(yaml.safe_dump(settings))
        (path / "provenance.json").write_text(json.dumps({"paceline": version, "cpu_model": "CPU", "cores": 4}))
        for number, value in enumerate(returns, start=1):
            spent = seconds * number
            row = {"iteration": number, "env_steps": 100 * number, "return_mean": value}
            row |= {"wall_seconds": 5.0 + spent, "train_seconds": spent, "time_start_seconds": 5.0}
            append_line(
                path / "metrics.jsonl", row | {"time_env_seconds": spent / 4, "time_learn_seconds": 3 * spent / 4}
            )
        ended = {"status": state, "algo": settings["algo"], "env": settings["env"]["id"], "engine": engine}
        ended |= {"workers": workers, "seed": settings["seed"], "env_steps": 100 * len(returns)}
        ended |= {"verdict": "learner-bound: 75 % of the time is gradient steps"}
        (path / "summary.json").write_text(json.dumps(ended | summary))
        (path / "status.json").write_text(json.dumps({"state": state, "reason": reason, "host": "gone", "pid": 1}))
        return path

    return make
