"""Writes docs/benchmarks.md from the results that are kept in benchmarks/results.

    python docs/make_benchmarks.py            rewrite the page if it is stale
    python docs/make_benchmarks.py --check    exit 1 if it is

A folder benchmarks/results/NAME is a section. In it: the `suite.json` of a `paceline bench suite`, or run directories
(or one) of which `summary.json`, `provenance.json` and, if evaluated, `eval.jsonl` are kept; `note.md`, if there is
something to know about them; and `curves.svg` or `curves.png`, if there is a picture.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from paceline.bench import results
from paceline.bench.plan import EVERYTHING, LEVEL_SETS
from paceline.run.console import duration
from paceline.run.directory import RunDirectory

DOCS = Path(__file__).parent
PAGE, RESULTS = DOCS / "benchmarks.md", DOCS.parent / "benchmarks/results"
NOT_RUN = "<!-- not run: hours of training -->\n```sh\n"

HEAD = f"""# Benchmarks: scores

<!-- made by docs/make_benchmarks.py from benchmarks/results: edit neither -->

What agents learned, in how many steps and in what time, with the commands that made the runs. How fast paceline is
beside other libraries is measured apart: [Speed](../benchmarks/README.md).

`paceline bench suite` trains and evaluates games × algorithms × seeds as ordinary runs. What is there already is left
alone, so the same command continues a suite that was interrupted, and adds seeds or games to one that is finished; runs
that failed are tried again only if that is asked for (see `paceline bench suite --help`). A suite is a short YAML file:
`procgen-easy`, `classic`, `atari-small`, or your own. Its tables are in `suite.md`, the figures in `suite.json`.

{NOT_RUN}paceline bench suite --suite classic --algos ppo,a2c --seeds 3
paceline bench suite --suite procgen-easy --algos ppo,impala --seeds 3 --games coinrun,starpilot
```

A suite of your own names the games; the rest may be left out. `range` holds the returns that count as 0 and as 1, and
`settings` are nested as in a file of settings. Before the first run all of it is checked, and shown if asked for:

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

NONE = """
## Results

None are kept yet. To keep one, copy the `suite.json` of a suite to `benchmarks/results/NAME/` and run
`python docs/make_benchmarks.py`.
"""


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
    sections = [section for path in sorted(folder.glob("*/")) if (section := _section(path))]
    return HEAD + ("".join(f"\n{section}" for section in sections) or NONE)


def _section(folder: Path) -> str:
    parts = []
    for path in sorted(folder.rglob("suite.json")):
        parts.append(_suite(json.loads(path.read_text(encoding="utf-8"))))
    runs = [RunDirectory(path.parent) for path in sorted(folder.rglob("summary.json"))]
    if runs:
        parts.append(_runs(runs))
    if not parts:
        return ""
    if (note := folder / "note.md").is_file():
        parts.append(note.read_text(encoding="utf-8"))
    for picture in sorted([*folder.glob("curves.svg"), *folder.glob("curves.png")]):
        parts.append(f"![Curves of {folder.name}](../benchmarks/results/{folder.name}/{picture.name})\n")
    return f"## {folder.name}\n\n" + "\n".join(parts)


def _suite(result: dict[str, Any]) -> str:
    result["commands"] = [_shown(shlex.split(command)) for command in result["commands"]]
    first: dict[str, dict[str, Any]] = {}
    for entry in result["runs"]:
        if entry["state"] == "done":
            first.setdefault(entry["algo"], entry)
    commands = [_shown(shlex.split(entry[verb])) for entry in first.values() for verb in ("train", "evaluate")]
    text = results.tables(result).replace("```sh\n", NOT_RUN)
    return f"{text}\nA run of each algorithm by itself:\n\n{NOT_RUN}" + "\n".join(commands) + "\n```\n"


def _runs(runs: list[RunDirectory]) -> str:
    rows = []
    for run in runs:
        summary, evaluated = run.read_summary(), _evaluated(run)
        rows.append(
            [
                run.path.name,
                summary["env"],
                summary["algo"],
                str(summary["seed"]),
                f"{summary['env_steps']:,}",
                _spread(summary),
                *(_spread(evaluated.get(level)) for level in LEVEL_SETS),
                f"{summary['steps_per_second']:,.0f}",
                duration(summary["wall_seconds"]),
            ]
        )
    head = ["run", "environment", "algorithm", "seed", "steps", "return while training", "evaluated"]
    head += ["evaluated, all levels", "steps/s", "wall time"]
    lines = results.machines(results.machine(run) for run in runs)
    commands = [command for run in runs if (command := _command(run))]
    note = "Returns: mean ± standard deviation over episodes, while training those of the last 100."
    block = NOT_RUN + "\n".join(commands) + "\n```"
    return "\n\n".join([block, *lines, results.table(head, rows), note]) + "\n"


def _evaluated(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """The last evaluation of each level set; that of an environment without them stands with the training levels."""
    rows = [row for row in run.read_eval() if row.get("kind") in ("deterministic", "stochastic")]
    return {str(row.get("levels") or EVERYTHING).replace(EVERYTHING, "train"): row for row in rows}


def _spread(row: dict[str, Any] | None) -> str:
    if row is None or row.get("return_mean") is None:
        return "–"
    return f"{row['return_mean']:.2f} ± {row['return_std']:.2f}"


def _command(run: RunDirectory) -> str | None:
    """As it was given; None: the run was made from Python."""
    words = json.loads(run.provenance_path.read_text(encoding="utf-8"))["argv"]
    return _shown(["paceline", *words[1:]]) if len(words) > 1 and words[1] == "train" else None


def _shown(words: list[str]) -> str:
    """Without the folder, if it is of one machine only."""
    if words[1] == "evaluate" and Path(words[2]).is_absolute():
        return shlex.join([*words[:2], f"runs/{Path(words[2]).name}", *words[3:]])
    for place, word in enumerate(words[:-1]):
        if word == "--out" and Path(words[place + 1]).is_absolute():
            return shlex.join([*words[:place], *words[place + 2 :]])
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
