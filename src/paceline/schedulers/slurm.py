"""SLURM, including heterogeneous jobs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.schedulers.scheduler import (
    INDEX,
    Allocation,
    Host,
    JobStatus,
    Scheduler,
    State,
    ask,
    bad_input,
    clock,
    deadline_of,
    set_options,
    with_variables,
)

if TYPE_CHECKING:
    from paceline.schedulers.job import Job

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
_MEGABYTES = {"M": 1, "G": 1 << 10, "T": 1 << 20}
# With --no-kill SLURM keeps the other hosts of a job when its first one fails, idle until the end of the walltime.
_REVIVE = """
for _ in $(seq 120); do
  sleep 10
  hosts=$(squeue --noheader --jobs="$1" --format=%N) && [ -n "$hosts" ] || exit
  scontrol show hostnames "$hosts" | grep -qx "$2" || { scontrol requeue "$1" || scancel "$1"; exit; }
done
"""


class Slurm(Scheduler):
    name = "slurm"
    prefix = "#SBATCH"
    id_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    hosts_variable = "SLURM_JOB_NODELIST"
    core_variables = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
    submit = ("sbatch", "--parsable")
    id_pattern = r"^(\d+)(?:;\S+)?$"  # 17;cluster on a federation
    cancel = "scancel"
    request_end = ("scancel", "--batch", "--signal=TERM")  # plain scancel signals every process, twice, then kills
    signals = True
    reads_setup = True
    never = r"(PartitionTime|PartitionNode)Limit|BadConstraints|DependencyNeverSatisfied|(QOS|Assoc)Max\w+PerJob"
    array_variable = "SLURM_ARRAY_TASK_ID"

    @property
    def id_text(self) -> str:
        return "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"

    def options(self, job: Job) -> list[str]:
        options = [f"--job-name={job.name}", *set_options(job, account="--account={}", qos="--qos={}")]
        return [*options, *([f"--dependency=afterok:{':'.join(job.after)}"] if job.after else [])]

    def header(self, job: Job, output: Path) -> list[str]:
        # Without B: the signal goes to every step and kills Ray's processes.
        options = [*self.options(job), f"--output={output}", "--open-mode=append", f"--signal=B:USR1@{job.save}"]
        options.append("--requeue" if job.attempts > 1 else "--no-requeue")
        options.append("--no-kill")  # training goes on without a host that fails
        options += [f"--mail-user={job.mail}", "--mail-type=BEGIN,END,FAIL,REQUEUE"] if job.mail else []
        first, *rest = map(_component, job.components)
        lines = [*map(_quoted, [*options, *first]), *job.extra]
        for component in rest:
            lines += ["hetjob", *map(_quoted, component), *job.extra]
        return [f"{self.prefix} {line}" for line in lines]

    def interactive_argv(self, job: Job, setup: Path | None = None) -> list[str]:
        first, *rest = map(_component, job.components)
        extra = [word for line in job.extra for word in shlex.split(line)]
        words = [*self.options(job), *first, *extra]
        for component in rest:
            words += [":", *component, *extra]
        # At many sites salloc alone opens its shell on the login node.
        step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--pty"]
        return ["salloc", *words, *step, "bash", *(["--rcfile", str(setup)] if setup else [])]

    def restart(self, script: Path) -> list[str]:
        return [f'scontrol requeue "{self.id_text}"']

    def can_be_array(self, job: Job) -> bool:
        return not job.learner_gpus  # SLURM has no arrays of heterogeneous jobs

    def array_header(self, job: Job, output: str, count: int, at_once: int | None) -> list[str]:
        limit = f"%{at_once}" if at_once else ""
        return [*self.header(job, Path(output.replace(INDEX, "%a"))), f"{self.prefix} --array=0-{count - 1}{limit}"]

    def array_ids(self, text: str, count: int) -> list[str]:
        return [f"{self.job_id(text)}_{index}" for index in range(count)]

    def after_array(self, array: str, elements: Sequence[str], attempts: int) -> list[str]:
        return [array]

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        # The name comes last: it may contain the separator.
        fields = "--format=%i|%T|%r|%N|%S|%j"
        which = ["--states=all", f"--jobs={','.join(ids)}"] if ids else ["--me"]
        return ["squeue", "--noheader", "--array", fields, *which]

    def history_argv(self, ids: Sequence[str]) -> list[str]:
        # squeue forgets a job some minutes after its end (MinJobAge); accounting, where a site has it, does not.
        fields = "--format=JobID,State,Reason,NodeList,Start,JobName"
        return ["sacct", "--noheader", "--allocations", "--parsable2", fields, f"--jobs={','.join(ids)}"]

    def states(self, text: str) -> dict[str, JobStatus]:
        states: dict[str, JobStatus] = {}
        for line in text.splitlines():
            parts = line.strip().split("|", 5)
            if len(parts) < 6:
                continue
            number, state, reason, hosts, started, name = parts
            state = state.partition(" ")[0]  # sacct: CANCELLED by 1000
            hosts = "" if hosts == "None assigned" else hosts
            job, _, component = number.partition("+")  # the first component of a heterogeneous job has the job's state
            if component in ("", "0"):
                began = _epoch(started) if _STATES.get(state) != "waiting" else None  # else it is an estimate
                why = "" if reason == "None" else reason
                states[job] = JobStatus(_STATES.get(state, "unknown"), why, None, hosts, began, name)
            elif job in states and hosts:
                known = states[job].hosts
                states[job] = replace(states[job], hosts=f"{known},{hosts}" if known else hosts)
        return states

    def check_limits(self, job: Job) -> None:
        # SLURM itself accepts most of these, and the job waits for ever (EnforcePartLimits is off by default).
        lines = ask(["sinfo", "--noheader", "--Node", "--format=%P|%l|%c|%m|%N"]).splitlines()
        rows = [row for row in (line.split("|") for line in lines) if len(row) == 5]
        for component in job.components:
            queue = component.queue or next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), "")
            hosts = {row[4]: row for row in rows if row[0].rstrip("*") == queue}
            if hosts:  # else several partitions are named, or sbatch says that there is none
                _check_partition(component, queue, list(hosts.values()))

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        job_id = environ.get("SLURM_JOB_ID")
        if not job_id or self.hosts_variable not in environ:
            return None
        # The batch script has SLURM_PROCID=0 too; only srun sets the number of tasks of a step.
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
            kill_delay=self.kill_delay(job_id),
            sentinel=self._sentinel(environ, list(hosts)) if rank is None else (),
        )

    def revive_argv(self, job_id: str, first_host: str) -> list[str]:
        return ["sh", "-c", _REVIVE, "sh", job_id, first_host]

    def kill_delay(self, job_id: str) -> float:
        match = re.search(r"^KillWait\s*=\s*(\d+)", ask(["scontrol", "show", "config"]), re.M)
        return float(match[1]) if match else super().kill_delay(job_id)

    def _sentinel(self, environ: Mapping[str, str], hosts: Sequence[str]) -> tuple[str, ...]:
        # When a grace time begins, SLURM tells the steps and not the script, which on one host has started none.
        is_needed = len(hosts) == 1 and "SLURM_STEP_ID" not in environ
        return tuple(self.remote_argv(hosts[0], ["sleep", "infinity"], {})) if is_needed else ()

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        for group, suffix in enumerate(_groups(os.environ)):
            if suffix and host in expand(os.environ[f"SLURM_JOB_NODELIST{suffix}"]):
                words.append(f"--het-group={group}")
                break
        cpus = {each.name: each.cpus for each in _hosts(os.environ)}.get(host, 0)
        words += [f"--cpus-per-task={cpus}"] if cpus else []  # a step does not inherit the job's
        # The whole host, and all variables even if `sbatch --export` said otherwise.
        words += ["--mem=0", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=1", "--quiet"]
        return [*words, *with_variables(argv, environ)]


def _component(job: Job) -> list[str]:
    """The options for one kind of host."""
    options = [f"--time={clock(job.walltime)}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    # Whole hosts still get DefMemPerCPU for each of their cores, unless the job asks for all memory.
    options += [f"--cpus-per-task={job.cores}"] if job.cores else ["--exclusive", *([] if job.memory else ["--mem=0"])]
    more = {"gpus": "--gres=gpu:{}", "memory": "--mem={}", "queue": "--partition={}", "constraint": "--constraint={}"}
    return [*options, *set_options(job, **more)]


def _check_partition(job: Job, queue: str, hosts: Sequence[Sequence[str]]) -> None:
    """UserError where no host of the partition has what the job asks for. A QOS may lift the time limit."""
    where, limit = f"partition {queue}", _limit_seconds(hosts[0][1])
    cores, megabytes = (max(int(row[at]) if row[at].isdecimal() else 0 for row in hosts) for at in (2, 3))
    if job.nodes > len(hosts):
        bad_input(f"--nodes {job.nodes}: {where} has {len(hosts)}")
    if cores and (job.cores or 0) > cores:
        bad_input(f"--cores {job.cores}: the hosts of {where} have {cores} at most")
    if job.memory and megabytes and int(job.memory[:-1]) * _MEGABYTES[job.memory[-1]] > megabytes:
        bad_input(f"--memory {job.memory}: the hosts of {where} have {megabytes}M at most")
    if limit and job.walltime > limit and not job.qos:
        bad_input(f"--walltime {clock(job.walltime)}: {where} allows {clock(limit)} at most")


def _limit_seconds(text: str) -> int:
    """`1-12:00:00` or `30:00`; 0 for `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups()) if match else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _quoted(option: str) -> str:
    """`--name=a b` → `--name="a b"`: sbatch splits its lines as a shell does."""
    name, _, value = option.partition("=")
    return option if re.fullmatch(r"[\w@%+=:,./-]*", value) else f'{name}="{value}"'


def expand(text: str) -> list[str]:
    """`n[01-03,7],x` → n01 n02 n03 n7 x, as `scontrol show hostnames` does, which not every host has."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            expanded = [name + tail for name in expanded for tail in ([literal] if literal else _numbers(numbers))]
        names += expanded
    return names


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if dash:
            yield from (f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1))
        else:
            yield low


def _groups(environ: Mapping[str, str]) -> list[str]:
    """Suffixes of variable names: an empty one for an ordinary job, else one for each component."""
    size = int(environ.get("SLURM_HET_SIZE", 0))
    return [f"_HET_GROUP_{group}" for group in range(size)] or [""]


def _hosts(environ: Mapping[str, str]) -> Iterator[Host]:
    for suffix in _groups(environ):
        names = expand(environ.get(f"SLURM_JOB_NODELIST{suffix}", ""))
        cpus = _repeated(environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", ""), len(names))
        per_node, per_cpu = (environ.get(f"SLURM_MEM_PER_{each}{suffix}", "") for each in ("NODE", "CPU"))
        for name, count in zip(names, cpus, strict=True):
            memory = int(per_node) if per_node.isdecimal() else 0
            yield Host(name, count, 0, (memory or (int(per_cpu) if per_cpu.isdecimal() else 0) * count) * _MB)


def _repeated(text: str, length: int) -> list[int]:
    """`36(x2),4` → 36, 36, 4."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts if len(counts) == length else [0] * length


def _deadline(environ: Mapping[str, str], job_id: str) -> float | None:
    if (end := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():  # SLURM 22.05 does not set it
        return float(end)
    return _epoch(ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%e"])) or deadline_of(environ)


def _epoch(text: str) -> float | None:
    """`2026-11-15T21:08:00`, local time; None for `N/A` and the like."""
    try:
        return datetime.fromisoformat(text.split()[0]).timestamp() if text.strip() else None
    except ValueError:
        return None
