"""A real SLURM with accounting and a real OAR, seen alike: for the trials of `cancel_trials.py`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts import Hosts, wait_until
from oarbed import OarBed
from slurmbed import SlurmBed

GOES_ON_SECONDS = 150.0  # after a loss: for others to notice, and for the scheduler to start a job again
END_SECONDS = 60.0
ALIVE = [
    "pending",
    "running",
    "completing",
    "requeued",
    "resizing",
    "waiting",
    "launching",
    "finishing",
    "tolaunch",
    "toerror",
    "resuming",
]
"""States of jobs that have not ended, in the words of either scheduler."""


class Site:
    """One scheduler, and a user who logs in on its first host."""

    name: str
    hosts: Hosts
    home: Path
    jobs: Path
    grace = True
    """Whether a job that is preempted has time to save."""

    def run(self, line: str, seconds: float = 90.0) -> str:
        raise NotImplementedError

    def accounted(self, job: str) -> str:
        """The state of an ended job in the scheduler's accounts."""
        raise NotImplementedError

    def forgets(self, job: str) -> bool:
        """Whether the scheduler's queue has forgotten the job."""
        return True

    def urgent(self) -> None:
        """Submit a job that needs all hosts now."""
        raise NotImplementedError

    def reboot(self, host: int) -> None:
        raise NotImplementedError

    def tidy(self) -> None:
        """Wait until nothing is queued, and until all hosts are ready."""
        raise NotImplementedError


class SlurmSite(Site):
    name = "slurm"

    def __init__(self, bed: SlurmBed) -> None:
        self.bed, self.hosts, self.home = bed, bed.hosts, bed.home
        self.jobs = bed.home / "data/paceline/jobs"

    def run(self, line: str, seconds: float = 90.0) -> str:
        done = self.bed.run(["sh", "-c", line], seconds=seconds)
        return done.stdout + done.stderr

    def accounted(self, job: str) -> str:
        lines = self.run(f"sacct --noheader --allocations --parsable2 --format=State --jobs={job}").splitlines()
        return lines[-1].strip() if lines else ""  # a job that lost a host has a line for each size

    def forgets(self, job: str) -> bool:
        return "|" not in self.run(f"squeue --noheader --states=all --format='%i|' --jobs={job}")

    def urgent(self) -> None:
        (self.home / "urgent.sh").write_text("#!/bin/sh\nsleep 3\n")
        self.run("sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null urgent.sh")

    def reboot(self, host: int) -> None:
        self.bed.reboot(host)

    def tidy(self) -> None:
        wait_until(lambda: self.run("squeue --noheader") == "", "nothing is queued", END_SECONDS)
        wait_until(self.bed._is_idle, "all hosts are ready", GOES_ON_SECONDS)


class OarSite(Site):
    name, grace = "oar", False

    def __init__(self, bed: OarBed) -> None:
        self.bed, self.hosts, self.home = bed, bed.hosts, bed.home
        self.jobs = bed.home / ".local/share/paceline/jobs"

    def run(self, line: str, seconds: float = 90.0) -> str:
        done = self.bed.run(line, seconds=seconds)
        return done.stdout + done.stderr

    def accounted(self, job: str) -> str:
        return self.run(f"oarstat -s -j {job}").strip().rpartition(" ")[2]

    def urgent(self) -> None:
        self.run("oarsub -l nodes=2,walltime=00:01:00 'sleep 3'")

    def reboot(self, host: int) -> None:
        self.bed.reboot(host)

    def tidy(self) -> None:
        wait_until(lambda: self.run("oarstat -u").strip() == "", "nothing is queued", GOES_ON_SECONDS)
        wait_until(lambda: self.run("oarnodes -s").count("Alive") == 4, "all hosts are ready", GOES_ON_SECONDS)


@contextmanager
def opened(name: str) -> Iterator[Site]:
    if name == "oar":
        with OarBed() as oar:
            yield OarSite(oar)
        return
    folder = Path(tempfile.mkdtemp(prefix="pc-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        with SlurmBed(folder, accounting=True) as slurm:
            yield SlurmSite(slurm)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
