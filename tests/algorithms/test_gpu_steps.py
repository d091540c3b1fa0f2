"""Optimizer steps of SAC and TD3 as a GPU makes them, on the CPU: the same weights as by autograd, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.algorithms.continuous import Transitions
from paceline.config import UserError
from paceline.config.resolve import validate
from paceline.models import gpu
from paceline.models.gpu import find_device
from paceline.spaces import ActionCodec, ObservationCodec

DEVICE = "cpu:0"  # not "cpu": the way of a GPU
ROWS, STEPS = 16, 7


def make(algo: str, device: str | None, **hyper: Any) -> Any:
    tree = {"algo": algo, "env": {"id": "Pendulum-v1"}, "model": {"hidden": [24, 16], "accelerate": False}}
    config = validate({**tree, algo: {"batch_size": ROWS, "learning_rate": 1e-3, "tau": 0.1, **hyper}})
    box = spaces.Box(-1, 1, (5,), np.float32), spaces.Box(-1, 1, (3,), np.float32)
    policy: Any = config.algorithm.make_policy(config, ObservationCodec(box[0]), ActionCodec(box[1]), seed=3)
    if device is not None:
        policy.learn_on(device)
    return config.algorithm(policy, config.hyper, rng=np.random.default_rng(0))


def rows_of(count: int) -> Transitions:
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    discount = np.where(rng.random(count) < 0.2, 0, 0.99).astype(np.float32)
    actions = np.tanh(normal(count, 3))
    return Transitions(
        normal(count, 5), actions, normal(count), normal(count, 5), discount, normal(count, 3), normal(count, 3)
    )


HYPER: list[tuple[str, dict[str, Any]]] = [
    ("sac", {}),
    ("sac", {"temperature": 0.2, "max_grad_norm": 0.5}),
    ("td3", {}),
    ("td3", {"policy_delay": 3, "max_grad_norm": 0.5}),
]


@pytest.mark.parametrize(("algo", "hyper"), HYPER, ids=str)
def test_the_steps_are_those_of_autograd(algo: str, hyper: dict[str, Any]) -> None:
    plain, device = make(algo, None, **hyper), make(algo, DEVICE, **hyper)
    assert device.accelerator is None and device.policy.learned is not device.policy
    rows = rows_of(STEPS * ROWS)
    for begin in range(0, STEPS * ROWS, ROWS):
        plain._step(rows.take(slice(begin, begin + ROWS)))
    assert device._gpu.run(rows, device.annealed["learning_rate"]) == STEPS
    device._count = STEPS
    before = device.policy.parameters.clone()
    device.policy.fetch_actor()
    changed = (device.policy.parameters != before).numpy()
    assert changed[device.policy.actor_slice].any() and not changed[device.policy.critic_slice].any()
    state, wanted = device.state(), plain.state()
    torch.testing.assert_close(device.policy.parameters, plain.policy.parameters, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(device.policy.target_parameters, plain.policy.target_parameters, atol=2e-6, rtol=1e-5)
    assert state["counts"] == wanted["counts"] and state["optimizer_steps"] == STEPS
    for name, array in wanted["optimizer"].items():
        np.testing.assert_allclose(state["optimizer"][name], array, atol=1e-6, rtol=1e-3, err_msg=name)
    means, theirs = device.means(), plain.means()
    assert means.keys() == theirs.keys()
    for name, value in theirs.items():
        assert means[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert not device.means()  # begun again


class NoWaiting(TorchDispatchMode):
    """A CUDA graph cannot be made of operations that need a number from the device, or data from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor made of a number of the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("algo", "hyper"), HYPER, ids=str)
def test_a_step_waits_for_nothing(algo: str, hyper: dict[str, Any]) -> None:
    algorithm = make(algo, DEVICE, **hyper)
    for _ in range(3):
        with NoWaiting():
            algorithm._gpu._work(algorithm.moves_actor)
        algorithm.optimizer_steps += 1
    with pytest.raises(AssertionError), NoWaiting():
        torch.zeros(3).sum().item()


def test_weights_go_to_the_device_and_back() -> None:
    """From a checkpoint, from another process, and from another run to start with."""
    algorithm, other = make("td3", DEVICE), make("td3", None)
    with torch.no_grad():
        other.policy.parameters.mul_(1.5)
    other.policy.target_parameters.mul_(0.5)
    algorithm.load(other.state())
    assert torch.equal(algorithm.policy.learned.parameters, other.policy.parameters)
    assert torch.equal(algorithm.policy.learned.target_parameters, other.policy.target_parameters)
    fresh = make("td3", DEVICE)
    fresh.policy.load(other.policy.state())
    learned = fresh.policy.learned
    assert torch.equal(learned.parameters, other.policy.parameters)
    assert torch.equal(learned.target_parameters, learned.parameters[learned.target_slice])
    fresh = make("td3", DEVICE)
    fresh.load_weights(other.weights())
    part = fresh.policy.actor_slice
    assert torch.equal(fresh.policy.learned.parameters[part], other.policy.parameters[part])


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_device", lambda *_: DEVICE)


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_a_run_on_a_device_is_resumed_exactly(algo: str, pretend: None, tmp_path: Path) -> None:
    tree = {
        "algo": algo,
        "env": {"id": "Pendulum-v1", "envs_per_worker": 2, "normalize_observation": True},
        "model": {"hidden": [16]},
        algo: {"learning_starts": 20, "rounds": 15, "batch_size": 8, "n_step": 3},
        "checkpoint": {"every_iterations": 1},
        "out": str(tmp_path),
    }
    whole = paceline.train({**tree, "name": "whole", "stop": {"iterations": 4}}, preset="none")
    paceline.train({**tree, "name": "cut", "stop": {"iterations": 2}}, preset="none")
    cut = paceline.train({"stop": {"iterations": 4}}, resume=tmp_path / "cut")
    weights = [paceline.load(run.path).policy.state() for run in (whole, cut)]
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name], err_msg=name)
    rows = [run.read_metrics()[-1] for run in (whole, cut)]
    assert rows[0]["critic_loss"] == rows[1]["critic_loss"] and rows[0]["optimizer_steps"] > 60


def test_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = ObservationCodec(spaces.Box(-1, 1, (4,), np.float32))
    action = ActionCodec(spaces.Box(-1, 1, (2,), np.float32))
    assert find_device("auto", vector, action, "vectors") == "cpu"
    with pytest.raises(UserError, match=r"engine\.device=cuda: this PyTorch"):
        find_device("cuda", vector, action, "vectors")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("cuda", vector, action, "vectors") == "cuda"
    assert find_device("auto", vector, action, "vectors") == "cpu"
    with pytest.raises(UserError, match=r"engine\.compile=true is for convolutions"):
        validate({"algo": "sac", "env": {"id": "Pendulum-v1"}, "engine": {"device": "cuda", "compile": True}})
