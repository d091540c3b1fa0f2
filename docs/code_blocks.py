"""Reads the code blocks of the documentation's pages. CONTRIBUTING.md explains the comments that mark them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+): (?P<note>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    mark: str
    note: str
    language: str
    text: str
    where: str


def blocks(page: Path) -> Iterator[Block]:
    content = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(content):
        line = content[: match.start("text")].count("\n") + 1
        yield Block(match["mark"] or "", match["note"] or "", match["language"], match["text"], f"{page.name}:{line}")


def apply_sources(page: Path, tree: Path) -> None:
    """Write the new files that a page shows into `tree`, and make the changes of its diffs there."""
    for block in blocks(page):
        if block.mark == "source" and block.language == "diff":
            for part in re.split(r"^--- ", block.text, flags=re.M)[1:]:
                name, _, changes = part.partition("\n")
                apply_diff(tree / name, changes, block.where)
        elif block.mark == "source":
            target = tree / block.note
            if target.exists():
                raise ValueError(f"{block.where}: {block.note} exists already")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)


def apply_diff(path: Path, changes: str, where: str) -> None:
    """A diff without line numbers: the old lines of each hunk occur together in the file, exactly once."""
    text = path.read_text()
    for hunk in re.split(r"^@@\n", changes, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        if text.count(old) != 1:
            raise ValueError(f"{where}: {path.name} has these lines {text.count(old)} times, not once:\n{old}")
        text = text.replace(old, new)
    path.write_text(text)
