"""A user's own algorithm does everything that a built-in one does, from its file alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import paceline
from paceline.code_bundle import pack
from paceline.config import UserError
from paceline.config.plugins import load_attribute
from paceline.config.resolve import resolve_tree, to_tree

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/algorithms").glob("*.py"))
REINFORCE = f"{ROOT}/examples/algorithms/reinforce.py:Reinforce"
PPO_RND = f"{ROOT}/examples/algorithms/ppo_rnd.py:PpoRnd"
SMALL = {"env": {"id": "CartPole-v1", "envs_per_worker": 4}}
ELSEWHERE = """
import pickle, sys
from pathlib import Path
from paceline.code_bundle import install, relocate, uninstall
from paceline.config.resolve import validate
bundle, tree = pickle.loads(Path(sys.argv[1]).read_bytes())
install(bundle)
config = validate(relocate(tree, bundle))
print(config.algorithm.__name__, config.algorithm_name, config.hyper.learning_rate)
uninstall(bundle)
"""
Cli = Callable[..., Any]


def train(algo: Any, tree: dict[str, Any], **options: Any) -> paceline.api.Run:
    return paceline.train({**SMALL, "algo": algo, **tree}, **options)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120


# -- training ---------------------------------------------------------------------------------------------------------


def test_reinforce_learns_cartpole(here: Path) -> None:
    run = paceline.train({"algo": REINFORCE, "env": "CartPole-v1", "stop": {"total_steps": 100_000}})
    assert run.summary["return_mean"] > 150 and run.summary["algo"] == "reinforce"


def test_ppo_rnd_trains_a_second_value_and_logs_its_own_metrics(here: Path) -> None:
    sizes = {"rollout_steps": 32, "minibatch_size": 64, "epochs": 2}
    run = train(PPO_RND, {"name": "rnd", "ppo_rnd": sizes, "stop": {"iterations": 20}})
    rows = run.read_metrics()
    assert all(np.isfinite(row["bonus_value_loss"]) for row in rows)
    assert rows[-1]["predictor_loss"] < rows[0]["predictor_loss"] / 2  # the predictor imitates the random network


def test_reinforce_runs_on_two_workers(here: Path, cli: Cli) -> None:
    result = cli(
        "train", "--algo", REINFORCE, "--env", "CartPole-v1", "--workers", 2, "--iterations", 3, "--name", "two"
    )
    assert result.code == 0, result.err
    summary = json.loads(Path("runs/two/summary.json").read_text())
    assert (summary["algo"], summary["engine"], summary["workers"]) == ("reinforce", "ray", 2)


def test_its_file_is_sent_to_machines_that_do_not_have_it(here: Path) -> None:
    source = here / "mine.py"
    source.write_text((ROOT / "examples/algorithms/reinforce.py").read_text())
    tree = to_tree(resolve_tree({"algo": "mine.py:Reinforce", "reinforce": {"learning_rate": 0.25}})[0])
    (here / "sent").write_bytes(pickle.dumps((pack(tree), tree)))
    source.unlink()
    words = [sys.executable, "-c", ELSEWHERE, str(here / "sent")]
    done = subprocess.run(words, cwd="/", env={**os.environ, "TMPDIR": str(here)}, capture_output=True, text=True)
    assert done.stdout == "Reinforce reinforce 0.25\n", done.stderr


def test_its_schedules_are_followed_and_logged(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples/algorithms")
    Path("mine.py").write_text(
        "from reinforce import Reinforce\n"
        "from paceline.config.values import Schedule\n"
        "class Mine(Reinforce):\n"
        "    class Settings(Reinforce.Settings):\n"
        "        warmth: float = 2.0\n"
        "        warmth_schedule: Schedule = 'linear'\n"
        "    def loss(self, rows, out):\n"
        "        loss, statistics = super().loss(rows, out)\n"
        "        return loss * self.annealed['warmth'], statistics\n"
    )
    run = train("mine.py:Mine", {"mine": {"learning_rate_schedule": "linear"}, "stop": {"iterations": 4}})
    rows = run.read_metrics()
    assert [row["warmth"] for row in rows] == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert [row["learning_rate"] for row in rows] == pytest.approx([3e-3, 2.25e-3, 1.5e-3, 0.75e-3])


# -- what comes after training ----------------------------------------------------------------------------------------


def test_an_interrupted_run_continues_exactly(here: Path, content: Callable[..., Any], stable_rows: Any) -> None:
    whole = train(REINFORCE, {"name": "whole", "stop": {"iterations": 6}})
    first = train(REINFORCE, {"name": "first", "stop": {"iterations": 3}})
    paceline.train({"stop": {"iterations": 6}}, resume=first.path)
    assert json.loads((first / "resume.json").read_text())["level"] == "exact"
    assert stable_rows(first.path) == stable_rows(whole.path)
    assert content(first.path) == content(whole.path)


def test_another_process_evaluates_and_exports_it_from_another_folder(here: Path, command: Callable[..., Any]) -> None:
    pytest.importorskip("onnx")
    source = here / "mine.py"
    source.write_text((ROOT / "examples/algorithms/reinforce.py").read_text())
    line = "train --algo mine.py:Reinforce --env CartPole-v1 --iterations 2 --name mine"
    assert command(*line.split()).code == 0
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    run = here / "runs/mine"
    evaluated = command("evaluate", run, "--episodes", 2, cwd=elsewhere)
    assert evaluated.code == 0, evaluated.err
    assert len((run / "eval.jsonl").read_text().splitlines()) == 1
    exported = command("export", run, "--format", "onnx", cwd=elsewhere)
    assert exported.code == 0, exported.err
    assert list(here.rglob("*.onnx"))


def test_it_has_its_name_in_comparisons_and_reports(here: Path, cli: Cli) -> None:
    train(REINFORCE, {"name": "mine", "stop": {"iterations": 2}})
    train("ppo", {"name": "theirs", "stop": {"iterations": 2}})
    compared = cli("compare", "runs/mine", "runs/theirs")
    assert compared.code == 0 and "reinforce" in compared.out and str(ROOT) not in compared.out, compared
    assert cli("report", "runs/mine", "-o", "report.html").code == 0
    assert "REINFORCE on CartPole-v1" in Path("report.html").read_text()


# -- its settings -----------------------------------------------------------------------------------------------------


def test_help_lists_its_settings(cli: Cli) -> None:
    result = cli("train", "--algo", REINFORCE, "--help")
    assert result.code == 0
    for key in ("reinforce.learning_rate", "reinforce.entropy_coef", "reinforce.gae_lambda"):
        assert key in result.out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "reinforce.entropy_coeff=0.01",
            "unknown key 'reinforce.entropy_coeff': did you mean 'reinforce.entropy_coef'?",
        ),
        ("reinforce.rollout_steps=few", "reinforce.rollout_steps=few: input should be a valid integer"),
        ("ppo.clip=0.1", f"ppo.clip is a setting of --algo ppo, but this run uses --algo {REINFORCE}"),
    ],
)
def test_a_wrong_setting_is_named(here: Path, cli: Cli, given: str, text: str) -> None:
    result = cli("train", "--algo", REINFORCE, "--env", "CartPole-v1", "--set", given)
    assert result.code == 2 and text in result.err and not Path("runs").exists()


def test_it_may_be_given_as_a_class(here: Path) -> None:
    reinforce = load_attribute(REINFORCE, "algo")
    run = train(reinforce, {"reinforce": {"entropy_coef": 0.02}, "stop": {"iterations": 1}})
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["algo"] == REINFORCE and config["reinforce"]["entropy_coef"] == 0.02


def test_a_class_that_is_no_algorithm_is_refused(here: Path) -> None:
    Path("mine.py").write_text("class Mine: pass\n")
    with pytest.raises(UserError, match=r"mine.py:Mine: expected a subclass of paceline.algorithms.base.Algorithm"):
        resolve_tree({"algo": "mine.py:Mine"})
