"""SLURM, heterogeneous jobs included."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from paceline.launch.job import Job
from paceline.launch.scheduler import Allocation, Host, JobStatus, State, ask, clock, deadline_of, found, with_variables

_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"), "waiting"),
    **dict.fromkeys(("SPECIAL_EXIT", "SUSPENDED", "STOPPED"), "waiting"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"), "running"),
    **dict.fromkeys(("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"), "failed"),
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), "cancelled"),
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "timeout"),
    "COMPLETED": "done",
}
_MB = 1 << 20


class Slurm:
    name = "slurm"
    prefix = "#SBATCH"
    id_variable = "SLURM_JOB_ID"
    signals = True

    def header(self, job: Job, output: Path) -> list[str]:
        options = [*_common(job), f"--output={output}", "--open-mode=append"]
        # Without B: the signal goes to every step, and Ray's processes die of it.
        options.append(f"--signal=B:USR1@{job.save}")
        options.append("--requeue" if job.attempts > 1 else "--no-requeue")
        if job.mail:
            options += [f"--mail-user={job.mail}", "--mail-type=BEGIN,END,FAIL,REQUEUE"]
        first, *rest = _components(job)
        lines = [*map(_quoted, [*options, *first]), *job.extra]
        for component in rest:
            lines += ["hetjob", *map(_quoted, component), *job.extra]
        return [f"{self.prefix} {line}" for line in lines]

    def again(self, script: Path) -> list[str]:
        return ['scontrol requeue "$SLURM_JOB_ID"']

    def submit_argv(self, script: Path) -> list[str]:
        return ["sbatch", "--parsable", str(script)]

    def interactive_argv(self, job: Job) -> list[str]:
        first, *rest = _components(job)
        extra = [word for line in job.extra for word in shlex.split(line)]
        words = [*_common(job), *first, *extra]
        for component in rest:
            words += [":", *component, *extra]
        # salloc alone leaves one on the login node at many sites.
        return ["salloc", *words, "srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--pty", "bash"]

    def job_id(self, text: str) -> str:
        return found(r"^(\d+)(?:;\S+)?$", text, "sbatch")  # 17;cluster on a federation

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        # The name comes last: it may hold anything.
        fields = "--format=%i|%T|%r|%N|%S|%j"
        return ["squeue", "--noheader", fields, *(["--states=all", f"--jobs={','.join(ids)}"] if ids else ["--me"])]

    def states(self, text: str) -> dict[str, JobStatus]:
        made: dict[str, JobStatus] = {}
        for line in text.splitlines():
            parts = line.strip().split("|", 5)
            if len(parts) < 6:
                continue
            number, state, reason, hosts, started, name = parts
            job, _, component = number.partition("+")  # of a heterogeneous job, the first speaks for all
            if component in ("", "0"):
                began = _epoch(started) if _STATES.get(state) != "waiting" else None  # else it is an estimate
                why = "" if reason == "None" else reason
                made[job] = JobStatus(_STATES.get(state, "unknown"), why, None, hosts, began, name)
            elif job in made and hosts:
                made[job] = _with_hosts(made[job], hosts)
        return made

    def cancel_argv(self, job_id: str) -> list[str]:
        return ["scancel", job_id]

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        job_id = environ.get("SLURM_JOB_ID")
        if not job_id or "SLURM_JOB_NODELIST" not in environ:
            return None
        # The batch script has SLURM_PROCID=0 too; only srun sets the step's.
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS", 1))
        rank = int(environ["SLURM_PROCID"]) if tasks > 1 and "SLURM_PROCID" in environ else None
        hosts = {host.name: host for host in reversed(list(_hosts(environ)))}
        return Allocation(
            scheduler=self.name,
            job_id=job_id,
            hosts=tuple(reversed(hosts.values())),
            deadline=_deadline(environ, job_id),
            rank=rank,
            size=tasks if rank is not None else 0,
        )

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        for group, suffix in enumerate(_groups(os.environ)):
            if suffix and host in expand(os.environ[f"SLURM_JOB_NODELIST{suffix}"]):
                words.append(f"--het-group={group}")
                break
        cpus = {each.name: each.cpus for each in _hosts(os.environ)}.get(host, 0)
        if cpus:
            words.append(f"--cpus-per-task={cpus}")  # a step is not given the job's by itself
        # The whole host, and the variables whatever `sbatch --export` said.
        words += ["--mem=0", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=1", "--quiet"]
        return [*words, *with_variables(argv, environ)]


def _common(job: Job) -> list[str]:
    options = [f"--job-name={job.name}"]
    if job.account:
        options.append(f"--account={job.account}")
    if job.qos:
        options.append(f"--qos={job.qos}")
    if job.after:
        options.append(f"--dependency=afterok:{':'.join(job.after)}")
    return options


def _components(job: Job) -> list[list[str]]:
    """The options of each kind of host; the first is where the script runs."""
    ordinary = _component(job, job.nodes, job.cores, job.gpus, job.memory, job.queue, job.constraint)
    if not job.learner_gpus:
        return [ordinary]
    cores, queue = job.learner_cores or job.cores, job.learner_queue or job.queue
    learner = _component(job, 1, cores, job.learner_gpus, job.learner_memory, queue, job.learner_constraint)
    return [learner, ordinary]


def _component(
    job: Job, nodes: int, cores: int | None, gpus: int, memory: str | None, queue: str | None, constraint: str | None
) -> list[str]:
    options = [f"--time={clock(job.walltime)}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    options.append(f"--cpus-per-task={cores}" if cores else "--exclusive")
    if gpus:
        options.append(f"--gres=gpu:{gpus}")
    if memory:
        options.append(f"--mem={memory}")
    if queue:
        options.append(f"--partition={queue}")
    if constraint:
        options.append(f"--constraint={constraint}")
    return options


def _quoted(option: str) -> str:
    """`--name=a b` → `--name="a b"`: sbatch takes its lines apart as a shell does."""
    name, _, value = option.partition("=")
    return option if re.fullmatch(r"[\w@%+=:,./-]*", value) else f'{name}="{value}"'


def expand(text: str) -> list[str]:
    """`n[01-03,7],x` → `n01 n02 n03 n7 x`, as `scontrol show hostnames` does, which is not there everywhere."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        grown = [""]
        for literal, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            grown = [name + tail for name in grown for tail in ([literal] if literal else _numbers(numbers))]
        names += grown
    return names


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if dash:
            yield from (f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1))
        else:
            yield low


def _groups(environ: Mapping[str, str]) -> list[str]:
    """Ends of the variables' names: one for an ordinary job, one for each component of a heterogeneous one."""
    size = int(environ.get("SLURM_HET_SIZE", 0))
    return [f"_HET_GROUP_{group}" for group in range(size)] or [""]


def _hosts(environ: Mapping[str, str]) -> Iterator[Host]:
    for suffix in _groups(environ):
        names = expand(environ.get(f"SLURM_JOB_NODELIST{suffix}", ""))
        cpus = _repeated(environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", ""), len(names))
        memory = _plain(environ.get(f"SLURM_MEM_PER_NODE{suffix}"))
        per_cpu = _plain(environ.get(f"SLURM_MEM_PER_CPU{suffix}"))
        for name, count in zip(names, cpus, strict=True):
            yield Host(name, count, 0, (memory or per_cpu * count) * _MB)


def _plain(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _repeated(text: str, length: int) -> list[int]:
    """`36(x2),4` → 36, 36, 4."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts if len(counts) == length else [0] * length


def _deadline(environ: Mapping[str, str], job_id: str) -> float | None:
    if (end := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():  # 22.05 does not set it
        return float(end)
    return _epoch(ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%e"])) or deadline_of(environ)


def _epoch(text: str) -> float | None:
    """SLURM's `2026-11-15T21:08:00`, local time; `N/A` and the like are None."""
    try:
        return datetime.fromisoformat(text.split()[0]).timestamp() if text.strip() else None
    except ValueError:
        return None


def _with_hosts(status: JobStatus, hosts: str) -> JobStatus:
    return replace(status, hosts=f"{status.hosts},{hosts}" if status.hosts else hosts)
