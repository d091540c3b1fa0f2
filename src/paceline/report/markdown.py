"""The same page as Markdown: all its text and tables; of a figure what it says."""

from __future__ import annotations

import re

from paceline.report.blocks import Block, Cell, Chart, Code, Page, Pair, Table, Text


def render(page: Page) -> str:
    parts = [f"# {_text(page.title)}", _text(page.lead), f"**{_text(page.headline)}**", *map(_text, page.because)]
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
        return f"*{_text(block.says)}*"
    if isinstance(block, Pair):
        return _block(block.charts[0])
    assert isinstance(block, Code)
    fence = "`" * (max((len(run) for run in re.findall("`+", "".join(block.lines))), default=2) + 1)
    return f"{fence}text\n" + "\n".join(block.lines) + f"\n{fence}"


def _table(table: Table) -> str:
    rule = ["---:" if column in table.numbers else "---" for column in range(len(table.head))]
    lines = [_row(table.head), _row(rule, raw=True)]
    lines += [_row([_cell(cell) for cell in row], raw=True) for row in table.rows]
    return f"{_text(table.caption)}\n\n" + "\n".join(lines)


def _cell(cell: Cell) -> str:
    return _text(cell.text) + _small(cell.small)


def _small(text: str) -> str:
    return f" ({_text(text)})" if text else ""


def _row(cells: list[str], raw: bool = False) -> str:
    return "| " + " | ".join(cell if raw else _text(cell) for cell in cells) + " |"


def _text(text: str) -> str:
    """Nothing in it is markup: neither HTML nor Markdown, and a line stays a line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)
