"""`paceline cluster`: your own machines, reached by ssh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from paceline.commands.flags import Argument, Flag, Verb, VerbGroup

if TYPE_CHECKING:
    from paceline.ssh_cluster.cluster_state import ClusterState


class ClusterVerb(Verb):
    hosts: Annotated[str, Argument("HOSTS")]
    """A hosts file, Ray's cluster.yaml, or the name of a cluster."""

    def cluster(self) -> ClusterState:
        from paceline.ssh_cluster.cluster_state import find

        return find(self.hosts)


class PageVerb(ClusterVerb):
    port: Annotated[int, Flag("P", least=0, most=65535)] = 0
    """Local port (default: the usual one, or a free one)."""


class ClusterUp(ClusterVerb):
    """Reach every host and build the environment there if needed."""

    def run(self) -> int:
        from paceline.ssh_cluster.manage import up

        return up(self.hosts)


class ClusterStatus(ClusterVerb):
    """Show the hosts, their load and memory, and what runs."""

    def run(self) -> int:
        from paceline.ssh_cluster.manage import status

        return status(self.cluster())


class ClusterAttach(ClusterVerb):
    """Open a shell on the head, in the environment."""

    def run(self) -> int:
        from paceline.ssh_cluster.tunnel import attach

        return attach(self.cluster())


class ClusterDashboard(PageVerb):
    """Open Ray's dashboard of the running job, on 127.0.0.1 of this machine."""

    def run(self) -> int:
        from paceline.ssh_cluster.tunnel import dashboard

        return dashboard(self.cluster(), self.port)


class ClusterTensorboard(PageVerb):
    """Open TensorBoard of all runs on the cluster, on 127.0.0.1 of this machine."""

    def run(self) -> int:
        from paceline.ssh_cluster.tunnel import tensorboard

        return tensorboard(self.cluster(), self.port)


class ClusterDown(ClusterVerb):
    """End every paceline process on the hosts."""

    purge: bool = False
    """Also remove the environment; runs stay."""

    def run(self) -> int:
        from paceline.ssh_cluster.manage import down

        return down(self.cluster(), self.purge)


CLUSTER = VerbGroup(
    "Use your own machines, reached by ssh.\n\nUse your own machines, reached by ssh. No paceline process runs on them "
    "between jobs.",
    "ACTION",
    {
        "up": ClusterUp,
        "status": ClusterStatus,
        "attach": ClusterAttach,
        "dashboard": ClusterDashboard,
        "tensorboard": ClusterTensorboard,
        "down": ClusterDown,
    },
)
