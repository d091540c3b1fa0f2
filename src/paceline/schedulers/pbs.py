"""PBS Pro and OpenPBS."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.schedulers.qsub import Qsub
from paceline.schedulers.scheduler import (
    INDEX,
    Allocation,
    Host,
    JobStatus,
    State,
    ask,
    bad_input,
    clock,
    deadline_of,
    read_node_file,
    set_options,
    with_variables,
)

if TYPE_CHECKING:
    from paceline.schedulers.job import Job

_STATES: dict[str, State] = {
    **dict.fromkeys("QHWTSUM", "waiting"),  # M: moved to another server
    **dict.fromkeys("REB", "running"),
    **dict.fromkeys("FX", "done"),
}
_TERMINATED = (256 + 15, 128 + 15)
_WALLTIME_EXCEEDED = -29
_UNITS = {unit: 1 << (10 * power) for power, unit in enumerate(("", "k", "m", "g", "t"))}
_KILL_DELAY_SECONDS = 10.0  # PBS's own default


class Pbs(Qsub):
    name = "pbs"
    prefix = "#PBS"
    id_variables = ("PBS_JOBID",)
    hosts_variable = "PBS_NODEFILE"
    id_pattern = r"^(\d+(?:\[\])?(?:\.[\w.-]+)?)$"
    after_words = ("-W", "depend=afterok:{}")
    # qsig also ends the login shell around the script, and PBS then kills everything at once; qdel waits kill_delay.
    request_end = ("qdel",)
    unsupported = {"qos": "try --queue", "learner_queue": "a job is in one queue"}
    never = "(?i)can never run"
    array_variable = "PBS_ARRAY_INDEX"

    def options(self, job: Job) -> list[str]:
        # Without scatter, two chunks may share a host.
        place = "scatter" if job.cores else "scatter:excl"
        chunks = "+".join(_chunk(component) for component in job.components)
        options = [f"-N {job.name}", f"-l select={chunks}", f"-l place={place}", f"-l walltime={clock(job.walltime)}"]
        return [*options, *set_options(job, account="-A {}", queue="-q {}")]

    def batch_options(self, job: Job, output: Path) -> list[str]:
        return ["-S /bin/bash", "-j oe", f"-o {output}", "-r n", *([f"-M {job.mail}", "-m abe"] if job.mail else [])]

    def array_header(self, job: Job, output: str, count: int, at_once: int | None) -> list[str]:
        limit = f"%{at_once}" if at_once else ""
        lines = self.header(job, Path(output.replace(INDEX, "^array_index^")))
        # An array must be allowed to run again.
        lines = [line.replace("-r n", "-r y") if line == f"{self.prefix} -r n" else line for line in lines]
        return [*lines, f"{self.prefix} -J 0-{count - 1}{limit}"]

    def array_ids(self, text: str, count: int) -> list[str]:
        return [self.job_id(text).replace("[]", f"[{index}]") for index in range(count)]

    def after_array(self, array: str, elements: Sequence[str], attempts: int) -> list[str]:
        if attempts > 1:  # an element that ends with 99 fails the array, and its successor is not part of it
            bad_input(
                f"--after {array}: PBS cannot wait for an array whose jobs continue themselves; submit the array with "
                "--attempts 1, or wait for its jobs one by one"
            )
        return [array]

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        return ["qstat", "-f", "-F", "json", *ids]

    def history_argv(self, ids: Sequence[str]) -> list[str]:
        # Job history is off by default, and -x then answers about no job at all, not even a running one.
        return ["qstat", "-x", "-f", "-F", "json", *ids]

    def states(self, text: str) -> dict[str, JobStatus]:
        return {number: _status(job) for number, job in _jobs(text).items()}

    def check_limits(self, job: Job) -> None:
        # PBS accepts it; a comment "Can Never Run" comes later.
        nodes = _objects(ask(["pbsnodes", "-a", "-F", "json"]), "nodes").values()
        cores = max((int((node.get("resources_available") or {}).get("ncpus", 0)) for node in nodes), default=0)
        if nodes and job.hosts > len(nodes):
            bad_input(f"--nodes {job.nodes}: PBS has {len(nodes)} hosts")
        if cores and max(job.cores or 0, job.learner_cores or 0) > cores:
            bad_input(f"--cores {job.cores}: the hosts have {cores} at most")

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        job_id, path = environ.get("PBS_JOBID"), environ.get(self.hosts_variable)
        if not job_id or not path or "COBALT_JOBID" in environ:
            return None
        lines, began = read_node_file(path)  # a line for each chunk or MPI process, not for each core
        own = next(iter(_jobs(ask(["qstat", "-f", "-F", "json", job_id])).values()), {})
        resources = own.get("Resource_List") or {}
        given = _given(str(own.get("exec_host") or ""), str(own.get("exec_vnode") or ""))
        whole = "excl" in str(resources.get("place"))
        deadline = deadline_of(environ)
        if deadline is None and (seconds := _seconds(str(resources.get("walltime")))):
            deadline = began + seconds
        hosts = []
        for name in lines:
            cpus, gpus, memory = given.get(name.partition(".")[0], (0, 0, 0))
            hosts.append(Host(name, 0 if whole else cpus, gpus, memory))
        kill_delay = _queue_kill_delay(str(own.get("queue") or ""))
        return Allocation(self.name, job_id, tuple(hosts), deadline, kill_delay=kill_delay)

    def kill_delay(self, job_id: str) -> float:
        own = next(iter(_jobs(ask(["qstat", "-f", "-F", "json", job_id])).values()), {})
        return _queue_kill_delay(str(own.get("queue") or ""))

    def attach_argv(self, pid: int, job_id: str) -> list[str]:
        # PBS accounts for sessions that it started; a supervisor has one of its own.
        return ["pbs_attach", "-j", job_id, "-p", str(pid)]

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        # pbs_tmrsh starts programs without a shell and with PATH=/bin:/usr/bin.
        return ["pbs_tmrsh", host, "/bin/sh", "-c", f"exec {shlex.join(with_variables(argv, environ))}"]


def _chunk(job: Job) -> str:
    # A chunk has one core unless it asks for more, and with the cgroups hook it gets no more, even with place=excl.
    cores = job.cores or _cores_of_a_host(job)
    options = [*([f"ncpus={cores}"] if cores else []), *set_options(job, gpus="ngpus={}")]
    options += [f"mem={job.memory.lower()}b"] if job.memory else []
    return ":".join([str(job.nodes), *options, *([job.constraint] if job.constraint else [])])


def _cores_of_a_host(job: Job) -> int:
    """Cores of the hosts that the job can get, the most frequent number of them; 0 if PBS does not say."""
    wanted = dict(part.split("=", 1) for part in (job.constraint or "").split(":") if "=" in part)
    counts: Counter[int] = Counter()
    for node in _objects(ask(["pbsnodes", "-a", "-F", "json"]), "nodes").values():
        has = node.get("resources_available") or {}
        fits = (
            all(str(has.get(name)) == value for name, value in wanted.items()) and int(has.get("ngpus", 0)) >= job.gpus
        )
        if fits and isinstance(has.get("ncpus"), int):
            counts[has["ncpus"]] += 1
    return counts.most_common(1)[0][0] if counts else 0


def _jobs(text: str) -> dict[str, dict[str, Any]]:
    return _objects(text, "Jobs")  # absent where it knows none of them


def _objects(text: str, key: str) -> dict[str, dict[str, Any]]:
    try:
        answer = json.loads(text, strict=False)  # PBS does not escape control characters
    except ValueError:
        return {}
    found = answer.get(key) if isinstance(answer, dict) else None
    return {str(name): each for name, each in (found or {}).items() if isinstance(each, dict)}


def _given(exec_host: str, exec_vnode: str) -> dict[str, tuple[int, int, int]]:
    """CPUs, GPUs and bytes of memory of each host: `n1/0*4+n2/0*4` and `(n1:ncpus=4:mem=8gb)+(n2:ncpus=4)`."""
    given: dict[str, tuple[int, int, int]] = {}
    chunks = re.findall(r"\(([^)]*)\)", exec_vnode)
    hosts = exec_host.split("+") if exec_host else []
    for at, text in enumerate(hosts):  # a chunk each, in the same order; a host may have several
        match = re.match(r"([\w-]+)[\w.-]*/\d+(?:\*(\d+))?", text)
        if match is None:
            continue
        chunk = chunks[at] if len(chunks) == len(hosts) else ""
        cpus, gpus, memory = given.get(match[1], (0, 0, 0))
        gpus += sum(map(int, re.findall(r":ngpus=(\d+)", chunk)))
        memory += sum(int(size) * _UNITS[unit] for size, unit in re.findall(r":mem=(\d+)([kmgt]?)b", chunk))
        given[match[1]] = cpus + int(match[2] or 1), gpus, memory
    return given


def _queue_kill_delay(queue: str) -> float:
    match = re.search(r"^\s*kill_delay = (\d+)", ask(["qstat", "-Q", "-f", queue]) if queue else "", re.M)
    return float(match[1]) if match else _KILL_DELAY_SECONDS


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", text)
    return int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3]) if match else 0


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
        ",".join(_given(str(job.get("exec_host") or ""), "")),
        _epoch(str(job.get("stime") or "")),
        str(job.get("Job_Name") or ""),
    )


def _epoch(text: str) -> float | None:
    """`Sun Nov 15 21:08:00 2026`, local time."""
    try:
        return time.mktime(datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timetuple())
    except ValueError:
        return None
