"""What the synchronous and the asynchronous engine on Ray have in common: the cluster, the choice of workers, the
checks before a run and the accounts after it.
"""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray

from paceline import machine
from paceline.config import RunConfig, UserError
from paceline.engine import cluster_address
from paceline.engine.base import Engine, Lane, TrainingError
from paceline.engine.crew import ASK_SECONDS, Crew, Member
from paceline.engine.messages import Facts, Order, role
from paceline.engine.ray_cluster import Cluster
from paceline.engine.team import Team
from paceline.engine.worker import PACKAGES
from paceline.ship import Parcel, pack


class RayEngine(Engine):
    name = "ray"

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config, self._resumes = config, resumes
        engine = config.engine
        learners = self.learners()
        own_cores = machine.cores()
        if cluster_address(engine):
            self.cluster = Cluster(engine, 0)
            cores = max(1, int(self.cluster.cpus))
            self.workers = engine.workers or self._choose(cores - learners)
        else:
            cores = own_cores
            self.workers = engine.workers or self._choose(cores - learners)
            self.cluster = Cluster(engine, self.workers + learners)
        self.cores = cores
        self._cores_each = max(1, cores // (self.workers + learners))
        self._parcel = Parcel() if self.cluster.is_own else pack(config)
        self._log_folder: Path | None = None
        self._room: Path | None = None
        self.crews: list[Crew] = []
        """Those with environments first."""
        self.facts: Facts
        """Of the first worker with environments."""
        self.bytes_moved = 0
        try:
            self.cluster.reserve(self.workers, learners)
            self._begin_crews()
            facts = self.crews[0].members[0].facts
            assert facts is not None
            self.facts, self.threads, self.parameters = facts, facts.threads, facts.parameters
            self.device = self._last_device()
            self._check_versions()
        except BaseException:
            self.close()
            raise

    def _last_device(self) -> str:
        """Learners come last, and only they use a GPU."""
        facts = self._everyone()[-1].facts
        return facts.device if facts is not None else "cpu"

    def learners(self) -> int:
        """Processes beside the workers."""
        return 0

    @abstractmethod
    def _begin_crews(self) -> None: ...

    def _choose(self, cores: int) -> int:
        most = self.config.env.envs_per_worker if self.config.engine.scaling == "strong" else cores
        return max(1, min(cores, most)) if self.learners() == 0 else max(1, cores)

    def _add_crew(self, places: dict[int, int], order: Callable[[int, int], Order]) -> Crew:
        config = self.config
        crew = Crew(
            self.cluster,
            order,
            places,
            silence=config.env.step_timeout_seconds,
            restarts=config.engine.max_restarts,
        )
        self.crews.append(crew)
        return crew

    def _make_team(self, crew: Crew) -> Team:
        return Team(
            crew,
            self.cluster.own_address,
            silence=self.config.env.step_timeout_seconds,
            start_timeout=self.config.engine.start_timeout_seconds,
        )

    def _load_policy(self, crew: Crew, arrays: dict[str, Any]) -> None:
        given = ray.put(arrays)
        calls = {member: member.handle.load_policy.remote(given) for member in crew.members}
        results, losses = crew.call(calls, limit=ASK_SECONDS)
        for problem in results.values():
            if problem is not None:
                raise UserError(problem)
        if losses:
            raise TrainingError(f"{losses[0].member.name} {losses[0].reason}")

    def _order(self, config: RunConfig, slot: int, restarts: int, envs: int, **more: Any) -> Order:
        log = str(self._log_path(slot)) if self._log_folder is not None else None
        return Order(
            config=config,
            parcel=self._parcel,
            slot=slot,
            envs=envs,
            restarts=restarts,
            resumes=self._resumes,
            cores=self._cores_each,
            log=log,
            folder=str(self._room) if self._room is not None else None,
            workers=self.workers,
            host=platform.node(),
            **more,
        )

    def _check_versions(self) -> None:
        own = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
        for member in self._everyone():
            facts = member.facts
            for package, here in own.items() if facts is not None else ():
                assert facts is not None
                there = facts.versions[package]
                if there != here:
                    raise UserError(
                        f"{facts.host} ({facts.address}) has {package} {there}, {platform.node()} has {here}: all "
                        "nodes need the same; use one environment on a shared folder, or install it alike everywhere"
                    )

    def _everyone(self) -> list[Member]:
        return [member for crew in self.crews for member in crew.members]

    # -- what the loop asks ---------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        config, facts, members = self.config, self.facts, self.crews[0].members
        envs = [member.order.envs for member in members]
        each = f"{envs[0]}" if len(set(envs)) == 1 else f"{min(envs)} to {max(envs)}"
        where = "a Ray of our own" if self.cluster.is_own else f"the Ray cluster at {self.cluster.address}"
        hosts = ", ".join(f"{host} {count}" for host, count in self._hosts().items())
        lines = [
            f"env        {config.env.id} x {sum(envs)}, {each} a worker, {facts.stepping}",
            *facts.lines,
            f"learner    {config.algo.upper()}, {facts.parameters:,} parameters, {facts.threads} thread(s) a process",
            f"workers    {self.workers} on {where}: {hosts}",
            *self._describe_schedule(),
        ]
        if self._parcel.left_out:
            lines.append(f"note       too large to be sent along, and left at home: {', '.join(self._parcel.left_out)}")
        processes = self.workers + self.learners()
        if processes > self.cores:
            lines.append(
                f"warning    {processes} processes share {self.cores} core(s) and take turns: right for simulators "
                "that wait for something else, slower for those that compute"
            )
        return lines

    def _describe_schedule(self) -> list[str]:
        return []

    def _hosts(self) -> dict[str, int]:
        """How many workers each host has, by name and address where names are not unique."""
        counts: dict[str, int] = defaultdict(int)
        for member in self._everyone():
            if member.facts is not None:
                counts[f"{member.facts.host} ({member.facts.address})"] += 1
        return dict(counts)

    def log_to(self, folder: Path) -> None:
        self._log_folder = folder.resolve()
        for member in self._everyone():
            member.handle.log_to.remote(str(self._log_path(member.slot)), platform.node())

    def keep_in(self, folder: Path) -> None:
        self._room = folder.resolve()
        for member in self._everyone():
            member.handle.keep_in.remote(str(self._room), platform.node())

    def _log_path(self, slot: int) -> Path:
        assert self._log_folder is not None
        kind, number = role(slot).split()
        return self._log_folder / f"{kind}-{int(number):03d}.log"

    def notes(self) -> list[str]:
        found: list[str] = []
        for crew in self.crews:
            found += crew.messages[crew.told :]
            crew.told = len(crew.messages)
        return found

    def usage(self) -> tuple[int, float]:
        memory, seconds = machine.memory_bytes(), machine.cpu_seconds()
        if not self.cluster.is_own:  # its processes are not our descendants
            for member in self._everyone():
                memory += member.latest.memory_bytes
                seconds += member.latest.cpu_seconds
        return memory, seconds

    @property
    def nodes(self) -> int:  # type: ignore[override]
        return len({member.facts.address for member in self._everyone() if member.facts is not None})

    def accounts(self) -> dict[str, Any]:
        members = self._everyone()
        nodes: dict[str, dict[str, Any]] = {}
        for member in members:
            if member.facts is None:
                continue
            node = nodes.setdefault(
                member.facts.address,
                {"host": member.facts.host, "address": member.facts.address, "cores": member.facts.cores}
                | {"workers": 0, "env_steps": 0, "memory_bytes": 0, "cpu_seconds": 0.0},
            )
            node["workers"] += 1
            node["env_steps"] += member.env_steps
            node["memory_bytes"] += member.latest.memory_bytes
            node["cpu_seconds"] += member.latest.cpu_seconds
        return {
            "nodes": self.nodes,
            "hosts": list(nodes.values()),
            **self._health(),
            "bytes_moved": self.bytes_moved,
            "worker_time_split": {role(member.slot).removeprefix("worker "): member.lane for member in members},
            "worker_memory_bytes": max((member.latest.memory_bytes for member in members), default=0),
        }

    def _health(self) -> dict[str, float]:
        """For every row of the metrics."""
        return {
            "workers_healthy": len(self.crews[0].members),
            "workers_lost": sum(crew.lost for crew in self.crews),
            "workers_restarted": sum(crew.restarted for crew in self.crews),
        }

    def close(self) -> None:
        if ray.is_initialized():
            for crew in self.crews:
                crew.close()
        self.cluster.close()


def mean_lane(members: list[Member]) -> Lane:
    parts: dict[str, float] = defaultdict(float)
    for member in members:
        for part, seconds in member.lane.items():
            parts[part] += seconds / len(members)
    return dict(parts)
