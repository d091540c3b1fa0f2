"""Batch schedulers, the jobs they are asked for, and the scripts that are submitted to them."""

from paceline.schedulers.cobalt import Cobalt
from paceline.schedulers.oar import Oar
from paceline.schedulers.pbs import Pbs
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {
    scheduler.name: scheduler
    for scheduler in (
        Slurm(),
        Oar(),
        Pbs(),
        Cobalt(),
    )
}
"""By name. A new scheduler is one file, one line here and its test (see docs/extending.md)."""
