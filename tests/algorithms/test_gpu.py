"""What runs on a GPU, on the CPU: the same actions, rollouts, losses and weights as the plain way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import paceline
from paceline.algorithms.impala import IMPALA
from paceline.algorithms.ppo import PPO
from paceline.config import EnvConfig, ModelConfig, UserError
from paceline.config.resolve import resolve_tree
from paceline.engines import actor_learner
from paceline.envs.make import make_vector
from paceline.models import gpu
from paceline.models.gpu import GpuPolicy, find_device
from paceline.models.policy import Policy
from paceline.rollout.batch import Batch
from paceline.rollout.collector import Collector, InterleavedCollector
from paceline.rollout.gpu_collector import GpuCollector
from paceline.spaces import ActionCodec, ObservationCodec

MODEL = ModelConfig(hidden=(32,), activation="relu", shared=True)
STEPS, ENVS = 12, 4


def vectors(count: int) -> list[Any]:
    made = [
        make_vector(EnvConfig(id="paceline/ImageSide-v0"), ENVS // count, seed=3, first_env=k * ENVS // count)[0]
        for k in range(count)
    ]
    return made


def policy(device: str | None) -> Policy:
    env = vectors(1)[0]
    if device is None:
        return Policy(env.observation, env.action, MODEL, seed=1)
    return GpuPolicy(env.observation, env.action, MODEL, device=device, seed=1)


def collector(device: str | None, count: int, **options: Any) -> Collector:
    rng = np.random.default_rng(5)
    made = policy(device)
    if isinstance(made, GpuPolicy):
        return GpuCollector(vectors(count), made, steps=STEPS, rng=rng, **options)
    kind = Collector if count == 1 else InterleavedCollector
    return kind(vectors(count), made, steps=STEPS, rng=rng)


def same(one: Batch, other: Batch) -> None:
    for name, array in one.arrays().items():
        theirs = np.asarray(other.arrays()[name])
        np.testing.assert_allclose(np.asarray(array), theirs, atol=1e-5, err_msg=name)
    assert one.episodes == other.episodes


@pytest.mark.parametrize(("device", "count"), [(None, 2), ("cpu", 1), ("cpu", 2)])
def test_rollouts_are_the_same_on_a_device_and_in_halves(device: str | None, count: int) -> None:
    plain, other = collector(None, 1), collector(device, count)
    plain.start()
    other.start()
    for _ in range(3):
        same(plain.collect(), other.collect())


def test_a_rollout_stays_while_the_next_is_collected() -> None:
    plain, device = collector(None, 1), collector("cpu", 2, buffers=2)
    plain.start()
    device.start()
    first, kept = plain.collect().copied_arrays(), device.collect()
    before = kept.copied_arrays()
    plain.collect()
    second = device.collect()
    assert second is not kept and np.array_equal(np.asarray(kept.obs), np.asarray(before["obs"]))
    same(Batch.join([first]), Batch.join([before]))
    same(plain.batch, second)


def test_acting_waits_for_publish() -> None:
    made, before = collector("cpu", 2), policy("cpu")
    assert isinstance(made, GpuCollector) and isinstance(made.policy, GpuPolicy)
    made.start()
    with torch.no_grad():
        made.policy.parameters.mul_(1.5)
    batch = made.collect()
    np.testing.assert_allclose(batch.value[3], before.value(batch.obs[3]), atol=1e-5)
    made.publish()
    batch = made.collect()
    np.testing.assert_allclose(batch.value[3], made.policy.value(batch.obs[3]), atol=1e-5)
    assert np.abs(batch.value[3] - before.value(batch.obs[3])).max() > 1e-3


@pytest.mark.parametrize("value_clip", [None, 0.2])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_passes_on_a_device_are_those_of_ppo(value_clip: float | None, max_grad_norm: float) -> None:
    hyper = PPO.Settings(
        rollout_steps=STEPS,
        epochs=3,
        minibatch_size=15,
        learning_rate=1e-3,
        entropy_coef=0.02,
        value_clip=value_clip,
        max_grad_norm=max_grad_norm,
    )
    batch = collector(None, 1)
    batch.start()
    rollout = batch.collect()
    assert rollout.env_steps % 15  # so that one minibatch is filled up
    outcomes = []
    for device in (None, "cpu"):
        own = policy(device)
        algorithm = PPO(own, hyper, rng=np.random.default_rng(2))
        given = rollout if device is None else Batch.join([{**rollout.arrays(), "obs": torch.from_numpy(rollout.obs)}])
        metrics = [algorithm.update(given, 1.0) for _ in range(3)][-1]
        assert (algorithm._gpu is not None) == (device is not None)
        outcomes.append((own.parameters.clone(), metrics))
    (plain, metrics), (on_device, theirs) = outcomes
    torch.testing.assert_close(on_device, plain, atol=2e-5, rtol=1e-4)
    assert metrics.keys() == theirs.keys()
    for name, value in metrics.items():
        assert theirs[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


def test_impala_learns_the_same_on_a_device() -> None:
    hyper = IMPALA.Settings(rollout_steps=STEPS)
    rollouts = collector(None, 1)
    rollouts.start()
    rollout = rollouts.collect()
    weights = []
    for device in (None, "cpu"):
        own = policy(device)
        algorithm = IMPALA(own, hyper, rng=np.random.default_rng(2))
        given = rollout if device is None else Batch.join([{**rollout.arrays(), "obs": torch.from_numpy(rollout.obs)}])
        algorithm.update(given, 1.0)
        weights.append(own.parameters.clone())
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)


def test_state_goes_from_a_device_to_the_cpu() -> None:
    made, plain = policy("cpu"), policy(None)
    with torch.no_grad():
        made.parameters.add_(0.1)
    plain.load(made.state())
    torch.testing.assert_close(plain.parameters, made.parameters)


def test_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    image = ObservationCodec(gymnasium.spaces.Box(0, 255, (3, 64, 64), np.uint8))
    vector = ObservationCodec(gymnasium.spaces.Box(-1, 1, (4,), np.float32))
    one = ActionCodec(gymnasium.spaces.Discrete(3))
    several = ActionCodec(gymnasium.spaces.MultiDiscrete([3, 2]))
    continuous = ActionCodec(gymnasium.spaces.Box(-1, 1, (2,), np.float32))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto", image, one) == "cpu"
    with pytest.raises(UserError, match="--device auto"):
        find_device("cuda", image, one)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("cpu", image, one) == "cpu" and find_device("auto", image, one) == "cuda"
    for observation, action in ((vector, one), (image, several), (image, continuous)):
        assert find_device("auto", observation, action) == "cpu"
        with pytest.raises(UserError, match="images and one Discrete action"):
            find_device("cuda", observation, action)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take the way of a GPU, on the CPU."""
    monkeypatch.setattr(gpu, "find_device", lambda *_: "cpu:0")


def test_a_run_that_overlaps(pretend: None, tmp_path: Path) -> None:
    settings = {"env": {"id": "paceline/ImageSide-v0", "envs_per_worker": 4}, "ppo": {"rollout_steps": 16}}
    more = {"engine": {"overlap": True}, "stop": {"iterations": 4}, "out": str(tmp_path), "name": "x"}
    run = paceline.train(settings | more, preset="none")
    rows = run.read_metrics()
    assert [row["policy_lag_mean"] for row in rows] == [0, 1, 1, 1]
    assert rows[-1]["env_steps"] == 4 * (64 - 7)  # of 64 slots each, seven are resets


@pytest.mark.parametrize("setting", ["overlap", "compile"])
def test_settings_of_a_gpu_that_is_not_used(setting: str, tmp_path: Path) -> None:
    tree = {"env": "CartPole-v1", "engine": {setting: True}, "out": str(tmp_path / "runs")}
    with pytest.raises(UserError, match=f"engine.{setting}=true"):
        paceline.train(tree)
    if setting == "overlap":
        with pytest.raises(UserError, match=r"engine\.name=local"):
            paceline.train(tree | {"engine": {setting: True, "workers": 2}})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("stop", "engine", "compiled"),
    [
        ({}, {}, True),  # the preset's 25M steps
        ({"total_steps": "1M"}, {}, False),
        ({"max_time": "10m"}, {}, True),
        ({"max_time": "1m"}, {}, False),
        ({"total_steps": "25M", "max_time": "1m"}, {}, False),
        ({"iterations": 10}, {}, False),
        ({}, {"compile": False}, False),
        ({"iterations": 10}, {"compile": True}, True),
    ],
)
def test_runs_that_are_long_enough_to_compile_first(
    stop: dict[str, Any], engine: dict[str, Any], compiled: bool
) -> None:
    config, _ = resolve_tree({"env": "coinrun", "stop": stop, "engine": engine}, preset="procgen-gpu")
    assert actor_learner.compiles(config) == compiled


def test_spaces_of_the_probe() -> None:
    """The tests above mean something: it has images, and rewards that differ."""
    env = vectors(1)[0]
    assert env.observation.is_image and isinstance(env.action.space, gymnasium.spaces.Discrete)
