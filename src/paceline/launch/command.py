"""The words of a COMMAND: those that are added so that it resumes or has its seed, and where it will write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from paceline.config import UserError

RESUMABLE = ("train", "tune")


def parse_seeds(text: str) -> list[int]:
    """`0-4` and `1,5,9`."""
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and (not high.isdecimal() or int(high) < int(low))):
            raise UserError(f"--seeds {text}: seeds such as 0-4 or 1,5,9")
        seeds += range(int(low), int(high or low) + 1)
    if len(set(seeds)) != len(seeds):
        raise UserError(f"--seeds {text}: each seed once")
    return seeds


def with_seed(command: Sequence[str], seed: int | None) -> list[str]:
    """`{seed}` in a word stands for it; where none has it, `--seed S` comes at the end."""
    if seed is None:
        return list(command)
    words = [word.replace("{seed}", str(seed)) for word in command]
    return words if words != list(command) else [*words, "--seed", str(seed)]


def train_words(command: Sequence[str]) -> list[str] | None:
    """What follows `paceline train` or `paceline tune`, where the command is one of them."""
    for at, word in enumerate(command):
        ours = Path(word).name == "paceline" or (word == "paceline" and command[at - 1 : at] == ["-m"])
        if ours:
            return list(command[at + 2 :]) if command[at + 1 : at + 2] and command[at + 1] in RESUMABLE else None
    return None


def resumable(command: Sequence[str], name: str, seed: int | None = None) -> list[str]:
    """A training goes on where it stood when the job starts again: for that the run needs a name, each seed its own."""
    words = train_words(command)
    made = list(command)
    if words is None or _value(words, "--resume") is not None:
        return made
    given = _value(words, "--name") or _set_value(words, "name")
    if given is None:
        made += ["--name", name]
    elif seed is not None and str(seed) not in given:
        made += ["--name", f"{given}-{seed}"]  # the last one counts
    return [*made, "--resume", "auto"]


def run_directory(command: Sequence[str], cwd: Path) -> str:
    """Where the command will write, as far as its words tell."""
    words = train_words(command)
    if words is None:
        return ""
    resume = _value(words, "--resume")
    if resume not in (None, "auto"):
        return str(cwd / Path(str(resume)).expanduser())
    name = _value(words, "--name") or _set_value(words, "name")
    out = _value(words, "--out") or _set_value(words, "out") or _config_value(words, cwd, "out") or "runs"
    return str(cwd / Path(out).expanduser() / name) if name else ""


def _value(words: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, as `--flag value` or `--flag=value`."""
    found = None
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            found = words[at + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _set_value(words: Sequence[str], key: str) -> str | None:
    found = None
    for at, word in enumerate(words[1:], start=1):
        if words[at - 1] == "--set" and word.startswith(f"{key}="):
            found = word.partition("=")[2]
    return found


def _config_value(words: Sequence[str], cwd: Path, key: str) -> str | None:
    path = _value(words, "--config")
    try:
        tree = yaml.safe_load((cwd / path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the command itself will say what is wrong with it
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, str) else None
