"""Writes the tables and pictures that the documentation takes from the code, in place.

    python docs/generate.py            rewrite what is stale
    python docs/generate.py --check    exit 1 if something is

Each stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fault_tables
import pictures
from python_reference import python_reference

from paceline.commands.flags import options
from paceline.commands.main import VERBS
from paceline.config import ALGORITHMS, RunConfig, algorithm_class, rllib_keys
from paceline.config.resolve import keys, presets, resolve_tree
from paceline.envs import procgen
from paceline.run.metrics import EVAL_METRICS, METRICS, Metric
from paceline.schedulers.profile import Profile
from paceline.training.memory import Resources, estimate, fit_to_memory, measure, workers_of

DOCS = Path(__file__).parent
procgen.import_envpool = lambda: None  # the tables need the games' spaces alone, also where envpool does not load
KINDS = {"int": "whole number", "float": "number", "str": "text", "bool": "`true`, `false`"}
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def package_list() -> str:
    """Every package and single module, by layer, with the first sentence of its docstring."""
    rows = [[_code(name), pictures.meaning(name)] for layer in pictures.layers() for name in layer]
    return _table(["package", ""], rows)


def settings() -> str:
    """Every key of the config, a table for each section."""
    parts: dict[str, list[list[str]]] = {}
    for key, kind, default, meaning in keys():
        section = key.partition(".")[0] if "." in key else ""
        parts.setdefault(section, []).append([_code(key), _code(default), _kind(kind), meaning])
    blocks = []
    for section, rows in parts.items():
        about = _about(section) if section else ""
        title = f"### `{section}`" if section else "### At the top"
        table = _table(["key", "default", "values", "meaning"], rows)
        blocks += [title, *([" ".join(about.split())] if about else []), table]
    return "\n\n".join(blocks)


def _about(section: str) -> str:
    """The first paragraph on an algorithm, or what the section's class says of itself."""
    if section in ALGORITHMS:
        return (sys.modules[algorithm_class(section).__module__].__doc__ or "").partition("\n\n")[0]
    return vars(RunConfig.model_fields[section].annotation).get("__doc__") or ""


def flags() -> str:
    """The settings that have a flag of their own."""
    chosen = [option for option in options(VERBS["train"]) if option.field == "settings"]
    rows = [[_code(option.names[0]), _code(option.setting), option.help] for option in chosen]
    return _table(["flag", "key", ""], rows)


def options_of(verb: str) -> str:
    """Every flag of a verb."""
    rows = []
    for option in options(VERBS[verb]):
        metavar = f" {value}" if (value := option.keywords.get("metavar")) else ""
        if option.names:
            rows.append([", ".join(_code(f"{flag}{metavar}") for flag in option.names), option.help])
    return _table(["option", ""], rows)


def profile() -> str:
    rows = [[_code(name), field.description or ""] for name, field in Profile.model_fields.items()]
    return _table(["key", "meaning"], rows)


def preset_list() -> str:
    rows = [
        [_code(name), _code(algo), " ".join(_code(f"{key}={value}") for key, value in _leaves(tree))]
        for algo in ALGORITHMS
        for name, tree in presets(algo).items()
    ]
    return _table(["preset", "algorithm", "settings"], rows)


def metrics() -> str:
    own = {
        name: Metric(meaning, "train") for algo in ALGORITHMS for name, meaning in algorithm_class(algo).metrics.items()
    }
    return _metric_table(METRICS | own)


def eval_metrics() -> str:
    return _metric_table(EVAL_METRICS)


def room() -> str:
    """What `auto` chooses for Procgen, by cores and memory."""
    rows = []
    for cores, memory in ((2, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 64), (64, 256)):
        here = Resources(cores, memory * 10**9)
        cells = [str(cores), f"{memory} GB"]
        for cnn in ("nature", "impala"):
            tree = {"env": {"id": "coinrun", "envs_per_worker": 0}, "ppo": {"minibatch_size": 0}, "model": {"cnn": cnn}}
            config, _ = fit_to_memory(_on_cpu(tree), may_lower=True, here=here)
            needed = estimate(config, _images(config), 1) / 1e9
            cells += [f"{config.env.envs_per_worker} x {config.hyper.minibatch_size}", f"{needed:.1f} GB"]
        config, _ = fit_to_memory(_on_cpu({"env": "coinrun", "engine": {"name": "ray"}}), may_lower=True, here=here)
        needed = estimate(config, _images(config), workers_of(config, here)) / 1e9
        rows.append([*cells, str(workers_of(config, here)), f"{needed:.1f} GB"])
    head = ["cores", "memory", "Nature-CNN", "takes", "IMPALA-CNN", "takes", "workers of PPO", "take"]
    return _table(head, rows)


def _on_cpu(tree: dict[str, Any]) -> RunConfig:
    return resolve_tree({**tree, "engine": {"device": "cpu", **tree.get("engine", {})}})[0]


def _images(config: RunConfig) -> Any:
    images, _ = measure(config)
    assert images is not None
    return images


def rllib_mapped() -> str:
    return _table(["key", "RLlib's"], [[_code(key), what] for key, what in rllib_keys.MAPPED.items()])


def rllib_refused() -> str:
    return _table(["key", "why, or what instead"], [[_code(key), why] for key, why in rllib_keys.REFUSED.items()])


TABLES: dict[str, Callable[[], str]] = {
    "packages": pictures.packages,
    "package-list": package_list,
    "iteration": pictures.iteration,
    "settings": settings,
    "flags": flags,
    "presets": preset_list,
    "launch-options": lambda: options_of("launch"),
    "submit-options": lambda: options_of("submit"),
    "profile": profile,
    "python": python_reference,
    "room": room,
    "metrics": metrics,
    "eval-metrics": eval_metrics,
    "rllib-mapped": rllib_mapped,
    "rllib-refused": rllib_refused,
    "crash-matrix": fault_tables.crash_matrix,
    "kills": fault_tables.kills,
    "node-kills": fault_tables.node_kills,
    "cancels": fault_tables.cancels,
    "soak": fault_tables.soak,
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
