"""Templates, style sheets and scripts of the pages, and the path of plotly's script."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import UserError

if TYPE_CHECKING:
    from jinja2 import Environment

SERVED = ("style.css", "dashboard.css", "charts.js", "dashboard.js")
_MISSING = "report and dashboard need plotly, aiohttp and jinja2; pip install 'paceline[report]'"


def read(name: str) -> str:
    return resources.files("paceline.report").joinpath("static", name).read_text(encoding="utf-8")


def render(template: str, **values: Any) -> str:
    """Render a template; text in `values` is escaped."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def check() -> None:
    """UserError if a library that the pages need is not installed."""
    if not all(importlib.util.find_spec(name) for name in ("plotly", "aiohttp", "jinja2")):
        raise UserError(_MISSING)


def plotly_path() -> Path:
    """The script in the installed package, found without importing it, which takes a second."""
    spec = importlib.util.find_spec("plotly")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise UserError(_MISSING)


def plotly_version() -> str:
    return importlib.metadata.version("plotly")
