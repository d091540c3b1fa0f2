"""The memory of a run, estimated and measured, and the sizes that follow from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

import paceline
from paceline import machine
from paceline.config import RunConfig, UserError
from paceline.config.resolve import names_envs, resolve_tree
from paceline.spaces import ActionCodec, ObservationCodec
from paceline.training import memory
from paceline.training.memory import FACTOR, Resources, check_vectors, estimate, fit_to_memory, measure

GB = 10**9
IMPALA = {"cnn": "impala", "hidden": [256], "shared": True}


def config_of(preset: str | None = None, **tree: Any) -> RunConfig:
    return resolve_tree({"env": "coinrun"} | tree, preset=preset)[0]


def of_sizes(envs: int, steps: int, rows: int, *, env: str = "coinrun", model: Any = None) -> RunConfig:
    ppo = {"rollout_steps": steps, "minibatch_size": rows}
    return config_of(env={"id": env, "envs_per_worker": envs}, ppo=ppo, model=model or {})


def estimated(config: RunConfig) -> int:
    footprint, _ = measure(config)
    assert footprint is not None
    return estimate(config, footprint, config.engine.workers or 1)


@pytest.mark.needs("procgen")
@pytest.mark.parametrize(
    ("config", "measured"),
    [
        (of_sizes(8, 16, 128), 0.78),
        (of_sizes(64, 16, 256), 0.91),
        (of_sizes(64, 128, 1024), 1.42),
        (of_sizes(64, 128, 4096), 1.71),
        (of_sizes(8, 32, 256, model=IMPALA), 1.22),
        (of_sizes(32, 16, 128, model=IMPALA), 0.99),
        (of_sizes(32, 64, 512, env="ALE/Pong-v5"), 0.84),
        (config_of("procgen-cpu"), 1.24),
        (config_of("procgen-paper"), 2.01),
        (config_of(engine={"workers": 2}), 2.49),
        (config_of(engine={"workers": 4}), 3.75),
        (config_of(algo="impala", engine={"workers": 2}), 2.7),
    ],
)
def test_the_estimate_against_what_was_measured(config: RunConfig, measured: float) -> None:
    assert 1 / FACTOR < estimated(config) / GB / measured < FACTOR


@pytest.mark.needs("procgen")
def test_the_estimate_against_a_run(tmp_path: Path) -> None:
    words = "--env coinrun --device cpu --iterations 2 --envs-per-worker 64 --set ppo.rollout_steps=32 --name x"
    argv = [sys.executable, "-m", "paceline", "train", *words.split(), "--set", "ppo.epochs=1", "--out", str(tmp_path)]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    measured = json.loads((tmp_path / "x" / "summary.json").read_text())["peak_memory_bytes"]
    assert 1 / FACTOR < estimated(of_sizes(64, 32, 1024)) / measured < FACTOR


@pytest.mark.needs("procgen")
def test_what_does_not_fit_is_lowered_if_nobody_named_it() -> None:
    small = Resources(2, round(1.4 * GB))
    config, lines = fit_to_memory(config_of(), may_lower=True, here=small)
    assert config.env.envs_per_worker == 16 and config.hyper.minibatch_size == 1024
    assert lines[0].endswith("about 1.1 GB of 1.4 GB; 16 environments instead of 32, as more would not fit")
    message = r"32 environments x 128 steps, minibatch 1024 need about 1\.2 GB, more than the usable 1\.1 GB"
    with pytest.raises(UserError, match=message):
        fit_to_memory(config_of(), may_lower=False, here=small)
    with pytest.raises(UserError, match=r"lower env.envs_per_worker or ppo.rollout_steps"):
        fit_to_memory(config_of(), may_lower=True, here=Resources(2, GB // 2))
    roomy, lines = fit_to_memory(config_of(), may_lower=True, here=Resources(64, 512 * GB))
    assert roomy == config_of() and lines == [
        "sizes      32 environments x 128 steps, minibatch 1024: about 1.2 GB of 512 GB"
    ]


def test_who_named_the_environments() -> None:
    assert not names_envs({"env": "coinrun"}, None)
    assert names_envs({"env": "coinrun"}, "procgen-paper") and names_envs({"preset": "none"}, None)
    assert names_envs({"env": {"id": "coinrun", "envs_per_worker": 8}}, None)


@pytest.mark.needs("procgen")
@pytest.mark.parametrize(
    ("cores", "gigabytes", "envs", "rows"),
    [
        (1, 64, 16, 512),
        (2, 64, 32, 1024),
        (4, 64, 64, 2048),
        (64, 64, 128, 2048),
        (64, 2, 32, 1024),
        (64, 1.3, 16, 512),
    ],
)
def test_auto_follows_cores_and_memory(cores: int, gigabytes: float, envs: int, rows: int) -> None:
    tree = config_of(env={"id": "coinrun", "envs_per_worker": "auto"}, ppo={"minibatch_size": 0})
    config, lines = fit_to_memory(tree, may_lower=False, here=Resources(cores, round(gigabytes * GB)))
    assert (config.env.envs_per_worker, config.hyper.minibatch_size) == (envs, rows)
    assert f"{envs} environments x 128 steps, minibatch {rows}" in lines[0]


def test_auto_for_vectors_is_the_default() -> None:
    tree = {"env": {"id": "Pendulum-v1", "envs_per_worker": 0}, "ppo": {"minibatch_size": "auto"}}
    config, lines = fit_to_memory(resolve_tree(tree, preset="none")[0], may_lower=True, here=Resources(64, GB))
    assert (config.env.envs_per_worker, config.hyper.minibatch_size, lines) == (8, 256, [])


def test_others_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure", lambda _: pytest.fail("an environment was made"))
    config = resolve_tree({"env": "CartPole-v1"})[0]
    assert fit_to_memory(config, may_lower=True, here=Resources(1, 10**7)) == (config, [])


@pytest.mark.needs("procgen")
@pytest.mark.parametrize("algo", ["ppo", "a2c", "a3c", "impala"])
def test_workers_that_do_not_fit(algo: str) -> None:
    tree = {"algo": algo, "engine": {"name": "ray"}}
    config, lines = fit_to_memory(config_of(**tree), may_lower=True, here=Resources(16, 8 * GB))
    assert 1 < config.engine.workers < 16 and "workers instead of 1" in lines[0]
    footprint, _ = measure(config)
    assert footprint is not None and estimate(config, footprint, config.engine.workers) <= 0.8 * 8 * GB
    roomy, _ = fit_to_memory(config_of(**tree), may_lower=True, here=Resources(16, 64 * GB))
    assert roomy.engine.workers == 0  # the engine's choice
    many = config_of(algo=algo, engine={"workers": 16})
    with pytest.raises(UserError, match=r"or engine\.workers$"):
        fit_to_memory(many, may_lower=False, here=Resources(16, 8 * GB))


def test_a_run_with_auto_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {
        "env": {"id": "paceline/ImageSide-v0", "envs_per_worker": "auto"},
        "ppo": {"rollout_steps": 8, "minibatch_size": "auto", "epochs": 1},
        "stop": {"iterations": 1},
        "out": str(tmp_path),
        "name": "x",
    }
    run = paceline.train(tree, preset="none", quiet=False)
    saved = run.read_config()
    assert saved["env"]["envs_per_worker"] >= 16 and saved["ppo"]["minibatch_size"] > 0
    assert f"sizes      {saved['env']['envs_per_worker']} environments x 8 steps" in capsys.readouterr().out
    again = paceline.train(tree | {"stop": {"iterations": 2}}, preset="none", resume="auto")
    assert again.summary["iterations"] == 2 and again.read_config()["env"] == saved["env"]


def test_observations_too_wide_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_tree({"env": "CartPole-v1"}, preset="none")[0]
    action = ActionCodec(spaces.Discrete(2))
    wide, narrow = (ObservationCodec(spaces.Box(-1, 1, (size,))) for size in (2_000_000, 2_000))
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 16 * GB)
    check_vectors(config, narrow, action, 8)
    with pytest.raises(UserError, match=r"2,000,000 numbers .* 20 GB, .* 13 GB: lower .*ppo.rollout_steps"):
        check_vectors(config, wide, action, 8)
    check_vectors(config, wide, action, 1)
