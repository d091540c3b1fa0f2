"""What the user may have meant by words that a verb does not take."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from paceline.commands.flags import Verb, options
from paceline.config.algorithms import ALGORITHMS
from paceline.config.keys import key_meant


def meant(verb: type[Verb], words: Sequence[str], algo: str | None = None) -> str | None:
    """The flag, with a value where it needs one, that the first of these words stands for; None for no idea."""
    flags = {name: option for option in options(verb) for name in option.names}
    by_setting = {option.setting: option.names[-1] for option in flags.values() if option.setting}
    word, sign, value = words[0].partition("=")
    if not word.startswith("-"):
        setting = "algo" if word in ALGORITHMS else "env.id"
        return f"{by_setting[setting]} {word}" if setting in by_setting else None
    if not sign and words[1:] and not words[1].startswith("-"):
        value = words[1]
    key = key_meant(word.lstrip("-").replace("-", "_"), algo) if by_setting else None
    if key in by_setting:
        return f"{by_setting[key]} {value}".rstrip()
    if key is not None and "--set" in flags:
        return f"--set {key}={value or 'VALUE'}"
    near = difflib.get_close_matches(word, list(flags), 1, 0.6)
    return near[0] if near else None
