"""OAR 2: a job is one process on the first host, which reaches the others with oarsh."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.schedulers.scheduler import (
    INDEX,
    Allocation,
    Host,
    JobStatus,
    Scheduler,
    State,
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
    **dict.fromkeys(("Waiting", "Hold", "toAckReservation", "toLaunch", "Launching"), "waiting"),
    **dict.fromkeys(("Suspended", "Resuming"), "waiting"),
    **dict.fromkeys(("Running", "Finishing"), "running"),
    "Terminated": "done",
    **dict.fromkeys(("Error", "toError"), "failed"),
}
_USR2 = 12


class Oar(Scheduler):
    name = "oar"
    prefix = "#OAR"
    id_variables = ("OAR_JOB_ID",)
    hosts_variable = "OAR_NODEFILE"
    submit = ("oarsub", "-S")
    id_pattern = r"^OAR_JOB_ID=(\d+)$"  # admission rules print their own lines before it
    cancel = "oardel"
    request_end = ("oardel", "--signal", "TERM")  # plain oardel kills at once
    signals = True
    after_failure = True
    array_variable = "OAR_ARRAY_INDEX"
    array_first = 1
    unsupported = {
        "qos": "try --extra '-t besteffort' or --queue",
        "memory": 'choose hosts that have it: --constraint "memnode >= 64"',
        "learner_gpus": "ask for both kinds of hosts with --extra '-l …'",
    }

    def options(self, job: Job) -> list[str]:
        # OAR takes a directive to the end of its line, quotes included: nothing is quoted here.
        if job.cores and job.gpus:
            bad_input(
                f"--cores {job.cores}: with --gpus, OAR gives the cores that belong to the GPUs; leave out --cores"
            )
        part = f"/gpu={job.gpus}" if job.gpus else f"/core={job.cores}" if job.cores else ""
        options = [f"-l nodes={job.nodes}{part},walltime={clock(job.walltime)}", f"-n {job.name}"]
        options += set_options(job, queue="-q {}", account="--project {}", constraint="-p {}")
        return [*options, *(f"-a {each}" for each in job.after)]

    def batch_options(self, job: Job, output: Path) -> list[str]:
        options = [f"-O {output}", f"-E {output}", f"--checkpoint {job.save}", f"--signal {_USR2}"]
        options += ["-t idempotent"] if job.attempts > 1 else []  # exit code 99 then resubmits the job
        return [*options, *set_options(job, mail="--notify mail:{}")]

    def can_be_array(self, job: Job) -> bool:
        return not job.after  # OAR 2.5 drops the only dependency of an array

    def array_header(self, job: Job, output: str, count: int, at_once: int | None) -> list[str]:
        if at_once:
            bad_input(f"--at-once {at_once}: not available on oar; submit fewer seeds at a time")
        # Messages of all elements go into the first one's folder: OAR puts only the job's id into file names.
        path = Path(output.replace(INDEX, str(self.array_first)))
        return [*self.header(job, path.with_suffix(".%jobid%.log")), f"{self.prefix} --array {count}"]

    def array_ids(self, text: str, count: int) -> list[str]:
        found = re.findall(self.id_pattern, text, re.M)
        if len(found) != count:
            bad_input(f"oarsub printed {len(found)} job ids for {count} jobs; its output: {' '.join(text.split())}")
        return found

    def interactive_argv(self, job: Job, setup: Path | None = None) -> list[str]:
        self.check(job)
        words = [word for option in self.options(job) for word in option.split(" ", 1)]
        return ["oarsub", "-I", *words, *(word for line in job.extra for word in shlex.split(line))]

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        return ["oarstat", "-f", "-J", *([word for each in ids for word in ("-j", each)] or ["-u"])]

    def states(self, text: str) -> dict[str, JobStatus]:
        try:
            jobs = json.loads(text)
        except ValueError:
            return {}
        return {str(number): _status(job) for number, job in jobs.items()} if isinstance(jobs, dict) else {}

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        if "OAR_JOB_ID" not in environ or self.hosts_variable not in environ:
            return None
        lines, began = read_node_file(environ[self.hosts_variable])
        deadline = deadline_of(environ)
        seconds = environ.get("OAR_JOB_WALLTIME_SECONDS", "")
        if deadline is None and seconds.isdecimal():
            deadline = began + int(seconds)
        hosts = tuple(Host(name, cores) for name, cores in lines.items())  # a line for each core
        return Allocation(self.name, environ["OAR_JOB_ID"], hosts, deadline)

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return ["oarsh", host, shlex.join(with_variables(argv, environ))]  # a shell on the host splits it again


def _status(job: dict[str, Any]) -> JobStatus:
    state = _STATES.get(str(job.get("state")), "unknown")
    wait_status = job.get("exit_code")
    code = None if wait_status is None else int(wait_status) >> 8 or (int(wait_status) & 127)
    events = {str(event.get("type")) for event in job.get("events") or [] if isinstance(event, dict)}
    if state == "done" and code:  # OAR calls it Terminated with any exit code
        state = "failed"
    if state == "failed" and "WALLTIME" in events:
        state = "timeout"
    elif state == "failed" and events & {"FRAG_JOB_REQUEST", "FRAG_JOB"}:
        state = "cancelled"
    reason = ", ".join(sorted(event for event in events if not event.startswith("SWITCH_INTO_")))  # repeats the state
    if state == "waiting":
        reason = str(job.get("message") or "")
    began = int(job.get("startTime") or 0)
    return JobStatus(
        state,
        reason,
        code,
        ",".join(job.get("assigned_network_address") or []),
        float(began) if began and state != "waiting" else None,
        str(job.get("name") or ""),
        str(job.get("resubmit_job_id") or ""),
    )
