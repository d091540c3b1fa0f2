"""What the synchronous and the asynchronous engine on Ray share: cluster, workers, checks before the run, accounts."""

from __future__ import annotations

import platform
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray

from paceline import machine
from paceline.code_bundle import pack
from paceline.config import RunConfig, UserError
from paceline.config.resolve import to_tree
from paceline.engines.ray.messages import WorkerInfo, WorkerSpec, installed_versions, role
from paceline.engines.ray.ray_cluster import RayCluster
from paceline.engines.ray.worker_pool import WorkerHandle, WorkerPool
from paceline.training.engine import Engine, TrainingError
from paceline.training.placement import cluster_address

Pool = TypeVar("Pool", bound=WorkerPool)
WORKER_BYTES = 130_000_000  # at least, of a worker with a small network


def check_memory(workers: int, available: int) -> None:
    """Refuse a number of workers that this machine cannot hold: they would take it down with them."""
    if workers * WORKER_BYTES > available:
        raise UserError(
            f"engine.workers={workers}: each takes {WORKER_BYTES / 1e6:g} MB at least, and this machine has "
            f"{available / 1e9:.0f} GB: give at most {available // WORKER_BYTES}, or use a cluster"
        )


class RayEngine(Engine):
    name = "ray"

    def __init__(self, config: RunConfig, *, resumes: int = 0) -> None:
        self.config, self._resumes = config, resumes
        engine, learners = config.engine, self.learner_count
        if cluster_address(engine):
            self.cluster = RayCluster(engine, 0)
            self.cores = max(1, int(self.cluster.cpus))
            self.workers = engine.workers or max(1, self.cores - learners)
        else:
            self.cores = machine.cores()
            self.workers = engine.workers or max(1, self.cores - learners)
            check_memory(self.workers, machine.memory_limit_bytes())
            self.cluster = RayCluster(engine, self.workers + learners)
        self._cores_each = max(1, self.cores // (self.workers + learners))
        self._code_bundle = pack(to_tree(config), files_too=not self.cluster.is_own)
        self._changes: dict[str, Any] = {}
        self._log_folder: Path | None = None
        self._scratch_dir: Path | None = None
        self.pools: list[WorkerPool] = []
        """The one with environments first."""
        self.first: WorkerInfo
        """Of the first worker with environments."""
        self.bytes_moved = 0
        try:
            self.cluster.reserve(self.workers, learners)
            self._start_pools()
            self.first = _info(self.pools[0].workers[0])
            self._at_work = self.workers
            self._envs = sum(worker.spec.envs for worker in self.pools[0].workers)
            self.threads, self.parameters = self.first.threads, self.first.parameters
            self.device = _info(self.pools[-1].workers[-1]).device  # learners come last, and only they use a GPU
            self._check_versions()
            self._driver_began = time.process_time()
        except BaseException as error:
            failure = self.failure() if isinstance(error, Exception) else None
            self.close()
            if failure is not None:
                raise TrainingError(failure) from error
            raise

    @property
    def learner_count(self) -> int:
        """Learner processes beside the workers."""
        return 0

    @abstractmethod
    def _start_pools(self) -> None: ...

    def _started(self, pool: Pool) -> Pool:
        self.pools.append(pool)
        pool.start()
        return pool

    def _spec(
        self, config: RunConfig, slot: int, restarts: int, envs: int, spaces: dict[str, Any] | None = None
    ) -> WorkerSpec:
        return WorkerSpec(
            settings=to_tree(config),
            code_bundle=self._code_bundle,
            slot=slot,
            envs=envs,
            restarts=restarts,
            resumes=self._resumes,
            cores=self._cores_each,
            workers=self.workers,
            driver_host=platform.node(),
            log=str(self._log_path(slot)) if self._log_folder is not None else None,
            scratch_dir=str(self._scratch_dir) if self._scratch_dir is not None else None,
            spaces=spaces,
            changes=self._changes,
        )

    def _check_versions(self) -> None:
        own = installed_versions()
        for info in map(_info, self._all_workers()):
            for package, here in own.items():
                if (there := info.versions[package]) != here:
                    raise UserError(
                        f"{info.host} ({info.address}) has {package} {there}, {platform.node()} has {here}: all nodes "
                        "need the same version; use one environment on a shared folder, or install the same everywhere"
                    )

    def _all_workers(self) -> list[WorkerHandle]:
        return [worker for pool in self.pools for worker in pool.workers]

    # -- interface of the loop --------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        config, first = self.config, self.first
        envs = [worker.spec.envs for worker in self.pools[0].workers]
        each = f"{envs[0]}" if len(set(envs)) == 1 else f"{min(envs)} to {max(envs)}"
        hosts: dict[str, int] = defaultdict(int)
        for info in map(_info, self._all_workers()):
            hosts[f"{info.host} ({info.address})"] += 1
        lines = [
            f"env        {config.env.id} x {sum(envs)}, {each} per worker, {first.stepping}",
            *first.lines,
            f"learner    {config.algorithm.__name__}, {first.parameters:,} parameters, {first.threads} thread(s) each",
            f"workers    {self.workers} on {self.cluster}: {', '.join(f'{h} {n}' for h, n in hosts.items())}",
            *self._describe_schedule(),
            *self._code_bundle.describe(),
        ]
        processes = self.workers + self.learner_count
        if processes > self.cores:
            lines.append(
                f"warning    {processes} processes share {self.cores} core(s) and take turns: fine for simulators "
                "that wait for something else, slower for those that compute"
            )
        return lines

    def _describe_schedule(self) -> list[str]:
        return []

    def change(self, changes: Mapping[str, Any]) -> None:
        self._changes = {**self._changes, **changes}
        for pool in self.pools:
            pool.call({worker: worker.actor.change.remote(dict(changes)) for worker in pool.workers})

    def log_to(self, folder: Path) -> None:
        self._log_folder = folder.resolve()
        for worker in self._all_workers():
            worker.actor.log_to.remote(str(self._log_path(worker.slot)), platform.node())

    def set_scratch_dir(self, folder: Path) -> None:
        self._scratch_dir = folder.resolve()
        for worker in self._all_workers():
            worker.actor.set_scratch_dir.remote(str(self._scratch_dir), platform.node())

    def _log_path(self, slot: int) -> Path:
        assert self._log_folder is not None
        kind, number = role(slot).split()
        return self._log_folder / f"{kind}-{int(number):03d}.log"

    def notes(self) -> list[str]:
        notes = [message for pool in self.pools for message in pool.new_messages()]
        at_work = self.pools[0].workers
        if len(at_work) != self._at_work:
            self._at_work = len(at_work)
            if self._at_work == self.workers:
                notes.append(f"all {self.workers} workers are at work again")
            else:
                share = sum(worker.spec.envs for worker in at_work) / self._envs
                notes.append(f"{self._at_work} of {self.workers} workers at work: {self._describe_loss(share)}")
        return notes

    @abstractmethod
    def _describe_loss(self, share: float) -> str:
        """What it means that only this share of the environments is at work."""

    def usage(self) -> machine.Usage:
        total = machine.usage()
        if not self.cluster.is_own:  # then the workers are not descendants of this process
            for worker in self._all_workers():
                total = total.plus(worker.latest.usage)
        return total

    def stepping_usage(self, total: machine.Usage) -> machine.Usage:
        """Without the driver, Ray's own processes and learners."""
        stepping = machine.Usage()
        for worker in self._all_workers():
            if worker.spec.envs:
                stepping = stepping.plus(worker.latest.usage)
        return stepping

    @property
    def nodes(self) -> int:  # type: ignore[override]
        return len({info.address for info in map(_info, self._all_workers())})

    def accounts(self) -> dict[str, Any]:
        workers = self._all_workers()
        hosts: dict[str, dict[str, Any]] = {}
        for worker in workers:
            info = _info(worker)
            host = hosts.setdefault(info.address, _no_workers(info.host, info.address) | {"cores": info.cores})
            host["workers"] += 1
            host["env_steps"] += worker.env_steps
            host["memory_bytes"] += worker.latest.usage.memory_bytes
            host["cpu_seconds"] += worker.latest.usage.cpu_seconds
        for pool in self.pools:
            for address, past in pool.past_hosts.items():
                host = hosts.setdefault(address, _no_workers(past["host"], address))
                host["env_steps"] += past["env_steps"]
        return {
            "nodes": self.nodes,
            "hosts": list(hosts.values()),
            **self._health(),
            "bytes_moved": self.bytes_moved,
            "driver_cpu_seconds": time.process_time() - self._driver_began,
            "worker_time_split": {role(w.slot).removeprefix("worker "): w.time_split for w in workers},
            "worker_memory_bytes": max((worker.latest.usage.memory_bytes for worker in workers), default=0),
        }

    def _health(self) -> dict[str, float]:
        """Part of every metrics row."""
        return {
            "workers_healthy": len(self.pools[0].workers),
            "workers_lost": sum(pool.lost for pool in self.pools),
            "workers_restarted": sum(pool.restarted for pool in self.pools),
        }

    def on_failure(self, call: Callable[[str], None]) -> None:
        self.cluster.on_failure(call)

    def failure(self) -> str | None:
        return self.cluster.failure()

    def close(self) -> None:
        if ray.is_initialized() and self.cluster.failure() is None:
            for pool in self.pools:
                pool.close()
        self.cluster.close()


def split_evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def _no_workers(host: str, address: str) -> dict[str, Any]:
    """The account of a host that has no workers (any more)."""
    empty = {"workers": 0, "env_steps": 0, "memory_bytes": 0, "cpu_seconds": 0.0}
    return {"host": host, "address": address, "cores": 0} | empty


def _info(worker: WorkerHandle) -> WorkerInfo:
    assert worker.info is not None  # true for every admitted worker
    return worker.info
