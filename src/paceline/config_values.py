"""What the settings of a run are made of: numbers and times as people write them, and what a section of them is."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class UserError(Exception):
    """Something the user can mend. The command line prints its one line and exits with 2."""


def parse_seconds(value: Any) -> Any:
    """`90`, `"90"`, `"30m"`, `"1h30m"`, `"01:30:00"` → seconds."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if re.fullmatch(r"\d+:\d{2}(:\d{2})?", text):
        seconds = 0
        for part in text.split(":"):
            seconds = seconds * 60 + int(part)
        return float(seconds)
    if re.fullmatch(r"([0-9.]+[smhd])+", text):
        return sum(float(number) * _TIME_UNITS[unit] for number, unit in re.findall(r"([0-9.]+)([smhd])", text))
    try:
        return float(text)
    except ValueError:
        raise ValueError("a duration such as 90, 90s, 30m, 1h30m or 01:30:00") from None


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
    """`auto` → 0, which stands for it."""
    return 0 if value == "auto" else parse_count(value)


Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
Count = Annotated[int, BeforeValidator(parse_count)]
Positive = Annotated[Count, Field(ge=1)]
OrAuto = Annotated[int, BeforeValidator(parse_auto), Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Schedule = Literal["constant", "linear"]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )
