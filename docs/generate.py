"""Writes the tables that the documentation takes from the code, in place.

    python docs/generate.py            rewrite what is stale
    python docs/generate.py --check    exit 1 if something is

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paceline import rllib_keys
from paceline.cli import TRAIN_FLAGS, make_parser
from paceline.config import ALGORITHM_NAMES, RunConfig
from paceline.engine.sizes import Machine, estimate, fit, look, workers_of
from paceline.launch.profile import Profile
from paceline.resolve import keys, presets, resolve_tree
from paceline.run.metrics import EVAL_METRICS, METRICS, Metric

DOCS = Path(__file__).parent
KINDS = {"int": "whole number", "float": "number", "str": "text", "bool": "`true`, `false`"}
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings() -> str:
    """Every key of the config, a table for each section."""
    parts: dict[str, list[list[str]]] = {}
    for key, kind, default, meaning in keys():
        section = key.partition(".")[0] if "." in key else ""
        parts.setdefault(section, []).append([_code(key), _code(default), _kind(kind), meaning])
    blocks = []
    for section, rows in parts.items():
        model = RunConfig.model_fields[section].annotation if section else None
        about = (vars(model).get("__doc__") if model else None) or ""
        title = f"### `{section}`" if section else "### At the top"
        table = _table(["key", "default", "values", "meaning"], rows)
        blocks += [title, *([" ".join(about.split())] if about else []), table]
    return "\n\n".join(blocks)


def flags() -> str:
    return _table(["flag", "key", ""], [[_code(flag), _code(key), text] for flag, (key, text) in TRAIN_FLAGS.items()])


def options_of(verb: str) -> str:
    """The options of a verb that has no keys, from its parser."""
    verbs = next(action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    rows = []
    for action in verbs[verb]._actions:
        if action.option_strings and "--help" not in action.option_strings:
            value = f" {action.metavar}" if action.metavar else ""
            rows.append([", ".join(_code(f"{flag}{value}") for flag in action.option_strings), action.help or ""])
    return _table(["option", ""], rows)


def profile() -> str:
    rows = [[_code(name), field.description or ""] for name, field in Profile.model_fields.items()]
    return _table(["key", "meaning"], rows)


def preset_list() -> str:
    rows = [
        [_code(name), _code(algo), " ".join(_code(f"{key}={value}") for key, value in _leaves(tree))]
        for algo in ALGORITHM_NAMES
        for name, tree in presets(algo).items()
    ]
    return _table(["preset", "algorithm", "settings"], rows)


def metrics() -> str:
    return _metric_table(METRICS)


def eval_metrics() -> str:
    return _metric_table(EVAL_METRICS)


def room() -> str:
    """What `auto` chooses for Procgen, by cores and memory."""
    rows = []
    for cores, memory in ((2, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 64), (64, 256)):
        here = Machine(cores, memory * 10**9)
        cells = [str(cores), f"{memory} GB"]
        for cnn in ("nature", "impala"):
            tree = {"env": {"id": "coinrun", "envs_per_worker": 0}, "ppo": {"minibatch_size": 0}, "model": {"cnn": cnn}}
            config, _ = fit(_on_cpu(tree), may_lower=True, here=here)
            needed = estimate(config, _images(config), 1) / 1e9
            cells += [f"{config.env.envs_per_worker} x {config.ppo.minibatch_size}", f"{needed:.1f} GB"]
        config, _ = fit(_on_cpu({"env": "coinrun", "engine": {"name": "ray"}}), may_lower=True, here=here)
        needed = estimate(config, _images(config), workers_of(config, here)) / 1e9
        rows.append([*cells, str(workers_of(config, here)), f"{needed:.1f} GB"])
    head = ["cores", "memory", "Nature-CNN", "takes", "IMPALA-CNN", "takes", "workers of PPO", "take"]
    return _table(head, rows)


def _on_cpu(tree: dict[str, Any]) -> RunConfig:
    return resolve_tree({**tree, "engine": {"device": "cpu", **tree.get("engine", {})}})[0]


def _images(config: RunConfig) -> Any:
    images, _ = look(config)
    assert images is not None
    return images


def rllib_mapped() -> str:
    return _table(["key", "RLlib's"], [[_code(key), what] for key, what in rllib_keys.MAPPED.items()])


def rllib_refused() -> str:
    return _table(["key", "why, or what instead"], [[_code(key), why] for key, why in rllib_keys.REFUSED.items()])


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "flags": flags,
    "presets": preset_list,
    "launch-options": lambda: options_of("launch"),
    "submit-options": lambda: options_of("submit"),
    "profile": profile,
    "room": room,
    "metrics": metrics,
    "eval-metrics": eval_metrics,
    "rllib-mapped": rllib_mapped,
    "rllib-refused": rllib_refused,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the documentation's generated tables.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    check = parser.parse_args().check
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        old = path.read_text(encoding="utf-8")
        new = BLOCK.sub(_fill, old)
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'is stale: run python docs/generate.py' if check else 'rewritten'}")
    return 1 if check and stale else 0


def _fill(match: re.Match[str]) -> str:
    if match[2] not in TABLES:
        sys.exit(f"there is no table '{match[2]}'; there are {', '.join(TABLES)}")
    return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"


def _metric_table(table: dict[str, Metric]) -> str:
    rows = [
        [_code(name), metric.description, _code(f"{metric.group}/{name}") if metric.group else ""]
        for name, metric in table.items()
    ]
    return _table(["name", "meaning", "in TensorBoard"], rows)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else value


def _kind(kind: str) -> str:
    """In words; a choice of words is listed."""
    if " | " in kind:
        return ", ".join(_code(word) for word in kind.split(" | "))
    return re.sub(r"\w+", lambda word: KINDS.get(word[0], word[0]), kind)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
