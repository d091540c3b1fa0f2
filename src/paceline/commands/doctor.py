"""`paceline doctor`."""

from __future__ import annotations

from typing import Annotated

from paceline.commands.flags import Flag, Verb


class DoctorVerb(Verb):
    """Check this machine or a set of hosts for problems, and suggest fixes.

    Check this machine; inside an allocation, or with --hosts, check all hosts and the network between them.
    """

    hosts: Annotated[str | None, Flag("FILE")] = None
    """Hosts to reach by ssh, as for launch."""
    interface: Annotated[str | None, Flag("IF")] = None
    """Network interface between the hosts, as for launch."""
    out: str = "runs"
    """The folder that the runs would go to."""

    def run(self) -> int:
        from paceline.doctor.diagnosis import run_doctor

        return run_doctor(self.out, self.hosts, self.interface)
