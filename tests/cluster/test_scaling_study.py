"""A scaling study over two hosts: with a slow link between them it names the network, with a fast one it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from raycluster import QUICK_HEALTH, RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

# 64 ms of environment and 8 exchanges an iteration: at 10 ms a way the latter take more than twice as long.
STUDY = """
envs: [paceline/FixedCost-v0]
engines: [ray]
workers: [2]
seeds: 1
iterations: 12
preset: none
settings:
  env: {envs_per_worker: 4, kwargs: {cost_seconds: 0.001}}
  ppo: {rollout_steps: 32, minibatch_size: 64, epochs: 4}
"""


def study(cluster: RayCluster, folder: Path, name: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "paceline.commands.main", "bench", "scaling", "--study", "study.yaml", "--out", name]
    process = cluster.start_driver(argv, cwd=folder, output=folder / f"{name}.txt")
    assert process.wait(timeout=100) == 0, (folder / f"{name}.txt").read_text()
    (series,) = json.loads((folder / name / "scaling.json").read_text())["series"]
    point: dict[str, Any] = series["points"][0]
    return point


def test_the_network_is_named_only_where_it_is_the_matter(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    with RayCluster(hosts, [1, 1], tmp_path, env=QUICK_HEALTH) as cluster:
        hosts.delay(1, 10)
        slow = study(cluster, tmp_path, "slow")
        hosts.delay(1, 0.1)
        fast = study(cluster, tmp_path, "fast")
    assert slow["verdict"].startswith("sync-bound") and "over the network" in slow["verdict"], slow["verdict"]
    assert "over the network" not in fast["verdict"] and not fast["verdict"].startswith("sync"), fast["verdict"]
    assert slow["time_split"]["sync"] > 3 * fast["time_split"]["sync"]
    assert "over the network" in (tmp_path / "slow/scaling.md").read_text()
