"""`paceline status`: a job's hosts with what they really do, its failures and its progress, from its own files."""

from __future__ import annotations

import argparse
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.launch.record import Record
    from paceline.launch.scheduler import JobStatus

Facts = dict[str, Any]
_GB = 1 << 30
_EVENTS = 5
_TAIL_BYTES = 1 << 16
_CLEAR = "\x1b[H\x1b[J"


def add_status(verbs: Any) -> None:
    status = verbs.add_parser(
        "status", help="hosts, CPUs in use, memory, failures and progress of a job", description=__doc__
    )
    status.add_argument("job", nargs="?", metavar="JOB", help="id or name (default: the newest)")
    status.add_argument("--watch", action="store_true", help="again and again, until the job ends")
    status.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two looks (default: 2)")
    status.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from paceline.config import UserError
    from paceline.launch import record
    from paceline.launch.cluster_jobs import run_folder
    from paceline.launch.jobs import STATE_SECONDS, refresh

    if options.every <= 0:
        raise UserError(f"--every {options.every:g}: more than 0 seconds")
    each, status = refresh([record.find(options.job)])[0]
    asked, before = time.monotonic(), None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            run = read_run(run_folder(each)) if each.run else {}
            text = render(each, status, run, before)
            if options.watch and sys.stdout.isatty():
                text = f"{_CLEAR}{time.strftime('%H:%M:%S')}\n{text}"
            print(text, flush=True)
            if not options.watch or each.is_over or status.state == "unknown":
                break
            if before is None or run.get("summary_at") != before.get("summary_at"):
                before = run
            time.sleep(options.every)
            if time.monotonic() - asked >= STATE_SECONDS:
                (each, status), asked = refresh([each])[0], time.monotonic()
    return 0


def read_run(path: Path) -> Facts:
    """What a run directory tells of its run; empty before there is one."""
    made: Facts = {"status": _json(path / "status.json"), "summary": _json(path / "summary.json")}
    with contextlib.suppress(OSError):
        made["summary_at"] = (path / "summary.json").stat().st_mtime
    for line in reversed(_tail(path / "metrics.jsonl")):
        with contextlib.suppress(ValueError):
            made["row"] = json.loads(line)
            break
    made["events"] = _tail(path / "logs/events.log")[-_EVENTS:]
    return made if made["status"] or "row" in made else {}


def render(record: Record, status: JobStatus, run: Facts, before: Facts | None = None, now: float | None = None) -> str:
    from paceline.launch.jobs import describe
    from paceline.launch.script import LAUNCH

    now = time.time() if now is None else now
    starts = record.starts()
    began = starts[-1][1] if starts else status.started
    state = describe(status)
    if status.state == "running" and began:
        state += f", for {_span(now - began)}" + (f" of {_span(record.walltime)}" if record.walltime else "")
    if len(starts) > 1:
        state += f", start {len(starts)}"
    lines = [f"job        {record.ids[-1]} ({record.scheduler}), {record.name}: {state}"]
    if status.hosts:
        lines.append(f"hosts      {record.nodes}: {status.hosts}")
    lines += _host_lines(_tail(record.folder / LAUNCH / "timeline.jsonl"), began)
    lines.append(f"output     {record.output}")
    if not record.run:
        lines.append(f"command    {textwrap.shorten(shlex.join(record.command), 100, placeholder=' …')}")
        return "\n".join(lines)
    lines.append(f"run        {record.run}")
    return "\n".join([*lines, *(_run_lines(run, began, before, now) if run else ["           nothing written yet"])])


def _host_lines(timeline: Sequence[str], began: float | None) -> list[str]:
    """What the launcher last heard of each host, since the job's last start."""
    last: dict[str, str] = {}
    for line in timeline:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            if event["timestamp"] >= (began or 0.0) - 1.0 and event["host"] != "launcher":
                last[event["host"]] = f"{event['phase']} {event['detail']}".strip()
    return [f"           {host}: {phase}" for host, phase in last.items()]


def _run_lines(run: Facts, began: float | None, before: Facts | None, now: float) -> list[str]:
    row, summary, status = run.get("row", {}), run["summary"], run["status"]
    lines = [f"state      {status.get('state', 'unknown')}" + (f": {r}" if (r := status.get("reason")) else "")]
    age = _age(status.get("updated_at"), now)
    if status.get("state") == "running" and age is not None and age > 60:
        lines[-1] += f", but nothing was heard for {_span(age)}"
    progress = [f"iteration {row.get('iteration', 0)}", f"{row.get('env_steps', 0):,} steps"]
    if (speed := row.get("iteration_steps_per_second")) is not None:
        progress.append(f"{speed:,.0f} steps/s")
    if (mean := row.get("return_mean")) is not None:
        progress.append(f"return {mean:.1f}")
    lines.append(f"progress   {', '.join(progress)}")
    hosts = summary.get("hosts") or []
    if hosts:
        lines.append(_table(hosts, status.get("host"), _cores_used(run, before, began)))
    total = sum(host.get("cores") or 0 for host in hosts)
    if (cpu := row.get("cpu_percent")) is not None:
        lines.append(f"CPU        {cpu / 100:.1f}{f' of {total}' if total else ''} cores in use, measured")
    if (memory := row.get("memory_bytes")) is not None:
        lines.append(f"memory     {memory / _GB:.1f} GB")
    lost, new = row.get("workers_lost"), row.get("workers_restarted")
    if lost is not None:
        lines.append(f"failures   {lost} workers lost, {new} replaced, {row.get('workers_healthy')} at work")
    return [*lines, *(f"           {event}" for event in run["events"])]


def _table(hosts: Sequence[Facts], driver: str | None, used: Mapping[str, float]) -> str:
    from paceline.launch.jobs import table

    rows = [["           host", "role", "cores used", "of", "memory", "processes", "steps"]]
    for host in hosts:
        name = str(host.get("host"))
        cores = used.get(str(host.get("address")))
        rows.append(
            [
                f"           {name}",
                "driver, workers" if name == driver else "workers",
                "?" if cores is None else f"{cores:.1f}",
                str(host.get("cores")),
                f"{(host.get('memory_bytes') or 0) / _GB:.1f} GB",
                str(host.get("workers")),
                f"{host.get('env_steps') or 0:,}",
            ]
        )
    return table(rows)


def _cores_used(run: Facts, before: Facts | None, began: float | None) -> dict[str, float]:
    """By address: the CPU time of a host's processes over the time it took; since the last look, if there was one."""
    at, hosts = run.get("summary_at"), run["summary"].get("hosts") or []
    if at is None:
        return {}
    earlier: dict[str, float] = {}
    since = began
    if before and before.get("summary_at") and before["summary_at"] < at:
        earlier = {str(h.get("address")): h.get("cpu_seconds") or 0.0 for h in before["summary"].get("hosts") or []}
        since = before["summary_at"]
    if since is None or at - since < 1.0:
        return {}
    return {
        str(host.get("address")): max(
            0.0, (host.get("cpu_seconds") or 0.0) - earlier.get(str(host.get("address")), 0.0)
        )
        / (at - since)
        for host in hosts
    }


def _json(path: Path) -> Facts:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _tail(path: Path) -> list[str]:
    """The last whole lines of a file that grows."""
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
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
