"""`paceline launch`."""

from __future__ import annotations

import shlex
from typing import Annotated

from paceline.commands.flags import Argument, Flag, Verb


class LaunchVerb(Verb):
    """Run a command on the machines of an allocation.

    Start Ray on every host of the allocation (from a batch job, mpirun or similar, or --hosts; otherwise this machine)
    and run COMMAND once, on the first host, with RAY_ADDRESS set and {address} replaced by it. Signals are passed on to
    COMMAND. At the end everything is stopped, and the exit code is COMMAND's.
    """

    usage = "paceline launch [options] -- COMMAND …"

    hosts: Annotated[str | None, Flag("FILE")] = None
    """Hosts to reach by ssh, one per line: [user@]name[:port] [cpus=N]."""
    rehearse: Annotated[int | None, Flag("N")] = None
    """Simulate N hosts with processes on this machine."""
    interface: Annotated[str | None, Flag("IF")] = None
    """Network interface between the hosts, such as ib0 or hsn0."""
    nodes: Annotated[int | None, Flag("N", least=1)] = None
    """Use only the first N hosts (default: all)."""
    min_nodes: Annotated[int | None, Flag("N", least=1)] = None
    """Start once this many hosts are ready (default: all)."""
    timeout: Annotated[float, Flag("S", least=1)] = 120
    """Seconds to wait for the hosts to be ready."""
    cpus: Annotated[int | None, Flag("N", least=1)] = None
    """CPUs to use on each host (default: those of the allocation)."""
    port: Annotated[int, Flag("P", least=0, most=65535)] = 0
    """Port of Ray's head (default: a free one)."""
    ports: Annotated[str | None, Flag("A-B")] = None
    """Ports that the launcher and Ray may use on every host (default: any free ones)."""
    container: Annotated[str | None, Flag("WORDS")] = None
    """Words before every command on the hosts, such as "apptainer exec IMAGE"."""
    dashboard: bool = False
    """Start Ray's dashboard, on the head's 127.0.0.1."""
    keep: bool = False
    """Keep the cluster after COMMAND, until Ctrl-C."""
    log: Annotated[str | None, Flag("DIR")] = None
    """Folder of the timeline (default: .paceline/launch/TIME)."""
    command: Annotated[tuple[str, ...], Argument("COMMAND", rest=True)]
    """The command, after --."""

    def run(self) -> int:
        from paceline.launch.launch_command import log_folder, port_range, run_launch
        from paceline.launch.options import LaunchOptions

        options = LaunchOptions(
            log_folder(self.log),
            interface=self.interface,
            min_nodes=self.min_nodes,
            timeout=self.timeout,
            keep=self.keep,
            cpus=self.cpus,
            port=self.port,
            ports=None if self.ports is None else port_range(self.ports),
            container=tuple(shlex.split(self.container or "")),
            dashboard=self.dashboard,
        )
        return run_launch(self.command, options, hosts=self.hosts, rehearse=self.rehearse, nodes=self.nodes)
