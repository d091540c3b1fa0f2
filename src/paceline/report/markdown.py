"""A report as Markdown: its text and tables, and the descriptions of its figures."""

from __future__ import annotations

import re

from paceline.report.blocks import Block, Cell, Chart, ChartPair, CodeBlock, Page, Table, Text


def render(page: Page) -> str:
    parts = [f"# {_text(page.title)}", _text(page.lead), f"**{_text(page.headline)}**", *map(_text, page.findings)]
    parts.append("\n".join(f"- {_text(tile.label)}: {_text(tile.value)}{_small(tile.small)}" for tile in page.tiles))
    for section in page.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [part for block in section.blocks if (part := _block(block))]
    parts.append(f"Made {_text(page.made)}.")
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"> {_text(block.text)}" if block.tone in ("notice", "bad") else _text(block.text)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Chart):
        return f"*{_text(block.description)}*"
    if isinstance(block, ChartPair):
        return _block(block.charts[0])
    assert isinstance(block, CodeBlock)
    fence = "`" * (max((len(run) for run in re.findall("`+", "".join(block.lines))), default=2) + 1)
    return f"{fence}text\n" + "\n".join(block.lines) + f"\n{fence}"


def _table(table: Table) -> str:
    rule = ["---:" if column in table.numbers else "---" for column in range(len(table.head))]
    cells = [[_text(text) for text in table.head], rule, *([_cell(cell) for cell in row] for row in table.rows)]
    return f"{_text(table.caption)}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(cell: Cell) -> str:
    return _text(cell.text) + _small(cell.small)


def _small(text: str) -> str:
    return f" ({_text(text)})" if text else ""


def _text(text: str) -> str:
    """One line, with HTML and Markdown escaped."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)
