"""The groups of one task with their comparison and speed-up, computed once for the whole report."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from paceline.config import UserError
from paceline.report.charts import has_returns
from paceline.results.comparison import Comparison, compare
from paceline.results.groups import RunGroup, group, groups_of_tasks, relabel
from paceline.results.runs import RunData
from paceline.results.scaling_series import ScalingPoint, scaling_series
from paceline.results.text import number

MUCH_LONGER = 1.1
"""A run this many times as long as the comparison's horizon makes the report name the horizon."""


class TaskResults:
    def __init__(self, name: str, groups: list[RunGroup], place: int) -> None:
        self.name, self.groups, self.id = name, groups, f"task{place}"
        self.slots = {group.label: slot for slot, group in enumerate(groups)}
        self.series = scaling_series(groups)
        self.without_returns = [run.name for group in groups for run in group.used if not has_returns(run)]
        compared = [
            RunGroup(group.label, group.key, [run for run in group.runs if has_returns(run)]) for group in groups
        ]
        self.by_steps: Comparison | None = None
        self.by_time: Comparison | None = None
        with contextlib.suppress(UserError):  # no run has finished with a return
            self.by_steps, self.by_time = compare(compared, at="steps"), compare(compared, at="time")

    @property
    def runs(self) -> list[RunData]:
        return [run for group in self.groups for run in group.runs]

    @property
    def horizon(self) -> float | None:
        """The steps at which returns are compared."""
        return None if self.by_steps is None else next(iter(self.by_steps.horizon.values()))

    @property
    def at_horizon(self) -> str:
        """` at N steps` if returns are compared well before the end of the longest run; else empty."""
        if self.horizon is None:
            return ""
        longest = max(run.env_steps for group in self.groups for run in group.used if has_returns(run))
        return f" at {number(self.horizon)} steps" if longest > MUCH_LONGER * self.horizon else ""

    def scaling_point(self, group: RunGroup) -> tuple[ScalingPoint, bool] | None:
        """The group's point in a series, and whether it is the base of the series."""
        for series in self.series:
            for place, point in enumerate(series.points):
                if point.group.label == group.label:
                    return point, place == 0
        return None


def task_results(runs: Sequence[RunData]) -> list[TaskResults]:
    groups = group(runs)
    names = list(dict.fromkeys(run.task for run in runs))
    short = short_names(names)
    return [
        TaskResults(short[name], relabel(groups_of_tasks(groups, [name])), place) for place, name in enumerate(names)
    ]


def short_names(tasks: Sequence[str]) -> dict[str, str]:
    """Tasks by their full name. An environment in a file is called by the file's name unless that is ambiguous."""
    short = {}
    for task in tasks:
        env, space, settings = task.partition(" ")
        short[task] = env.rpartition("/")[2] + space + settings if ".py:" in task else task
    return {task: name if list(short.values()).count(name) == 1 else task for task, name in short.items()}
