"""Writes docs/benchmarks.md from the results that are kept in benchmarks/results.

    python docs/make_benchmarks.py            rewrite the page if it is stale
    python docs/make_benchmarks.py --check    exit 1 if it is

A section of the page is one of benchmarks/sections.py, and each of its parts has a file of results, which
benchmarks/bench.py writes. Beside it may lie a note (.md) and a picture (.png or .svg) of the same name.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from paceline.bench import suite_tables
from paceline.results.text import table as markdown_table

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

from published import TABLES, Published  # noqa: E402
from sections import RESULTS, SECTIONS, Result, Section, minutes, result_path  # noqa: E402
from tables import Row, bars_table, commands, number, ratio_of, ratio_text, spread, work_table  # noqa: E402

PAGE = DOCS / "benchmarks.md"
FENCE = "```sh\n"
NOT_RUN = f"<!-- not run: long, and needs a quiet machine -->\n{FENCE}"
FIRST = ("published",)  # what most come for
CPU_MINUTES, GPU_MINUTES = (sum(minutes(gpu).values()) for gpu in (False, True))

HEAD = f"""# Benchmarks

<!-- made by docs/make_benchmarks.py from benchmarks/results: edit neither -->

Every figure on this page is measured by one command, and is shown with that command, the versions, the cores and the
date. [Benchmarks](../benchmarks/README.md) describes the methods and their checks.

{NOT_RUN}make bench               # everything that needs no GPU: about {CPU_MINUTES:.0f} minutes on two cores
make bench ONLY=dqn      # one section, or one part of it: ONLY=dqn/replay
make bench-gpu           # everything that needs a GPU: about {GPU_MINUTES:.0f} minutes
```

The same command continues an interrupted benchmark: parts that were measured today with this version are kept;
`make bench AGAIN=1` repeats them. A part that fails is shown as a line in its table.
"""

FOOT = f"""
## Suites of your own

`paceline bench suite` trains and evaluates games × algorithms × seeds as ordinary runs. Existing runs are kept, so
the same command continues an interrupted suite, or adds seeds or games to a finished one. `--retry` repeats failed runs
(see `paceline bench suite --help`). A suite is a short YAML file: `procgen-easy`, `classic`, `atari-small`, `mujoco`,
or your own. Its tables are in `suite.md`, the figures in `suite.json`.

{NOT_RUN}paceline bench suite --suite classic --algos ppo,a2c --seeds 3
paceline bench suite --suite procgen-easy --algos ppo,impala --seeds 3 --games coinrun,starpilot
```

Your own suite must list its games; everything else is optional. `range` gives the returns that score 0 and 1, and
`settings` are nested as in a config file. The suite is checked before the first run, and `--dry-run` shows it:

<!-- file: mine.yaml -->
```yaml
about: Two small problems.
total_steps: 100k
episodes: 50
games:
  cartpole: {{env: CartPole-v1, range: [23, 500]}}
  acrobot: {{env: Acrobot-v1, range: [-500, -70], total_steps: 300k}}
settings:
  engine: {{threads: 1}}
```

```sh
paceline bench suite --suite mine.yaml --algos ppo,a2c --seeds 2 --dry-run
```
"""

RATIOS = """Median (minimum–maximum). A ratio above 1 means better than the peer. It is the median over the pairs,
with its bootstrap interval."""
FLOORS = {
    1: """The arithmetic floor is the time for only the matrix products of learning, at {} GFLOP/s. One thread of this
machine reaches that rate with 128 × 256 × 256, so no program that does the same work on one thread in 32 bits can be
much faster.""",
    2: """The arithmetic floor is the time for only the matrix products of learning, at {} GFLOP/s. Two processes with a
thread each reach that rate together with 256 × 256 × 256, so no program that does the same work on these cores in 32
bits can be much faster. An update of SAC takes 0.577 GFLOP, one of TD3 0.413 on average.""",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/benchmarks.md from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    check = parser.parse_args().check
    text = page(RESULTS)
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}: {'is stale: run python docs/make_benchmarks.py' if check else 'rewritten'}")
    return 1 if check else 0


def page(folder: Path) -> str:
    parts = [*minutes(False), *minutes(True)]
    found = {part: json.loads(path.read_text()) for part in parts if (path := result_path(part, folder)).is_file()}
    order = sorted(SECTIONS, key=lambda key: key not in FIRST)
    return HEAD + "".join(f"\n{_section(key, SECTIONS[key], found, folder)}" for key in order) + FOOT


def _section(key: str, section: Section, found: dict[str, Result], folder: Path) -> str:
    names = [f"{key}/{name}" for name in section.minutes]
    own = {name: found[name] for name in names if name in found}
    done = {name: result for name, result in own.items() if not result["failure"]}
    blocks = [f"## {section.title}", prose(section.about), f"{NOT_RUN}{command_of(key)}\n```"]
    if key == "published":
        blocks += [_beside(table, found) for table in TABLES]
    rows = [Row.from_dict(row) for result in done.values() for row in result["rows"]]
    failures = {name: result["failure"] for name, result in own.items() if result["failure"]}
    if rows or failures:
        blocks.append(bars_table(rows, failures))
        if any(row.peer for row in rows):
            blocks.append(RATIOS)
    if any(row.floor_seconds is not None for row in rows):
        rates = sorted({round(result["gflops"]) for result in done.values() if result["gflops"]})
        blocks.append(prose(FLOORS[section.floor_threads].format(" or ".join(map(str, rates)))))
    for name, result in done.items():
        blocks += [f"{title.capitalize()}:\n\n{_figures(lines)}" for title, lines in result["tables"].items()]
        if result["suite"]:
            blocks.append(_suite(result["suite"], name))
        if result.get("text"):
            blocks.append(f"### {name.partition('/')[2]}\n\n{result['text'].replace(FENCE, NOT_RUN)}")
        blocks += _beside_file(name, folder)
    runs = {job: records for result in done.values() for job, records in result["runs"].items()}
    if runs:
        blocks += [work_table(runs), NOT_RUN + "\n".join(commands(runs)) + "\n```"]
    if missing := [name for name in names if name not in own]:
        blocks.append(f"Not measured yet: {', '.join(f'`{name}`' for name in missing)}.")
    return "\n\n".join([*blocks, *_origins(own)]) + "\n"


def prose(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def command_of(key: str) -> str:
    """What measures a section: of the published figures also the parts that stand beside them."""
    others = {part: None for table in TABLES for part, _ in table.here.values() if part.partition("/")[0] != key}
    only = shlex.quote(" ".join([key, *others])) if key == "published" else key
    return f"make {'bench-gpu' if SECTIONS[key].gpu else 'bench'} ONLY={only}"


def _origins(found: dict[str, Result]) -> list[str]:
    """Of each part: date, command, machine and commit; versions once where they agree."""
    known = {name: result for name, result in found.items() if "versions" in result}
    if not known:
        return []
    lines = [
        [
            name.partition("/")[2],
            result["date"],
            result["command"],
            _machine(result["machine"]),
            result["commit"],
        ]
        for name, result in known.items()
    ]
    versions: dict[str, list[str]] = {}
    for name, result in known.items():
        sides = [(side, ", ".join(f"{k} {v}" for k, v in of.items())) for side, of in result["versions"].items() if of]
        text = " ".join(f"{'Versions' if side == 'ours' else 'Peers'}: {words}." for side, words in sides)
        versions.setdefault(text, []).append(f"`{name.partition('/')[2]}`")
    said = [text if len(versions) == 1 else f"{', '.join(names)}: {text}" for text, names in versions.items()]
    return [markdown_table(["part", "measured", "command", "machine", "commit"], lines), *said]


def _machine(here: dict[str, Any]) -> str:
    gpu = f"{here['gpu']}, " if here.get("gpu") else ""
    return f"{gpu}{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB; load before {here['load_before']}"


def _beside(table: Published, found: dict[str, Result]) -> str:
    """The published figures, then ours with their ratios to each."""
    head = ["", "system", table.measure, "return", *(f"to {where}" for where in table.figures)]
    digits = 0 if table.better == "higher" else 1
    lines = [
        [where, "published", number(figure, digits), given, *["–"] * len(table.figures)]
        for where, (figure, given) in table.figures.items()
    ]
    for label, (part, job) in table.here.items():
        records = found.get(part, {}).get("runs", {}).get(job, [])
        for system in dict.fromkeys(record["system"] for record in records):
            own = [record for record in records if record["system"] == system]
            values = [record[table.key] for record in own]
            returns = [record["return_last100"] for record in own if record["return_last100"] is not None]
            ratios = [
                ratio_text([ratio_of(figure, value, table.better) for value in values])
                for figure, _ in table.figures.values()
            ]
            where = f"{label.rpartition(', ')[2]}, {found[part]['machine']['cores']} cores"
            lines.append([where, f"{system}, here", spread(values, digits), spread(returns, 0), *ratios])
        if not records:
            lines.append([label, "here", f"not measured yet (`{part}`)", "–", *["–"] * len(table.figures)])
    parts = dict.fromkeys(part for part, _ in table.here.values())
    origins = "The figures measured here are from " + " and ".join(
        f"`{part}`" + (f" ({found[part]['date']})" if part in found else "") for part in parts
    )
    return "\n\n".join([f"### {table.title}", prose(table.about), markdown_table(head, lines), f"{origins}."])


def _figures(lines: list[dict[str, Any]]) -> str:
    head = list(lines[0])
    return markdown_table(
        [name.replace("_", " ") for name in head], [[_cell(line[name]) for name in head] for line in lines]
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _suite(result: dict[str, Any], name: str) -> str:
    first: dict[str, dict[str, Any]] = {}
    for entry in result["runs"]:
        if entry["state"] == "done":
            first.setdefault(entry["algo"], entry)
    lines = [shlex.join(shlex.split(entry[verb])) for entry in first.values() for verb in ("train", "evaluate")]
    text = suite_tables.tables(result).replace(FENCE, NOT_RUN).rstrip()
    alone = f"To repeat one run of each algorithm:\n\n{NOT_RUN}" + "\n".join(lines) + "\n```"
    return f"### {name.partition('/')[2]}\n\n{text}\n\n{alone}"


def _beside_file(name: str, folder: Path) -> list[str]:
    found = []
    if (note := folder / f"{name}.md").is_file():
        found.append(note.read_text(encoding="utf-8").strip())
    for picture in (folder / f"{name}{ending}" for ending in (".svg", ".png")):
        if picture.is_file():
            found.append(f"![Curves of {name.partition('/')[2]}](../benchmarks/results/{name}{picture.suffix})")
    return found


if __name__ == "__main__":
    sys.exit(main())
