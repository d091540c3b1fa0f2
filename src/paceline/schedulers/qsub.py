"""What PBS and Cobalt have in common: jobs are submitted by `qsub` and a stopped job submits itself again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.schedulers.scheduler import Scheduler

if TYPE_CHECKING:
    from paceline.schedulers.job import Job


class Qsub(Scheduler):
    submit = ("qsub",)
    interactive = ("qsub", "-I")
    cancel = "qdel"
    after_words: tuple[str, ...]
    """Options for the ids of jobs that must succeed first; {} stands for them."""

    def submit_argv(self, script: Path, after: Sequence[str] = ()) -> list[str]:
        # Not in the script: it also submits the job's successor, when the jobs before it are over and perhaps unknown.
        return [*self.submit, *self._after(after), str(script)]

    def interactive_argv(self, job: Job, setup: Path | None = None) -> list[str]:
        return [*super().interactive_argv(job, setup), *self._after(job.after)]

    def restart(self, script: Path) -> list[str]:
        # `qrerun` is for operators. A job runs a copy of its script, so the script is named by its path. Jobs that wait
        # for this one would be deleted when it ends with 99: they are told to wait for its successor instead.
        after = " ".join(self.after_words).replace("{}", '"$(paste -sd: "$place/after")"')
        return [
            f'next=$(qsub {shlex.quote(str(script))}) && echo "$next" >>"$folder/ids" &&',
            '  if [ -e "$folder/dependents" ]; then',
            "    while read -r each place; do",
            f'      {{ grep -vxF "{self.id_text}" "$place/after"; echo "$next"; }} >"$place/after.new"',
            '      mv "$place/after.new" "$place/after"',
            f'      qalter {after} "$each" || :',
            '    done <"$folder/dependents"',
            "  fi",
        ]

    def _after(self, ids: Sequence[str]) -> list[str]:
        return [word.replace("{}", ":".join(ids)) for word in self.after_words] if ids else []
