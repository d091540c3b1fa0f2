"""Types of settings: numbers and times as people write them, and the base class of a section."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

_OTHER_NAMES = {  # what users call a value or a verb → its name here
    "gpu": "cuda",
    "learn": "train",
    "enjoy": "evaluate",
    "play": "evaluate",
    "sweep": "tune",
    "list": "runs",
    "ls": "runs",
}
_TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_].*?\x1b\\|[ -/]*[0-~])", re.S)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text from elsewhere, such as an env's exception, without what a terminal would obey. Lines and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", text.replace("\r\n", "\n")))


class UserError(Exception):
    """Bad input. The command line prints its one line and exits with 2."""


def did_you_mean(word: str, words: list[str]) -> str:
    """A hint at the nearest of `words`, or nothing."""
    lower = {w.lower(): w for w in words}
    near = difflib.get_close_matches(_OTHER_NAMES.get(word.lower(), word.lower()), list(lower), 1, 0.5)
    return f"; did you mean '{lower[near[0]]}'?" if near else ""


def expanded(path: str | Path) -> Path:
    """`~/runs` → `/home/me/runs`; UserError for `~` before the name of somebody who is not there."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: there is no user '{str(path)[1:].partition('/')[0]}' on this machine") from None


def shortened(text: str, most: int = 200) -> str:
    """The beginning of a long text, for a message."""
    return text if len(text) <= most else f"{text[:most]}…"


def parse_seconds(value: Any) -> Any:
    """`90`, `"90"`, `"30m"`, `"1h30m"`, `"01:30:00"` → seconds."""
    if not isinstance(value, str):
        return value
    text, seconds = value.strip(), 0.0
    try:
        if re.fullmatch(r"\d+:\d{2}(:\d{2})?", text):
            for part in text.split(":"):
                seconds = seconds * 60 + float(part)
        elif re.fullmatch(r"([0-9.]+[smhd])+", text):
            seconds = sum(float(number) * _TIME_UNITS[unit] for number, unit in re.findall(r"([0-9.]+)([smhd])", text))
        else:
            seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError("expected a duration such as 90, 90s, 30m, 1h30m or 01:30:00")
    return seconds


def parse_count(value: Any) -> Any:
    """`100000`, `"100_000"`, `"1e5"`, `"100k"`, `"1M"` → int. Leaves alone what is not a whole number."""
    if isinstance(value, str):
        text = value.strip().replace("_", "").replace(",", "")
        factor = {"k": 1_000, "M": 1_000_000}.get(text[-1:], 1)
        try:
            value = float(text[:-1] if factor > 1 else text) * factor
        except ValueError:
            return text
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_auto(value: Any) -> Any:
    """`auto` → 0, which means the same."""
    return 0 if value == "auto" else parse_count(value)


MOST = 2**63 - 1
"""The largest whole number: that of 64 bits."""
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
Count = Annotated[int, BeforeValidator(parse_count), Field(le=MOST)]
Positive = Annotated[Count, Field(ge=1)]
OrAuto = Annotated[int, BeforeValidator(parse_auto), Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Schedule = Literal["constant", "linear"]


class Section(BaseModel):
    """A frozen group of settings. Unknown keys are errors; the text under a field is its description."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in arguments of environments, wrappers and networks
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would read `gamma: true` as 1."""
        values = value if isinstance(value, list) else [value]
        if info.field_name and any(isinstance(one, bool) for one in values):
            types = _types_in(cls.model_fields[info.field_name].annotation)
            if types & {int, float} and bool not in types:
                raise ValueError("expected a number, not true or false")
        return value


def _types_in(annotation: Any) -> set[Any]:
    """`list[int] | None` → list, int, None."""
    inside = [] if get_origin(annotation) is Literal else get_args(annotation)
    return {get_origin(annotation) or annotation}.union(*map(_types_in, inside))
