"""Cobalt, of a few older machines (legacy). Where only aprun reaches the hosts, a profile's `launcher` says so."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config import UserError
from paceline.launch.job import Job
from paceline.launch.scheduler import (
    Allocation,
    Host,
    JobStatus,
    State,
    deadline_of,
    found,
    node_file,
    refuse,
    with_variables,
)

_STATES: dict[str, State] = {
    **dict.fromkeys(("queued", "user_hold", "admin_hold", "dep_hold", "maxrun_hold", "dep_fail"), "waiting"),
    **dict.fromkeys(("starting", "running", "exiting", "killing", "preempting"), "running"),
}


class Cobalt:
    name = "cobalt"
    prefix = "#COBALT"
    id_variable = "COBALT_JOBID"
    signals = False

    def header(self, job: Job, output: Path) -> list[str]:
        options = [*_options(job), f"-o {output}", f"-e {output}", f"--debuglog {output.with_suffix('.cobalt')}"]
        if job.mail:
            options.append(f"-M {job.mail}")
        return [f"{self.prefix} {option}" for option in [*options, *job.extra]]

    def again(self, script: Path) -> list[str]:
        return [f'qsub {shlex.quote(str(script))} >>"$folder/ids"']

    def submit_argv(self, script: Path) -> list[str]:
        return ["qsub", str(script)]

    def interactive_argv(self, job: Job) -> list[str]:
        return ["qsub", "-I", *(word for option in [*_options(job), *job.extra] for word in shlex.split(option))]

    def job_id(self, text: str) -> str:
        return found(r"^(\d+)$", text, "qsub")

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        return ["qstat", "-f", "-l", *ids]

    def states(self, text: str) -> dict[str, JobStatus]:
        """Of jobs in the queue: one that has ended is no longer known."""
        made: dict[str, JobStatus] = {}
        for block in re.split(r"^(?=JobID\s*:)", text, flags=re.M):
            fields = dict(re.findall(r"^\s*(\w+)\s*:\s*(.*?)\s*$", block, re.M))
            if "JobID" in fields:
                state = fields.get("State", "")
                hosts = fields.get("Location", "")
                made[fields["JobID"]] = JobStatus(
                    _STATES.get(state, "unknown"),
                    state,
                    hosts="" if hosts == "None" else hosts,
                    name=fields.get("JobName", ""),
                )
        return made

    def cancel_argv(self, job_id: str) -> list[str]:
        return ["qdel", job_id]

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        job_id = environ.get("COBALT_JOBID")
        if not job_id:
            return None
        if "COBALT_NODEFILE" not in environ:
            raise UserError(
                "this Cobalt job has no COBALT_NODEFILE: start one process on each host, as in "
                "`aprun -n $COBALT_JOBSIZE -N 1 paceline launch -- COMMAND`"
            )
        lines, _ = node_file(environ["COBALT_NODEFILE"])
        end = environ.get("COBALT_ENDTIME", "")
        deadline = float(end) if re.fullmatch(r"\d+(\.\d+)?", end) else deadline_of(environ)
        return Allocation(self.name, job_id, tuple(Host(name) for name in lines), deadline)

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return ["ssh", "-o", "BatchMode=yes", host, shlex.join(with_variables(argv, environ))]


def _options(job: Job) -> list[str]:
    refuse(
        job,
        "Cobalt",
        qos="try --queue",
        memory="its hosts are given whole",
        cores="its hosts are given whole",
        gpus="ask for a queue that has them: --queue",
        learner_gpus="its hosts are all of one kind",
    )
    minutes = -(-job.walltime // 60)
    options = [f"-n {job.nodes}", f"-t {minutes}", f"--jobname {job.name}"]
    if job.account:
        options.append(f"-A {job.account}")
    if job.queue:
        options.append(f"-q {job.queue}")
    if job.constraint:
        options.append(f"--attrs {job.constraint}")
    if job.after:
        options.append(f"--dependencies {':'.join(job.after)}")
    return options
