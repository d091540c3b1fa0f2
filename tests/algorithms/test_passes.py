"""Images go through the network in small parts: the gradient is the same, and the memory has a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import algorithm_class
from paceline.config.resolve import validate

ROWS = 7
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"entropy_coef": 0.02, "epochs": 2, "minibatch_size": 40},
    "a2c": {"entropy_coef": 0.02},
    "a3c": {"entropy_coef": 0.02},
    "impala": {"entropy_coef": 0.02, "surrogate_clip": 0.2, "normalize_advantage": True},
}

MEMORY = """
import json, resource, sys
import gymnasium, numpy as np
from paceline.config import ALGORITHMS, algorithm_class
from paceline.config import ModelConfig
from paceline.models import policy as policies
from paceline.config.resolve import validate
from paceline.rollout.batch import Batch
from paceline.spaces import ActionCodec, ObservationCodec

observation = ObservationCodec(gymnasium.spaces.Box(0, 255, (3, 64, 64), np.uint8))
action = ActionCodec(gymnasium.spaces.Discrete(15))
policy = policies.Policy(observation, action, ModelConfig(cnn="impala", hidden=(32,), shared=True))
algo, rows = sys.argv[1], int(sys.argv[2])
algorithm = algorithm_class(algo)(policy, validate({"algo": algo}).hyper, rng=np.random.default_rng(0))

def peak(envs):
    batch = Batch.empty(8, envs, observation, action)
    batch.valid[:] = True
    algorithm.update(batch, 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

policies.PASS_BYTES = 10**12
few = peak(rows // 8)
policies.PASS_BYTES = rows * policy.net.row_bytes
print(json.dumps([rows * policy.net.row_bytes, peak(rows) - few]))
"""


def learned(lab: Any, algo: str, net: str, action: str) -> tuple[list[int], Any, Any, dict[str, float]]:
    """Rows of each pass with autograd, the last gradient, the weights and the metrics of an update."""
    policy = lab.policy(net, action)
    algorithm = algorithm_class(algo)(
        policy, validate({"algo": algo, algo: OPTIONS[algo]}).hyper, rng=np.random.default_rng(0)
    )
    batch = lab.batch(policy)
    lab.shake(policy, 0.1, seed=1)
    rows: list[int] = []
    policy.net.register_forward_hook(
        lambda _net, _x, out: rows.append(len(out[1])) if torch.is_grad_enabled() else None
    )
    metrics = algorithm.update(batch, 1.0)
    return rows, policy.gradient.clone(), policy.parameters.clone(), metrics


@pytest.mark.parametrize(("net", "action"), [("cnn", "discrete"), ("mixed", "gaussian")])
@pytest.mark.parametrize("algo", OPTIONS)
def test_the_gradient_is_that_of_one_pass(
    lab: Any, algo: str, net: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, gradient, weights, metrics = learned(lab, algo, net, action)
    row_bytes = lab.policy(net, action).net.row_bytes
    monkeypatch.setattr("paceline.models.policy.PASS_BYTES", ROWS * row_bytes)
    passes, same_gradient, same_weights, same_metrics = learned(lab, algo, net, action)
    assert max(whole) > 3 * ROWS >= 3 * max(passes) and sum(passes) == sum(whole)
    scale = float(gradient.abs().max())
    torch.testing.assert_close(same_gradient, gradient, rtol=1e-3, atol=1e-4 * scale)
    torch.testing.assert_close(same_weights, weights, rtol=1e-3, atol=1e-4)
    assert same_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("algo", ["a2c", "impala"])
def test_eight_times_the_rows_take_no_more_memory(algo: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, algo, "40"], capture_output=True, text=True, timeout=60, check=True
    )
    one_pass, more = json.loads(run.stdout)
    assert one_pass > 80e6 and more < 0.5 * one_pass  # as one pass it would be seven times as much
