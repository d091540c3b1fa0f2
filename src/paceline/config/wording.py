"""Error messages are written in the words of the command line. In Python they speak of keys and arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from paceline.config.train_flags import FLAGS
from paceline.config.values import UserError

_KEYS = {flag: key for key, flag in FLAGS.items()} | {"-o": "output"}
_QUOTED = re.compile(r"(`[^`]*`)")
_VALUE = r"(?: (?=\S+: |rllib\b|local\b|ray\b|auto\b|cpu\b|cuda\b|none\b))?"
"""A space that becomes `=`, since a value follows."""
_FLAG = re.compile(rf"(?<![\w-])(--[a-z][a-z-]*|-o(?= )){_VALUE}")
_ALGO = re.compile(r"--algo (\w+)")


@contextlib.contextmanager
def python_words() -> Iterator[None]:
    """Errors that leave it speak of keys and arguments."""
    try:
        yield
    except UserError as error:
        error.args = (in_python(str(error)),)
        raise


def in_python(text: str) -> str:
    """`--engine rllib` → `engine.name=rllib`, `--init-from` → `init_from`; commands between backticks stay."""
    parts = _QUOTED.split(text)
    return "".join(part if part.startswith("`") else _translated(part) for part in parts)


def _translated(text: str) -> str:
    def key(match: re.Match[str]) -> str:
        name = _KEYS.get(match[1], match[1].removeprefix("--").replace("-", "_"))
        return f"{name}=" if match[0].endswith(" ") else name

    return _FLAG.sub(key, _ALGO.sub(r"algo=\1", text))
