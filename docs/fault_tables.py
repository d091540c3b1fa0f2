"""The tables of docs/faults.md, from the results that tests/faults/ wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results/faults"
PHASES = ("start", "iteration", "save", "evaluation", "end")
HOSTS = {"first": "that of the command", "second": "the other"}
OUTCOMES = ("saved", "resumable", "went on", "never started")
PARTS = {
    "memory_bytes": ("memory, all processes", 1e6, "MB"),
    "open_files": ("open files and sockets", 1, ""),
    "threads": ("threads", 1, ""),
    "processes": ("processes", 1, ""),
    "files": ("files of the run and of Ray", 1, ""),
    "metrics_bytes": ("metrics on the disk", 1e6, "MB"),
    "other_bytes": ("everything else on the disk", 1e6, "MB"),
}


def crash_matrix() -> str:
    """A row for each engine and fault, a column for each phase: exit codes, how often, and what the resume restored."""
    tries = _tries("matrix.json")
    rows = []
    for engine, fault in dict.fromkeys((one["engine"], one["fault"]) for one in tries):
        cells = [[one for one in tries if _key(one) == (engine, fault, phase)] for phase in PHASES]
        rows.append([engine, fault, *map(_cell, cells)])
    return "\n\n".join([_about("matrix.json"), _table(["engine", "fault", *PHASES], rows)])


def kills() -> str:
    """A row for each engine and killed process."""
    tries = _tries("kills.json")
    rows = []
    for engine, fault in dict.fromkeys((one["engine"], one["fault"]) for one in tries):
        chosen = [one for one in tries if (one["engine"], one["fault"]) == (engine, fault)]
        algorithms = len({one["algo"] for one in chosen})
        rows.append([engine, fault.removeprefix("kill "), str(len(chosen)), str(algorithms), _codes(chosen)])
        rows[-1] += [_count(one["resume_code"] == 0 for one in chosen), _count(not one["problems"] for one in chosen)]
    head = ["engine", "killed", "times", "algorithms", "exit codes", "ended or resumed", "exact and nothing left"]
    return "\n\n".join([_about("kills.json"), _table(head, rows)])


def node_kills() -> str:
    """A row for each host and phase."""
    tries = _tries("node_kills.json")
    rows = []
    for host, phase in sorted({(one["host"], one["phase"]) for one in tries}, key=lambda x: (x[0], PHASES.index(x[1]))):
        chosen = [one for one in tries if (one["host"], one["phase"]) == (host, phase)]
        algorithms = len({one["algo"] for one in chosen})
        rows.append([HOSTS[host], phase, str(len(chosen)), str(algorithms), _codes(chosen)])
        rows[-1].append(_count(one["went_on"] for one in chosen))
        rows[-1] += [_count(one["resume_code"] == 0 for one in chosen), _count(not one["problems"] for one in chosen)]
    head = ["killed host", "phase", "times", "algorithms", "exit codes", "went on without it"]
    head += ["ended or resumed", "exact and nothing left"]
    return "\n\n".join([_about("node_kills.json"), _table(head, rows)])


def cancels() -> str:
    """A row for each scheduler and event."""
    tries = _tries("cancels.json")
    rows = []
    for scheduler, event, hosts in dict.fromkeys((one["scheduler"], one["event"], one["hosts"]) for one in tries):
        chosen = [one for one in tries if (one["scheduler"], one["event"], one["hosts"]) == (scheduler, event, hosts)]
        good = Counter(one["outcome"] for one in chosen if not one["problems"])
        counts = [good[outcome] for outcome in OUTCOMES]
        rows.append([scheduler, event, str(hosts), *map(str, [len(chosen), *counts, len(chosen) - sum(counts)])])
    head = ["scheduler", "event", "hosts", "tried", *OUTCOMES, "wrong"]
    return "\n\n".join([_about("cancels.json"), _table(head, rows)])


def soak() -> str:
    """A row for what might grow, with two columns for each run."""
    record = _read("soak.json")
    runs: dict[str, Any] = record["runs"]
    head = ["", *(text for way in runs for text in (f"{way}: first tenth", "last tenth"))]
    rows = []
    for name, (title, unit, word) in PARTS.items():
        values = [value for run in runs.values() for value in run["figures"][name]]
        rows.append([title, *(f"{value / unit:,.1f} {word}".strip() for value in values)])
    steps = " and ".join(f"{run['env_steps']:,}" for run in runs.values())
    about = (
        f"{record['minutes']:g} minutes in all, half for each way, {steps} env steps; commit `{record['commit']}`, "
        f"{record['date']}. Means over the first and the last tenth of the time, after a fifth for warming up."
    )
    return "\n\n".join([about, _table(head, rows)])


def _key(one: dict[str, Any]) -> tuple[str, str, str]:
    return one["engine"], one["fault"], one["phase"]


def _cell(tries: list[dict[str, Any]]) -> str:
    if not tries:
        return "not tried"
    levels = Counter(one["resume_level"] if one["resume_code"] == 0 else "not resumed" for one in tries)
    bad = sum(bool(one["problems"]) for one in tries)
    word = "try" if len(tries) == 1 else "tries"
    text = f"{_codes(tries)}; {', '.join(level for level, _ in levels.most_common())}; {len(tries)} {word}"
    return f"{text}, **{bad} with problems**" if bad else text


def _codes(tries: list[dict[str, Any]]) -> str:
    return ", ".join(f"{_code(code)} ×{times}" for code, times in Counter(t["exit_code"] for t in tries).most_common())


def _code(code: int | None) -> str:
    return "none" if code is None else "killed" if code == -9 else f"signal {-code}" if code < 0 else str(code)


def _count(values: Iterable[bool]) -> str:
    values = list(values)
    return f"{sum(values)} of {len(values)}"


def _about(name: str) -> str:
    record = _read(name)
    bad = sum(bool(one["problems"]) for one in record["tries"])
    return f"{len(record['tries'])} tries, {bad} with problems; commit `{record['commit']}`, {record['date']}."


def _tries(name: str) -> list[dict[str, Any]]:
    return list(_read(name)["tries"])


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / name).read_text()))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
