"""End jobs on a real SLURM with accounting and on a real OAR in every way, and write down what came of their runs.

    python tests/cluster/cancel_trials.py                     every way, on one and on two hosts
    python tests/cluster/cancel_trials.py --on slurm          on one of them
    python tests/cluster/cancel_trials.py --only "link cut"   those whose name, scheduler/hosts/event, contains it
    python tests/cluster/cancel_trials.py --tries 2           so many times each, instead of as the table below says

Tries are added to benchmarks/results/faults/cancels.json; those of another version of paceline are dropped.
docs/generate.py makes a table of docs/faults.md from them. It needs root. The exit code is 1 if something happened that
must not: a run that is neither saved nor resumable from its last seconds, a status that is not true, something left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "faults")]
from crash_matrix import RESULTS, add  # noqa: E402
from hosts import wait_until  # noqa: E402
from sites import ALIVE, END_SECONDS, GOES_ON_SECONDS, Site, opened  # noqa: E402

# (event, hosts) → how often
ALL_SITES = {("paceline cancel", 1): 5, ("paceline cancel", 2): 5, ("host crashes", 2): 2, ("link cut", 2): 2}
TRIES = {
    "slurm": {("scancel", 1): 5, ("scancel", 2): 5, **ALL_SITES, ("preempted", 1): 2, ("preempted", 2): 2,
              ("first host crashes", 1): 1, ("first host crashes", 2): 1, ("link cut for a while", 1): 1,
              ("scancel before it starts", 1): 2},
    "oar": {("oardel", 1): 5, ("oardel", 2): 5, **ALL_SITES, ("preempted", 1): 1, ("first host crashes", 1): 1,
            ("first host crashes", 2): 1, ("oardel before it starts", 1): 1},
}  # fmt: skip
SAVE_SECONDS = 2.0  # between two checkpoints
LATE_SECONDS = 6.0  # a checkpoint that is older was not made in the run's last seconds
TRAIN = (
    "paceline train --env CartPole-v1 --preset none --envs-per-worker 2 --workers 2 --set ppo.rollout_steps=16 "
    f"--set ppo.minibatch_size=32 --set ppo.epochs=1 --set checkpoint.every_seconds={SAVE_SECONDS:g}"
)
NEVER_ENDS = "--total-steps 1000M"


@dataclass(frozen=True)
class Trial:
    scheduler: str
    hosts: int
    event: str

    @property
    def name(self) -> str:
        return f"{self.scheduler}/{self.hosts}/{self.event}"


@dataclass
class Result:
    """`outcome`: saved, resumable (killed, from its last checkpoint), went on (and was saved later), never started, or
    lost. `state`: what `paceline jobs` calls the job."""

    outcome: str = "lost"
    state: str = ""
    accounted: str = ""
    checkpoint_age_seconds: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Attempt:
    def __init__(self, site: Site, trial: Trial, number: int, dice: random.Random) -> None:
        self.site, self.trial, self.dice = site, trial, dice
        self.key = f"{trial.event.replace(' ', '-')}-{trial.hosts}-{number}"
        self.run = site.home / "runs" / self.key
        self.result = Result()
        self.job = ""
        self.down: list[int] = []
        self.before: dict[int, set[str]] = {}

    def make(self) -> Result:
        began = time.monotonic()
        self.before = {host: self.seen(host) for host in (1, 2)}
        try:
            self.break_it()
        except TimeoutError as error:
            self.problem(str(error))
            self.site.run(f"paceline cancel {self.job}")
        if self.trial.event.endswith("before it starts"):
            self.look_at_job()
            self.result.outcome = "never started" if not self.run.exists() else "lost"
        else:
            self.look_around()
            self.resume()
        for host in self.down:
            self.site.reboot(host)
        self.result.seconds = time.monotonic() - began
        return self.result

    # -- the event --------------------------------------------------------------------------------------------------

    def break_it(self) -> None:
        event, site = self.trial.event, self.site
        if event.endswith("before it starts"):
            self.submit()
            site.run(f"{event.split()[0]} {self.job}")
            self.wait_for_end()
            return
        self.submit()
        wait_until(lambda: self.rows() > 3 and self.last().exists(), "it trains", 120)
        time.sleep(self.dice.uniform(0.5, 4.0))
        self.result.checkpoint_age_seconds = time.time() - self.last().lstat().st_mtime
        if event in ("paceline cancel", "scancel", "oardel", "qdel"):
            site.run(f"{event} {self.job}")
            self.wait_for_end()
        elif event == "preempted":
            self.preempt()
        elif event == "host crashes":
            self.lose(2, site.hosts.kill)
        elif event == "first host crashes":
            self.lose(self.first_host(), site.hosts.kill, is_first=True)
        elif event == "link cut":
            self.lose(2, lambda host: site.hosts.link(host, False))
        elif event == "link cut for a while":
            host = self.first_host()
            site.hosts.link(host, False)
            time.sleep(30)  # longer than SlurmdTimeout
            site.hosts.link(host, True)
            self.goes_on()

    def submit(self) -> None:
        options = f"--nodes {self.trial.hosts} --walltime 10m --name {self.key}"
        if self.trial.event == "preempted" and self.site.name == "oar":
            options += ' --extra "-t besteffort"'
        if self.trial.event.endswith("before it starts"):
            options += ' --extra "--begin=now+600"' if self.site.name == "slurm" else " --after 1"
        said = self.site.run(
            f"paceline submit --on {self.site.name} {options} -- {TRAIN} {NEVER_ENDS} --name {self.key}"
        )
        words = said[said.find("job        ") :].split()
        if len(words) < 2:
            raise TimeoutError(f"it is not submitted: {said}")
        self.job = words[1]

    def preempt(self) -> None:
        self.site.urgent()
        wait_until(lambda: self.is_stopped() or self.starts() > 1, "it is preempted", END_SECONDS)
        rows = self.rows()
        if self.site.grace and not self.is_saved():
            self.problem("it did not save in its grace time")
        wait_until(lambda: self.starts() > 1 and self.rows() > rows + 3, "it starts again", GOES_ON_SECONDS)
        self.cancel_later()

    def lose(self, host: int, how: Callable[[int], None], is_first: bool = False) -> None:
        """The job must go on without the host; without its first one, in another start."""
        how(host)
        if host not in self.site.hosts._firsts:
            self.down.append(host)
        if is_first and self.site.name == "oar":  # which waits for the host, for minutes
            time.sleep(2)
            self.site.run(f"paceline cancel {self.job}; paceline cancel {self.job}", seconds=150)
            self.wait_for_end(GOES_ON_SECONDS)
            return
        if is_first and self.trial.hosts == 2:  # queued again, the job waits for two hosts
            time.sleep(30)
            self.site.reboot(self.down.pop())
        self.goes_on()
        if host in self.site.hosts._firsts:
            self.site.hosts.link(host, True)

    def goes_on(self) -> None:
        rows = self.rows()
        wait_until(lambda: self.rows() > rows + 3, "it goes on", GOES_ON_SECONDS)
        time.sleep(20)  # longer than the scheduler takes a silent host for alive
        rows = self.rows()
        wait_until(lambda: self.rows() > rows + 3, "it still goes on", GOES_ON_SECONDS)
        self.cancel_later()

    def cancel_later(self) -> None:
        """The run has gone on; end it, so that the rest can be looked at."""
        self.result.checkpoint_age_seconds = 0.0
        self.site.run(f"paceline cancel {self.job}", seconds=120)
        self.wait_for_end()
        self.result.outcome = "went on"

    def wait_for_end(self, seconds: float = END_SECONDS) -> None:
        wait_until(lambda: self.site.accounted(self.job).lower() not in ("", *ALIVE), "it ends", seconds)

    # -- what came of it --------------------------------------------------------------------------------------------

    def look_at_job(self) -> None:
        """What paceline says, long after the end, when only the accounts know the job."""
        wait_until(lambda: self.site.forgets(self.job), "the queue forgets it", END_SECONDS)
        self.result.accounted = self.site.accounted(self.job)
        lines = self.site.run(f"paceline status {self.job}").splitlines()
        self.result.state = lines[0].partition(f"{self.key}: ")[2] if lines else ""
        if not self.result.state.startswith("cancelled"):
            self.problem(f"paceline calls it {self.result.state!r}, the accounts {self.result.accounted!r}")

    def look_around(self) -> None:
        self.look_at_job()
        if self.is_saved():
            self.result.outcome = "saved" if self.result.outcome == "lost" else self.result.outcome
        elif self.is_stopped() and self.result.checkpoint_age_seconds < LATE_SECONDS:
            self.result.outcome = "resumable"
        else:
            self.result.outcome = "lost"
            self.problem(f"status {self.status()}, last checkpoint {self.last().resolve().name}")
        code = self.folder() / "exit_code"
        if self.is_saved() and code.exists() and code.read_text().strip() != "99":
            self.problem(f"saved, but exit code {code.read_text().strip()}")
        try:
            wait_until(lambda: not self.left(), "nothing is left", 30)
        except TimeoutError:
            self.problem(f"left behind: {', '.join(self.left())}")

    def resume(self) -> None:
        rows = self.iterations()
        if rows != list(range(1, len(rows) + 1)):
            self.problem("its iterations are not those of one run")
        last = f"--iterations {len(rows) + 3}"
        said = self.site.run(f"{TRAIN} --name {self.key} --resume auto --engine local --workers 1 {last}", seconds=120)
        after = self.iterations()
        if after != list(range(1, len(rows) + 4)) or self.status().get("state") != "done":
            self.problem(f"not resumed: {len(rows)} then {len(after)} rows; {said[-300:]}")

    def status(self) -> dict[str, Any]:
        path = self.run / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def is_stopped(self) -> bool:
        return self.status().get("state") == "stopped"

    def is_saved(self) -> bool:
        status = self.status()
        return (
            self.is_stopped() and self.last().exists() and self.last().readlink().name == f"step-{status['env_steps']}"
        )

    def last(self) -> Path:
        return self.run / "checkpoints/last"

    def iterations(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["iteration"] for line in lines if line.endswith("\n")]

    def rows(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def folder(self) -> Path:
        return next(self.site.jobs.glob(f"{self.key}-*"))

    def starts(self) -> int:
        return (self.folder() / "starts").read_text().count("\n")

    def first_host(self) -> int:
        return self.site.hosts.names.index(self.status()["host"])

    def seen(self, host: int) -> set[str]:
        """Processes, temporary files and shared memory on a host."""
        if host not in self.site.hosts._firsts:
            return set()
        root, found = self.site.hosts.root(host), set()
        for pid in self.site.hosts.pids(host):
            found.add(f"process {pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:60].decode(errors='replace')}")
        return found | {str(path.relative_to(root)) for at in ("tmp", "dev/shm") for path in (root / at).iterdir()}

    def left(self) -> list[str]:
        every = ((host, what) for host in (1, 2) if host not in self.down for what in self.seen(host))
        found = [f"{self.site.hosts.names[host]}: {what}" for host, what in every if what not in self.before[host]]
        return [each for each in found if not any(own in each for own in ("sshd", "slurmd\0", "oar"))]

    def problem(self, text: str) -> None:
        self.result.problems.append(text.replace("\0", " ")[:500])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=sorted(TRIES), help="one scheduler alone")
    parser.add_argument("--only", default="", help="part of the names, scheduler/hosts/event")
    parser.add_argument("--tries", type=int, help="how often each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dice, failed, counts = random.Random(), 0, dict[str, list[Result]]()
    for name in [options.on] if options.on else sorted(TRIES):
        chosen = [(Trial(name, hosts, event), n) for (event, hosts), n in TRIES[name].items()]
        chosen = [(trial, options.tries or n) for trial, n in chosen if options.only in trial.name]
        if not chosen:
            continue
        with opened(name) as site:
            for trial, times in chosen:
                for number in range(times):
                    result = Attempt(site, trial, number, dice).make()
                    site.tidy()
                    add(options.out / "cancels.json", trial, number, result)
                    counts.setdefault(trial.name, []).append(result)
                    failed += bool(result.problems)
                    text = "; ".join(result.problems) or f"{result.state} ({result.accounted})"
                    now = datetime.now(UTC).strftime("%H:%M:%S")
                    print(f"{now} {trial.name}: {result.outcome}, {result.seconds:.0f} s, {text}", flush=True)
    print_table(counts)
    return 1 if failed else 0


def print_table(counts: dict[str, list[Result]]) -> None:
    words = ("saved", "resumable", "went on", "never started")
    print("{:<40} {:>6} {:>7} {:>10} {:>8} {:>14} {:>6}".format("", "tried", *words, "wrong"))
    for name, results in counts.items():
        row = [sum(each.outcome == word and not each.problems for each in results) for word in words]
        wrong = sum(bool(each.problems) for each in results)
        print("{:<40} {:>6} {:>7} {:>10} {:>8} {:>14} {:>6}".format(name, len(results), *row, wrong))


if __name__ == "__main__":
    sys.exit(main())
