"""The words of COMMAND: those added so that it resumes or gets its seed, and the run directory it will write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from paceline.config import UserError
from paceline.config.values import shortened
from paceline.config.yaml_text import load_yaml, read_text

RESUMABLE = ("train", "tune")
MAX_SEEDS = 1_000


def parse_seeds(text: str) -> list[int]:
    """`0-4` or `1,5,9`."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip(), re.ASCII)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if high < low:
            raise UserError(f"--seeds {shortened(text)}: give seeds such as 0-4 or 1,5,9")
        if len(seeds) + high - low >= MAX_SEEDS:
            raise UserError(f"--seeds {text}: at most {MAX_SEEDS:,} at once; give fewer")
        seeds += range(low, high + 1)
    if len(set(seeds)) != len(seeds):
        raise UserError(f"--seeds {text}: give each seed once")
    return seeds


def with_seed(command: Sequence[str], seed: int | None) -> list[str]:
    """Replaces `{seed}` in the words; where no word has it, appends `--seed S`."""
    if seed is None:
        return list(command)
    words = [word.replace("{seed}", str(seed)) for word in command]
    return words if words != list(command) else [*words, "--seed", str(seed)]


def train_words(command: Sequence[str]) -> list[str] | None:
    """The words after `paceline train` or `paceline tune`; None for another command."""
    for at, word in enumerate(command):
        if Path(word).name == "paceline":
            return list(command[at + 2 :]) if command[at + 1 : at + 2] and command[at + 1] in RESUMABLE else None
    return None


def resumable(command: Sequence[str], name: str, seed: int | None = None) -> list[str]:
    """A training command that resumes when its job starts again: the run gets a name, different for each seed."""
    arguments, words = train_words(command), list(command)
    if arguments is None or _flag(arguments, "--resume") is not None:
        return words
    given = _flag(arguments, "--name") or _setting(arguments, "name")
    if given is None:
        words += ["--name", name]
    elif seed is not None and str(seed) not in given:
        words += ["--name", f"{given}-{seed}"]  # the last one counts
    return [*words, "--resume", "auto"]


def run_directory(command: Sequence[str], cwd: Path) -> str:
    """The run directory as far as the words tell; empty where they do not."""
    words = train_words(command)
    if words is None:
        return ""
    resume = _flag(words, "--resume")
    if resume not in (None, "auto"):
        return str(cwd / Path(str(resume)).expanduser())
    name = _flag(words, "--name") or _setting(words, "name")
    out = _flag(words, "--out") or _setting(words, "out") or _config_value(words, cwd, "out") or "runs"
    return str(cwd / Path(out).expanduser() / name) if name else ""


def _flag(words: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, as `--flag value` or `--flag=value`."""
    found = None
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            found = words[at + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _setting(words: Sequence[str], key: str) -> str | None:
    """The last value of `--set key=value`."""
    values = [words[at + 1] for at in range(len(words) - 1) if words[at] == "--set"]
    found = [value.partition("=")[2] for value in values if value.startswith(f"{key}=")]
    return found[-1] if found else None


def _config_value(words: Sequence[str], cwd: Path, key: str) -> str | None:
    path = _flag(words, "--config")
    try:
        tree = load_yaml(read_text(cwd / path)) if path else None
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the command itself will report it
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, str) else None
