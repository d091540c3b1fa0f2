"""`paceline status`: a job's hosts and what they really do, its failures and its progress, from its own files."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.config import UserError
from paceline.doctor.diagnosis import table
from paceline.jobs.listing import STATE_SECONDS, describe, refresh
from paceline.schedulers import job_record
from paceline.schedulers.job_record import JobRecord
from paceline.schedulers.scheduler import JobStatus, clock
from paceline.schedulers.script import LAUNCH
from paceline.ssh_cluster.remote_jobs import run_folder

RunFiles = dict[str, Any]
"""What the files of a run directory say."""
_GB = 1 << 30
_EVENTS = 5
_TAIL_BYTES = 1 << 16
_SILENT_SECONDS = 60.0
_CLEAR = "\x1b[H\x1b[J"
_INDENT = " " * 11


def show_status(job: str | None, *, watch: bool, every: float) -> None:
    if every <= 0:
        raise UserError(f"--every {every:g}: must be more than 0 seconds")
    record, status = refresh([job_record.find(job)])[0]
    asked, before = time.monotonic(), None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            run = read_run(run_folder(record)) if record.run else {}
            text = render(record, status, run, before)
            if watch and sys.stdout.isatty():
                text = f"{_CLEAR}{time.strftime('%H:%M:%S')}\n{text}"
            print(text, flush=True)
            if not watch or record.is_over or status.state == "unknown":
                break
            if before is None or run.get("summary_at") != before.get("summary_at"):
                before = run
            time.sleep(every)
            if time.monotonic() - asked >= STATE_SECONDS:
                (record, status), asked = refresh([record])[0], time.monotonic()


def read_run(path: Path) -> RunFiles:
    """Empty before the run has written anything."""
    run: RunFiles = {"status": _json(path / "status.json"), "summary": _json(path / "summary.json")}
    with contextlib.suppress(OSError):
        run["summary_at"] = (path / "summary.json").stat().st_mtime
    for line in reversed(_tail(path / "metrics.jsonl")):
        with contextlib.suppress(ValueError):
            run["row"] = json.loads(line)
            break
    run["events"] = _tail(path / "logs/events.log")[-_EVENTS:]
    return run if run["status"] or "row" in run else {}


def render(
    record: JobRecord, status: JobStatus, run: RunFiles, before: RunFiles | None = None, now: float | None = None
) -> str:
    """`before`: the run as last shown, to measure the CPU time used since."""
    now = time.time() if now is None else now
    starts = record.starts()
    began = starts[-1][1] if starts else status.started
    state = describe(status)
    if status.state == "running" and began:
        state += f", for {_span(now - began)}" + (f" of {_span(record.walltime)}" if record.walltime else "")
    if len(starts) > 1:
        state += f", start {len(starts)}"
    lines = [f"job        {record.id} ({record.scheduler}), {record.name}: {state}"]
    if status.hosts:
        lines.append(f"hosts      {record.nodes}: {status.hosts}")
    lines += _host_lines(_tail(record.folder / LAUNCH / "timeline.jsonl"), began)
    lines.append(f"output     {record.output}")
    if not record.run:
        lines.append(f"command    {textwrap.shorten(shlex.join(record.command), 100, placeholder=' …')}")
        return "\n".join(lines)
    lines.append(f"run        {record.run}")
    return "\n".join([*lines, *(_run_lines(run, began, before, now) if run else [f"{_INDENT}nothing written yet"])])


def _host_lines(timeline: Sequence[str], began: float | None) -> list[str]:
    """The last phase of each host since the job's last start."""
    last: dict[str, str] = {}
    for line in timeline:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            if event["timestamp"] >= (began or 0.0) - 1.0 and event["host"] != "launcher":
                last[event["host"]] = f"{event['phase']} {event['detail']}".strip()
    return [f"{_INDENT}{host}: {phase}" for host, phase in last.items()]


def _run_lines(run: RunFiles, began: float | None, before: RunFiles | None, now: float) -> list[str]:
    row, summary, status = run.get("row", {}), run["summary"], run["status"]
    lines = [f"state      {status.get('state', 'unknown')}" + (f": {r}" if (r := status.get("reason")) else "")]
    age = _age(status.get("updated_at"), now)
    if status.get("state") == "running" and age is not None and age > _SILENT_SECONDS:
        lines[-1] += f", but no update for {_span(age)}"
    progress = [f"iteration {row.get('iteration', 0)}", f"{row.get('env_steps', 0):,} steps"]
    if (speed := row.get("iteration_steps_per_second")) is not None:
        progress.append(f"{speed:,.0f} steps/s")
    if (mean := row.get("return_mean")) is not None:
        progress.append(f"return {mean:.1f}")
    lines.append(f"progress   {', '.join(progress)}")
    hosts = summary.get("hosts") or []
    if hosts:
        lines.append(_host_table(hosts, status.get("host"), _cores_used(run, before, began)))
    total = sum(host.get("cores") or 0 for host in hosts)
    if (cpu := row.get("cpu_percent")) is not None:
        lines.append(f"CPU        {cpu / 100:.1f}{f' of {total}' if total else ''} cores in use, measured")
    if (memory := row.get("memory_bytes")) is not None:
        lines.append(f"memory     {memory / _GB:.1f} GB")
    if restarts := row.get("env_restarts"):
        lines.append(f"restarts   {restarts:,} environments failed and were started again")
    lost, new = row.get("workers_lost"), row.get("workers_restarted")
    if lost is not None:
        of = f" of {summary['workers']}" if summary.get("workers") else ""
        lines.append(f"failures   {lost} workers lost, {new} replaced, {row.get('workers_healthy')}{of} at work")
    return [*lines, *(f"{_INDENT}{event}" for event in run["events"])]


def _host_table(hosts: Sequence[RunFiles], driver: str | None, used: Mapping[str, float]) -> str:
    rows = [[f"{_INDENT}host", "role", "cores used", "of", "memory", "processes", "steps"]]
    for host in hosts:
        name, cores = str(host.get("host")), used.get(str(host.get("address")))
        memory = host.get("memory_bytes")  # 0 before the first measurement, and on a host that is lost
        rows.append(
            [
                f"{_INDENT}{name}",
                "driver, workers" if name == driver else "workers" if host.get("workers") else "lost",
                f"{cores:.1f}" if memory and cores is not None else "?",
                str(host.get("cores") or "?"),
                f"{memory / _GB:.1f} GB" if memory else "?",
                str(host.get("workers")),
                f"{host.get('env_steps') or 0:,}",
            ]
        )
    return table(rows)


def _cores_used(run: RunFiles, before: RunFiles | None, began: float | None) -> dict[str, float]:
    """By address: CPU seconds per second, since `before` or else since the job began."""
    at, since, earlier = run.get("summary_at"), began, {}
    if at is not None and before and before.get("summary_at") and before["summary_at"] < at:
        since, earlier = before["summary_at"], _cpu_seconds(before)
    if at is None or since is None or at - since < 1.0:
        return {}
    return {
        address: max(0.0, seconds - earlier.get(address, 0.0)) / (at - since)
        for address, seconds in _cpu_seconds(run).items()
    }


def _cpu_seconds(run: RunFiles) -> dict[str, float]:
    hosts = run["summary"].get("hosts") or []
    return {str(host.get("address")): float(host.get("cpu_seconds") or 0.0) for host in hosts}


def _json(path: Path) -> RunFiles:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _tail(path: Path) -> list[str]:
    """The last complete lines of a file that grows."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return data[: data.rfind(b"\n") + 1].decode(errors="replace").splitlines()


def _age(text: object, now: float) -> float | None:
    try:
        return now - datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def _span(seconds: float) -> str:
    return clock(max(0, int(seconds)))
