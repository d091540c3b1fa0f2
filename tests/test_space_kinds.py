"""The tables of docs/spaces.md: every kind of observation and action, with every algorithm."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import native_algorithms
from paceline.config.resolve import validate
from paceline.evaluate import evaluate
from paceline.export import export
from paceline.spaces import ActionCodec, ObservationCodec
from space_envs import ACTION_KINDS, OBSERVATION_KINDS

ROOT = Path(__file__).parents[1]
Kinds = tuple[str, str, str]


def tables() -> list[dict[tuple[str, str], bool]]:
    """Of the page: whether an algorithm takes a kind of observation, and of action."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/spaces.md").read_text(encoding="utf-8"), re.M):
        head, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines())
        found.append(
            {(row[0], algo): mark == "✓" for row in rows for algo, mark in zip(head[1:], row[1:], strict=True)}
        )
    return found


ALGORITHMS = sorted({algo for _, algo in tables()[0]})


def refusal(observation: str, action: str, algo: str) -> str:
    """Why the algorithm does not train on these kinds; empty if it does."""
    config = validate({"algo": algo, "model": {"hidden": [4]}})
    try:
        codecs = ObservationCodec(OBSERVATION_KINDS[observation]), ActionCodec(ACTION_KINDS[action])
        config.algorithm.make_policy(config, *codecs)
    except paceline.UserError as error:
        return str(error)
    return ""


def test_the_tables_say_what_is_refused() -> None:
    seen, done = tables()
    assert set(ALGORITHMS) <= set(native_algorithms())
    assert seen.keys() == set(itertools.product(OBSERVATION_KINDS, ALGORITHMS))
    assert done.keys() == set(itertools.product(ACTION_KINDS, ALGORITHMS))
    for observation, action, algo in itertools.product(OBSERVATION_KINDS, ACTION_KINDS, ALGORITHMS):
        reason = refusal(observation, action, algo)
        assert (reason == "") == (seen[observation, algo] and done[action, algo]), (observation, action, algo, reason)
        assert not reason or re.search(r": (use|make|give|pad|convert) ", reason), reason


def chosen() -> list[Kinds]:
    """Every pair that trains with one algorithm, and every kind with every algorithm that takes it."""
    seen, done = tables()
    runs: list[Kinds] = []
    had: Counter[tuple[str, str, str]] = Counter()

    def add(observation: str, action: str, algo: str) -> None:
        had.update([("sees", observation, algo), ("does", action, algo)])
        runs.append((observation, action, algo))

    for observation, action in itertools.product(OBSERVATION_KINDS, ACTION_KINDS):
        fit = [algo for algo in ALGORITHMS if seen[observation, algo] and done[action, algo]]
        if fit:
            least = min(fit, key=lambda algo: had["sees", observation, algo] + had["does", action, algo])
            add(observation, action, least)
    for (observation, algo), works in seen.items():
        if works and not had["sees", observation, algo]:
            add(observation, next(action for action in ACTION_KINDS if done[action, algo]), algo)
    for (action, algo), works in done.items():
        if works and not had["does", action, algo]:
            add(next(iter(OBSERVATION_KINDS)), action, algo)
    return runs


def test_every_kind_runs_with_every_algorithm_that_takes_it() -> None:
    seen, done = tables()
    runs = chosen()
    assert {(observation, algo) for observation, _, algo in runs} == {key for key, works in seen.items() if works}
    assert {(action, algo) for _, action, algo in runs} == {key for key, works in done.items() if works}


SIZES: dict[str, dict[str, Any]] = {
    "ppo": {"rollout_steps": 8, "minibatch_size": 8, "epochs": 1},
    "dqn": {"rollout_steps": 4, "rounds": 2, "gradient_steps": 1, "learning_starts": 8, "replay_size": 64},
    "impala": {"rollout_steps": 8, "batch_size": 16},
    "sac": {"rounds": 8, "learning_starts": 8, "buffer_size": 64, "batch_size": 4},
}


@pytest.mark.parametrize(("observation", "action", "algo"), chosen(), ids=lambda kind: kind.replace("`", ""))
def test_it_trains_resumes_evaluates_and_exports(observation: str, action: str, algo: str, tmp_path: Path) -> None:
    kinds = {"observation": observation, "action": action}
    tree = {
        "algo": algo,
        "env": {"id": f"{ROOT}/tests/space_envs.py:Kind", "kwargs": kinds, "envs_per_worker": 2},
        "model": {"hidden": [4]},
        "engine": {"threads": 1},
        "out": str(tmp_path),
        "stop": {"iterations": 2},
        algo: SIZES.get("sac" if algo == "td3" else algo, {"rollout_steps": 8}),
    }
    run = paceline.train(tree, preset="none")
    run = paceline.train({"stop": {"iterations": 3}}, resume=run.path)
    assert run.summary["resumed"] == 1
    assert [row["episodes"] for row in evaluate(run.path, episodes=1)] == [1]
    assert "the same actions" in export(run.path).checked
