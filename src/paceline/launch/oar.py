"""OAR 2: the job is one process on the first host, which reaches the others with oarsh."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import UserError
from paceline.launch.job import Job
from paceline.launch.scheduler import (
    Allocation,
    Host,
    JobStatus,
    State,
    clock,
    deadline_of,
    found,
    node_file,
    refuse,
    with_variables,
)

_STATES: dict[str, State] = {
    **dict.fromkeys(("Waiting", "Hold", "toAckReservation", "toLaunch", "Launching"), "waiting"),
    **dict.fromkeys(("Suspended", "Resuming"), "waiting"),
    **dict.fromkeys(("Running", "Finishing"), "running"),
    "Terminated": "done",
    **dict.fromkeys(("Error", "toError"), "failed"),
}
_USR2 = 12


class Oar:
    name = "oar"
    prefix = "#OAR"
    id_variable = "OAR_JOB_ID"
    signals = True

    def header(self, job: Job, output: Path) -> list[str]:
        # A directive is taken to the end of its line, quotes and all: nothing is quoted here.
        options = [*_options(job), f"-O {output}", f"-E {output}"]
        options += [f"--checkpoint {job.save}", f"--signal {_USR2}"]
        if job.attempts > 1:
            options.append("-t idempotent")
        if job.mail:
            options.append(f"--notify mail:{job.mail}")
        return [f"{self.prefix} {option}" for option in [*options, *job.extra]]

    def again(self, script: Path) -> list[str]:
        return []

    def submit_argv(self, script: Path) -> list[str]:
        return ["oarsub", "-S", str(script)]

    def interactive_argv(self, job: Job) -> list[str]:
        words = ["oarsub", "-I"]
        for option in _options(job):
            flag, _, value = option.partition(" ")
            words += [flag, value]
        return [*words, *(word for line in job.extra for word in shlex.split(line))]

    def job_id(self, text: str) -> str:
        return found(r"^OAR_JOB_ID=(\d+)$", text, "oarsub")  # admission rules print lines of their own before it

    def status_argv(self, ids: Sequence[str]) -> list[str]:
        return ["oarstat", "-f", "-J", *(word for each in ids for word in ("-j", each))] if ids else _MINE

    def states(self, text: str) -> dict[str, JobStatus]:
        try:
            jobs = json.loads(text)
        except ValueError:
            return {}
        return {str(number): _status(job) for number, job in jobs.items()} if isinstance(jobs, dict) else {}

    def cancel_argv(self, job_id: str) -> list[str]:
        return ["oardel", job_id]

    def allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        if "OAR_JOB_ID" not in environ or "OAR_NODEFILE" not in environ:
            return None
        lines, began = node_file(environ["OAR_NODEFILE"])
        deadline = deadline_of(environ)
        seconds = environ.get("OAR_JOB_WALLTIME_SECONDS", "")
        if deadline is None and seconds.isdecimal():
            deadline = began + int(seconds)
        hosts = tuple(Host(name, cores) for name, cores in lines.items())  # a line for each core
        return Allocation(self.name, environ["OAR_JOB_ID"], hosts, deadline)

    def remote_argv(self, host: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        return ["oarsh", host, shlex.join(with_variables(argv, environ))]  # a shell there takes it apart again


_MINE = ["oarstat", "-f", "-J", "-u"]


def _options(job: Job) -> list[str]:
    refuse(
        job,
        "OAR",
        qos="try --extra '-t besteffort' or --queue",
        memory='ask for hosts that have it: --constraint "memnode >= 64"',
        learner_gpus="ask for both kinds in --extra '-l …'",
    )
    if job.cores and job.gpus:
        raise UserError(f"--cores {job.cores}: with --gpus OAR gives the cores that belong to the GPUs; leave it out")
    part = f"/gpu={job.gpus}" if job.gpus else f"/core={job.cores}" if job.cores else ""
    options = [f"-l nodes={job.nodes}{part},walltime={clock(job.walltime)}", f"-n {job.name}"]
    if job.queue:
        options.append(f"-q {job.queue}")
    if job.account:
        options.append(f"--project {job.account}")
    if job.constraint:
        options.append(f"-p {job.constraint}")
    return [*options, *(f"-a {each}" for each in job.after)]


def _status(job: dict[str, Any]) -> JobStatus:
    state = _STATES.get(str(job.get("state")), "unknown")
    wait_status = job.get("exit_code")  # of a shell, times 256
    code = None if wait_status is None else int(wait_status) >> 8 or (int(wait_status) & 127)
    events = [event for event in job.get("events") or [] if isinstance(event, dict)]
    kinds = {str(event.get("type")) for event in events}
    if state == "done" and code:  # it is called Terminated whatever the code
        state = "failed"
    if state == "failed" and "WALLTIME" in kinds:
        state = "timeout"
    elif state == "failed" and kinds & {"FRAG_JOB_REQUEST", "FRAG_JOB"}:
        state = "cancelled"
    reason = ", ".join(sorted(kind for kind in kinds if not kind.startswith("SWITCH_INTO_")))  # those say nothing new
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
