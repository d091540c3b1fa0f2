from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ray import tune

from paceline.config.resolve import resolve_tree, to_yaml
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory
from paceline.tune.sweep_plan import make_sweep
from paceline.tune.trial import ORIGIN, adopt_checkpoint


def test_a_member_that_takes_over_a_checkpoint_drops_its_own_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint names rows of the replay file, and they are in the other member's file."""
    given = {"env": "CartPole-v1", "algo": "dqn", "dqn": {"replay": "disk"}, "stop": {"total_steps": 1000}}
    sweep = make_sweep(tmp_path, given, {"dqn.gamma": [0.9, 0.99]}, search="pbt", trials=4)
    ours, other = (RunDirectory(tmp_path / trial.name) for trial in sweep.trials[:2])
    for run, steps in ((ours, 10), (other, 20)):
        (run.path / "replay").mkdir(parents=True)
        run.logs_path.mkdir()
        (run.path / "replay" / "observations.npy").write_bytes(b"rows")
        run.config_path.write_text(to_yaml(resolve_tree(sweep.tree(sweep.trials[0]))[0]))
        checkpoint.save(run, steps, {}, {"loop": {"counters": {"env_steps": steps}}}, keep=1)
    shutil.copytree(checkpoint.find(other.path, "last"), tmp_path / "given" / "state")
    monkeypatch.setattr(tune, "get_checkpoint", lambda: tune.Checkpoint.from_directory(str(tmp_path / "given")))
    for origin, kept in ((ours, True), (other, False)):
        (tmp_path / "given" / ORIGIN).write_text(origin.path.name)
        adopt_checkpoint(sweep, ours, sweep.tree(sweep.trials[0], {"dqn.gamma": 0.95}))
        assert (ours.path / "replay").exists() is kept
    assert checkpoint.find(ours.path, "last").resolve().name == "step-20"
    assert ours.read_config()["dqn"]["gamma"] == 0.95 and (other.path / "replay").exists()
