from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
RUN = ["train", "--env", "CartPole-v1", "--iterations", "3", "--quiet"]
SMALL = ["--set", "ppo.rollout_steps=32", "--set", "ppo.epochs=1"]


@pytest.fixture
def runs(here: Path, cli: Cli) -> Path:
    for seed in (0, 1):
        assert cli(*RUN, *SMALL, "--seed", seed, "--name", f"ppo{seed}").code == 0
        assert cli(*RUN, "--algo", "a2c", "--seed", seed, "--name", f"a2c{seed}").code == 0
    return here / "runs"


def test_tables_and_files(runs: Path, cli: Cli) -> None:
    result = cli("compare", "runs", "--out", "out")
    assert result.code == 0, result.err
    assert "| a2c | 2 |" in result.out and "| ppo | 2 |" in result.out and "| a2c over ppo | " in result.out
    assert "reached 475" in result.out and "0 of 2" in result.out
    tree = json.loads(Path("out/compare.json").read_text())
    assert [one["label"] for one in tree["results"]] == ["a2c", "ppo"]
    rows = list(csv.DictReader(Path("out/compare.csv").read_text().splitlines()))
    assert float(rows[1]["steps_per_second"]) == pytest.approx(tree["results"][1]["steps_per_second"]["value"])
    assert Path("out/compare.png").stat().st_size > 20_000
    assert Path("out/compare.md").read_text().startswith("# Comparison\n\n```sh\npaceline compare runs --at steps")
    # By hand, from the files.
    rates = []
    for path in runs.glob("ppo*"):
        last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
        rates.append(last["env_steps"] / last["train_seconds"])
    assert tree["results"][1]["steps_per_second"]["value"] == pytest.approx(sum(rates) / 2)


def test_bad_input_is_one_clear_line(here: Path, cli: Cli) -> None:
    Path("empty").mkdir()
    assert "empty: no run in it" in cli("compare", "empty").err
    assert "there is no run at gone" in cli("compare", "gone").err
    assert cli(*RUN, *SMALL, "--name", "a").code == 0
    assert cli(*RUN[:2], "Acrobot-v1", *RUN[3:], "--set", "ppo.rollout_steps=600", "--name", "b").code == 0
    result = cli("compare", "runs", "--out", "out")
    assert result.code == 2 and "different tasks (CartPole-v1; Acrobot-v1)" in result.err and "--mixed" in result.err
    assert result.err.count("\n") == 1 and not Path("out").exists()
    result = cli("compare", "runs", "--mixed")
    assert result.code == 0 and "0 and 1 are 23 and 500 in CartPole-v1" in result.out, result.err
    assert "expected ENV=LEAST,GREATEST" in cli("compare", "runs", "--mixed", "--range", "CartPole-v1=5,1").err
    with Path("runs/a/metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "env_steps": 99')
    result = cli("compare", "runs/a")
    assert result.code == 0 and "- a: metrics.jsonl: line 4, the last one, is incomplete, skipped" in result.out
    file = Path("runs/a/provenance.json")
    file.write_text(file.read_text().replace('"paceline": "', '"paceline": "9.'))
    assert "written by paceline 9." in cli("compare", "runs/a").out
