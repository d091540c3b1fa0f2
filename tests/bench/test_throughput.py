from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.bench import ceilings, throughput
from paceline.bench.ceilings import Ceilings
from paceline.bench.throughput import account
from paceline.config.resolve import validate
from paceline.machine import cores
from paceline.results.runs import load_run
from paceline.run.provenance import cpu_model

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


def test_a_run_of_another_machine_has_no_ceilings(make_run: MakeRun) -> None:
    run = load_run(make_run("a"))
    elsewhere = throughput.other_machine(run)
    assert elsewhere.startswith("CPU, 4 cores; this machine is ")
    parts = account(run, validate(run.config), MACHINE, elsewhere)
    assert {part.of_ceiling for part in parts} == {None} and {part.ceiling for part in parts} == {
        "– (another machine)",
        "–",
    }
    text = throughput.page(run, parts, MACHINE, elsewhere)
    assert "No ceilings: the run was made on CPU, 4 cores" in text and "| copy * | – |" in text
    (run.path / "provenance.json").write_text(json.dumps({"cpu_model": cpu_model(), "cores": cores()}))
    assert throughput.other_machine(load_run(run.path)) == ""


def test_what_a_gpu_does_has_no_ceiling_of_the_cpu(make_run: MakeRun) -> None:
    run = load_run(make_run("a", device="Some GPU"))
    parts = {part.name: part for part in account(run, validate(run.config), MACHINE)}
    assert parts["learn"].ceiling == parts["act"].ceiling == "– (on Some GPU)" and parts["learn"].of_ceiling is None
    assert parts["env"].of_ceiling is not None and parts["copy *"].seconds is None
    run = load_run(make_run("b", device="Some GPU", engine="ray", actor_time_split={"env": 1.0, "act": 2.0}))
    parts = {part.name: part for part in account(run, validate(run.config), MACHINE)}
    assert parts["learn"].of_ceiling is None and parts["act"].of_ceiling is not None  # actors have none


def test_actors_of_a3c_learn(make_run: MakeRun) -> None:
    """Their gradients take the time, and not the learner, which adds them up."""
    actors = {"env": 1.0, "act": 2.0, "learn": 5.0}
    run = load_run(make_run("a", config={"algo": "a3c"}, engine="ray", workers=4, actor_time_split=actors))
    parts = {part.name: part for part in account(run, validate(run.config), MACHINE)}
    assert parts["learn"].seconds == 5.0
    assert parts["learn"].of_ceiling == pytest.approx(250 * 3 * 1000 / 5.0 / 20e9)


def test_epochs_that_were_left_out_are_not_counted(make_run: MakeRun) -> None:
    path = make_run("a")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "epochs_done": 2 if number else 10}) for number, row in enumerate(rows)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = load_run(path)
    assert throughput.learned_rows(run, validate(run.config)) == 100 * 10 + 900 * 2
    run = load_run(make_run("b", config={"algo": "impala", "impala": {"replay_ratio": 0.5}}))
    assert throughput.learned_rows(run, validate(run.config)) == 1500


def test_the_cores_of_a_worker(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "cores", lambda: 8)
    for engine, algo, workers, each in (("local", "ppo", 1, 0), ("ray", "ppo", 4, 2), ("ray", "impala", 3, 2)):
        run = load_run(make_run(f"{engine}-{algo}", config={"algo": algo}, engine=engine, workers=workers))
        assert throughput._cores(validate(run.config), run) == each


def test_a_profile_that_takes_too_long_leaves_nothing_behind(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    # The run, which does not listen to SIGTERM, and the profiler, which does.
    tool.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\n'
        f"sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/pid; sleep 60; sleep 60' &\nsleep 60\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(throughput, "PROFILE_SECONDS", 0.5)
    monkeypatch.setattr(throughput, "GRACE_SECONDS", 0.3)
    throughput._flame_graph(tmp_path, load_run(make_run("a")))
    assert "not drawn: still running" in capsys.readouterr().out
    assert "--max-time 10s" in (tmp_path / "words").read_text()
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while (alive := psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not alive


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
