"""Show runs: comparisons, figures, reports and the dashboard. Read-only, and free of torch and Ray."""

from __future__ import annotations

from typing import Any

from paceline.callable_module import make_callable


def report(*arguments: Any, **options: Any) -> Any:
    """See `paceline.report.page.report`."""
    from paceline.report.page import report

    return report(*arguments, **options)


make_callable(__name__, "report")
