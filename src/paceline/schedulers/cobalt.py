"""Cobalt (legacy). On machines where only aprun reaches the hosts, set `launcher` in the site's profile."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.schedulers.qsub import Qsub
from paceline.schedulers.scheduler import (
    Allocation,
    Host,
    JobStatus,
    State,
    bad_input,
    deadline_of,
    read_node_file,
    set_options,
    with_variables,
)

if TYPE_CHECKING:
    from paceline.schedulers.job import Job

_STATES: dict[str, State] = {
    **dict.fromkeys(("queued", "user_hold", "admin_hold", "dep_hold", "maxrun_hold", "dep_fail"), "waiting"),
    **dict.fromkeys(("starting", "running", "exiting", "killing", "preempting"), "running"),
}


class Cobalt(Qsub):
    name = "cobalt"
    prefix = "#COBALT"
    id_variables = ("COBALT_JOBID",)
    hosts_variable = "COBALT_NODEFILE"
    id_pattern = r"^(\d+)$"
    after_words = ("--dependencies", "{}")
    unsupported = {
        "qos": "try --queue",
        "memory": "jobs get whole hosts",
        "cores": "jobs get whole hosts",
        "gpus": "choose a queue that has GPUs with --queue",
        "learner_gpus": "all hosts of a job are of one kind",
    }

    def options(self, job: Job) -> list[str]:
        minutes = -(-job.walltime // 60)
        options = [f"-n {job.nodes}", f"-t {minutes}", f"--jobname {job.name}"]
        return [*options, *set_options(job, account="-A {}", queue="-q {}", constraint="--attrs {}")]

    def batch_options(self, job: Job, output: Path) -> list[str]:
        options = [f"-o {output}", f"-e {output}", f"--debuglog {output.with_suffix('.cobalt')}"]
        return [*options, *set_options(job, mail="-M {}")]

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        return ["qstat", "-f", "-l", *ids]

    def states(self, text: str) -> dict[str, JobStatus]:
        """Only jobs in the queue: Cobalt forgets a job when it ends."""
        states: dict[str, JobStatus] = {}
        for block in re.split(r"^(?=JobID\s*:)", text, flags=re.M):
            fields = dict(re.findall(r"^\s*(\w+)\s*:\s*(.*?)\s*$", block, re.M))
            if "JobID" in fields:
                state, hosts = fields.get("State", ""), fields.get("Location", "")
                states[fields["JobID"]] = JobStatus(
                    _STATES.get(state, "unknown"),
                    state,
                    hosts="" if hosts == "None" else hosts,
                    name=fields.get("JobName", ""),
                )
        return states

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        job_id = environ.get("COBALT_JOBID")
        if not job_id:
            return None
        if self.hosts_variable not in environ:
            bad_input(
                "this Cobalt job has no COBALT_NODEFILE: start one process on each host, as in "
                "`aprun -n $COBALT_JOBSIZE -N 1 paceline launch -- COMMAND`"
            )
        lines, _ = read_node_file(environ[self.hosts_variable])
        end = environ.get("COBALT_ENDTIME", "")
        deadline = float(end) if re.fullmatch(r"\d+(\.\d+)?", end) else deadline_of(environ)
        return Allocation(self.name, job_id, tuple(Host(name) for name in lines), deadline)

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return ["ssh", "-o", "BatchMode=yes", host, shlex.join(with_variables(argv, environ))]
