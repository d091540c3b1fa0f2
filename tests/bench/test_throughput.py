from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import ceilings
from paceline.bench.ceilings import Ceilings
from paceline.bench.study import load_run
from paceline.bench.throughput import account
from paceline.resolve import validate

Cli = Callable[..., Any]
MakeRun = Callable[..., Path]
MACHINE = Ceilings(800.0, 50.0, 20.0, None, 10.0, 2.0, 50.0, 1, 1000, 16)


def test_parts_by_hand(make_run: MakeRun) -> None:
    """1000 steps of two workers in 2.5 s of env and 7.5 s of learning each, ten epochs over them."""
    run = load_run(make_run("a", workers=2, engine="ray", bytes_moved=8e9))
    parts = {part.name: part for part in account(run, validate(run.config), MACHINE)}
    assert parts["env"].seconds == 2.5 and parts["env"].rate == "200 steps/s" and parts["env"].of_ceiling == 0.25
    assert parts["env"].share == pytest.approx(2.5 / 15) and parts["start"].seconds == 5.0
    # 500 steps x 10 epochs x 3 passes x 1000 FLOP in 7.5 s, of 20 GFLOP/s.
    assert parts["learn"].of_ceiling == pytest.approx(500 * 10 * 3 * 1000 / 7.5 / 20e9)
    assert parts["copy *"].seconds == pytest.approx((500 + 5000) * 16 / 10e9)
    assert parts["sync"].of_ceiling == 0.0  # no time was measured for it


def test_a_run_there_is(here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "SECONDS", 0.02)
    words = ["train", "--env", "CartPole-v1", "--iterations", "3", "--set", "ppo.epochs=2", "--quiet", "--name", "a"]
    assert cli(*words).code == 0
    result = cli("bench", "throughput", "runs/a", "--out", "out")
    assert result.code == 0, result.err
    tree = json.loads(Path("out/throughput.json").read_text())
    parts = {part["name"]: part for part in tree["parts"]}
    assert list(parts)[:6] == ["env", "act", "copy *", "learn", "sync", "log"]
    assert 0 < parts["env"]["of_ceiling"] < 1.5 and 0 < parts["learn"]["of_ceiling"] < 1
    made = tree["ceilings"]
    # Two towers of 64-64 over 4 inputs, with 2 outputs and 1.
    assert made["forward_flop"] == 2 * (2 * (4 * 64 + 64 * 64) + 64 * 2 + 64)
    assert made["copy_gbytes_per_second"] > 0.1 and made["network_gbytes_per_second"] > 0.01
    assert 1 < made["round_trip_microseconds"] < 50_000 and made["conv_gflops"] is None
    total = sum(part["seconds"] for part in tree["parts"] if part["name"] != "copy *")
    last = json.loads(Path("runs/a/metrics.jsonl").read_text().splitlines()[-1])
    assert total == pytest.approx(last["wall_seconds"], rel=0.02)


def test_bad_input_writes_nothing(here: Path, cli: Cli) -> None:
    assert "there is no run at gone" in cli("bench", "throughput", "gone").err
    assert "give one of them" in cli("bench", "throughput", "gone", "--env", "CartPole-v1").err
    assert "ppo.gama" in cli("bench", "throughput", "--set", "ppo.gama=1").err
    assert not list(here.iterdir())
