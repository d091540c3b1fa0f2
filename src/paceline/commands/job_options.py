"""The flags by which `submit` and `bench scaling` describe a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from paceline.commands.flags import Flag, SettingFlags, Verb, flag_name

if TYPE_CHECKING:
    from paceline.schedulers.job import Job
    from paceline.schedulers.profile import Profile
    from paceline.schedulers.scheduler import Scheduler

ALSO = {"queue": ("--partition",), "constraint": ("--property",)}
METAVARS = {"walltime": "TIME", "save": "TIME", "after": "JOB", "extra": "TEXT", "mail": "ADDRESS"} | {
    f"learner_{name}": name.upper() for name in ("memory", "queue", "constraint")
}


def job_flags(without: tuple[str, ...] = ()) -> SettingFlags:
    from paceline.schedulers.job import Job

    names = (name for name in Job.model_fields if name not in without)
    return SettingFlags(Job, {name: (flag_name(name), *ALSO.get(name, ())) for name in names}, metavars=METAVARS)


class JobVerb(Verb):
    on: Annotated[str | None, Flag("SCHEDULER")] = None
    """Name of the scheduler (default: the profile's)."""
    profile: Annotated[str | None, Flag("SITE")] = None
    """Site profile: a YAML file, or the name of one in ~/.config/paceline/sites."""
    job: Annotated[dict[str, Any], job_flags()]

    @classmethod
    def epilog(cls, arguments: Sequence[str]) -> str:
        from paceline.schedulers import SCHEDULERS

        return f"\nschedulers: {', '.join(SCHEDULERS)}\n"

    def requested(self) -> tuple[Scheduler, Profile, Job]:
        """The scheduler, the site's profile, and the job that they and the flags describe."""
        from paceline.config import UserError
        from paceline.jobs.submit import scheduler_named
        from paceline.schedulers.job import Job
        from paceline.schedulers.profile import read_profile, validated

        profile = read_profile(self.profile)
        scheduler = scheduler_named(self.on or profile.scheduler)
        if (time := self.job.get("walltime", "")).isdecimal():
            raise UserError(f"--walltime {time}: ambiguous (minutes in SLURM, seconds in PBS); give {time}m or {time}s")
        return scheduler, profile, validated(Job, {**profile.defaults, **self.job}, "--")
