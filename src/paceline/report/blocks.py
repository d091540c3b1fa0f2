"""What a report is made of. Sections hold blocks, blocks hold plain text and numbers; how they look is the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.comparison import Estimate


@dataclass(frozen=True)
class Cell:
    text: str
    small: str = ""
    """A second line: the interval, the reason."""
    slot: int | None = None
    """Of the colour that stands for it in the plots."""
    state: str = ""
    """Of a run, where the text is one."""


@dataclass(frozen=True)
class Text:
    text: str
    tone: str = ""
    """Empty, `note`, or of a box: `notice`, `bad`."""
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    caption: str
    head: list[str]
    rows: list[list[Cell]]
    numbers: tuple[int, ...] = ()
    """Columns aligned to the right."""
    fold: str = ""
    """What is shown instead until it is opened."""
    kind: str = "table"


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    says: str
    """For those who cannot see it."""
    data: dict[str, Any]
    """What charts.js draws."""
    controls: tuple[str, ...] = ()
    """Of `x, members, unit`."""
    caption: str = ""
    kind: str = "chart"


@dataclass(frozen=True)
class Pair:
    """Side by side where there is room."""

    charts: list[Chart]
    kind: str = "pair"


@dataclass(frozen=True)
class Code:
    """Commands, each to be copied; or one text, folded."""

    lines: list[str]
    fold: str = ""
    kind: str = "code"


Block = Text | Table | Chart | Pair | Code


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    small: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    made: str
    headline: str
    because: list[str]
    """Sentences below the headline."""
    tiles: list[Tile] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


def number(value: float | int | None) -> str:
    """Four digits, and thousands apart; a dash for what is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 100 else f"{value:.1f}"


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def percent(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def times(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}×"


def interval(low: float | None, high: float | None, form: Any = number) -> str:
    return "" if low is None or high is None else f"{form(low)} to {form(high)}"


def estimate_cell(estimate: Estimate, form: Any = number) -> Cell:
    return Cell(form(estimate.value), interval(estimate.low, estimate.high, form))


def file_names(tasks: Sequence[str]) -> dict[str, str]:
    """How tasks are called: an environment in a file by the file's name, where that is enough."""
    short = {task: task.partition(" ")[0].rpartition("/")[2] if ".py:" in task else task for task in tasks}
    short = {task: name + "".join(task.partition(" ")[1:]) if name != task else task for task, name in short.items()}
    return {task: name if list(short.values()).count(name) == 1 else task for task, name in short.items()}


def count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
