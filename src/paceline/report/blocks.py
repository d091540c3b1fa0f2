"""The content of a report, as plain text and numbers. The HTML template and `markdown.py` decide how it looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.results.estimates import Estimate
from paceline.results.text import interval, number


@dataclass(frozen=True)
class Cell:
    text: str
    small: str = ""
    """A second line: the interval, or a reason."""
    slot: int | None = None
    """Number of the colour that the plots use for it."""
    state: str = ""
    """The state of a run, if the text is one."""


@dataclass(frozen=True)
class Text:
    text: str
    tone: str = ""
    """Empty, `note`, or a box: `notice`, `bad`."""
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    caption: str
    head: list[str]
    rows: list[list[Cell]]
    numbers: tuple[int, ...] = ()
    """Columns aligned to the right."""
    fold: str = ""
    """If set, the table is folded under this text."""
    kind: str = "table"


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    description: str
    """For readers who cannot see the chart."""
    data: dict[str, Any]
    """What charts.js draws."""
    controls: tuple[str, ...] = ()
    """Any of `x, members, unit`."""
    caption: str = ""
    kind: str = "chart"


@dataclass(frozen=True)
class ChartPair:
    """Two charts, side by side if there is room."""

    charts: list[Chart]
    kind: str = "pair"


@dataclass(frozen=True)
class CodeBlock:
    """Commands, each with a copy button."""

    lines: list[str]
    fold: str = ""
    kind: str = "code"


Block = Text | Table | Chart | ChartPair | CodeBlock


@dataclass(frozen=True)
class PageSection:
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
    findings: list[str]
    """Sentences below the headline."""
    tiles: list[Tile] = field(default_factory=list)
    sections: list[PageSection] = field(default_factory=list)


def estimate_cell(estimate: Estimate, form: Callable[[float | None], str] = number) -> Cell:
    return Cell(form(estimate.value), interval(estimate.low, estimate.high, form))
