"""PBS Pro and OpenPBS."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.launch.job import Job
from paceline.launch.scheduler import (
    Allocation,
    Host,
    JobStatus,
    State,
    ask,
    clock,
    deadline_of,
    found,
    node_file,
    refuse,
    with_variables,
)

_STATES: dict[str, State] = {
    **dict.fromkeys("QHWTSUM", "waiting"),  # M: moved to another server, which will say more
    **dict.fromkeys("REB", "running"),
    **dict.fromkeys("FX", "done"),
}
_TERMINATED = (256 + 15, 128 + 15)
_WALLTIME_EXCEEDED = -29


class Pbs:
    name = "pbs"
    prefix = "#PBS"
    id_variable = "PBS_JOBID"
    signals = False

    def header(self, job: Job, output: Path) -> list[str]:
        options = [*_options(job), "-S /bin/bash", "-j oe", f"-o {output}", "-r n"]
        if job.mail:
            options += [f"-M {job.mail}", "-m abe"]
        return [f"{self.prefix} {option}" for option in [*options, *job.extra]]

    def again(self, script: Path) -> list[str]:
        # qrerun is for operators. The script runs from a copy of its own, so by its path.
        return [f'qsub {shlex.quote(str(script))} >>"$folder/ids"']

    def submit_argv(self, script: Path) -> list[str]:
        return ["qsub", str(script)]

    def interactive_argv(self, job: Job) -> list[str]:
        return ["qsub", "-I", *(word for option in [*_options(job), *job.extra] for word in shlex.split(option))]

    def job_id(self, text: str) -> str:
        return found(r"^(\d+(?:\[\])?(?:\.[\w.-]+)?)$", text, "qsub")

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        return ["qstat", "-x", "-f", "-F", "json", *ids]  # without -x a finished job is an error

    def states(self, text: str) -> dict[str, JobStatus]:
        return {number: _status(job) for number, job in _jobs(text).items()}

    def cancel_argv(self, job_id: str) -> list[str]:
        return ["qdel", job_id]

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        job_id, path = environ.get("PBS_JOBID"), environ.get("PBS_NODEFILE")
        if not job_id or not path or "COBALT_JOBID" in environ:
            return None
        lines, began = node_file(path)  # a line for each chunk or MPI process, never for each core
        own = next(iter(_jobs(ask(["qstat", "-f", "-F", "json", job_id])).values()), {})
        asked = own.get("Resource_List") or {}
        cpus = {} if "excl" in str(asked.get("place")) else _cpus(str(own.get("exec_host") or ""))
        deadline = deadline_of(environ)
        if deadline is None and (seconds := _seconds(str(asked.get("walltime")))):
            deadline = began + seconds
        hosts = tuple(Host(name, cpus.get(name.partition(".")[0], 0)) for name in lines)
        return Allocation(self.name, job_id, hosts, deadline)

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        # Started without a shell and with PATH=/bin:/usr/bin; `env` by its path finds the rest.
        words = with_variables(argv, environ)
        return ["pbs_tmrsh", host, "/bin/sh", "-c", f"exec {shlex.join(words)}"]


def _options(job: Job) -> list[str]:
    refuse(job, "PBS", qos="try --queue", learner_queue="a job is in one queue")
    chunks = [_chunk(job.nodes, job.cores, job.gpus, job.memory, job.constraint)]
    if job.learner_gpus:  # first, as the script runs on the first chunk's host
        cores = job.learner_cores or job.cores
        chunks.insert(0, _chunk(1, cores, job.learner_gpus, job.learner_memory, job.learner_constraint))
    # Without scatter two chunks may share a host.
    place = "scatter" if job.cores else "scatter:excl"
    options = [f"-N {job.name}", f"-l select={'+'.join(chunks)}", f"-l place={place}"]
    options.append(f"-l walltime={clock(job.walltime)}")
    if job.account:
        options.append(f"-A {job.account}")
    if job.queue:
        options.append(f"-q {job.queue}")
    if job.after:
        options.append(f"-W depend=afterok:{':'.join(job.after)}")
    return options


def _chunk(nodes: int, cores: int | None, gpus: int, memory: str | None, constraint: str | None) -> str:
    parts = [str(nodes)]
    if cores:
        parts.append(f"ncpus={cores}")
    if gpus:
        parts.append(f"ngpus={gpus}")
    if memory:
        parts.append(f"mem={memory.lower()}b")
    if constraint:
        parts.append(constraint)
    return ":".join(parts)


def _jobs(text: str) -> dict[str, dict[str, Any]]:
    try:
        answer = json.loads(text, strict=False)  # values are written out raw
    except ValueError:
        return {}
    jobs = answer.get("Jobs") if isinstance(answer, dict) else None  # absent where it knows none of them
    return {str(number): job for number, job in (jobs or {}).items() if isinstance(job, dict)}


def _cpus(exec_host: str) -> dict[str, int]:
    """`n1/0*4+n2/1*4+n2/0` → 4 and 5."""
    cpus: dict[str, int] = {}
    for name, count in re.findall(r"([\w-]+)[\w.-]*/\d+(?:\*(\d+))?", exec_host):
        cpus[name] = cpus.get(name, 0) + int(count or 1)
    return cpus


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", text)
    return sum(int(part) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0


def _status(job: dict[str, Any]) -> JobStatus:
    state = _STATES.get(str(job.get("job_state")), "unknown")
    code = job.get("Exit_status")
    code = code if isinstance(code, int) else None
    if state == "done" and code != 0:
        if code == _WALLTIME_EXCEEDED:
            state = "timeout"
        elif code in _TERMINATED or code is None:  # None: deleted before it began
            state = "cancelled"
        else:
            state = "failed"
    return JobStatus(
        state,
        str(job.get("comment") or ""),
        code,
        ",".join(_cpus(str(job.get("exec_host") or ""))),
        _epoch(str(job.get("stime") or "")),
        str(job.get("Job_Name") or ""),
    )


def _epoch(text: str) -> float | None:
    """PBS's `Sun Nov 15 21:08:00 2026`, local time."""
    try:
        return time.mktime(datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timetuple())
    except ValueError:
        return None
