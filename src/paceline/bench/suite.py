"""`paceline bench suite`: games x algorithms x seeds, trained and evaluated, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench import results
from paceline.bench.make import STOPPED, Entry, Interrupts, Ledger, Screen, drive, reason, run_words
from paceline.bench.plan import Cell, load_suite, plan


def run_suite(
    name: str,
    *,
    algos: Sequence[str],
    seeds: int,
    games: Sequence[str] | None = None,
    total_steps: int | None = None,
    episodes: int | None = None,
    sets: Sequence[str] = (),
    out: str | None = None,
    retry: bool = False,
    dry_run: bool = False,
) -> int:
    """Make what is missing, write `suite.json` and `suite.md`, and return the exit status."""
    shown, suite = load_suite(name)
    folder = Path(out or f"runs/{shown}").expanduser()
    cells = plan(
        suite,
        out=folder,
        algos=algos,
        seeds=seeds,
        games=games,
        total_steps=total_steps,
        episodes=episodes,
        sets=sets,
    )
    words = ["--suite", name, "--algos", ",".join(algos), "--seeds", str(seeds)]
    words += ["--games", ",".join(games)] if games is not None else []
    for flag, value in (("--total-steps", total_steps), ("--episodes", episodes), ("--out", out)):
        words += [flag, str(value)] if value is not None else []
    words += [word for item in sets for word in ("--set", item)]
    return drive(SuiteLedger(folder, shown, suite.about, cells, words), retry=retry, dry_run=dry_run)


class SuiteLedger(Ledger[Cell]):
    kind = "suite"

    def read(self, cell: Cell, before: Entry | None) -> Entry:
        return results.read(cell, before)

    def make(self, cell: Cell, entry: Entry, screen: Screen, interrupts: Interrupts) -> tuple[int, str | None]:
        """Train unless that is done, then evaluate."""
        log = cell.out / "logs" / f"{cell.name}.log"
        if not entry["trained"]:
            code, said = run_words(cell.train_words, log, screen, interrupts)
            if code == STOPPED or interrupts.received:
                return STOPPED, None
            if code:
                return code, reason(code, said)
        screen.progress("evaluation")
        code, said = run_words(cell.evaluate_words, log, screen, interrupts)
        if interrupts.received:
            return STOPPED, None
        if code:
            return code, f"evaluation: {reason(code, said)}"
        return 0, None if self.read(cell, None)["state"] == "done" else "evaluation: it left no row in eval.jsonl"

    def commands_of(self, cell: Cell) -> list[list[str]]:
        return [cell.train_words, cell.evaluate_words]

    def line(self, entry: Entry) -> str:
        return results.line(entry)

    def collect(self) -> dict[str, Any]:
        return results.collect(self.title, self.about, self.commands, list(self.entries.values()))

    def page(self, result: dict[str, Any]) -> str:
        return results.page(result)

    def tables(self, result: dict[str, Any]) -> str:
        return results.tables(result)
