from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.suite_tables import page, tables
from paceline.results.suite_scores import suite_result

MACHINE = {"date": "2026-01-02", "commit": "abc", "cpu": "CPU", "cores": 2, "device": "cpu", "versions": {"torch": "2"}}


def entry(game: str, algo: str, seed: int, value: float | None, **changes: Any) -> dict[str, Any]:
    """A run that reached `value` in a game of range 0 to 10, or did not end."""
    name = f"{game}-{algo}-s{seed}"
    one = {"name": name, "game": game, "algo": algo, "seed": seed, "state": "missing", "reason": None}
    one |= {"range": [0, 10], "episodes": 5, "stochastic": False, "levels": ["all"], "train": f"paceline train {name}"}
    one |= {"evaluate": f"paceline evaluate {name}"}
    if value is not None:
        one |= {"state": "done", "returns": {"all": value}, "scores": {"all": value / 10}, "env_steps": 100 + seed}
        one |= {"steps_per_second": 10.0 + seed, "wall_seconds": 60.0, "machine": MACHINE}
    return {**one, **changes}


def collected(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return suite_result("mine", "What it is.", ["paceline bench suite --suite mine"], entries)


def test_figures_by_hand() -> None:
    runs = [entry("a", "ppo", 0, 4), entry("a", "ppo", 1, 6), entry("b", "ppo", 0, 8), entry("b", "ppo", 1, 10)]
    runs += [entry("a", "a2c", 0, 5), entry("a", "a2c", 1, 5), entry("b", "a2c", 0, 8), entry("b", "a2c", 1, 8)]
    result = collected(runs)
    row = result["games"][0]
    assert (row["game"], row["algo"], row["done"], row["failed"], row["missing"]) == ("a", "ppo", 2, 0, 0)
    assert row["returns"]["all"] == {"mean": 5.0, "std": pytest.approx(2**0.5)}
    assert row["scores"]["all"] == {"mean": 0.5, "std": pytest.approx(0.2**0.5 / 10**0.5)}
    assert row["steps_per_second"] == 10.5 and row["env_steps"] == [100, 101]
    ppo, a2c = result["aggregates"]
    assert ppo["iqm"] == pytest.approx(0.7) and ppo["mean"] == pytest.approx(0.7)  # of 0.4 0.6 0.8 1.0
    # The middle two of four: (a, b) of (4 or 6) and (8 or 10); the least is 0.4 and 0.8, the greatest 0.6 and 1.0.
    assert (ppo["low"], ppo["high"]) == pytest.approx((0.6, 0.8))
    assert a2c["iqm"] == pytest.approx(0.65) and (a2c["low"], a2c["high"]) == pytest.approx((0.65, 0.65))
    (better,) = result["improvements"]
    # Game a: 4 loses twice, 6 wins twice: 1/2. Game b: 8 ties twice, 10 wins twice: 3/4.
    assert (better["algo"], better["over"], better["probability"]) == ("ppo", "a2c", 0.625)
    assert better["low"] < 0.625 < better["high"]
    text = page(result)
    assert "| a | ppo | 2 of 2 | 100–101 | 5.00 ± 1.41 | 0.500 ± 0.141 | 10 | 1:00 |" in text
    assert "| ppo | 0.700 | 0.600 to 0.800 | 0.700 | 4 | 2 |" in text
    assert "| ppo over a2c | 0.62 |" in text and "Not in these figures" not in text
    assert "2026-01-02: CPU, 2 cores; torch 2, commit abc." in text
    assert all(f"paceline train {run['name']}\npaceline evaluate {run['name']}\n" in text for run in runs)


def test_what_is_missing_is_said() -> None:
    runs = [entry("a", "ppo", 0, 4), entry("a", "ppo", 1, None, state="failed", reason="no memory")]
    runs += [entry("b", "ppo", 0, 8), entry("a", "a2c", 0, 5), entry("b", "a2c", 0, None, state="interrupted")]
    runs += [entry("b", "ppo", 1, None)]
    result = collected(runs)
    assert [(row["done"], row["failed"], row["missing"]) for row in result["games"]] == [
        (1, 1, 0),
        (1, 0, 0),
        (1, 0, 1),
        (0, 0, 1),
    ]
    assert [row["without"] for row in result["aggregates"]] == [[], ["b"]]
    assert result["improvements"] == []  # a2c has no run in b
    assert [row["low"] for row in result["aggregates"]] == [None, None]  # one run a game: nothing to resample
    text = tables(result)
    assert "| 1 of 2 (1 failed) |" in text and "| 1 of 2 (1 missing) |" in text and "1, without b" in text
    assert "- `a-ppo-s1` failed: no memory\n- interrupted: `b-a2c-s0`\n- missing: `b-ppo-s1`" in text


def test_games_without_a_range_have_no_score() -> None:
    free = {"range": None, "scores": {"all": None}}
    result = collected([entry("a", "ppo", 0, 4, **free), entry("b", "ppo", 0, 5), entry("b", "ppo", 1, 6)])
    assert result["unranged"] == ["a"] and result["aggregates"][0]["games"] == 1
    assert "| a | ppo | 1 of 1 | 100 | 4.00 | – |" in tables(result)
    alone = collected([entry("a", "ppo", 0, 4, **free)])
    assert alone["aggregates"] == [] and alone["improvements"] == []


def test_both_level_sets() -> None:
    sets = {"levels": ["train", "test"], "returns": {"train": 9.0, "test": 7.0}, "scores": {"train": 0.8, "test": 0.4}}
    text = tables(collected([entry("a", "ppo", 0, 9, **sets)]))
    assert "return, training levels | return, all levels" in text and "| 9.00 | 7.00 | 0.800 | 0.400 |" in text
    assert "| ppo | training levels | 0.800 |" in text and "| ppo | all levels | 0.400 |" in text


def test_nothing_done_yet() -> None:
    text = page(collected([entry("a", "ppo", 0, None)]))
    assert "| a | ppo | 0 of 1 (1 missing) | – | – | – | – | – |" in text
