"""Numbers, intervals and tables as text, written the same way everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.results.estimates import Estimate

UNKNOWN = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def number(value: float | int | None) -> str:
    """About four digits, with thousands separators."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 100 else f"{value:.1f}"


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def times(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}×"


def fixed(digits: int) -> Callable[[float], str]:
    """A format with this many decimals and thousands separators."""
    return f"{{:,.{digits}f}}".format


def interval(low: float | None, high: float | None, form: Callable[[float], str] = number) -> str:
    """`1.75 to 1.88`; empty without an interval."""
    return "" if low is None or high is None else f"{form(low)} to {form(high)}"


def with_interval(estimate: Estimate, form: Callable[[float], str] = number, unit: str = "") -> str:
    """`1.81 (1.75 to 1.88)`."""
    if not estimate.runs:
        return UNKNOWN
    ends = interval(estimate.low, estimate.high, form)
    return f"{form(estimate.value)}{unit}" + (f" ({ends})" if ends else "")


def count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def counts(states: dict[str, int]) -> str:
    """`2 failed, 1 missing`, without the zeros."""
    return ", ".join(f"{many} {state}" for state, many in states.items() if many)


def listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def hardware(machine: dict[str, Any]) -> str:
    """The machine of a run (`RunData.machine`): its CPU and cores."""
    return f"{machine['cpu']}, {machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"


def machine_lines(machines: Iterable[dict[str, Any]]) -> list[str]:
    """One line for each kind of machine and set of versions, with the dates."""
    dates: dict[str, set[str]] = {}
    for one in machines:
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items() if version)
        device = "" if one["device"] == "cpu" else f"{one['device']}, "
        commit = f", commit {one['commit']}" if one["commit"] else ""
        dates.setdefault(f"{device}{hardware(one)}; {versions}{commit}", set()).add(one["date"])
    return [f"{' to '.join(sorted({min(days), max(days)}))}: {text}." for text, days in dates.items()]
